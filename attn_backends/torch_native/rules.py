"""How a score is made from q.k, and which keys a query sees: shared by both implementations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..spec import AttentionSpec

Scale = "float | torch.Tensor | None"


@dataclass(frozen=True)
class ScoreRules:
    """Everything between ``q . k`` and the softmax, for one sequence.

    Attributes:
        sm_scale: Factor on ``q . k``.
        softcap: c in ``c * tanh(s / c)``, or None.
        bounds: ``(left, right)`` around the diagonal; None is unbounded. Right is 0 if causal.
        diagonal: ``kv_len - q_len``: query i stands at key position ``i + diagonal``.
        slopes: ``[H]`` ALiBi slopes, or None.
        mask: ``[q_len, kv_len]`` bool, True = visible, or None.
        k_scale: ``[HK]`` factor of stored keys, or None.
    """

    sm_scale: float
    softcap: float | None
    bounds: tuple[int | None, int | None]
    diagonal: int
    slopes: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        q_len: int,
        kv_len: int,
        slopes: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
    ) -> ScoreRules:
        """The rules of a spec for a sequence of ``q_len`` queries over ``kv_len`` keys."""
        diagonal = kv_len - q_len
        return cls(spec.scale, spec.softcap, spec.bounds, diagonal, slopes, mask, k_scale)

    def key_range(self, rows: range, kv_len: int) -> tuple[int, int]:
        """Smallest ``[start, stop)`` of keys that any of ``rows`` may see by bounds alone."""
        left, right = self.bounds
        start, stop = 0, kv_len
        if left is not None:
            start = max(0, rows.start + self.diagonal - left)
        if right is not None:
            stop = min(kv_len, rows.stop - 1 + self.diagonal + right + 1)
        return start, max(start, stop)

    def visible(self, rows: range, cols: range, device: torch.device) -> torch.Tensor:
        """``[rows, cols]`` bool: what bounds and mask let each query see."""
        i = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.diagonal
        j = torch.arange(cols.start, cols.stop, device=device)[None, :]
        seen = torch.ones(len(rows), len(cols), dtype=torch.bool, device=device)
        left, right = self.bounds
        if left is not None:
            seen &= j >= i - left
        if right is not None:
            seen &= j <= i + right
        if self.mask is not None:
            seen &= self.mask[rows.start : rows.stop, cols.start : cols.stop]
        return seen

    def scores(self, q: torch.Tensor, k: torch.Tensor, rows: range, cols: range) -> torch.Tensor:
        """Scores after scale, softcap and ALiBi, before the mask.

        Args:
            q: ``[rows, H, D]`` in the compute dtype.
            k: ``[cols, HK, D]`` in the compute dtype.
            rows: Query positions in the sequence.
            cols: Key positions in the sequence.

        Returns:
            ``[H, rows, cols]``.
        """
        heads, kv_heads = q.shape[1], k.shape[1]
        grouped = q.transpose(0, 1).reshape(kv_heads, -1, q.shape[2])  # [HK, G * rows, D]
        s = torch.matmul(grouped, k.permute(1, 2, 0)) * self.sm_scale  # [HK, G * rows, cols]
        if self.k_scale is not None:
            s = s * self.k_scale.to(s.dtype)[:, None, None]
        s = s.view(heads, len(rows), len(cols))
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)
        if self.slopes is not None:
            i = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + self.diagonal
            j = torch.arange(cols.start, cols.stop, device=q.device)[None, :]
            s = s - self.slopes.to(s.dtype)[:, None, None] * (i - j).abs()
        return s


def kv_scale(
    scale: float | torch.Tensor | None, kv_heads: int, device: torch.device
) -> torch.Tensor | None:
    """A KV scale as ``[HK]`` float32, or None."""
    if scale is None:
        return None
    return torch.as_tensor(scale, dtype=torch.float32, device=device).expand(kv_heads)


__all__ = ["ScoreRules", "kv_scale"]
