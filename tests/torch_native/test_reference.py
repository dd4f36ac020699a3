"""The reference: both implementations against the oracle, whatever the tiles, and its promises."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from attn_backends.batch import Batch
from attn_backends.conformance.cases import Base
from attn_backends.conformance.grid import LONG, value_cases
from attn_backends.conformance.inputs import build
from attn_backends.conformance.tolerance import expect
from attn_backends.errors import InvalidInputError
from attn_backends.spec import AttentionSpec
from attn_backends.torch_native.backend import TorchNativeBackend, TorchNativeOptions
from attn_backends.torch_native.keys import KeySource
from attn_backends.torch_native.online import OnlineState, attend
from attn_backends.torch_native.rules import ScoreRules

CPU = torch.device("cpu")
#: In float64 nothing but float64 rounding is left between the implementations and the oracle.
BASE = Base(dtype=torch.float64, head_dim=16)
GRID = [
    c
    for c in value_cases("full")
    if (c.q_lens, c.kv_lens) not in LONG.values()
    and sum(c.kv_lens) < 200
    and not c.name.startswith(("dtype", "dims", "mla", "dim-", "head-dim", "fp8"))
]


def run(inputs, **options):
    backend = TorchNativeBackend(inputs.spec, options=TorchNativeOptions(**options))
    plan = backend.plan(inputs.batch)
    return backend.run(inputs.q, inputs.k, inputs.v, plan, **inputs.kwargs)


@pytest.mark.parametrize("case", GRID, ids=lambda c: c.name)
def test_online_and_naive_equal_the_oracle_to_float64(case):
    inputs = build(case, case.spec(BASE), CPU)
    want = expect(inputs.spec, inputs.sequences, inputs.extras)
    for options in ({"implementation": "naive"}, {"tile_q": 3, "tile_k": 7}):
        out = run(inputs, **options)
        # Sinks are merged through the LSE, which is float32 by contract.
        atol = 1e-6 if case.sinks else 1e-12
        torch.testing.assert_close(out.o, want.o, rtol=0, atol=atol)
        finite = want.lse.isfinite()
        assert torch.equal(out.lse.isneginf(), ~finite)
        atol = 1e-6 if case.sinks else 0
        got = out.lse[finite].double()
        torch.testing.assert_close(got, want.lse[finite], rtol=2**-23, atol=atol)


@pytest.mark.parametrize("tile_q", [1, 2, 5, 256])
@pytest.mark.parametrize("tile_k", [1, 3, 16, 64])
def test_tiles_change_nothing_but_the_last_bits(tile_q, tile_k):
    spec = AttentionSpec(4, 2, 16, dtype=torch.float64, window=(9, 0), softcap=4.0)
    case = next(c for c in value_cases("smoke") if c.name == "ragged-extend")
    inputs = build(case, spec, CPU)
    want = run(inputs, implementation="naive")
    got = run(inputs, tile_q=tile_q, tile_k=tile_k)
    torch.testing.assert_close(got.o, want.o, rtol=0, atol=1e-13)
    torch.testing.assert_close(got.lse, want.lse, rtol=2**-23, atol=0)


def test_one_pass_equals_three_passes_with_a_late_outlier():
    gen = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8192, generator=gen, dtype=torch.float64)
    logits[4000] = 40.0
    v = torch.randn(8192, 1, 128, generator=gen, dtype=torch.float64)
    state = OnlineState.empty(1, 1, 128, torch.float64, CPU)
    for start in range(0, 8192, 64):
        tile = logits[start : start + 64].view(1, 1, -1)
        state.step(tile, torch.ones(1, 64, dtype=torch.bool), v[start : start + 64])
    o, lse = state.finish()
    top = logits.max()
    p = torch.exp(logits - top)
    direct = (p[:, None] * v[:, 0]).sum(0) / p.sum()
    assert float((o[0, 0] - direct).abs().max()) < 1e-12
    assert abs(float(lse) - float(top + torch.log(p.sum()))) < 1e-12


def test_the_worked_example_rescales_once_by_e_to_the_minus_five():
    blocks = [[1.0, 3.0], [2.0, 0.0], [8.0, 7.0], [4.0, 5.0]]
    state = OnlineState.empty(1, 1, 1, torch.float64, CPU)
    maxima, sums = [], []
    for block in blocks:
        tile = torch.tensor(block, dtype=torch.float64).view(1, 1, 2)
        v = torch.ones(2, 1, 1, dtype=torch.float64)
        state.step(tile, torch.ones(1, 2, dtype=torch.bool), v)
        maxima.append(float(state.m))
        sums.append(float(state.l))
    assert maxima == [3, 3, 8, 8]
    banked = sums[1] * math.exp(-5)
    assert math.exp(-5) == pytest.approx(0.0067379, abs=5e-8)
    assert sums[2] == pytest.approx(banked + 1 + math.exp(-1), abs=1e-15)
    direct = sum(math.exp(x - 8) for block in blocks for x in block)
    assert sums[3] == pytest.approx(direct, abs=1e-15)


@pytest.mark.parametrize("implementation", ["online", "naive"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_visible_infinities_stay_and_hidden_ones_never_leak(implementation, value):
    spec = AttentionSpec(2, 1, 8, dtype=torch.float32)
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(6, h, 8, generator=gen) for h in (2, 1, 1))
    options = TorchNativeOptions(implementation=implementation, tile_q=2, tile_k=2)
    backend = TorchNativeBackend(spec, options=options)
    plan = backend.plan(Batch.from_lengths([6], [6]))
    clean = backend.run(q, k, v, plan)
    v[3, 0, 5] = value
    out = backend.run(q, k, v, plan)
    assert torch.equal(out.lse, clean.lse)
    # Rows 0..2 do not see key 3; lanes other than 5 do not hold the value.
    assert torch.equal(out.o[:3], clean.o[:3])
    assert torch.equal(out.o[..., :5], clean.o[..., :5])
    seen = out.o[3:, :, 5]
    assert bool(seen.isnan().all()) if math.isnan(value) else bool((seen == value).all())


@pytest.mark.parametrize("implementation", ["online", "naive"])
def test_infinities_of_both_signs_make_a_nan(implementation):
    spec = AttentionSpec(1, 1, 4, dtype=torch.float32)
    options = TorchNativeOptions(implementation=implementation, tile_k=1)
    backend = TorchNativeBackend(spec, options=options)
    q = torch.zeros(2, 1, 4)
    v = torch.tensor([math.inf, -math.inf])[:, None, None].expand(2, 1, 4).contiguous()
    out = backend.run(q, torch.zeros(2, 1, 4), v, backend.plan(Batch.from_lengths([2], [2])))
    assert bool((out.o[0] == math.inf).all()) and bool(out.o[1].isnan().all())


@pytest.mark.parametrize("implementation", ["online", "naive"])
def test_a_nan_score_shows_in_output_and_lse_of_the_rows_that_see_it(implementation):
    spec = AttentionSpec(1, 1, 4, dtype=torch.float32)
    options = TorchNativeOptions(implementation=implementation, tile_q=1, tile_k=2)
    backend = TorchNativeBackend(spec, options=options)
    k = torch.zeros(5, 1, 4)
    k[3] = math.nan
    v = torch.ones(5, 1, 4)
    plan = backend.plan(Batch.from_lengths([5], [5]))
    out = backend.run(torch.ones(5, 1, 4), k, v, plan)
    assert bool(out.o[3:].isnan().all()) and bool(out.lse[3:].isnan().all())
    assert bool((out.o[:3] == 1).all()) and bool(out.lse[:3].isfinite().all())


def test_logits_beyond_the_range_of_exp_are_exact():
    spec = AttentionSpec(1, 1, 1, dtype=torch.float64, sm_scale=1.0, causal=False)
    backend = TorchNativeBackend(spec)
    q = torch.ones(1, 1, 1).double()
    for logits in ([1e4, 1e4 - 1], [-1e4, -1e4 - 1], [1e4, -1e4]):
        k = torch.tensor(logits).double()[:, None, None]
        v = torch.tensor([1.0, 0.0]).double()[:, None, None]
        out = backend.run(q, k, v, backend.plan(Batch.from_lengths([1], [2])))
        weight = 1 / (1 + math.exp(logits[1] - logits[0]))
        assert float(out.o) == pytest.approx(weight, abs=1e-12)
        assert float(out.lse) == pytest.approx(logits[0] - math.log(weight), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_sequence_do_not_depend_on_its_neighbors(dtype):
    spec = AttentionSpec(4, 2, 16, dtype=dtype, batch_invariant=True)
    backend = TorchNativeBackend(spec, options=TorchNativeOptions(tile_q=4, tile_k=8))
    gen = torch.Generator().manual_seed(3)
    lens = [(5, 29), (1, 40), (7, 7), (0, 3), (3, 0)]
    parts = [
        [torch.randn(n, h, 16, generator=gen).to(dtype) for n, h in ((q, 4), (kv, 2), (kv, 2))]
        for q, kv in lens
    ]

    def together(order):
        q, k, v = (torch.cat([parts[b][n] for b in order]) for n in range(3))
        batch = Batch.from_lengths([lens[b][0] for b in order], [lens[b][1] for b in order])
        out = backend.run(q, k, v, backend.plan(batch))
        rows = [lens[b][0] for b in order]
        return dict(zip(order, zip(out.o.split(rows), out.lse.split(rows))))

    alone = {b: together([b])[b] for b in range(5)}
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 0]):
        for b, (o, lse) in together(order).items():
            assert torch.equal(o, alone[b][0]) and torch.equal(lse, alone[b][1])


def test_rows_of_no_sequence_get_the_state_of_no_keys():
    spec = AttentionSpec(2, 1, 8, dtype=torch.float32)
    backend = TorchNativeBackend(spec)
    index = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    batch = Batch(
        index(0, 2), index(3), index(0, 3), total_q=9, total_k=3, max_seqlen_q=2, max_seqlen_k=3
    )
    q, k = torch.randn(5, 2, 8), torch.randn(3, 1, 8)
    out = backend.run(q, k, k, backend.plan(batch))
    assert bool((out.o[2:] == 0).all()) and bool(out.lse[2:].isneginf().all())
    assert bool(out.lse[:2].isfinite().all())


MEMORY = """
import torch
from attn_backends.batch import Batch
from attn_backends.spec import AttentionSpec
from attn_backends.torch_native.backend import TorchNativeBackend

