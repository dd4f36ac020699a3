"""The merges as registered torch operators, for ``torch.compile`` and other tensor subclasses.

Eager calls skip this module: the dispatcher would cost more than the launch. A fake implementation
checks the layouts, so a wrong call fails while tracing. Results are fresh contiguous tensors;
``_out`` forms write into theirs, and ``merge_pair_`` writes into its first state, so that a
functionalising compiler sees every mutation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..output import AttentionOutput
from . import many, pair

_LIB = torch.library.Library("attn_backends", "FRAGMENT")  # must stay alive: it owns the ops
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_PAIR = (
    "Tensor? o_b, Tensor lse_b, SymInt? num_prefix, float? scale, Tensor? scale_tensor, str? path"
)
_OUT = "Tensor(a!) out_o, Tensor(b!) out_lse"
_SCHEMAS = (
    f"merge_pair(Tensor o_a, Tensor lse_a, {_PAIR}) -> (Tensor, Tensor)",
    f"merge_pair_out(Tensor o_a, Tensor lse_a, {_PAIR}, {_OUT}) -> ()",
    f"merge_pair_(Tensor(a!) o_a, Tensor(b!) lse_a, {_PAIR}) -> ()",
    "merge_stacked(Tensor o, Tensor lse, Tensor? counts, str? path) -> (Tensor, Tensor)",
    f"merge_stacked_out(Tensor o, Tensor lse, Tensor? counts, str? path, {_OUT}) -> ()",
    "merge_separate(Tensor[] o, Tensor[] lse, str? path) -> (Tensor, Tensor)",
    f"merge_separate_out(Tensor[] o, Tensor[] lse, str? path, {_OUT}) -> ()",
)


def merge_pair(
    o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, out: Any, path: Any, num_prefix: Any, scale: Any
) -> AttentionOutput:
    """``pair.merge`` through the dispatcher."""
    number, tensor = (None, scale) if isinstance(scale, torch.Tensor) else (scale, None)
    rest = (o_b, lse_b, num_prefix, number, tensor, path)
    ops = torch.ops.attn_backends
    if out is None:
        return AttentionOutput(*ops.merge_pair(o_a, lse_a, *rest))
    out_o, out_lse = out
    if out_o is o_a and out_lse is lse_a:
        ops.merge_pair_(o_a, lse_a, *rest)
    else:
        ops.merge_pair_out(o_a, lse_a, *rest, out_o, out_lse)
    return AttentionOutput(out_o, out_lse)


def merge_many(os: Any, lses: Any, out: Any, path: Any, counts: Any) -> AttentionOutput:
    """``many.merge`` through the dispatcher."""
    ops = torch.ops.attn_backends
    args: tuple[Any, ...]
    if isinstance(os, torch.Tensor):
        name, args = "merge_stacked", (os, lses, counts, path)
    else:
        many.check_separate_counts(counts)
        name, args = "merge_separate", (list(os), list(lses), path)
    if out is None:
        return AttentionOutput(*getattr(ops, name)(*args))
    getattr(ops, f"{name}_out")(*args, *out)
    return AttentionOutput(*out)


def _pair(o_a, lse_a, o_b, lse_b, num_prefix, scale, scale_tensor, path):  # type: ignore
    factor = scale if scale_tensor is None else scale_tensor
    return tuple(pair.merge(o_a, lse_a, o_b, lse_b, None, path, num_prefix, factor, from_op=True))


def _pair_out(o_a, lse_a, o_b, lse_b, num_prefix, scale, scale_tensor, path, o, lse):  # type: ignore
    factor = scale if scale_tensor is None else scale_tensor
    pair.merge(o_a, lse_a, o_b, lse_b, (o, lse), path, num_prefix, factor, from_op=True)


def _pair_inplace(o_a, lse_a, *rest):  # type: ignore
    _pair_out(o_a, lse_a, *rest, o_a, lse_a)


def _stacked(o, lse, counts, path):  # type: ignore
    return tuple(many.merge_eager(o, lse, None, path, counts))


def _stacked_out(o, lse, counts, path, out_o, out_lse):  # type: ignore
    many.merge_eager(o, lse, (out_o, out_lse), path, counts)


def _separate(o, lse, path):  # type: ignore
    return tuple(many.merge_separate(tuple(o), tuple(lse), None, path))


def _separate_out(o, lse, path, out_o, out_lse):  # type: ignore
    many.merge_separate(tuple(o), tuple(lse), (out_o, out_lse), path)


def _pair_fake(o_a, lse_a, o_b, lse_b, num_prefix, scale, scale_tensor, path):  # type: ignore
    factor = scale if scale_tensor is None else scale_tensor
    pair.check_pair(o_a, lse_a, o_b, lse_b, None, factor)
    return _fresh(o_a, o_a.shape, pair.result_dtype(o_a, None, factor))


def _pair_out_fake(o_a, lse_a, o_b, lse_b, num_prefix, scale, scale_tensor, path, o, lse):  # type: ignore
    factor = scale if scale_tensor is None else scale_tensor
    pair.check_pair(o_a, lse_a, o_b, lse_b, (o, lse), factor)


def _pair_inplace_fake(o_a, lse_a, *rest):  # type: ignore
    _pair_out_fake(o_a, lse_a, *rest, o_a, lse_a)


def _stacked_fake(o, lse, counts, path):  # type: ignore
    many.check_many(o, lse, None, counts)
    return _fresh(o, o.shape[1:], o.dtype)


def _stacked_out_fake(o, lse, counts, path, out_o, out_lse):  # type: ignore
    many.check_many(o, lse, (out_o, out_lse), counts)


def _separate_fake(o, lse, path):  # type: ignore
    many.check_many(tuple(o), tuple(lse), None, None)
    return _fresh(o[0], o[0].shape, o[0].dtype)


def _separate_out_fake(o, lse, path, out_o, out_lse):  # type: ignore
    many.check_many(tuple(o), tuple(lse), (out_o, out_lse), None)


def _fresh(o: torch.Tensor, shape: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return o.new_empty(shape, dtype=dtype), o.new_empty(shape[:-1], dtype=torch.float32)


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "merge_pair": (_pair, _pair_fake),
    "merge_pair_out": (_pair_out, _pair_out_fake),
    "merge_pair_": (_pair_inplace, _pair_inplace_fake),
    "merge_stacked": (_stacked, _stacked_fake),
    "merge_stacked_out": (_stacked_out, _stacked_out_fake),
    "merge_separate": (_separate, _separate_fake),
    "merge_separate_out": (_separate_out, _separate_out_fake),
}

for _schema in _SCHEMAS:
    _LIB.define(_schema, tags=_TAGS)
for _name, (_real, _fake) in _IMPLEMENTATIONS.items():
    _LIB.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attn_backends::{_name}", _fake, lib=_LIB)

__all__ = ["merge_many", "merge_pair"]
