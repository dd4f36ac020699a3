"""Writing into a paged cache: every slot, stride, dtype and scale; nothing outside it."""

from __future__ import annotations

import os

import pytest
import torch

from attn_backends import write_kv
from attn_backends.errors import InvalidInputError, UnsupportedCallError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
NAN = float("nan")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HERE = DEVICE.type == "cuda" or INTERPRETED
PATHS = ["torch", pytest.param("triton", marks=[] if HERE else [pytest.mark.gpu])]
GPU_TRITON = pytest.param("triton", marks=[] if DEVICE.type == "cuda" else [pytest.mark.gpu])

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def tokens(count: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, heads, dim, generator=g).to(DEVICE, dtype)


def cache(
    pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype, layout: str = "NHD"
):
    """A cache of 7s in one of the layouts that engines use."""
    if layout == "NHD":
        x = torch.full((pages, page_size, heads, dim), 7.0, device=DEVICE)
        return x.to(dtype)
    if layout == "HND":
        x = torch.full((pages, heads, page_size, dim), 7.0, device=DEVICE).to(dtype)
        return x.transpose(1, 2)
    if layout == "packed":  # K and V side by side
        x = torch.full((pages, 2, page_size, heads, dim), 7.0, device=DEVICE).to(dtype)
        return x[:, 1]
    assert layout == "wide"
    x = torch.full((pages, page_size, heads + 1, dim + 8), 7.0, device=DEVICE).to(dtype)
    return x[:, :, 1:, 8:]


