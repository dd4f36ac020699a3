"""The public merge functions: they check, allocate, choose a path once per layout, and launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..output import AttentionOutput
from . import many, pair
from .dispatch import MergePath


def merge_state(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    path: str | None = None,
    num_tokens_with_prefix: int | None = None,
    output_scale: float | torch.Tensor | None = None,
) -> AttentionOutput:
    """Merge two states of the same queries over disjoint keys.

    Exact for empty states: ``lse = -inf`` (or +inf, as some kernels report it) gives a side weight
    0, and its ``o`` is then ignored whatever it holds. Arithmetic is float32, float64 for float64
    inputs. A NaN in an LSE stays visible in both results.

    Args:
        o_a: ``[T, H, DV]`` float32, float16, bfloat16 or float64, last dim contiguous.
        lse_a: ``[T, H]`` float32, natural log, any strides (a transposed ``[H, T]`` too).
        o_b: The other state's output, of the same shape and dtype.
        lse_b: The other state's LSE.
        out: ``(o, lse)`` to write; ``o`` has the inputs' dtype, or a half type for float32
            inputs. An input may be its own output; other overlaps are refused.
        path: ``"cuda"``, ``"triton"`` or ``"torch"``; None chooses, see ``choose_merge_path``.
        num_tokens_with_prefix: Rows from this one on take state b alone, as if a were empty.
        output_scale: Divide ``o`` by this and store it as float8_e4m3fn, saturated; a number or
            a float32 scalar tensor.

    Returns:
        The merged state: ``o [T, H, DV]``, ``lse [T, H]`` float32.

    Raises:
        InvalidInputError: An input is malformed; the message names it.
        UnsupportedCallError: The path asked for cannot do this merge.
    """
    return pair.merge(o_a, lse_a, o_b, lse_b, out, path, num_tokens_with_prefix, output_scale)


def merge_state_(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    path: str | None = None,
    num_tokens_with_prefix: int | None = None,
) -> AttentionOutput:
    """Merge state b into state a, in place; bit-identical to ``merge_state``.

    Args:
        o_a: ``[T, H, DV]``, read and overwritten.
        lse_a: ``[T, H]`` float32, read and overwritten.
        o_b: ``[T, H, DV]``.
        lse_b: ``[T, H]`` float32.
        path: As in ``merge_state``.
        num_tokens_with_prefix: As in ``merge_state``.

    Returns:
        ``(o_a, lse_a)`` themselves.

    Raises:
        InvalidInputError: An input is malformed; the message names it.
        UnsupportedCallError: The path asked for cannot do this merge.
    """
    return pair.merge(o_a, lse_a, o_b, lse_b, (o_a, lse_a), path, num_tokens_with_prefix, None)


def merge_states(
    states: Sequence[Any],
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    path: str | None = None,
    counts: torch.Tensor | None = None,
) -> AttentionOutput:
    """Merge any number of states of the same queries over disjoint keys, reading each once.

    Args:
        states: A sequence of states ``(o [T, H, DV], lse [T, H])``, or one stacked pair
            ``(o [n, T, H, DV], lse [n, T, H])``; n >= 1. Dtypes as in ``merge_state``.
        out: ``(o, lse)`` to write, as in ``merge_state``.
        path: As in ``merge_state``.
        counts: ``[T]`` int32 or int64 on the states' device, for stacked states: row t merges
            its first ``counts[t]`` states only; 0 gives the empty state.

    Returns:
        The merged state: ``o [T, H, DV]``, ``lse [T, H]`` float32.

    Raises:
        InvalidInputError: An input is malformed; the message names it.
        UnsupportedCallError: The path asked for cannot do this merge.
    """
    return many.merge(states, out, path, counts)


def apply_sinks(
    state: Any, sinks: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> AttentionOutput:
    """Merge attention sinks into a state, once, after all keys are merged.

    A sink is one more key of logit ``sinks[h]`` and value 0: ``o`` shrinks by the mass it takes,
    and ``lse`` includes it. An empty row becomes ``o = 0``, ``lse = sinks[h]``.

    Args:
        state: ``(o [T, H, DV], lse [T, H])`` over keys only.
        sinks: ``[H]`` float32 logits, neither scaled nor capped; -inf is no sink.
        out: ``(o, lse)`` to write, as in ``merge_state``; ``state`` itself is allowed.

    Returns:
        The state with the sink.

    Raises:
        InvalidInputError: An input is malformed; the message names it.
    """
    return pair.apply_sinks(state, sinks, out)


def choose_merge_path(
    o_a: torch.Tensor,
    o_b: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    path: str | None = None,
) -> MergePath:
    """Tell which path a merge of these tensors takes, and why; LSEs count as contiguous.

    Args:
        o_a: ``[T, H, DV]`` output of one state, or ``[n, T, H, DV]`` of stacked ones.
        o_b: The other's; None where there is none.
        out: ``(o, lse)`` that the merge would write to, of the shape of its result; None means
            fresh tensors.
        path: The path that would be asked for.

    Returns:
        The path, with the reason for it and against those before it.

    Raises:
        InvalidInputError: ``path`` is no path's name.
        UnsupportedCallError: The path asked for cannot do this merge.
    """
    return pair.choose_path(o_a, o_b, out, path)


__all__ = ["apply_sinks", "choose_merge_path", "merge_state", "merge_state_", "merge_states"]