torch.set_num_threads(1)
n = 32768
spec = AttentionSpec(1, 1, 8, dtype=torch.float32)
backend = TorchNativeBackend(spec)
q, k, v = (torch.randn(n, 1, 8) for _ in range(3))
out = backend.run(q, k, v, backend.plan(Batch.from_lengths([n], [n])))
assert out.lse.isfinite().all()
# Not ru_maxrss: a process inherits the peak of the one that started it.
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(peak)
"""


def test_32k_tokens_take_less_than_a_gigabyte():
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=300
    )
    # The scores alone would take 4 GiB.
    assert int(done.stdout) * 1024 < 1e9


def test_the_online_form_reads_each_key_once_per_query_tile():
    reads = []

    class Counting(KeySource):
        def tile(self, start, stop, dtype):
            reads.append((start, stop))
            return super().tile(start, stop, dtype)

    k = torch.randn(100, 1, 4)
    rules = ScoreRules.of(AttentionSpec(1, 1, 4, dtype=torch.float32), 8, 100)
    attend(torch.randn(8, 1, 4), Counting(k, k, 100), rules, dtype=torch.float32,
           tile_q=8, tile_k=16)  # fmt: skip
    assert reads == [(s, min(s + 16, 100)) for s in range(0, 100, 16)]


@pytest.mark.parametrize("bad", [{"tile_q": 0}, {"tile_k": -1}, {"tile_k": "16"}, {"tile": 3},
                                 {"implementation": "fast"}])  # fmt: skip
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        TorchNativeOptions(**bad)


def test_fp8_queries_give_bfloat16_unless_another_dtype_is_asked_for():
    fp8 = torch.float8_e4m3fn
    spec = AttentionSpec(2, 1, 16, dtype=fp8)
    backend = TorchNativeBackend(spec)
    q, k = torch.randn(3, 2, 16).to(fp8), torch.randn(3, 1, 16).to(fp8)
    plan = backend.plan(Batch.from_lengths([3], [3]))
    assert backend.run(q, k, k, plan).o.dtype == torch.bfloat16
    out = (torch.empty(3, 2, 16), torch.empty(3, 2))
    assert backend.run(q, k, k, plan, out=out).o.dtype == torch.float32
    with pytest.raises(InvalidInputError, match=r"out\.o"):
        backend.run(q, k, k, plan, out=(torch.empty(3, 2, 16).int(), torch.empty(3, 2)))


@pytest.mark.gpu
def test_the_reference_on_a_gpu_equals_the_reference_on_the_cpu():
    cuda = torch.device("cuda")
    for case in GRID[::5]:
        spec = case.spec(BASE)
        a, b = run(build(case, spec, CPU)), run(build(case, spec, cuda))
        torch.testing.assert_close(a.o, b.o.cpu(), rtol=0, atol=1e-12)
        torch.testing.assert_close(a.lse, b.lse.cpu(), rtol=2**-22, atol=0)
