"""Merges on a GPU: every path over the field's shapes, on streams, in graphs, in place."""

from __future__ import annotations

import threading

import pytest
import torch

from attn_backends.errors import UnsupportedCallError
from attn_backends.merge import (
    apply_sinks,
    choose_merge_path,
    merge_state,
    merge_state_,
    merge_states,
)

pytestmark = pytest.mark.gpu
PATHS = ("torch", "triton", "cuda")
KERNELS = ("triton", "cuda")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INF, NAN = float("inf"), float("nan")


def paths_for(o: torch.Tensor) -> list[str]:
    """Kernel paths that take these tensors."""
    found = []
    for path in KERNELS:
        try:
            found.append(choose_merge_path(o, path=path).path)
        except UnsupportedCallError:
            assert path == "cuda" and o.shape[-1] % (16 // o.element_size())
    return found


def states(tokens: int, heads: int, dim: int, dtype: torch.dtype, n: int = 2):
    g = torch.Generator("cuda").manual_seed(tokens * heads + dim)
    o = torch.randn(n, tokens, heads, dim, generator=g, device="cuda").to(dtype)
    lse = torch.randn(n, tokens, heads, generator=g, device="cuda") * 5
    empty = torch.rand(lse.shape, generator=g, device="cuda") < 0.1
    lse[empty] = -INF
    o[empty] = NAN
    return list(zip(o, lse))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 613, 1536])
def test_field_shapes(tokens, dtype, oracle, assert_merged):  # F07
    for dim in (8, 16, 32, 40, 64, 72, 80, 96, 100, 112, 128, 192, 256, 320, 512, 576):
        for heads in (1, 5) if tokens > 1000 else (4, 64):
            a, b = states(tokens, heads, dim, dtype)
            expected = oracle([a, b])
            for path in paths_for(a[0]):
                merged = merge_state(*a, *b, path=path)
                assert_merged(merged, expected, [a, b])


@pytest.mark.parametrize("heads", [64, 65, 128, 256, 1000])
def test_many_heads(heads, oracle, assert_merged):  # F07
    a, b = states(33, heads, 128, torch.bfloat16)
    for path in PATHS:
        assert_merged(merge_state(*a, *b, path=path), oracle([a, b]), [a, b])
        merged = merge_states([a, b, a], path=path)
        assert_merged(merged, oracle([a, b, a]), [a, b, a])


@pytest.mark.parametrize("heads, dim", [(32, 128), (5, 64), (128, 192), (1, 576), (3, 8)])
def test_lse_strides_change_no_bit(heads, dim):
    a, b = states(613, heads, dim, torch.bfloat16)
    major = [x[1].mT.contiguous().mT for x in (a, b)]
    for path in KERNELS:
        plain = merge_state(*a, *b, path=path)
        for lse_a, lse_b in ((major[0], b[1]), (a[1], major[1]), major):
            merged = merge_state(a[0], lse_a, b[0], lse_b, path=path)
            assert torch.equal(merged.o, plain.o) and torch.equal(merged.lse, plain.lse)
        out = torch.empty_like(plain.o), torch.empty(heads, 613, device="cuda").mT
        merge_state(a[0], major[0], b[0], major[1], out=out, path=path)
        assert torch.equal(out[0], plain.o) and torch.equal(out[1], plain.lse)
        pile = torch.stack([a[0], b[0]]), torch.stack([a[1].mT, b[1].mT]).mT
        merged, want = merge_states(pile, path=path), merge_states([a, b], path=path)
        torch.testing.assert_close(merged.lse, want.lse, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256, 512, 576])
def test_in_place_at_every_head_dim(path, dim):
    for dtype in DTYPES.values():
        a, b = states(1536, 16, dim, dtype)
        want = merge_state(*a, *b, path=path)
        for _ in range(3):  # a race would not lose every time
            o, lse = a[0].clone(), a[1].clone()
            merge_state_(o, lse, *b, path=path)
            assert torch.equal(o, want.o) and torch.equal(lse, want.lse)


