"""The forms that configurations choose between: the same answers, at scores of any size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from attn_backends.spec import AttentionSpec
from attn_backends.triton_native import operands
from attn_backends.triton_native.primitives import exponent_form

#: fuse, lane_sums, phases; the prefill kernel has phases always.
FORMS = [(False, True, False), (True, False, True), (True, True, True)]


def forms(fuse: bool, lane_sums: bool, phases: bool, split: bool) -> dict[str, Any]:
    if split:
        tile = (16, 16, 4, 2, 2, 16, fuse, lane_sums, phases)
        return {"split_config": tile, "short_rows": 2**31 - 1, "num_splits": 2}
    return {"prefill_config": (16, 16, 4, 2, phases, True, fuse, lane_sums), "short_rows": 0}


@triton.jit
def _form(m_ptr, factor_ptr, base_ptr, scale, N: tl.constexpr):
    lane = tl.arange(0, N)
    unit = scale  # the interpreter makes tensors of numbers where they are assigned
    factor, base = exponent_form(tl.load(m_ptr + lane), unit)
    tl.store(factor_ptr + lane, factor)
    tl.store(base_ptr + lane, base)


@pytest.mark.parametrize("scale", [0.3, 1.0, 1.2e-38, 1.7e20])
def test_the_largest_score_has_an_exponent_near_zero_whatever_its_size(
    lab: SimpleNamespace, scale: float
) -> None:
    m = torch.tensor([0.0, 1.0, -3.7, 1e4, -1e9, 3.1e30, -3.1e30, 1e-30], device=lab.device)
    factor, base = torch.full_like(m, float("nan")), torch.full_like(m, float("nan"))
    _form[(1,)](m, factor, base, scale, 8)
    of_scale = torch.tensor(scale)  # in float32
    # In float64 the product of two float32 is exact, and so is what a fused step rounds.
    left = m.double() * factor.double() - base.double()
    small = (m.double() * of_scale.double()).abs() < 2.0**28
    overflown = torch.isinf(base)
    assert bool((left[~overflown].abs() <= 8.0).all())
    assert bool((factor[small] == of_scale).all()) and bool((left[~small & ~overflown] == 0).all())
    assert bool(((factor <= of_scale) & (factor > 0.49 * of_scale)).all())


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["prefill", "split"])
@pytest.mark.parametrize(
    "feature", [{}, {"window": (20, 3), "causal": False}, {"softcap": 2.0, "has_alibi": True}]
)
def test_every_form_equals_the_definition(
    lab: SimpleNamespace, feature: dict[str, Any], split: bool, form: tuple[bool, bool, bool]
) -> None:
    spec = AttentionSpec(4, 2, 16, dtype=torch.float32, page_size=8, **feature)
    p = lab.Problem(spec, [5, 1, 0, 3], [70, 33, 4, 0])
    p.check(lab.run(p.with_sinks(), **forms(*form, split)))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["prefill", "split"])
@pytest.mark.parametrize("size", [-1e30, -3e9, 7e8, 1e12])
def test_scores_of_any_size_leave_the_largest_alone(
    lab: SimpleNamespace, size: float, split: bool, form: tuple[bool, bool, bool]
) -> None:
    spec = AttentionSpec(1, 1, 16, dtype=torch.float32, sm_scale=0.7, causal=False)
    p = lab.Problem(spec, [1], [70])
    p.q.zero_()
    p.q[:, 0, 0] = 1.0
    start = int(p.batch.cu_seqlens_k[0])
    p.k[start : start + 70] = 0.0
    # One key is ahead of the others by far, in the third tile, after an early tile of small ones.
    p.k[start : start + 70, 0, 0] = size - abs(size) / 8
    p.k[start : start + 5, 0, 0] = -abs(size) * 2
    p.k[start + 40, 0, 0] = size
    out = lab.run(p, **forms(*form, split))
    torch.testing.assert_close(out.o[0, 0], p.v[start + 40, 0])
    assert float(out.lse[0, 0]) == pytest.approx(0.7 * size, rel=1e-6)


@pytest.mark.parametrize("page_size", [None, 3, 16])
def test_offsets_of_32_and_64_bits_give_the_same_bits(
    lab: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, page_size: int | None
) -> None:
    spec = AttentionSpec(4, 2, 16, dtype=torch.float32, page_size=page_size)
    p = lab.Problem(spec, [5, 1, 0, 3], [70, 33, 4, 0])
    options = forms(False, False, False, True)
    narrow = lab.run(p, **options)
    monkeypatch.setattr(operands, "NARROW_ELEMENTS", 0)
    wide = lab.run(p, **options)
    assert torch.equal(narrow.o, wide.o) and torch.equal(narrow.lse, wide.lse)


def test_the_extent_counts_to_the_last_element() -> None:
    x = torch.empty(3, 4, 2, 8)
    assert operands.extent(x) == x.numel() - 1
    assert operands.extent(x[:, ::2].transpose(1, 2)) == 2 * 64 + 2 * 16 + 8 + 7
    assert operands.extent(x[:0]) <= 63