def expected(x: torch.Tensor, before: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The cache after writing, one token at a time."""
    want = before.float().clone()
    size = want.shape[1]
    for t, slot in enumerate(slots):
        if 0 <= slot < want.shape[0] * size:
            want[slot // size, slot % size] = x[t].float()
    return want


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "heads, dim, dim_v, page_size",
    [(1, 64, 64, 1), (2, 80, 96, 3), (5, 16, 100, 16), (3, 192, 128, 4)],
)
def test_each_token_lands_in_its_slot(path, index, heads, dim, dim_v, page_size):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        k, v = tokens(6, heads, dim, dtype), tokens(6, heads, dim_v, dtype, 1)
        pages = -(-24 // page_size)
        slots = [5, -1, 0, pages * page_size - 1, 7, -100]
        k_cache = cache(pages, page_size, heads, dim, dtype)
        v_cache = cache(pages, page_size, heads, dim_v, dtype)
        want = expected(k, k_cache, slots), expected(v, v_cache, slots)
        write_kv(k, v, k_cache, v_cache, torch.tensor(slots, dtype=index, device=DEVICE), path=path)
        assert torch.equal(k_cache.float(), want[0]) and torch.equal(v_cache.float(), want[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["HND", "packed", "wide"])
def test_any_layout_of_cache_and_tokens(path, layout):
    fused = tokens(5, 8, 64, torch.float16)  # q, k and v of one projection
    k, v = fused[:, 4:6], fused[:, 6:8]
    k_cache, v_cache = (cache(4, 4, 2, 64, torch.float16, layout) for _ in range(2))
    slots = torch.tensor([3, 9, -1, 15, 4, 0, 0, 0, 0, 0], device=DEVICE)[::1][:5]
    strided = torch.stack([slots, slots * 0 + 99], 1)[:, 0]
    want = expected(k, k_cache, slots.tolist()), expected(v, v_cache, slots.tolist())
    backing = [x._base.clone() for x in (k_cache, v_cache)]
    write_kv(k, v, k_cache, v_cache, strided, path=path)
    assert torch.equal(k_cache.float(), want[0]) and torch.equal(v_cache.float(), want[1])
    for x, before in ((k_cache, backing[0]), (v_cache, backing[1])):
        x.copy_(torch.full_like(x, 7.0))
        assert torch.equal(x._base, torch.full_like(before, 7.0)), "written outside the cache"


@pytest.mark.parametrize("path", PATHS)
def test_slots_beyond_the_cache_write_nothing(path, monkeypatch):
    room = torch.full((4, 4, 2, 16), 7.0, device=DEVICE)
    k_cache = room[1:3]
    k = tokens(6, 2, 16, torch.float32)
    slots = [8, 2**31 - 1, -(2**31), 3, 2**40, -(2**40)]
    want = expected(k, k_cache, slots)
    index = torch.tensor(slots, device=DEVICE)
    write_kv(k, None, k_cache, None, index, path=path)
    assert torch.equal(k_cache, want)
    assert bool((room[0] == 7).all()) and bool((room[3] == 7).all())
    monkeypatch.setenv("ATTN_BACKENDS_VALIDATE", "1")
    with pytest.raises(
        InvalidInputError, match=r"slot_mapping\[0\]=8 \(allowed: -1 .skip. or 0..7"
    ):
        write_kv(k, None, k_cache, None, index, path=path)


@pytest.mark.parametrize("path", PATHS)
def test_inputs_are_left_alone_and_empty_calls_do_nothing(path):
    k, v = tokens(3, 2, 16, torch.float32), tokens(3, 2, 16, torch.float32, 1)
    slots = torch.tensor([0, 1, 2], device=DEVICE)
    k_cache, v_cache = cache(2, 4, 2, 16, k.dtype), cache(2, 4, 2, 16, k.dtype)
    before = [x.clone() for x in (k, v, slots)]
    write_kv(k, v, k_cache, v_cache, slots, path=path)
    assert all(torch.equal(x, y) for x, y in zip((k, v, slots), before))
    after = k_cache.clone()
    write_kv(k[:0], v[:0], k_cache, v_cache, slots[:0], path=path)
    assert torch.equal(k_cache, after)


@pytest.mark.parametrize("path", PATHS)
def test_latent_cache_has_no_values(path):
    k = tokens(3, 1, 576, torch.float16)
    k_cache = cache(2, 4, 1, 576, torch.float16)
    want = expected(k, k_cache, [7, -1, 2])
    write_kv(k, None, k_cache, None, torch.tensor([7, -1, 2], device=DEVICE), path=path)
    assert torch.equal(k_cache.float(), want)


@pytest.mark.parametrize("path", ["torch", GPU_TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_float8_caches_hold_the_scaled_and_saturated_value(path, dtype, fp8):
    k, v = tokens(4, 3, 64, dtype), tokens(4, 3, 64, dtype, 1)
    k[0, 0, :4] = torch.tensor([6e4, -6e4, NAN, 0.0], dtype=dtype, device=DEVICE)
    slots = torch.tensor([2, -1, 5, 0], device=DEVICE)
    per_head = torch.tensor([0.5, 0.02, 3.0], device=DEVICE)
    top = torch.finfo(fp8).max
    for k_scale, v_scale in ((0.1, per_head), (torch.tensor(0.3, device=DEVICE), None)):
        k_cache, v_cache = cache(2, 4, 3, 64, fp8), cache(2, 4, 3, 64, fp8)
        write_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale, path=path)
        for x, scale, held in ((k, k_scale, k_cache), (v, v_scale, v_cache)):
            divisor = 1.0 if scale is None else scale
            if isinstance(divisor, torch.Tensor):
                divisor = divisor.reshape(-1, 1)
            right = (x.float() / divisor).clamp(-top, top).to(fp8).float()
            got = held.float().reshape(8, 3, 64)
            for t, slot in ((0, 2), (2, 5), (3, 0)):
                torch.testing.assert_close(got[slot], right[t], rtol=0, atol=0, equal_nan=True)
            assert bool((got[1] == 7).all())


@pytest.mark.parametrize("path", PATHS)
def test_float8_tokens_are_copied_as_they_are(path):
    if path == "triton" and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter has no float8 arithmetic to test a copy with")
    k = tokens(3, 2, 64, torch.float32).to(E4M3)
    k_cache = cache(2, 4, 2, 64, E4M3)
    want = expected(k, k_cache, [1, 7, -1])
    write_kv(k, None, k_cache, None, torch.tensor([1, 7, -1], device=DEVICE), path=path)
    assert torch.equal(k_cache.float(), want)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": None}, "k=NoneType"),
        ({"k": torch.ones(3, 2)}, r"k.shape=\[3, 2\] \(allowed: \[T, HK, D\]\)"),
        ({"k": torch.ones(3, 2, 16).int()}, "k.dtype=torch.int32"),
        ({"k": torch.ones(3, 2, 32)[..., ::2]}, r"k.stride\(-1\)=2 \(allowed: 1\)"),
        ({"v": None}, r"v=None \(allowed: None exactly if v_cache is None\)"),
        ({"v_cache": None}, "v=given"),
        ({"v": torch.ones(3, 1, 16)}, r"v.shape=\[3, 1, 16\] \(allowed: \[3, 2, DV\], as k\)"),
        ({"v": torch.ones(3, 2, 16).half()}, "v=torch.float16 on cpu"),
        ({"v": torch.ones(3, 2, 8)}, r"v_cache.shape=\[2, 4, 2, 16\] \(allowed: \[2, 4, 2, 8\]\)"),
        ({"k_cache": torch.ones(2, 4, 16)}, r"k_cache.shape=\[2, 4, 16\]"),
        ({"k_cache": torch.ones(2, 4, 1, 16)}, r"k_cache.shape=.*\(allowed: \[\*, \*, 2, 16\]\)"),
        ({"k_cache": torch.ones(2, 4, 2, 16).half()}, r"k_cache.dtype=torch.float16 .*float8"),
        ({"v_cache": torch.ones(2, 4, 2, 16).to(E4M3)}, "v_cache.dtype=torch.float8_e4m3fn"),
        ({"v_cache": torch.ones(3, 4, 2, 16)}, r"v_cache.shape=\[3, 4, 2, 16\]"),
        ({"k_cache": torch.ones(2, 1, 2, 16).expand(2, 4, 2, 16)}, r"k_cache.stride\(\)=\(32, 0"),
        ({"slot_mapping": [0, 1, 2]}, "slot_mapping=list"),
        ({"slot_mapping": torch.zeros(2).int()}, r"slot_mapping.shape=\[2\] \(allowed: \[T=3\]\)"),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping.dtype=torch.float32"),
        ({"k_scale": 1.0}, r"k_scale=1.0 \(allowed: None, since the cache holds torch.float32"),
        ({"path": "cuda"}, r"path='cuda' \(allowed: None, 'triton', 'torch'\)"),
        ({"k_cache": torch.ones(2, 4, 2, 16, device="meta")}, "k_cache.device=meta"),
    ],
)
def test_a_malformed_call_is_named(change, message):
    call = {
        "k": torch.ones(3, 2, 16),
        "v": torch.ones(3, 2, 16),
        "k_cache": torch.ones(2, 4, 2, 16),
        "v_cache": torch.ones(2, 4, 2, 16),
        "slot_mapping": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(InvalidInputError, match=message):
        write_kv(**{**call, **change})


@pytest.mark.parametrize(
    "scale, message",
    [
        (0.0, r"k_scale=0.0 \(allowed: a finite number > 0"),
        (float("inf"), "k_scale=inf"),
        (True, "k_scale=True"),
        (torch.ones(3), r"k_scale.shape=\[3\] \(allowed: \[\], \[1\] or \[num_kv_heads=2\]\)"),
        (torch.ones(2).half(), "k_scale=torch.float16"),
    ],
)
def test_a_malformed_scale_is_named(scale, message):
    k, k_cache = torch.ones(3, 2, 16), torch.ones(2, 4, 2, 16).to(E4M3)
    with pytest.raises(InvalidInputError, match=message):
        write_kv(k, None, k_cache, None, torch.zeros(3).int(), scale)
    with pytest.raises(InvalidInputError, match="v_scale=given"):
        write_kv(k, None, k_cache, None, torch.zeros(3).int(), 1.0, 1.0)


def test_gradients_are_refused():
    k = torch.ones(3, 2, 16, requires_grad=True)
    k_cache, slots = torch.ones(2, 4, 2, 16), torch.zeros(3).int()
    with pytest.raises(InvalidInputError, match=r"k.requires_grad=True"):
        write_kv(k, None, k_cache, None, slots)
    with torch.no_grad():
        write_kv(k, None, k_cache, None, slots)


def test_a_path_that_cannot_is_refused(monkeypatch):
    from attn_backends.merge import triton_merge

    k, slots = torch.ones(3, 2, 16), torch.zeros(3).int()
    monkeypatch.setattr(triton_merge, "interpreted", lambda: False)
    with pytest.raises(UnsupportedCallError, match=r"device=cpu \(supported: cuda"):
        write_kv(k, None, torch.ones(2, 4, 2, 16), None, slots, path="triton")
    monkeypatch.setattr(triton_merge, "interpreted", lambda: True)
    with pytest.raises(UnsupportedCallError, match=r"k_cache.dtype=torch.float8_e4m3fn"):
        write_kv(k, None, torch.ones(2, 4, 2, 16).to(E4M3), None, slots, path="triton")
    with pytest.raises(UnsupportedCallError, match=r"k.dtype=float64"):
        double = torch.ones(2, 4, 2, 16).double()
        write_kv(k.double(), None, double, None, slots, path="triton")


def test_the_operator_passes_opcheck_and_compiles():
    op = torch.ops.attn_backends.write_kv.default
    k, v = tokens(3, 2, 16, torch.float32), tokens(3, 2, 16, torch.float32, 1)
    slots = torch.tensor([0, -1, 5], device=DEVICE)
    k_cache, v_cache = cache(2, 4, 2, 16, k.dtype), cache(2, 4, 2, 16, k.dtype)
    torch.library.opcheck(op, (k, v, k_cache, v_cache, slots, *[None] * 5))
    torch.library.opcheck(op, (k, None, k_cache, None, slots, *[None] * 5))
    held = cache(2, 4, 2, 16, E4M3)
    scale = torch.tensor(0.5, device=DEVICE)
    with torch.no_grad():
        torch.library.opcheck(
            op,
            (k, None, held, None, slots, None, scale, None, None, "torch"),
            test_utils=(
                "test_faketensor",
                "test_autograd_registration",
            ),  # its own check is no float8
        )

    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(module, inputs):
        graphs.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def step(k, v, both, slots):
        write_kv(k * 2, v, both[:, 0], both[:, 1], slots)

    for count in (7, 11, 1, 30):
        k, v = tokens(count, 2, 16, torch.float32), tokens(count, 2, 16, torch.float32, 1)
        slots = torch.randperm(40, device=DEVICE)[:count]
        both = torch.full((10, 2, 4, 2, 16), 7.0, device=DEVICE)
        want = both.clone()
        write_kv(k * 2, v, want[:, 0], want[:, 1], slots)
        step(k, v, both, slots)
        assert torch.equal(both, want)
    assert len(graphs) <= 2


@pytest.mark.gpu
def test_offsets_beyond_32_bits():  # F20
    pages, size, dim = 14_600, 256, 576
    k_cache = torch.empty(pages, size, 1, dim, dtype=torch.bfloat16, device="cuda")
    k = tokens(3, 1, dim, torch.bfloat16)
    slots = [(pages - 1) * size + 255, 14_563 * size + 200, 14_564 * size]
    write_kv(k, None, k_cache, None, torch.tensor(slots, device="cuda"), path="triton")
    for t, slot in enumerate(slots):
        assert torch.equal(k_cache[slot // size, slot % size], k[t])


@pytest.mark.gpu
def test_a_graph_replay_follows_its_slots():
    k, v = tokens(8, 4, 128, torch.bfloat16), tokens(8, 4, 128, torch.bfloat16, 1)
    k_cache, v_cache = cache(4, 16, 4, 128, k.dtype), cache(4, 16, 4, 128, k.dtype)
    slots = torch.arange(8, device="cuda", dtype=torch.int32)
    write_kv(k, v, k_cache, v_cache, slots)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            write_kv(k, v, k_cache, v_cache, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    slots.copy_(torch.tensor([60, -1, 33, 2, -1, 17, 63, 5], device="cuda"))
    k.normal_()
    k_cache.fill_(7)
    want = expected(k, k_cache, slots.tolist())
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(k_cache.float(), want)
