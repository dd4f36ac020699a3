"""A state that grows: states over more and more keys are merged into it, one at a time."""

from __future__ import annotations

import torch

from .merge import apply_sinks, merge_state
from .output import AttentionOutput
from .spec import AttentionSpec


class RunningState:
    """The state of all rows over the keys so far.

    One state alone is kept as it came, so that a single part gives the bits of a plain run. From
    the second on the sum is held in float32 (float64 for float64), and half types are rounded once
    at the end: however many parts there are, each is rounded once by its kernel and the sum once.

    Args:
        spec: What the layer fixes.
        rows: T, the rows of the state.
        device: Where the states are.
    """

    def __init__(self, spec: AttentionSpec, rows: int, device: torch.device) -> None:
        self.spec = spec
        self.rows = rows
        self.device = device
        self._first: AttentionOutput | None = None
        self._sum: AttentionOutput | None = None

    def add(self, state: AttentionOutput, rows: slice) -> None:
        """Merge in the state of some rows over further keys.

        Args:
            state: ``o [n, H, DV]`` and ``lse [n, H]``, over keys that no earlier state saw.
            rows: Which n rows it is about.
        """
        if self._sum is None and self._first is None and rows == slice(0, self.rows):
            self._first = state
            return
        total = self._total()
        o = state.o if state.o.dtype == total.o.dtype else state.o.to(total.o.dtype)
        part = AttentionOutput(total.o[rows], total.lse[rows])
        merge_state(*part, o, state.lse, out=part)

    def _total(self) -> AttentionOutput:
        if self._sum is None:
            dtype = torch.float64 if self.spec.out_dtype == torch.float64 else torch.float32
            if self._first is not None:
                self._sum = AttentionOutput(self._first.o.to(dtype), self._first.lse)
                self._first = None
            else:
                shape = (self.rows, self.spec.num_heads, self.spec.dv)
                o = torch.zeros(shape, dtype=dtype, device=self.device)
                lse = torch.full(shape[:2], float("-inf"), device=self.device)
                self._sum = AttentionOutput(o, lse)
        return self._sum

    def finish(
        self,
        sinks: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> AttentionOutput:
        """The state over all keys added, in the output dtype.

        Args:
            sinks: ``[H]`` float32, merged once, now.
            out: ``(o, lse)`` to write into.
        """
        state = self._first if self._first is not None else self._total()
        if sinks is not None:
            state = apply_sinks(state, sinks)
        if out is not None:
            out[0].copy_(state.o)
            out[1].copy_(state.lse)
            return AttentionOutput(*out)
        return AttentionOutput(state.o.to(self.spec.out_dtype), state.lse)


__all__ = ["RunningState"]
