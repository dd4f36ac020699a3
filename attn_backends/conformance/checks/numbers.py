"""Numbers: logits far outside what random data shows."""

from __future__ import annotations

import math

import torch

from ..cases import Case, case
from ..inputs import Inputs, place
from ..oracle import Extras, Sequence
from ..target import Target, require, require_lse, require_o
from .base import check

#: Logits of the keys of one sequence: the largest first, last, alone, and all of them tiny.
LOGITS = {
    "late-outlier": [0.0] * 11 + [40.0] + [1.0] * 5,
    "huge-first": [8000.0] + [0.0] * 9 + [7999.0],
    "huge-last": [0.0] * 20 + [8000.0],
    "all-very-negative": [-8000.0, -8001.0, -7999.0, -8000.0] * 5,
    "wide-range": [-8000.0, 8000.0, 0.0, 7990.0, -3.0],
    "above-exp-range": [100.0, 88.0, 90.0, 12.0, 99.0],
    "single": [-6000.0],
}


def _logit_cases(level: str) -> list[Case]:
    found = []
    for name, logits in LOGITS.items():
        n = len(logits)
        keys = "paged" if n % 2 else "any"
        found.append(case(name, (1, 1), (n, n), keys=keys, sm_scale=1.0, tags={"logits": name}))
    return found


@check("extreme_logits", _logit_cases)
def check_extreme_logits(target: Target, case: Case) -> None:
    """Logits of thousands, of either sign, give finite and right answers."""
    inputs, logits = target.inputs(case), LOGITS[case.tag("logits")]
    dtype = inputs.spec.dtype
    # q = (64, 1, 0, ...): exact products in every half type, with k = (coarse, fine, 0, ...).
    for seq in inputs.sequences:
        seq.q.zero_()
        seq.q[..., 0], seq.q[..., 1] = 64.0, 1.0
        seq.k.zero_()
        for j, logit in enumerate(logits):
            coarse = math.floor(logit / 64)
            seq.k[j, :, 0], seq.k[j, :, 1] = coarse, logit - 64 * coarse
    rebuilt = _rebuild(target, case, inputs.sequences)
    want = target.expected_of(rebuilt.spec, rebuilt.sequences, Extras())
    got = target.call(rebuilt)
    require(got.o.dtype == rebuilt.spec.out_dtype and dtype == rebuilt.q.dtype, "dtype changed")
    require(bool(torch.isfinite(got.o).all()), "o is not finite")
    require_o(got.o, want, rebuilt.spec)
    require_lse(got.lse, want)


def _rebuild(target: Target, case: Case, sequences: list[Sequence]) -> Inputs:
    spec = case.spec(target.base)
    return place(case, spec, sequences, Extras(), {}, target.device)


def _cap_cases(level: str) -> list[Case]:
    return [
        case(f"score-{score:g}", (1,), (1,), softcap=50.0, sm_scale=1.0, tags={"score": score})
        for score in (1.0, 100.0, 1000.0, 4400.0, 5000.0, 10000.0, -1.0, -10000.0)
    ]


@check("softcap_range", _cap_cases)
def check_softcap_range(target: Target, case: Case) -> None:
    """The softcap saturates at the cap for scores of any size: no overflow inside tanh."""
    inputs, score = target.inputs(case), case.tag("score")
    (seq,) = inputs.sequences
    seq.q.zero_()
    seq.k.zero_()
    root = 1.0 if abs(score) <= 1 else 100.0
    seq.q[..., 0], seq.k[..., 0] = score / root, root
    rebuilt = _rebuild(target, case, inputs.sequences)
    want = target.expected_of(rebuilt.spec, rebuilt.sequences, Extras())
    got = target.call(rebuilt)
    require(bool(torch.isfinite(got.lse).all()), "lse is not finite")
    require_o(got.o, want, rebuilt.spec)
    require_lse(got.lse, want)


__all__ = ["check_extreme_logits", "check_softcap_range"]
