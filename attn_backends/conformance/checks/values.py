"""Values: the output and the LSE of every feature, against the oracle."""

from __future__ import annotations

import torch

from ..cases import Case, case
from ..grid import value_cases
from ..target import Target, require, require_lse, require_o, require_same_bits
from .base import check


def _core_cases(level: str) -> list[Case]:
    return [
        case("decode", (1, 1, 1), (9, 1, 33)),
        case("prefill", (7, 1, 18), (7, 1, 18)),
    ]


@check("core", _core_cases, refusable=False)
def check_core(target: Target, case: Case) -> None:
    """Plain causal attention in a half type at head dim 64 or 128 works and returns its LSE.

    No backend may refuse it: a suite in which nothing ran has shown nothing. A backend for one
    phase must do that phase.
    """
    base = target.base
    spec = case.spec(base)
    require(base.accepted, f"no plain call is accepted: {_first_refusal(target, case)}")
    half = base.dtype in (torch.bfloat16, torch.float16)
    require(half, f"dtype={base.dtype} (supported: bfloat16 or float16 at least)")
    require(base.head_dim in (64, 128), f"head_dim={base.head_dim} (supported: 64 or 128 at least)")
    require(base.causal, "causal=True is refused (supported: plain causal calls at least)")
    phases = target.backend.capabilities.phases
    if case.phase not in phases:
        require(bool(phases), "phases=() (supported: prefill or decode at least)")
        return
    want, got = target.expected(case, spec), target.result(case)
    require_o(got.o, want, spec)
    require_lse(got.lse, want)


def _first_refusal(target: Target, case: Case) -> str:
    return "; ".join(map(str, target.reasons(case.spec(target.base), case.phase)))


@check("values", value_cases)
def check_values(target: Target, case: Case) -> None:
    """``o`` equals the exact output within the error of an honest kernel on the same data."""
    require_o(target.result(case).o, target.expected(case), case.spec(target.base))


@check("lse", value_cases)
def check_lse(target: Target, case: Case) -> None:
    """``lse`` is the natural log of the sum of exp(score), in float32, ``[tokens, heads]``."""
    require_lse(target.result(case).lse, target.expected(case))


def _repeat_cases(level: str) -> list[Case]:
    found = [
        case("decode", (1, 1, 1), (9, 1, 33), keys="paged"),
        case("extend", (3, 1, 7), (20, 33, 7)),
    ]
    return found


@check("allocates", _repeat_cases)
def check_allocates(target: Target, case: Case) -> None:
    """Without ``out=`` the backend allocates, and the answer is the same."""
    inputs = target.inputs(case)
    got = target.call(inputs, poisoned=False)
    require_same_bits("allocated outputs", got, target.call(inputs))
    require(got.o.data_ptr() != inputs.q.data_ptr(), "o shares memory with q")


__all__ = ["check_allocates", "check_core", "check_lse", "check_values"]
