r"""Attention in one pass over the keys: the online softmax, written out.

A row has scores x_1 .. x_n over the keys it sees, and values v_1 .. v_n. Wanted are
O = sum_j e^{x_j} v_j / sum_j e^{x_j} and LSE = ln sum_j e^{x_j}. Exponentials of raw scores
overflow, and the maximum that would tame them is known only at the end. So carry three variables
over tiles of keys, starting from (m, l, A) = (-inf, 0, 0), and for each tile X:

    m' = max(m, max X)
    a  = exp(m - m')                          in [0, 1]: one rescale per row and tile
    l' = a l + sum_X exp(x - m')
    A' = a A + sum_X exp(x - m') v

Claim: after every tile, over the set S of keys seen so far, m = max_S x, l = sum_S exp(x - m) and
A = sum_S exp(x - m) v.
Proof: by induction over tiles. It holds for S = {} (empty sums). A step turns each old term
exp(x - m) into exp(m - m') exp(x - m) = exp(x - m'), which is what the claim asks of it under the
new maximum, and adds the terms of X in the same form; S and X are disjoint, so no key counts
twice. Division commutes with both sums, hence at the end O = A / l and LSE = m + ln l.  []

In IEEE arithmetic the empty state is the trap: exp(-inf - -inf) is NaN. While no key has been seen,
0 is subtracted in place of m; the exponentials of -inf are then the zeros that the claim needs.

Sources: Milakov and Gimelshein, arXiv:1805.02867 (the recurrence for l); Rabe and Staats,
arXiv:2112.05682 (A, and with it one pass for attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .keys import KeySource
from .rules import ScoreRules

NEG_INF = float("-inf")


@dataclass
class OnlineState:
    """The running variables of the recurrence for a tile of queries.

    Attributes:
        m: ``[H, rows]`` largest score seen, -inf before the first.
        l: ``[H, rows]`` sum of exp(score - m).
        acc: ``[H, rows, DV]`` sum of exp(score - m) * v, not yet normalised.
        seen: ``[rows]`` bool, whether any key was visible; emptiness is read from this alone.
        bad: ``[H, rows, DV]`` the NaN and inf that visible values carry, else 0; None if none did.
    """

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741 - the name it has in every paper
    acc: torch.Tensor
    seen: torch.Tensor
    bad: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, heads: int, rows: int, dv: int, dtype: torch.dtype, device: torch.device
    ) -> OnlineState:
        """The state of no keys."""
        m = torch.full((heads, rows), NEG_INF, dtype=dtype, device=device)
        seen = torch.zeros(rows, dtype=torch.bool, device=device)
        acc = torch.zeros((heads, rows, dv), dtype=dtype, device=device)
        return cls(m, torch.zeros_like(m), acc, seen)

    def step(self, scores: torch.Tensor, visible: torch.Tensor, v: torch.Tensor) -> None:
        """Take in one tile of keys.

        Args:
            scores: ``[H, rows, cols]``.
            visible: ``[rows, cols]`` bool. What it hides is selected away, whatever it holds.
            v: ``[cols, HK, DV]``.
        """
        x = torch.where(visible, scores, NEG_INF)
        m_new = torch.maximum(self.m, x.amax(dim=-1))
        shift = torch.where(m_new == NEG_INF, 0.0, m_new)  # the guard of the empty state
        rescale = torch.exp(self.m - shift)  # [H, rows]
        p = torch.exp(x - shift[..., None])  # [H, rows, cols]
        self.l = rescale * self.l + p.sum(dim=-1)
        self.acc = rescale[..., None] * self.acc + _weigh(p, self._finite(v, visible))
        self.m = m_new
        self.seen |= visible.any(dim=-1)

    def _finite(self, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Values fit for the product: 0 * NaN would leak a hidden NaN, so both kinds part here."""
        finite = torch.isfinite(v)
        if bool(finite.all()):
            return v
        weights = visible.to(v.dtype).expand(self.m.shape[0], -1, -1)
        found = torch.zeros_like(self.acc)
        kinds = {float("inf"): v == float("inf"), NEG_INF: v == NEG_INF, float("nan"): v.isnan()}
        for value, where in kinds.items():
            found += torch.where(_weigh(weights, where.to(v.dtype)) > 0, value, 0.0)
        self.bad = found if self.bad is None else self.bad + found
        return torch.where(finite, v, 0.0)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``o [H, rows, DV]`` and ``lse [H, rows]``: one division at the very end."""
        o = torch.where(self.seen[:, None], self.acc / self.l[..., None], 0.0)
        if self.bad is not None:
            o = o + self.bad
        return o, torch.where(self.seen, self.m + torch.log(self.l), NEG_INF)


def _weigh(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[H, rows, cols] @ [cols, HK, DV] -> [H, rows, DV]``; heads of a group share values."""
    heads, rows, cols = p.shape
    grouped = p.reshape(v.shape[1], -1, cols)  # [HK, G * rows, cols]
    return torch.matmul(grouped, v.transpose(0, 1)).view(heads, rows, v.shape[2])


def attend(
    q: torch.Tensor,
    keys: KeySource,
    rules: ScoreRules,
    *,
    dtype: torch.dtype,
    tile_q: int,
    tile_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence, in memory that does not grow with ``q_len * kv_len``.

    Tiles of keys start at multiples of ``tile_k``, so a row's arithmetic depends on its own
    sequence alone.

    Args:
        q: ``[q_len, H, D]``.
        keys: The sequence's keys and values.
        rules: Scale, softcap, bounds, ALiBi, mask.
        dtype: Compute dtype, float32 or float64.
        tile_q: Queries per tile.
        tile_k: Keys per tile.

    Returns:
        ``o [q_len, H, DV]`` and ``lse [q_len, H]`` in the compute dtype.
    """
    q_len, heads, _ = q.shape
    dv = keys.v.shape[-1]
    o = torch.empty(q_len, heads, dv, dtype=dtype, device=q.device)
    lse = torch.empty(q_len, heads, dtype=dtype, device=q.device)
    for top in range(0, q_len, tile_q):
        rows = range(top, min(top + tile_q, q_len))
        q_tile = q[rows.start : rows.stop].to(dtype)
        state = OnlineState.empty(heads, len(rows), dv, dtype, q.device)
        first, last = rules.key_range(rows, keys.length)
        for left in range(first // tile_k * tile_k, last, tile_k):
            cols = range(left, min(left + tile_k, keys.length))
            k_tile, v_tile = keys.tile(cols.start, cols.stop, dtype)
            scores = rules.scores(q_tile, k_tile, rows, cols)
            state.step(scores, rules.visible(rows, cols, q.device), v_tile)
        o_tile, lse_tile = state.finish()
        o[rows.start : rows.stop] = o_tile.transpose(0, 1)
        lse[rows.start : rows.stop] = lse_tile.transpose(0, 1)
    return o, lse


__all__ = ["OnlineState", "attend"]
