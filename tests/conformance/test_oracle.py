"""The oracle against attention spelled out in Python floats, and the tolerances that follow."""

from __future__ import annotations

import math

import pytest
import torch

from attn_backends.conformance.cases import Base, Case
from attn_backends.conformance.grid import value_cases
from attn_backends.conformance.inputs import build
from attn_backends.conformance.oracle import attend
from attn_backends.conformance.probes import probe_answers, visible_positions
from attn_backends.conformance.target import ConformanceError, require_lse, require_o
from attn_backends.conformance.tolerance import (
    _fp8_products,
    emulate,
    expect,
    unit_roundoff,
)

CPU = torch.device("cpu")
BASE = Base(head_dim=16)


def spelled_out(spec, seq, extras, i, h):
    """One row of attention in plain Python: ``(o, lse)``."""
    q_len, kv_len, kv_head = len(seq.q), len(seq.k), h // (spec.num_heads // spec.num_kv_heads)
    k_scale = 1.0 if extras.k_scale is None else float(extras.k_scale[kv_head])
    v_scale = 1.0 if extras.v_scale is None else float(extras.v_scale[kv_head])
    q = seq.q[i, h].double().tolist()
    pairs = []
    for j in visible_positions(spec, i, q_len, kv_len):
        if seq.mask is not None and not bool(seq.mask[i, j]):
            continue
        k = seq.k[j, kv_head].double().tolist()
        x = sum(a * b * k_scale for a, b in zip(q, k)) * spec.scale
        if spec.softcap is not None:
            x = spec.softcap * math.tanh(x / spec.softcap)
        if extras.slopes is not None:
            x -= float(extras.slopes[h]) * abs(i + kv_len - q_len - j)
        pairs.append((x, [v_scale * y for y in seq.v[j, kv_head].double().tolist()]))
    if extras.sinks is not None:
        pairs.append((float(extras.sinks[h]), [0.0] * spec.dv))
    if not pairs:
        return [0.0] * spec.dv, -math.inf
    top = max(x for x, _ in pairs)
    total = sum(math.exp(x - top) for x, _ in pairs)
    o = [sum(math.exp(x - top) * v[d] for x, v in pairs) / total for d in range(spec.dv)]
    return o, top + math.log(total)


@pytest.mark.parametrize("case", value_cases("smoke"), ids=lambda c: c.name)
def test_the_oracle_is_attention_spelled_out(case: Case):
    spec = case.spec(BASE)
    inputs = build(case, spec, CPU)
    for seq in inputs.sequences:
        exact = attend(spec, seq, inputs.extras)
        for i in range(0, len(seq.q), 3):
            h = (5 * i + 1) % spec.num_heads
            o, lse = spelled_out(spec, seq, inputs.extras, i, h)
            torch.testing.assert_close(exact.o[i, h], torch.tensor(o).double(), rtol=0, atol=1e-6)
            assert float(exact.lse[i, h]) == pytest.approx(lse, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_bounds_are_a_few_rounding_steps_wide_and_hold_for_an_honest_kernel(dtype):
    case = next(c for c in value_cases("smoke") if c.name == "ragged-extend")
    spec = case.spec(Base(dtype=dtype))
    inputs = build(case, spec, CPU)
    want = expect(spec, inputs.sequences, inputs.extras)
    low = [emulate(spec, seq, inputs.extras) for seq in inputs.sequences]
    o, lse = torch.cat([a for a, _ in low]), torch.cat([b for _, b in low])
    require_o(o, want, spec)
    require_lse(lse, want)
    size = want.step / unit_roundoff(dtype)
    assert bool((want.o_tol <= 30 * unit_roundoff(dtype) * size).all())
    assert bool((want.lse_tol <= 1e-5).all())


@pytest.mark.parametrize(
    ("dtype", "part"), [(torch.bfloat16, 0.03), (torch.float16, 0.004), (torch.float32, 1e-5)]
)
def test_an_error_of_a_few_rounding_steps_is_seen(dtype, part):
    case = next(c for c in value_cases("smoke") if c.name == "ragged-extend")
    spec = case.spec(Base(dtype=dtype))
    inputs = build(case, spec, CPU)
    want = expect(spec, inputs.sequences, inputs.extras)
    with pytest.raises(ConformanceError, match="o\\[token, head, lane\\]"):
        require_o((want.o * (1 + part)).to(dtype), want, spec)
    with pytest.raises(ConformanceError, match="lse"):
        require_lse((want.lse + 1e-4).float(), want)
    with pytest.raises(ConformanceError):
        require_o(torch.full_like(want.o, math.nan).to(dtype), want, spec)


def test_a_declared_rounding_of_the_row_sum_widens_the_bound_of_the_lse_alone_by_one_roundoff():
    case = next(c for c in value_cases("smoke") if c.name == "ragged-extend")
    spec = case.spec(Base(dtype=torch.bfloat16))
    inputs = build(case, spec, CPU)
    strict = expect(spec, inputs.sequences, inputs.extras)
    wide = expect(spec, inputs.sequences, inputs.extras, rounds_row_sum=True)
    assert torch.equal(strict.o_tol, wide.o_tol)
    more = wide.lse_tol - strict.lse_tol
    torch.testing.assert_close(more, torch.full_like(more, unit_roundoff(torch.bfloat16)))


def test_fp8_products_are_cut_to_the_grid_of_the_largest_term_as_tensor_cores_do():
    q = torch.zeros(1, 1, 64)
    k = torch.zeros(1, 1, 64)
    q[0, 0, 0], k[0, 0, 0] = 64.0, 64.0  # 2**12, so that the grid is 1/2
    q[0, 0, 1:4], k[0, 0, 1:4] = 0.5, 0.875  # 0.4375 each: below the grid, so lost
    q[0, 0, 4], k[0, 0, 4] = 1.0, 0.75  # cut to 0.5
    assert float(_fp8_products(q, k, torch.float32)[0, 0, 0]) == 4096.5
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(3, 2, 96, generator=generator).to(torch.float8_e4m3fn)
    k = torch.randn(5, 2, 96, generator=generator).to(torch.float8_e4m3fn)
    exact = torch.einsum("qhd,khd->hqk", q.double(), k.double())
    error = (_fp8_products(q, k, torch.float32).double() - exact).abs()
    largest = float(exact.abs().max() + q.double().abs().max() * k.double().abs().max())
    assert 0 < float(error.max()) < 99 * largest * 2.0**-13


def test_probe_answers_are_the_oracles():
    case = Case("probe", (5, 1, 0, 3), (2, 9, 4, 0), data="probe")
    spec = case.spec(BASE)
    inputs = build(case, spec, CPU)
    want = expect(spec, inputs.sequences, inputs.extras)
    got = probe_answers(spec, case.q_lens, case.kv_lens, CPU)
    torch.testing.assert_close(got.o, want.o)
    torch.testing.assert_close(got.lse, want.lse)


def test_cases_are_the_same_in_every_process():
    case = value_cases("smoke")[0]
    assert case.stable_seed() == Case(case.name, case.q_lens, case.kv_lens).stable_seed()
    first, second = (build(case, case.spec(BASE), CPU) for _ in range(2))
    assert torch.equal(first.q, second.q) and torch.equal(first.k, second.k)


def test_the_full_grid_contains_the_smoke_grid():
    assert set(value_cases("smoke")) <= set(value_cases("full"))
    assert len(value_cases("full")) > 250