@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("n", [2, 3, 8, 9, 64, 1024, 4096])
def test_n_states(path, n, oracle):
    tokens = 64 if n <= 64 else 2
    many = states(tokens, 4, 128, torch.float32, n)
    pile = torch.stack([o for o, _ in many]), torch.stack([lse for _, lse in many])
    o, lse = oracle(many)
    forms = [pile] + ([many] if n <= 64 else [])
    for form in forms:
        merged = merge_states(form, path=path)
        # Each of n terms is rounded once; errors of a random walk stay far below n of them.
        bound = 2.0**-23 * max(8.0, n**0.5) * 6
        assert float((merged.o - o).abs().max()) < bound
        finite = lse.isfinite()
        assert torch.equal(finite, merged.lse.isfinite())
        assert float((merged.lse - lse)[finite].abs().max()) < bound
    counts = torch.arange(tokens, device="cuda", dtype=torch.int32) % (n + 1)
    merged = merge_states(pile, counts=counts, path=path)
    want = merge_states(pile, counts=counts, path="torch")
    torch.testing.assert_close(merged.o, want.o, atol=bound, rtol=0)
    torch.testing.assert_close(merged.lse, want.lse, atol=bound, rtol=0)


@pytest.mark.parametrize("path", KERNELS)
def test_large_and_small_kernels_agree_bit_for_bit(path):
    a, b = states(65536, 32, 128, torch.bfloat16)
    big = merge_state(*a, *b, path=path)
    small = merge_state(a[0][:64], a[1][:64], b[0][:64], b[1][:64], path=path)
    assert torch.equal(big.o[:64], small.o) and torch.equal(big.lse[:64], small.lse)
    tail = merge_state(a[0][-7:], a[1][-7:], b[0][-7:], b[1][-7:], path=path)
    assert torch.equal(big.o[-7:], tail.o) and torch.equal(big.lse[-7:], tail.lse)


def test_offsets_beyond_32_bits():
    tokens, heads, dim = 2**31 // (32 * 128) + 64, 32, 128
    o = torch.ones(tokens, heads, dim, dtype=torch.float16, device="cuda")
    lse = torch.zeros(tokens, heads, device="cuda")
    other = torch.full_like(o, 3.0)
    out = torch.empty_like(o), torch.empty_like(lse)
    for path in KERNELS:
        out[0].fill_(NAN)
        merge_state(o, lse, other, lse, out=out, path=path)
        assert bool((out[0] == 2).all())


