"""Every feature of the contract, against the definition in float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.spec import AttentionSpec

PREFILL, DECODE = {"short_rows": 0}, {"short_rows": 2**31 - 1}
KERNELS = [pytest.param(PREFILL, id="prefill"), pytest.param(DECODE, id="split")]
LENGTHS = ([5, 1, 0, 3, 37], [70, 33, 4, 0, 37])

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (7, 0)},
    "window-both": {"causal": False, "window": (5, 2)},
    "window-right": {"causal": False, "window": (None, 3)},
    "window-left": {"causal": False, "window": (20, None)},
    "softcap": {"softcap": 2.0},
    "alibi": {"has_alibi": True},
    "alibi-full": {"has_alibi": True, "causal": False, "softcap": 5.0},
    "mask": {"has_mask": True, "causal": False},
    "mask-causal-window": {"has_mask": True, "window": (9, 0)},
    "zero-scale": {"sm_scale": 0.0},
    "invariant": {"batch_invariant": True},
    "invariant-window": {"batch_invariant": True, "window": (6, 0)},
}


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize(
    ("feature", "page_size"),
    [(name, (None, 3)[i % 2]) for i, name in enumerate(FEATURES)] + [("causal", 16)],
)
def test_a_feature_equals_its_definition(
    lab: SimpleNamespace, feature: str, page_size: int | None, options: dict[str, int]
) -> None:
    spec = AttentionSpec(6, 2, 16, dtype=torch.float32, page_size=page_size, **FEATURES[feature])
    p = lab.Problem(spec, *LENGTHS)
    if spec.batch_invariant:  # one kernel for all rows
        options = {}
    p.check(lab.run(p, **options))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_split_parts_merge_to_the_whole(lab: SimpleNamespace, num_splits: int, sinks: bool) -> None:
    spec = AttentionSpec(5, 1, 16, dtype=torch.float32, page_size=4)
    p = lab.Problem(spec, [1, 1, 2, 1], [300, 0, 170, 5])
    if sinks:
        p.with_sinks()
    p.check(lab.run(p, num_splits=num_splits, **DECODE))


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (12, 2), (7, 1)])
def test_any_group_finds_its_kv_head(
    lab: SimpleNamespace, heads: int, kv_heads: int, options: dict[str, int]
) -> None:  # F17
    spec = AttentionSpec(heads, kv_heads, 16, dtype=torch.float16)
    p = lab.Problem(spec, [2, 1], [4, 9])
    p.q.zero_()
    for n in range(kv_heads):
        p.v[:, n] = n
    out = lab.run(p, **options)
    want = torch.arange(heads) // (heads // kv_heads)
    assert torch.equal(out.o.cpu(), want.half()[None, :, None].expand(3, heads, 16))


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize(
    ("d", "dv"),
    [(1, 1), (40, 40), (72, 72), (100, 100), (192, 128), (96, 80), (288, 32)],
)
def test_any_head_dim_is_masked_not_read(
    lab: SimpleNamespace, d: int, dv: int, options: dict[str, int]
) -> None:  # F18, F19
    spec = AttentionSpec(2, 1, d, head_dim_v=dv, dtype=torch.float16, causal=False)
    p = lab.Problem(spec, [3], [17])
    wide_k = torch.full((*p.k.shape[:2], d + 7), float("nan"), dtype=p.k.dtype, device=p.k.device)
    wide_v = torch.full((*p.v.shape[:2], dv + 9), float("nan"), dtype=p.k.dtype, device=p.k.device)
    wide_k[..., :d], wide_v[..., :dv] = p.k, p.v
    p.k, p.v = wide_k[..., :d], wide_v[..., :dv]
    p.check(lab.run(p, **options))


@pytest.mark.parametrize("share", [False, True])
def test_mla_reads_values_out_of_keys(lab: SimpleNamespace, share: bool) -> None:
    spec = AttentionSpec(5, 1, 576, head_dim_v=512, dtype=torch.float16, page_size=8)
    p = lab.Problem(spec, [1, 2], [33, 20], share_kv=True)
    if not share:
        p.v = p.k[..., :512].clone()
    p.check(lab.run(p, num_splits=2))


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize("scales", ["none", "float", "tensor", "per-head", "strided", "expanded"])
def test_fp8_keys_carry_their_scales(
    lab: SimpleNamespace, scales: str, options: dict[str, int]
) -> None:  # F25
    given = {
        "none": (None, None),
        "float": (0.5, 2.0),
        "tensor": (torch.tensor(0.5), torch.tensor([2.0])),
        "per-head": (torch.tensor([0.5, 0.25]), torch.tensor([1.5, 0.5])),
        "strided": torch.tensor([[0.5, 1.5], [0.25, 0.5]]).unbind(1),
        "expanded": (torch.tensor([0.5]).expand(2), torch.tensor([1.5]).expand(2)),
    }[scales]
    spec = AttentionSpec(4, 2, 32, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, page_size=4)
    p = lab.Problem(spec, [2, 3], [40, 3], fp8_scales=given)
    p.check(lab.run(p, **options))


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    "sm_scale, k_scale",
    [
        (None, torch.zeros(1)), (None, torch.tensor([0.0, 0.5])), (None, 1e-40), (0.0, 0.25),
        (0.0, torch.tensor([1e-10, 1.0])),
    ],
)  # fmt: skip
def test_scales_of_keys_that_vanish_weigh_the_visible_keys_alike(
    lab: SimpleNamespace, sm_scale: float | None, k_scale: Any, softcap: float | None,
    options: dict[str, int],
) -> None:  # fmt: skip
    spec = AttentionSpec(
        4, 2, 16, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, window=(4, None),
        sm_scale=sm_scale, softcap=softcap,
    )  # fmt: skip
    p = lab.Problem(spec, [2, 3], [40, 3], fp8_scales=(k_scale, None))
    p.check(lab.run(p, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_fp8_keys_serve_every_query_dtype(lab: SimpleNamespace, dtype: torch.dtype) -> None:
    spec = AttentionSpec(4, 2, 32, dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    p = lab.Problem(spec, [2, 3], [40, 3])
    out = lab.run(p)
    assert out.o.dtype == spec.out_dtype
    p.check(out)


def test_every_fp8_byte_is_decoded_exactly(lab: SimpleNamespace) -> None:
    spec = AttentionSpec(1, 1, 16, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, window=(0, 0))
    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    p = lab.Problem(spec, [254, 1, 1], [254, 1, 1])
    p.k.zero_()
    starts = p.batch.cu_seqlens_k.tolist()
    values = p.v.view(torch.uint8)
    values[: starts[0] + 254] = finite.to(p.v.device)[:, None, None]
    values[starts[1]], values[starts[2]] = 0x7F, 0xFF
    out = lab.run(p).o[:, 0, 0].float().cpu()
    assert torch.equal(out[:254], finite.view(torch.float8_e4m3fn).float())
    assert bool(out[254:].isnan().all())


@pytest.mark.parametrize("options", KERNELS)
def test_bf16_is_computed_not_reinterpreted(
    lab: SimpleNamespace, options: dict[str, int]
) -> None:  # F26
    spec = AttentionSpec(2, 1, 16, dtype=torch.bfloat16)
    p = lab.Problem(spec, [16], [16])
    for x in (p.q, p.k, p.v):
        x.copy_(torch.randint(-2, 3, x.shape))
    p.check(lab.run(p, **options))


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize("layout", ["transposed", "packed", "out-views"])
def test_strides_change_no_bit(lab: SimpleNamespace, layout: str, options: dict[str, int]) -> None:
    spec = AttentionSpec(4, 2, 16, dtype=torch.float16, page_size=4)
    p = lab.Problem(spec, [3, 1], [11, 6])
    want = lab.run(p, **options)
    backend = lab.Backend(spec, device=p.device, options=lab.Options(**options))
    out = None
    if layout == "transposed":  # [pages, heads, slots, dim]
        p.k = p.k.transpose(1, 2).contiguous().transpose(1, 2)
        p.v = p.v.transpose(1, 2).contiguous().transpose(1, 2)
        p.q = p.q.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "packed":
        both = torch.stack([p.k, p.v], 1)
        p.k, p.v = both[:, 0], both[:, 1]
        p.q = torch.cat([p.q, p.q * float("nan"), p.q], 1)[:, :4]
    else:
        room = torch.full((4, 6, 40), 7.0, dtype=torch.float16, device=p.device)
        rows = torch.full((4, 9), 7.0, device=p.device).t()[2:6]
        out = (room[:, 1:5, 8:24], rows)
    got = backend.run(p.q, p.k, p.v, backend.plan(p.batch), out=out)
    assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)
    if out is not None:
        assert got.o.data_ptr() == out[0].data_ptr()
        room[:, 1:5, 8:24] = 7.0
        assert bool((room == 7.0).all())


@pytest.mark.parametrize("options", KERNELS)
def test_softcap_cannot_overflow(lab: SimpleNamespace, options: dict[str, int]) -> None:  # F14
    scores = [1.0, 100.0, 1000.0, 4400.0, 5000.0, 10000.0, -1.0, -10000.0]
    want = [0.999867, 48.201379, 50.0, 50.0, 50.0, 50.0, -0.999867, -50.0]
    spec = AttentionSpec(1, 1, 16, dtype=torch.float32, softcap=50.0, sm_scale=1.0)
    p = lab.Problem(spec, [1] * 8, [1] * 8)
    p.q.zero_()
    p.q[:, 0, 0] = torch.tensor(scores)
    rows = p.batch.cu_seqlens_k[:-1].long()
    p.k[rows] = 0.0
    p.k[rows, :, 0] = 1.0
    out = lab.run(p, **options)
    torch.testing.assert_close(out.lse[:, 0].cpu(), torch.tensor(want), atol=2e-5, rtol=1e-6)
    assert torch.equal(out.o, p.v[rows])


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize("size", [1e4, -1e30])
def test_extreme_logits_are_finite_and_right(
    lab: SimpleNamespace, size: float, options: dict[str, int]
) -> None:
    spec = AttentionSpec(1, 1, 16, dtype=torch.float32, sm_scale=1.0, window=(70, 0))
    p = lab.Problem(spec, [2], [150])
    p.q.zero_()
    p.q[:, 0, 0] = size
    rows = p.batch.cu_seqlens_k[:1].long() + torch.arange(150, device=p.device)
    p.k[rows] = 0.0
    p.k[rows, 0, 0] = 1.0
    out = lab.run(p, **options)
    mean = torch.stack([p.v[rows[78:149]].mean(0), p.v[rows[79:150]].mean(0)])
    torch.testing.assert_close(out.o, mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.lse, torch.full_like(out.lse, size), rtol=1e-3, atol=0)


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_outside_the_window_and_the_length_stays_out(
    lab: SimpleNamespace, poison: float, options: dict[str, int]
) -> None:  # F21
    spec = AttentionSpec(2, 1, 16, dtype=torch.float32, page_size=4, window=(5, 0))
    p = lab.Problem(spec, [2], [13], poison=poison)
    table = p.page_table[0].long()
    clean = p.k.clone(), p.v.clone()
    for j in range(6):  # seen by no query: the first sees keys 6..11
        p.k[table[j // 4], j % 4] = poison
        p.v[table[j // 4], j % 4] = poison
    out = lab.run(p, **options)
    p.k, p.v = clean
    p.check(out)


@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_in_a_visible_key_stays_visible(
    lab: SimpleNamespace, which: str, options: dict[str, int]
) -> None:
    spec = AttentionSpec(2, 1, 16, dtype=torch.float32)
    p = lab.Problem(spec, [1, 1], [13, 13])
    getattr(p, which)[5] = float("nan")
    out = lab.run(p, **options)
    assert bool(out.o[0].isnan().all()) and bool(out.o[1].isfinite().all())


@pytest.mark.parametrize("options", KERNELS)
def test_queries_of_no_sequence_get_the_state_of_no_keys(
    lab: SimpleNamespace, options: dict[str, int]
) -> None:
    from attn_backends.batch import Batch

    spec = AttentionSpec(4, 2, 16, dtype=torch.float32)
    p = lab.Problem(spec, [3, 0, 1], [9, 2, 4])
    want = lab.run(p, **options)
    given = p.batch
    batch = Batch(
        given.cu_seqlens_q, given.seqlens_k, given.cu_seqlens_k, total_q=9, max_seqlen_q=5,
        max_seqlen_k=20, total_k=given.total_k,
    )  # fmt: skip
    backend = lab.Backend(spec, device=p.device, options=lab.Options(**options))
    q = torch.cat([p.q, torch.full_like(p.q, float("nan"))[:3]])
    got = backend.run(q, p.k, p.v, backend.plan(batch))
    assert torch.equal(got.o[:4], want.o) and torch.equal(got.lse[:4], want.lse)
    assert bool((got.o[4:] == 0).all()) and bool((got.lse[4:] == float("-inf")).all())


@pytest.mark.parametrize("page_size", [1, 3, 48, 64])
def test_every_page_size_finds_its_keys(lab: SimpleNamespace, page_size: int) -> None:  # F22
    lens = [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size]
    spec = AttentionSpec(1, 1, 16, dtype=torch.float32, page_size=page_size)
    p = lab.Problem(spec, [1] * 6, lens)
    p.q.zero_()
    for b, n in enumerate(lens):
        for j in range(n):
            p.v[p.page_table[b, j // page_size], j % page_size] = j
    out = lab.run(p)
    want = torch.tensor([(n - 1) / 2 if n else 0.0 for n in lens])
    torch.testing.assert_close(out.o[:, 0, 0].cpu(), want, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out.lse[:, 0].cpu(), torch.tensor(lens).float().log())


@pytest.mark.parametrize("q_lens", [[], [0], [0, 0]])
def test_batches_without_queries_or_keys_are_empty(
    lab: SimpleNamespace, q_lens: list[int]
) -> None:  # F31
    spec = AttentionSpec(2, 1, 16, dtype=torch.float16)
    out = lab.run(lab.Problem(spec, q_lens, [4] * len(q_lens)))
    assert out.o.shape == (0, 2, 16) and out.lse.shape == (0, 2)


def test_mixed_batches_are_shared_by_both_kernels(lab: SimpleNamespace) -> None:
    spec = AttentionSpec(4, 2, 16, dtype=torch.float32, page_size=8)
    p = lab.Problem(spec, [1, 50, 2, 1, 9], [40, 60, 2, 300, 9])
    p.check(lab.run(p, short_rows=8))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 4), (28, 4), (40, 8), (48, 1), (64, 1)])
@pytest.mark.parametrize("d", [8, 16, 88, 112, 160, 224, 288, 512, 576])
def test_wide_heads_on_a_gpu(lab: SimpleNamespace, d: int, heads: int, kv_heads: int) -> None:
    spec = AttentionSpec(heads, kv_heads, d, dtype=torch.bfloat16, page_size=16)
    for q_lens, kv_lens in (([1, 1], [700, 33]), ([40, 3], [90, 200])):
        p = lab.Problem(spec, q_lens, kv_lens)
        p.check(lab.run(p))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 48])
@pytest.mark.parametrize("d", [64, 80, 128, 192, 256])
def test_wide_grid_on_a_gpu(
    lab: SimpleNamespace, d: int, page_size: int | None, dtype: torch.dtype
) -> None:
    lengths = (
        ([1] * 9, [1, 17, 128, 1000, 4097, 0, 63, 64, 65]),
        ([100, 333, 64, 1, 200], [100, 1333, 64, 500, 2200]),
        ([7, 3, 1], [777, 3, 5000]),
    )
    for (q_lens, kv_lens), (heads, kv_heads), feature in itertools.product(
        lengths, [(8, 2), (7, 1)], ["causal", "full", "window", "softcap", "alibi", "mask"]
    ):
        spec = AttentionSpec(
            heads, kv_heads, d, dtype=dtype, page_size=page_size, **FEATURES[feature]
        )
        p = lab.Problem(spec, q_lens, kv_lens)
        p.check(lab.run(p))
