"""A state that grows: states over more and more keys are added, and merged a few at a time."""

from __future__ import annotations

from itertools import pairwise

import torch

from .merge import apply_sinks, merge_state, merge_states
from .merge.dispatch import steady_path
from .output import AttentionOutput
from .spec import AttentionSpec
from .validation import check_out

#: States that one pass merges, as many as the merge takes without copying them together.
KEEP = 8


class RunningState:
    """The state of all rows over the keys so far.

    A state alone is kept as it came, so that a single part gives the bits of a plain run. Up to
    ``KEEP`` are merged by one pass that reads each once. If there are more, merged groups of them
    are summed in float32 (float64 for float64): however many parts there are, half types are
    rounded once in each part, once in each group and once at the end.

    With ``batch_invariant`` every group is one state: how many parts there are, and where groups
    end, then depends on nothing but a row's own keys, as merging the state of no keys is exact.
    Nor does the path of a merge follow the number of rows then.

    Args:
        spec: What the layer fixes.
        rows: T, the rows of the state.
        device: Where the states are.
    """

    def __init__(self, spec: AttentionSpec, rows: int, device: torch.device) -> None:
        self.spec = spec
        self.rows = rows
        self.device = device
        self._most = 1 if spec.batch_invariant else KEEP
        self._kept: list[tuple[AttentionOutput, slice]] = []
        self._sum: AttentionOutput | None = None

    def add(self, state: AttentionOutput, rows: slice) -> None:
        """Add the state of some rows over further keys.

        Args:
            state: ``o [n, H, DV]`` and ``lse [n, H]``, over keys that no earlier state saw.
            rows: Which n rows it is about.
        """
        if len(self._kept) == self._most:
            self._sum = self._summed()
        self._kept.append((state, rows))

    def finish(
        self,
        sinks: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> AttentionOutput:
        """The state over all keys added, in the output dtype.

        Args:
            sinks: ``[H]`` float32, merged once, now.
            out: ``(o, lse)`` to write into.

        Raises:
            InvalidInputError: ``out`` has another shape or dtype.
        """
        if out is not None:
            check_out(out, self.rows, self.spec, self.device)
        target = None if out is None or sinks is not None else AttentionOutput(*out)
        if self._sum is not None:
            state = self._summed()
        else:
            state = self._merged(target)
        if sinks is not None:
            state = apply_sinks(state, sinks)
        if out is None:
            return AttentionOutput(state.o.to(self.spec.out_dtype), state.lse)
        if state.o is not out[0]:
            out[0].copy_(state.o)
            out[1].copy_(state.lse)
        return AttentionOutput(*out)

    def _segments(self) -> list[tuple[slice, list[AttentionOutput]]]:
        """Rows that the same states are about, and those states' views of them."""
        bounds = {0, self.rows}
        for _, rows in self._kept:
            bounds |= {rows.start, rows.stop}
        return [(slice(a, z), self._over(a, z)) for a, z in pairwise(sorted(bounds))]

    def _over(self, start: int, stop: int) -> list[AttentionOutput]:
        found = []
        for state, rows in self._kept:
            if rows.start <= start and stop <= rows.stop:
                own = slice(start - rows.start, stop - rows.start)
                found.append(AttentionOutput(state.o[own], state.lse[own]))
        return found

    def _merged(self, out: AttentionOutput | None) -> AttentionOutput:
        """The states kept, in one pass, in the output dtype."""
        if out is None and len(self._kept) == 1 and self._kept[0][1] == slice(0, self.rows):
            return self._kept[0][0]
        if out is None:
            shape = (self.rows, self.spec.num_heads, self.spec.dv)
            o = torch.empty(shape, dtype=self.spec.out_dtype, device=self.device)
            out = AttentionOutput(o, torch.empty(shape[:2], device=self.device))
        for rows, states in self._segments():
            part = AttentionOutput(out.o[rows], out.lse[rows])
            if len(states) > 1:
                merge_states(states, out=part)
            elif states:
                part.o.copy_(states[0].o)
                part.lse.copy_(states[0].lse)
            else:
                part.o.zero_()
                part.lse.fill_(float("-inf"))
        return out

    def _summed(self) -> AttentionOutput:
        """The sum so far with the states kept in it; none is kept afterwards."""
        dtype = torch.float64 if self.spec.out_dtype == torch.float64 else torch.float32
        total = self._sum
        if total is None:
            shape = (self.rows, self.spec.num_heads, self.spec.dv)
            o = torch.zeros(shape, dtype=dtype, device=self.device)
            lse = torch.full(shape[:2], float("-inf"), device=self.device)
            total = AttentionOutput(o, lse)
        path = None
        if self.spec.batch_invariant:
            path = steady_path(self.device, dtype, self.spec.dv)
        for rows, states in self._segments():
            if states:
                group = states[0] if len(states) == 1 else merge_states(states)
                part = AttentionOutput(total.o[rows], total.lse[rows])
                merge_state(*part, group.o.to(dtype), group.lse, out=part, path=path)
        self._kept.clear()
        return total


__all__ = ["KEEP", "RunningState"]