@pytest.mark.parametrize("path", KERNELS)
def test_runs_on_the_current_stream(path):  # F08
    a, b = states(64, 8, 128, torch.bfloat16)
    want = merge_state(*a, *b, path=path)
    stream = torch.cuda.Stream()
    late = torch.empty_like(a[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the input arrives late, on this stream
        late.copy_(a[0])
        merged = merge_state(late, a[1], *b, path=path)
    stream.synchronize()
    assert torch.equal(merged.o, want.o)


@pytest.mark.parametrize("path", KERNELS)
def test_graph_replay_follows_its_inputs(path):  # F08
    a, b = states(64, 8, 136, torch.bfloat16)  # a head dim that nothing compiled before
    extra = torch.empty(3, 64, 8, 136, device="cuda"), torch.empty(3, 64, 8, device="cuda")
    out = torch.empty_like(a[0]), torch.empty_like(a[1])
    sinks = torch.randn(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    if path == "triton":  # Triton itself cannot load a module during capture
        merge_state(*a, *b, out=out, path=path)
        merge_states(extra, path=path)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        merge_state(*a, *b, out=out, path=path)
        many = merge_states(extra, path=path)
    for seed in range(3):
        fresh = states(64, 8, 136, torch.bfloat16)
        a[0].copy_(fresh[0][0].nan_to_num() * (seed + 1))
        a[1].copy_(fresh[1][1] + seed)
        extra[0].normal_()
        extra[1].normal_()
        graph.replay()
        want = merge_state(*a, *b, path=path)
        assert torch.equal(out[0], want.o) and torch.equal(out[1], want.lse)
        want = merge_states(extra, path=path)
        assert torch.equal(many.o, want.o) and torch.equal(many.lse, want.lse)
    assert apply_sinks(want, sinks).o.shape == want.o.shape


@pytest.mark.parametrize("path", KERNELS)
def test_no_allocation_and_no_sync_with_outputs_given(path):
    a, b = states(64, 8, 128, torch.bfloat16)
    out = torch.empty_like(a[0]), torch.empty_like(a[1])
    merge_state(*a, *b, out=out, path=path)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            merge_state(*a, *b, out=out, path=path)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("path", KERNELS)
def test_kept_calls_follow_their_tensors(path):
    a, b = states(64, 8, 128, torch.bfloat16)
    merge_state(*a, *b, path=path)
    out = torch.empty_like(a[0]), torch.empty_like(a[1])
    merge_state(*a, *b, out=out, path=path)
    for seed in range(3):
        x, y = (tuple(t.clone() for t in s) for s in (a, b))
        x[1].add_(seed), y[1].sub_(seed)
        want = merge_state(*x, *y, path="torch")
        fresh = merge_state(*x, *y, path=path)
        given = torch.empty_like(out[0]), torch.empty_like(out[1])
        merge_state(*x, *y, out=given, path=path)
        partly = torch.empty_like(x[0]), y[1].clone()
        merge_state(*x, y[0], partly[1], out=partly, path=path)
        merge_state_(*x, *y, path=path)
        for got in (fresh, given, partly, x):
            torch.testing.assert_close(got[0], want.o, atol=4e-2, rtol=0)
            assert torch.equal(got[0], fresh.o) and torch.equal(got[1], fresh.lse)
    with torch.inference_mode():
        assert torch.equal(merge_state(*a, *b, path=path).o, merge_state(*a, *b, path=path).o)
    wide = torch.empty(65, 8, 128, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="overlaps"):
        merge_state(wide[:64], a[1], *b, out=(wide[1:], out[1]), path=path)
    with pytest.raises(ValueError, match="requires_grad"):
        merge_state(a[0].float().requires_grad_(), a[1], b[0].float(), b[1], path=path)


@pytest.mark.parametrize("path", KERNELS)
def test_kept_calls_of_n_states_follow_their_tensors(path):
    many = states(33, 4, 64, torch.float32, 5)
    for seed in range(3):
        many = [(o.clone(), lse + seed * i) for i, (o, lse) in enumerate(many)]
        pile = torch.stack([o for o, _ in many]), torch.stack([lse for _, lse in many])
        counts = torch.arange(33, device="cuda", dtype=torch.int32) % (3 + seed)
        for form, options in (
            (many, {}), (pile, {}), (pile, {"counts": counts}), (many[:2], {}),
        ):  # fmt: skip
            got = merge_states(form, path=path, **options)
            want = merge_states(form, path="torch", **options)
            torch.testing.assert_close(got.o, want.o, atol=1e-5, rtol=0)
            torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", KERNELS)
def test_chains_of_merges_wait_for_each_other(path):
    # Kernels may start before the one ahead has ended: each must still see all that it wrote.
    g = torch.Generator("cuda").manual_seed(1)
    parts = torch.randn(200, 16, 8, 128, device="cuda", generator=g)
    lses = torch.randn(200, 16, 8, device="cuda", generator=g)
    want = merge_states((parts.double(), lses), path="torch")
    o, lse = parts[0].clone(), lses[0].clone()

    def chain() -> None:
        o.copy_(parts[0]), lse.copy_(lses[0])
        for i in range(1, 200):
            merge_state_(o, lse, parts[i], lses[i], path=path)

    def check() -> None:
        assert float((o - want.o).abs().max()) < 1e-3
        assert float((lse - want.lse).abs().max()) < 1e-3

    for _ in range(5):
        chain()
        check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(5):
        o.fill_(float("nan"))
        graph.replay()
        check()


@pytest.mark.parametrize("path", KERNELS)
def test_what_was_fetched_early_is_what_was_written_last(path):
    # Inputs come to L2 before the kernel ahead, which writes them, has ended.
    a, b = states(1024, 32, 128, torch.bfloat16)
    first = merge_state(*a, *b, path=path)
    second = merge_state(*first, *b, path=path)
    third = merge_state(*second, *a, path=path)
    outs = [tuple(torch.empty_like(x) for x in first) for _ in range(3)]
    for _ in range(50):
        merge_state(*a, *b, out=outs[0], path=path)
        merge_state(*outs[0], *b, out=outs[1], path=path)
        merge_state(*outs[1], *a, out=outs[2], path=path)
        for got, want in zip(outs, (first, second, third)):
            assert torch.equal(got[0], want.o) and torch.equal(got[1], want.lse)
            got[0].fill_(float("nan")), got[1].fill_(float("nan"))


@pytest.mark.parametrize("path", KERNELS)
def test_a_fresh_thread_can_launch(path):
    a, b = states(64, 8, 128, torch.bfloat16)
    want = merge_state(*a, *b, path=path)
    results: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            results.append(merge_state(*a, *b, path=path).o)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80 and all(torch.equal(o, want.o) for o in results)


def test_misaligned_rows_take_triton_and_agree():
    a, b = states(33, 4, 64, torch.bfloat16)
    wide = torch.full((33, 4, 67), NAN, dtype=torch.bfloat16, device="cuda")
    odd = wide[..., 1:65]
    odd.copy_(a[0])
    choice = choose_merge_path(odd, b[0])
    assert choice.path == "triton" and "stride" in choice.reason
    merged = merge_state(odd, a[1], *b)
    want = merge_state(*a, *b, path="triton")
    assert torch.equal(merged.o, want.o)
    with pytest.raises(UnsupportedCallError, match="multiples of 8"):
        merge_state(odd, a[1], *b, path="cuda")
    # The same layout with another tensor out of line, after the first one was planned.
    flat = torch.empty(33 * 4 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(33, 4, 64)
    flat.copy_(b[0])
    assert torch.equal(merge_state(*a, flat, b[1]).o, want.o)
    flat.copy_(a[0])
    assert torch.equal(merge_state(flat, a[1], *b).o, want.o)


@pytest.mark.parametrize("path", PATHS)
def test_float8_output_at_scale(path):
    a, b = states(613, 16, 128, torch.bfloat16)
    scale = torch.tensor([0.02], device="cuda")
    merged = merge_state(*a, *b, output_scale=scale, path=path)
    want = merge_state(*a, *b, output_scale=0.02, path="torch").o.float()
    got = merged.o.float()
    assert bool(((got - want).abs() <= want.abs() / 8 + 2.0**-9).all())
    assert float((got != want).float().mean()) < 0.01


def test_compiled_merge_uses_the_kernel():
    a, b = states(64, 8, 128, torch.bfloat16)
    torch._dynamo.reset()
    function = torch.compile(lambda a, x, b, y: merge_state(a, x, b, y), fullgraph=True)
    merged, want = function(*a, *b), merge_state(*a, *b)
    assert torch.equal(merged.o, want.o) and torch.equal(merged.lse, want.lse)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("path", KERNELS)
def test_tensors_on_another_device_than_the_current_one(path):  # F08
    a, b = states(64, 8, 128, torch.bfloat16)
    want = merge_state(*a, *b, path=path)
    there = [x.to("cuda:1") for x in (*a, *b)]
    assert torch.cuda.current_device() == 0
    merged = merge_state(*there, path=path)
    assert merged.o.device.index == 1 and torch.equal(merged.o.to("cuda:0"), want.o)
    with pytest.raises(ValueError, match=r"o_b.device=cuda:1"):
        merge_state(*a, *there[2:], path=path)
