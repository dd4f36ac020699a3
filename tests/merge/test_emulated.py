"""The CUDA kernels themselves, run on a CPU: every mapping of rows, threads and states."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from attn_backends.merge import (
    apply_sinks,
    cuda_merge,
    default_path,
    merge_state,
    merge_state_,
    merge_states,
)

_spec = importlib.util.spec_from_file_location("emulate", Path(__file__).with_name("emulate.py"))
emulate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(emulate)

INF, NAN = float("inf"), float("nan")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ALWAYS, NEVER = 1 << 62, -1

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    emulate.install(monkeypatch, tmp_path)
    yield
    emulate.pair.forget()
    emulate.many.forget()


def with_garbage(state, seed):
    """Every fourth row empty, said either way, with garbage in its output."""
    o, lse = (x.cpu().clone() for x in state)
    g = torch.Generator().manual_seed(seed)
    for mark in (-INF, INF):
        rows = torch.rand(lse.shape, generator=g) < 0.13
        lse[rows] = mark
        o[rows] = NAN
    return o, lse


def assert_same(got, want) -> None:
    unit = {FP32: 1e-6, FP16: 2e-3, BF16: 2e-2}[got.o.dtype]
    torch.testing.assert_close(got.o, want.o, atol=unit, rtol=unit, equal_nan=True)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-6, rtol=1e-6, equal_nan=True)


PAIRS = [
    (FP16, 7, 5, 64, "plain"),
    (BF16, 13, 12, 80, "padded"),
    (FP32, 19, 3, 192, "head_major"),
    (BF16, 2, 2, 8192, "plain"),  # wider than the reach of a block
]


@pytest.mark.parametrize("dtype, tokens, heads, dim, layout", PAIRS)
def test_two_states(emulated, make_state, arrange, monkeypatch, dtype, tokens, heads, dim, layout):
    a, b = (
        arrange(*with_garbage(make_state(tokens, heads, dim, dtype, seed=i), i), layout)
        for i in range(2)
    )
    a[1][-1, 0] = NAN
    for unroll in (1, 2):
        tuning = cuda_merge.TUNING._replace(unroll=unroll)
        monkeypatch.setattr(cuda_merge.prepare_pair, "__defaults__", (tuning,))
        emulate.pair.forget()
        for prefix in (None, tokens // 2):
            options = {"num_tokens_with_prefix": prefix}
            got = merge_state(*a, *b, path="cuda", **options)
            assert_same(got, merge_state(*a, *b, path="torch", **options))
        out = arrange(torch.full(a[0].shape, NAN, dtype=dtype), torch.full(a[1].shape, NAN), layout)
        whole = merge_state(*a, *b, path="cuda")
        merge_state(*a, *b, out=out, path="cuda")
        copies = arrange(a[0].clone(), a[1].clone(), layout)
        merge_state_(*copies, *b, path="cuda")
        for o, lse in (out, copies):
            torch.testing.assert_close(o, whole.o, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(lse, whole.lse, rtol=0, atol=0, equal_nan=True)


def test_sinks_and_half_results(emulated, make_state):
    a = with_garbage(make_state(9, 3, 64), 0)
    b = with_garbage(make_state(9, 3, 64, seed=1), 1)
    sinks = torch.tensor([0.5, -INF, 3.0])
    found = []
    for path in ("cuda", "torch"):
        token = default_path.set(path)
        out = torch.full(a[0].shape, NAN, dtype=FP16), torch.full(a[1].shape, NAN)
        found.append((apply_sinks(a, sinks), merge_state(*a, *b, out=out)))
        default_path.reset(token)
    for got, want in zip(*found):
        assert_same(got, want)


@pytest.mark.parametrize("scale", [0.02, torch.tensor([3.0])])
@pytest.mark.parametrize("dtype, dim", [(BF16, 128), (FP32, 80)])
def test_float8_results(emulated, make_state, dtype, dim, scale):
    a, b = (with_garbage(make_state(13, 5, dim, dtype, seed=i), i) for i in range(2))
    got, want = (merge_state(*a, *b, output_scale=scale, path=p).o for p in ("cuda", "torch"))
    assert got.dtype == torch.float8_e4m3fn and want.float().abs().max() > 1
    # A quotient between two results may be rounded either way, after another float32 rounding.
    torch.testing.assert_close(got.float(), want.float(), atol=2.0**-9, rtol=2.0**-3)
    assert float((got.float() != want.float()).float().mean()) < 0.01


MANY = [
    (FP16, 5, 3, 64, 5, "plain"),
    (FP32, 11, 4, 80, 19, "head_major"),
    (BF16, 3, 2, 576, 8, "padded"),
]


@pytest.mark.parametrize("dtype, tokens, heads, dim, n, layout", MANY)
def test_n_states(emulated, make_state, arrange, monkeypatch, dtype, tokens, heads, dim, n, layout):
    states = [with_garbage(make_state(tokens, heads, dim, dtype, seed=i), i) for i in range(n)]
    stacked = torch.stack([o for o, _ in states]), torch.stack([lse for _, lse in states])
    stacked[1][0, 0, 0] = NAN
    if layout == "head_major":
        stacked = stacked[0], stacked[1].mT.contiguous().mT
    counts = torch.arange(tokens, dtype=torch.int32 if n % 2 else torch.int64) * 3 - 2
    for limit in (ALWAYS, NEVER):  # states shared by groups of threads, or not
        tuning = cuda_merge.TUNING._replace(split_limit=limit)
        for prepare in (cuda_merge.prepare_stacked, cuda_merge.prepare_separate):
            monkeypatch.setattr(prepare, "__defaults__", (tuning,))
        emulate.many.forget()
        want = merge_states(stacked, path="torch")
        assert_same(merge_states(stacked, path="cuda"), want)
        want = merge_states(stacked, counts=counts, path="torch")
        assert_same(merge_states(stacked, counts=counts, path="cuda"), want)
        if n <= 8:
            separate = [arrange(*s, layout) for s in states]
            want = merge_states(separate, path="torch")
            assert_same(merge_states(separate, path="cuda"), want)
        own = stacked[0].clone(), stacked[1].clone()
        want = merge_states(own, path="cuda")
        got = merge_states(own, out=(own[0][n // 2], own[1][n // 2]), path="cuda")
        torch.testing.assert_close(got.o, want.o, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(got.lse, want.lse, rtol=0, atol=0, equal_nan=True)


def test_thousands_of_states_with_counts_of_their_own(emulated):
    n, counts = 4096, torch.tensor([0, 1, 7, 63, 64, 65, 4095, 4096], dtype=torch.int32)
    g = torch.Generator().manual_seed(0)
    o, lse = torch.randn(n, 8, 1, 16, generator=g), torch.randn(n, 8, 1, generator=g) * 3
    for t, count in enumerate(counts):  # what a row does not have is not looked at
        o[count:, t], lse[count:, t] = NAN, NAN
    got, want = (merge_states((o, lse), counts=counts, path=p) for p in ("cuda", "torch"))
    torch.testing.assert_close(got.o, want.o, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-6)
    assert got.lse[0, 0] == -INF and not got.o[0].any() and not want.o.isnan().any()


@pytest.mark.parametrize("limit", [ALWAYS, NEVER])
@pytest.mark.parametrize("n", [3, 19, 70])
def test_no_state_is_read_that_is_not_there(emulated, monkeypatch, n, limit):
    # A NaN among the LSEs of a row makes all its weights NaN, none of which is 0.
    o, lse = torch.randn(n, 5, 3, 64), torch.randn(n, 5, 3)
    lse[n // 2, 1, 2] = NAN
    tuning = cuda_merge.TUNING._replace(split_limit=limit)
    monkeypatch.setattr(cuda_merge.prepare_stacked, "__defaults__", (tuning,))
    readable = [(x.data_ptr(), x.numel() * x.element_size()) for x in (o, lse)]
    monkeypatch.setattr(emulate, "within", readable)
    want = merge_states((o, lse), path="torch")
    assert_same(merge_states((o, lse), path="cuda"), want)
    assert want.o[1, 2].isnan().all()
