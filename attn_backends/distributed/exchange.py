"""How the states of all ranks become one: three exchanges, all of them the n-way merge.

Rank r ends up with heads ``[r * h, (r + 1) * h)``, h = ceil(H / ranks), or with all of them.

    all_to_all      each rank gets every state of its own heads, and merges them in rank order
    all_gather      each rank gets every state of all heads: one exchange where all are wanted
    reduce_scatter  LSEs are gathered, every rank weighs its own output, and the sum is scattered

A state travels as one run of bytes, its LSE before its output, so that it takes one exchange.
"""

from __future__ import annotations

import torch

from ..merge import merge_states
from ..output import AttentionOutput
from .group import Group

EXCHANGES = ("all_to_all", "all_gather", "reduce_scatter")
#: Bytes of all ranks' states up to which one exchange of everything beats two of the parts.
SMALL = 1 << 20
ALIGN = 16  # bytes; lets the merge load whole vectors


def heads_of(rank: int, world: int, heads: int) -> slice:
    """The heads that a rank ends up with; the last ranks may have fewer, or none."""
    each = -(-heads // world)
    return slice(min(rank * each, heads), min((rank + 1) * each, heads))


class _Packed:
    """States ``[n, T, h, DV]`` and ``[n, T, h]`` as ``n`` runs of bytes."""

    def __init__(self, n: int, rows: int, heads: int, like: torch.Tensor) -> None:
        dv, size = like.shape[-1], like.element_size()
        lse_bytes = -(-rows * heads * 4 // ALIGN) * ALIGN
        o_bytes = -(-rows * heads * dv * size // ALIGN) * ALIGN
        shape = (n, lse_bytes + o_bytes)
        self.shape = (rows, heads, dv)
        self.dtype = like.dtype
        self.lse_bytes = lse_bytes
        self.bytes = torch.empty(shape, dtype=torch.uint8, device=like.device)

    def views(self, packed: torch.Tensor | None = None) -> AttentionOutput:
        """``o [n, T, h, DV]`` and ``lse [n, T, h]`` of the bytes."""
        data = self.bytes if packed is None else packed
        n, (rows, heads, dv) = data.shape[0], self.shape
        lse = data[:, : rows * heads * 4].view(torch.float32)
        size = rows * heads * dv * self.dtype.itemsize
        o = data[:, self.lse_bytes : self.lse_bytes + size].view(self.dtype)
        return AttentionOutput(o.view(n, rows, heads, dv), lse.view(n, rows, heads))


def exchange(
    state: AttentionOutput, group: Group, how: str, replicate: bool, path: str | None = None
) -> AttentionOutput:
    """Merge the states of all ranks.

    Args:
        state: This rank's, ``o [T, H, DV]`` and ``lse [T, H]``, over its own keys.
        group: The ranks.
        how: One of ``EXCHANGES``.
        replicate: Whether every rank gets all heads, or only its own.
        path: Path of the merge; None chooses.

    Returns:
        The state over all ranks' keys: ``[T, H, DV]`` if ``replicate``, else the heads of
        ``heads_of``.
    """
    if group.size == 1 or not state.o.shape[0]:
        mine = slice(None) if replicate else heads_of(group.rank, group.size, state.o.shape[1])
        return AttentionOutput(state.o[:, mine], state.lse[:, mine])
    if how == "all_gather":
        return _all_gather(state, group, replicate, path)
    all_to_all = how == "all_to_all"
    own = _all_to_all(state, group, path) if all_to_all else _reduce_scatter(state, group)
    return _replicated(own, state.o.shape[1], group) if replicate else own


def _all_gather(
    state: AttentionOutput, group: Group, replicate: bool, path: str | None
) -> AttentionOutput:
    rows, heads, _ = state.o.shape
    packed = _Packed(1, rows, heads, state.o)
    o, lse = packed.views()
    o[0].copy_(state.o)
    lse[0].copy_(state.lse)
    o, lse = packed.views(group.all_gather(packed.bytes[0]))
    if not replicate:
        mine = heads_of(group.rank, group.size, heads)
        o, lse = o[:, :, mine], lse[:, :, mine]
    return merge_states((o, lse), path=path)


def _all_to_all(state: AttentionOutput, group: Group, path: str | None) -> AttentionOutput:
    rows, heads, _ = state.o.shape
    each = -(-heads // group.size)
    packed = _Packed(group.size, rows, each, state.o)
    o, lse = packed.views()
    _by_rank(o, state.o)
    _by_rank(lse, state.lse)
    o, lse = packed.views(group.all_to_all(packed.bytes))
    mine = heads_of(group.rank, group.size, heads)
    count = mine.stop - mine.start
    return merge_states((o[:, :, :count], lse[:, :, :count]), path=path)


def _by_rank(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``[T, H, ...]`` into ``[n, T, h, ...]``; places of heads beyond H stay as they are."""
    each, heads = target.shape[2], source.shape[1]
    full = heads // each
    whole = source[:, : full * each].view(source.shape[0], full, each, *source.shape[2:])
    target[:full].copy_(whole.transpose(0, 1))
    if rest := heads - full * each:
        target[full, :, :rest].copy_(source[:, full * each :])


def _reduce_scatter(state: AttentionOutput, group: Group) -> AttentionOutput:
    rows, heads, dv = state.o.shape
    each = -(-heads // group.size)
    dtype = torch.float64 if state.o.dtype == torch.float64 else torch.float32
    lses = group.all_gather(state.lse.contiguous())  # [n, T, H]
    peak = lses.amax(0)
    shift = torch.where(peak == float("-inf"), 0.0, peak)
    masses = torch.exp(lses.to(dtype) - shift)
    total = masses.sum(0)  # [T, H]
    weight = torch.where(total == 0, 0.0, masses[group.rank] / total)[..., None]
    # The output of a side without weight may hold anything: it is selected away.
    weighed = torch.where(weight == 0, 0.0, weight * state.o.to(dtype))
    parts = torch.zeros((group.size, rows, each, dv), dtype=dtype, device=weighed.device)
    _by_rank(parts, weighed)
    mine = heads_of(group.rank, group.size, heads)
    o = group.reduce_scatter(parts)[:, : mine.stop - mine.start]
    lse = (shift + torch.log(total)).to(torch.float32)
    return AttentionOutput(o.to(state.o.dtype), lse[:, mine])


def _replicated(own: AttentionOutput, heads: int, group: Group) -> AttentionOutput:
    """All heads from those of every rank: ``[T, H, DV]`` and ``[T, H]``."""
    rows, count, dv = own.o.shape
    each = -(-heads // group.size)
    packed = _Packed(1, rows, each, own.o)
    o, lse = packed.views()
    o[0, :, :count].copy_(own.o)
    lse[0, :, :count].copy_(own.lse)
    o, lse = packed.views(group.all_gather(packed.bytes[0]))
    all_o = o.transpose(0, 1).reshape(rows, group.size * each, dv)
    all_lse = lse.transpose(0, 1).reshape(rows, group.size * each)
    return AttentionOutput(all_o[:, :heads], all_lse[:, :heads])


__all__ = ["EXCHANGES", "SMALL", "exchange", "heads_of"]
