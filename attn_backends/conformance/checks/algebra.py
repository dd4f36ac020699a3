"""The algebra: states over disjoint keys merge into the state over all of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from ...merge import merge_state, merge_states
from ...output import AttentionOutput
from ...spec import AttentionSpec
from ..cases import Case, case
from ..inputs import Inputs, place
from ..oracle import Sequence
from ..target import Target, require_close, require_lse, require_o
from ..tolerance import Expected, unit_roundoff
from .base import check


def _split_cases(level: str) -> list[Case]:
    found = [
        case("decode", (1, 1, 1), (40, 2, 7), keys="paged", tags={"cuts": (16, 18)}),
        case("decode-ragged", (1, 1), (23, 1), keys="ragged", tags={"cuts": (0, 9)}),
        case("extend", (3, 2), (20, 9), tags={"cuts": (5, 7)}),
        case("softcap", (1, 1), (23, 4), softcap=3.0, tags={"cuts": (4, 11)}),
    ]
    if level == "full":
        mla = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
        dims = {"head_dim": 192, "head_dim_v": 128}
        found += [
            case("long", (1, 1, 1), (3000, 16, 1), keys="paged", tags={"cuts": (1024, 2048)}),
            case("long-extend", (70, 9), (700, 333), tags={"cuts": (100, 311)}),
            case("dims", (5, 1), (33, 20), keys="ragged", tags={"cuts": (7, 16)}, **dims),
            case(
                "mla", (1, 2), (40, 33), keys="paged", v_from_k=True, tags={"cuts": (7, 16)}, **mla
            ),
            case("group-5", (1,) * 9, (9,) * 9, num_heads=5, num_kv_heads=1, tags={"cuts": (2, 6)}),
        ]
    return found


@check("split", _split_cases)
def check_split(target: Target, case: Case) -> None:
    """Keys cut into any ranges, empty ones too, and merged in any order give the whole."""
    inputs = target.inputs(case)
    want, whole = target.expected(case), target.call(inputs)
    require_o(whole.o, want, inputs.spec)
    parts = _parts(target, case, inputs)
    # Each part and each merge adds a rounding step to o and a few roundings to lse.
    for order in itertools.permutations(range(len(parts))):
        a, b, c = (parts[n] for n in order)
        for name, got in (
            ("((a b) c)", _merge(_merge(a, b), c)),
            ("(a (b c))", _merge(a, _merge(b, c))),
        ):
            _require_whole(got, want, inputs.spec, f"{name} in order {order}")
    _require_whole(merge_states(parts), want, inputs.spec, "merge_states")


def _merge(a: AttentionOutput, b: AttentionOutput) -> AttentionOutput:
    return merge_state(a.o, a.lse, b.o, b.lse)


def _require_whole(got: AttentionOutput, want: Expected, spec: AttentionSpec, how: str) -> None:
    try:
        require_o(got.o, want, spec, slack=6)
        require_lse(got.lse, want, factor=3)
    except AssertionError as error:
        raise type(error)(f"merged as {how}: {error}") from None


def _parts(target: Target, case: Case, inputs: Inputs) -> list[AttentionOutput]:
    """States over three ranges of keys, cut for each sequence at the case's two cuts at most."""
    cuts = case.tag("cuts")
    ranges = []
    for q_len, kv_len in zip(case.q_lens, case.kv_lens):
        # All queries see everything before the last q_len keys.
        most = max(0, kv_len - q_len) if inputs.spec.causal else kv_len
        first, second = (min(cut, most) for cut in cuts)
        ranges.append(((0, first), (first, second), (second, kv_len)))
    parts = []
    for n in range(3):
        sequences, kv_lens = [], []
        for seq, spans in zip(inputs.sequences, ranges):
            left, right = spans[n]
            sequences.append(Sequence(seq.q, seq.k[left:right], seq.v[left:right]))
            kv_lens.append(right - left)
        spec = inputs.spec
        if n < 2 and max(case.q_lens) > 1:
            spec = replace(spec, causal=False)
        part = replace(case, kv_lens=tuple(kv_lens))
        placed = place(part, spec, sequences, inputs.extras, inputs.kwargs, target.device)
        parts.append(target.call(placed))
    return parts


def _self_cases(level: str) -> list[Case]:
    return [
        case("decode", (1, 1, 1), (9, 0, 33), keys="paged"),
        case("prefill", (7, 3), (7, 1)),
    ]


@check("self_merge", _self_cases)
def check_self_merge(target: Target, case: Case) -> None:
    """A state merged with itself keeps its output and gains log 2; an empty one stays empty."""
    got = target.result(case)
    twice = _merge(got, got)
    step = 2 * unit_roundoff(got.o.dtype)
    require_close("o", "[token, head, lane]", twice.o, got.o.double(), step * got.o.double().abs())
    want = got.lse.double() + math.log(2)
    bound = 4 * unit_roundoff(torch.float32) * torch.where(want.isinf(), 0.0, want.abs() + 1)
    require_close("lse", "[token, head]", twice.lse, want, bound)


__all__ = ["check_self_merge", "check_split"]
