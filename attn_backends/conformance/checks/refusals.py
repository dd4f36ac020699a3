"""Honoured or refused: options have effects, refusals are real, mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...batch import Batch
from ...errors import InvalidInputError
from ...spec import AttentionSpec
from ..cases import DTYPES, Case, case
from ..grid import FP8
from ..inputs import Inputs
from ..oracle import Extras, Sequence
from ..target import Target, require, require_lse, require_o
from .base import check


def _option_cases(level: str) -> list[Case]:
    found = []
    for keys in ("ragged", "paged"):
        found += [
            case(f"causal-{keys}", (4,), (6,), keys=keys, tags={"option": "causal"}),
            case(f"window-{keys}", (16,), (16,), keys=keys, window=(2, 0),
                 tags={"option": "window"}),
            case(f"window-right-{keys}", (3,), (16,), keys=keys, causal=False, window=(None, 1),
                 tags={"option": "window"}),
            case(f"window-decode-{keys}", (1, 1), (16, 9), keys=keys, window=(2, 0),
                 tags={"option": "window"}),
            case(f"softcap-{keys}", (2, 1), (9, 5), keys=keys, softcap=1.0,
                 tags={"option": "softcap"}),
            case(f"softcap-decode-{keys}", (1, 1), (9, 5), keys=keys, softcap=1.0,
                 tags={"option": "softcap"}),
            case(f"sm_scale-{keys}", (2, 1), (9, 5), keys=keys, sm_scale=0.5,
                 tags={"option": "sm_scale"}),
            case(f"alibi-{keys}", (4, 1), (4, 9), keys=keys, has_alibi=True,
                 tags={"option": "alibi_slopes"}),
            case(f"mask-{keys}", (4, 1), (4, 9), keys=keys, has_mask=True, causal=False,
                 tags={"option": "mask"}),
            case(f"sinks-{keys}", (2, 1), (9, 5), keys=keys, sinks=True,
                 tags={"option": "sinks"}),
            case(f"sinks-decode-{keys}", (1, 1), (9, 5), keys=keys, sinks=True,
                 tags={"option": "sinks"}),
        ]  # fmt: skip
        for scale in ("k_scale", "v_scale"):
            for form in ("float", "scalar", "head"):
                own = {"kv_dtype": FP8, "kv_scale": form, "keys": keys, "tags": {"option": scale}}
                found.append(case(f"{scale}-{form}-{keys}", (1, 1), (9, 5), **own))
    return found


@check("options", _option_cases)
def check_options(target: Target, case: Case) -> None:
    """An option that is accepted has its effect: with it, the answer is the one with it.

    The cases are such that the answers with and without differ by far more than the tolerance.
    """
    option, inputs = case.tag("option"), target.inputs(case)
    want = target.expected(case)
    got = target.call(inputs)
    other = target.expected_of(*_without(option, inputs))
    gap = (want.o - other.o).abs().amax(-1) > 4 * (want.o_tol + other.o_tol)
    gap_lse = (want.lse - other.lse).abs() > 4 * (want.lse_tol + other.lse_tol)
    require(bool((gap | gap_lse).any()), f"the case does not show {option}: a fault of the suite")
    try:
        require_o(got.o, want, inputs.spec)
        require_lse(got.lse, want)
    except AssertionError as error:
        try:
            require_o(got.o, other, inputs.spec)
            require_lse(got.lse, other)
        except AssertionError:
            raise error from None
        require(False, f"{option} has no effect: the answer is the one without it ({error})")


def _without(option: str, inputs: Inputs) -> tuple[AttentionSpec, list[Sequence], Extras]:
    spec, sequences, extras = inputs.spec, inputs.sequences, inputs.extras
    if option == "causal":
        spec = replace(spec, causal=False)
    elif option in ("window", "softcap", "sm_scale"):
        off: dict[str, Any] = {option: None}
        spec = replace(spec, **off)
    elif option == "mask":
        sequences = [replace(seq, mask=None) for seq in sequences]
    else:
        field = {"alibi_slopes": "slopes"}.get(option, option)
        extras = replace(extras, **{field: None})
    return spec, sequences, extras


def _claim_cases(level: str) -> list[Case]:
    small, found = ((1,), (3,)), []
    for dtype in DTYPES:
        found.append(case(f"dtype-{dtype}".replace("torch.", ""), *small, dtype=dtype))
    for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
        found.append(case(f"kv-{fp8}".replace("torch.", ""), *small, kv_dtype=fp8))
    for dim in (1, 7, 8, 24, 48, 96, 100, 160, 256, 264, 512, 1024):
        found.append(case(f"head_dim-{dim}", *small, head_dim=dim))
    for dim, dv in ((64, 128), (128, 64), (64, 1), (96, 80), (192, 128), (576, 512), (64, 2048)):
        found.append(case(f"dims-{dim}-{dv}", *small, head_dim=dim, head_dim_v=dv))
    for size in (1, 7, 16, 100, 256, 1024):
        found.append(case(f"page_size-{size}", *small, page_size=size))
    for group in (1, 3, 5, 8, 17, 64):
        found.append(case(f"group-{group}", *small, num_heads=group, num_kv_heads=1))
    features: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "bidirectional": {"causal": False},
        "window": {"window": (1, 0)},
        "window-right": {"causal": False, "window": (None, 1)},
        "softcap": {"softcap": 5.0},
        "alibi": {"has_alibi": True},
        "mask": {"has_mask": True},
        "batch_invariant": {"batch_invariant": True},
    }
    for name, change in features.items():
        for keys in ("ragged", "paged"):
            found.append(case(f"{name}-{keys}", *small, keys=keys, **change))
    return found


@check("claims", _claim_cases)
def check_claims(target: Target, case: Case) -> None:
    """What is not refused works, from one end of the declared ranges to the other.

    What is refused is refused by the constructor too, with every reason, in the fixed grammar; and
    what the declaration rules out is refused. (The runner tries refusals of every other
    requirement in the same way.)
    """
    spec = case.spec(target.base)
    declared = list(target.backend.capabilities.spec_reasons(spec, case.phase))
    require(
        not declared,
        f"the declaration rules the call out ({'; '.join(map(str, declared))}), "
        "unsupported_reasons does not",
    )
    want = target.expected(case)
    got = target.call(target.inputs(case))
    require_o(got.o, want, spec)
    require_lse(got.lse, want)


def _mistake_cases(level: str) -> list[Case]:
    shapes: dict[str, dict[str, Any]] = {
        "page_id_too_large": {"keys": "paged"},
        "page_id_negative": {"keys": "paged"},
        "length_beyond_table": {"keys": "paged"},
        "alibi_missing": {"has_alibi": True},
        "mask_missing": {"has_mask": True},
        "mask_too_short": {"has_mask": True},
        "too_few_keys": {"keys": "ragged"},
    }
    return [case(name, (2, 1), (9, 5), **shapes.get(name, {})) for name in MISTAKES]


@check("mistakes", _mistake_cases)
def check_mistakes(target: Target, case: Case) -> None:
    """What no backend accepts raises InvalidInputError with field, value and allowed range."""
    inputs = target.inputs(case)
    backend = target.make(inputs.spec)
    try:
        MISTAKES[case.name](target, inputs, backend)
    except InvalidInputError as error:
        text = str(error)
        require("=" in text and "(allowed: " in text, f"the message names too little: {text}")
        return
    except Exception as error:
        require(False, f"raised {type(error).__name__}, not InvalidInputError: {error}")
    require(False, f"{case.name} was accepted")


def _run(inputs: Inputs, backend: Any, **change: Any) -> None:
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    tensors |= {n: change.pop(n) for n in list(change) if n in tensors}
    plan = change.pop("plan", None) or backend.plan(inputs.batch)
    backend.run(*tensors.values(), plan, **{**inputs.kwargs, **change})


def _page_table(inputs: Inputs, value: int) -> Inputs:
    table = inputs.batch.host_page_table
    assert table is not None
    table = table.clone()
    table[1, 0] = value
    q_lens, kv_lens = inputs.batch.q_lens, inputs.batch.kv_lens
    assert q_lens is not None and kv_lens is not None
    batch = Batch.from_lengths(q_lens, kv_lens, page_table=table, device=inputs.q.device)
    return replace(inputs, batch=batch)


def _longer_than_table(target: Target, inputs: Inputs, backend: Any) -> None:
    table, size = inputs.batch.host_page_table, inputs.spec.page_size
    assert table is not None and size is not None
    lens = [9, table.shape[1] * size + 1]
    batch = Batch.from_lengths([2, 1], lens, page_table=table, device=inputs.q.device)
    backend.plan(batch)


def _other_plan(target: Target, inputs: Inputs, backend: Any) -> None:
    other = target.make(replace(inputs.spec, sm_scale=0.25))
    _run(inputs, backend, plan=other.plan(inputs.batch))


def _wrong_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32 if x.dtype != torch.float32 else torch.float16)


def _last_dim_strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], dim=-1).flatten(-2)[..., ::2]


def _vector(inputs: Inputs, n: int, **kwargs: Any) -> torch.Tensor:
    return torch.ones(n, device=kwargs.pop("device", inputs.q.device), **kwargs)


Mistake = Callable[[Target, Inputs, Any], None]

MISTAKES: dict[str, Mistake] = {
    "q_dtype": lambda t, i, b: _run(i, b, q=_wrong_dtype(i.q)),
    "k_dtype": lambda t, i, b: _run(i, b, k=_wrong_dtype(i.k)),
    "q_heads": lambda t, i, b: _run(i, b, q=i.q[:, :-1]),
    "k_heads": lambda t, i, b: _run(i, b, k=torch.cat([i.k, i.k], dim=-2)),
    "q_rows": lambda t, i, b: _run(i, b, q=i.q[:-1]),
    "too_few_keys": lambda t, i, b: _run(i, b, k=i.k[:-1], v=i.v[:-1] if i.v is not None else None),
    "v_width": lambda t, i, b: _run(i, b, v=i.v[..., :-1] if i.v is not None else None),
    "q_last_dim_strided": lambda t, i, b: _run(i, b, q=_last_dim_strided(i.q)),
    "k_last_dim_strided": lambda t, i, b: _run(i, b, k=_last_dim_strided(i.k)),
    "q_requires_grad": lambda t, i, b: _run(i, b, q=i.q.clone().requires_grad_()),
    "q_other_device": lambda t, i, b: _run(i, b, q=i.q.to("meta")),
    "sinks_length": lambda t, i, b: _run(i, b, sinks=_vector(i, b.spec.num_heads - 1)),
    "sinks_strided": lambda t, i, b: _run(i, b, sinks=_vector(i, 2 * b.spec.num_heads)[::2]),
    "sinks_device": lambda t, i, b: _run(i, b, sinks=_vector(i, b.spec.num_heads, device="meta")),
    "alibi_undeclared": lambda t, i, b: _run(i, b, alibi_slopes=_vector(i, b.spec.num_heads)),
    "alibi_missing": lambda t, i, b: _run(i, b, alibi_slopes=None),
    "mask_missing": lambda t, i, b: _run(i, b, mask=None),
    "mask_too_short": lambda t, i, b: _run(i, b, mask=i.kwargs["mask"][:-1]),
    "k_scale_without_fp8": lambda t, i, b: _run(i, b, k_scale=0.5),
    "page_id_too_large": lambda t, i, b: _run(_page_table(i, i.k.shape[0]), b),
    "page_id_negative": lambda t, i, b: _run(_page_table(i, -1), b),
    "length_beyond_table": _longer_than_table,
    "plan_of_another_spec": _other_plan,
    "out_shape": lambda t, i, b: _run(i, b, out=(i.q[:-1].clone(), _vector(i, 3))),
}

__all__ = ["MISTAKES", "check_claims", "check_mistakes", "check_options"]
