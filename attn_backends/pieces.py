"""Attention between queries and keys at given positions, cut into calls that every backend knows.

A backend knows two shapes of visibility: all keys, and bottom-right causal. When only some of a
sequence's keys are at hand (a chunk of a long prefix, another rank's shard), a causal query at
position p sees those at positions up to p. With both lists in order of position that is always the
first c(p) of them, and c grows by 0 or 1 from a query to the next. So the queries fall into runs:

    c stays the same       every query of the run sees the first c keys: a call without causality
    c grows by 1 each time the last query of the run sees the first c keys: bottom-right causal

A run is one sequence of a call. Queries that see none of the keys get the state of no keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch

from .backend import AttentionBackend
from .batch import Batch
from .errors import InvalidInputError, Reason, UnsupportedCallError
from .output import AttentionOutput
from .plan import Plan
from .registry import select
from .spec import AttentionSpec

#: Positions ``start <= p < stop`` of a sequence.
Span: TypeAlias = tuple[int, int]
Spans: TypeAlias = Sequence[Span]
BackendLike: TypeAlias = "str | AttentionBackend | None"


class Run(NamedTuple):
    """Queries of one sequence that one call serves.

    Attributes:
        first: First row among the sequence's queries at hand.
        stop: One past the last row.
        keys: The last row sees this many of the sequence's keys at hand, from the first on.
        causal: Each row sees one key less than the next; else all see the same.
    """

    first: int
    stop: int
    keys: int
    causal: bool


def length(spans: Spans) -> int:
    """How many positions the spans hold."""
    return sum(stop - start for start, stop in spans)


def cut_runs(queries: Spans, keys: Spans, causal: bool) -> list[Run]:
    """The runs of queries that see any of the keys.

    Args:
        queries: Positions of the queries, in order and disjoint; negative ones see no key.
        keys: Positions of the keys, in order and disjoint.
        causal: Whether a query sees only keys up to its own position.
    """
    rows, total = length(queries), length(keys)
    if not causal:
        return [Run(0, rows, total, False)] if rows and total else []
    runs: list[Run] = []
    row = 0
    for start, stop in queries:
        seen = 0  # keys of the spans before
        at = start
        for key_start, key_stop in keys:
            for end, grows in ((key_start, False), (key_stop, True)):
                end = min(end, stop)
                if end > at:
                    count = seen + (end - key_start if grows else 0)
                    _extend(runs, Run(row, row + end - at, count, grows))
                    row, at = row + end - at, end
            seen += key_stop - key_start
        if stop > at:
            _extend(runs, Run(row, row + stop - at, seen, False))
            row += stop - at
    return [run for run in runs if run.keys]


def _extend(runs: list[Run], run: Run) -> None:
    """Append a run, or lengthen the last one by it where the count goes on in the same way."""
    if runs and runs[-1].causal == run.causal and runs[-1].stop == run.first:
        step = run.stop - run.first if run.causal else 0
        if run.keys - step == runs[-1].keys:
            runs[-1] = runs[-1]._replace(stop=run.stop, keys=run.keys)
            return
    runs.append(run)


def refuse_positions(spec: AttentionSpec, what: str) -> None:
    """Refuse what needs a query's distance to its keys, or a mask over all of them.

    Raises:
        UnsupportedCallError: The spec has a window, ALiBi or a mask; it carries every reason.
    """
    fix = f"run without {what}"
    reasons = []
    if spec.window is not None:
        reasons.append(Reason("window", str(spec.window), "None", fix))
    if spec.has_alibi:
        reasons.append(Reason("has_alibi", "True", "False", fix))
    if spec.has_mask:
        reasons.append(Reason("has_mask", "True", "False", fix))
    if reasons:
        text = "; ".join(map(str, reasons))
        raise UnsupportedCallError(f"{what} cannot do this call: {text}", reasons=reasons)


def bind(
    backend: BackendLike, spec: AttentionSpec, phase: str, device: torch.device
) -> AttentionBackend:
    """A backend for a spec: by name, by choice (None), or as another spec's backend is.

    Args:
        backend: A name, None, or a backend whose class and options are taken.
        spec: What it is bound to.
        phase: ``"prefill"`` or ``"decode"``.
        device: Where it runs.

    Raises:
        AttnBackendsError: It cannot do the call, or does not exist; see ``select``.
    """
    if backend is None or isinstance(backend, str):
        return select(spec, phase=phase, device=device, backend=backend).backend
    if not isinstance(backend, AttentionBackend):
        allowed = "a name, an AttentionBackend, or None"
        raise InvalidInputError.of("backend", type(backend).__name__, allowed)
    if backend.spec == spec:
        return backend
    return type(backend)(spec, device=device, options=backend.options)


@dataclass(frozen=True)
class Work:
    """What one sequence has at hand for a call.

    Attributes:
        queries: Positions of its queries, which lie one after the other from ``row`` on.
        keys: Positions of its keys, which lie one after the other from ``key`` on.
        row: First row of its queries.
        key: First row of its keys, if they are ragged.
        pages: ``[n]`` int32 page ids of its keys, if they are paged; the first span starts a page.
        host_pages: The same on the host, if known.
    """

    queries: Spans
    keys: Spans
    row: int
    key: int = 0
    pages: torch.Tensor | None = None
    host_pages: torch.Tensor | None = None


@dataclass(frozen=True)
class Call:
    """One call of a backend over part of the rows.

    Attributes:
        rows: The rows of q, and of the state, that it serves.
        keys: The rows of ragged k and v that it reads; None passes caches whole.
        backend: Who runs it.
        plan: That backend's plan.
    """

    rows: slice
    keys: slice | None
    backend: AttentionBackend
    plan: Plan

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, **extras: Any
    ) -> AttentionOutput:
        """The state of ``q[rows]`` over the call's keys; ``extras`` as in a backend's ``run``."""
        if self.keys is not None:
            k, v = k[self.keys], None if v is None else v[self.keys]
        return self.backend.run(q[self.rows], k, v, self.plan, **extras)


def plan_calls(
    spec: AttentionSpec, work: Sequence[Work], backend: BackendLike, device: torch.device
) -> list[Call]:
    """Plan the attention between all queries and keys at hand.

    Args:
        spec: What the layer fixes; ``page_size`` says whether keys are paged.
        work: One entry per sequence, in order of rows and of keys.
        backend: Who runs the calls; see ``bind``.
        device: Where.

    Returns:
        Calls whose rows are disjoint but for rows that see nothing. Rows in none of them see no
        key.
    """
    runs = [cut_runs(w.queries, w.keys, spec.causal) for w in work]
    calls = []
    for causal in (True, False):
        kind = [[run for run in found if run.causal == causal] for found in runs]
        for i in range(max(map(len, kind), default=0)):
            chosen = [(w, found[i]) for w, found in zip(work, kind) if len(found) > i]
            calls.append(_plan_call(replace(spec, causal=causal), chosen, backend, device))
    return calls


def _plan_call(
    spec: AttentionSpec, chosen: list[tuple[Work, Run]], backend: BackendLike, device: torch.device
) -> Call:
    """One call over a run of each chosen sequence; rows in between are sequences without keys."""
    top = chosen[0][0].row + chosen[0][1].first
    left = chosen[0][0].key
    q_lens, kv_lens, k_starts = [], [], []
    pages: list[torch.Tensor | None] = []
    host: list[torch.Tensor | None] = []
    row = top
    for work, run in chosen:
        gap = work.row + run.first - row
        if gap:
            q_lens.append(gap)
            kv_lens.append(0)
            k_starts.append(work.key - left)
            pages.append(None)
            host.append(None)
        q_lens.append(run.stop - run.first)
        kv_lens.append(run.keys)
        k_starts.append(work.key - left)
        pages.append(work.pages)
        host.append(work.host_pages)
        row = work.row + run.stop
    last = chosen[-1][0]
    right = last.key + length(last.keys)
    keys: slice | None = None
    if spec.page_size is None:
        keys = slice(left, right)
        batch = Batch.from_lengths(
            q_lens, kv_lens, cu_seqlens_k=[*k_starts, right - left], device=device
        )
    else:
        batch = _paged(q_lens, kv_lens, pages, host, device)
    phase = "decode" if max(q_lens) == 1 else "prefill"
    bound = bind(backend, spec, phase, device)
    return Call(slice(top, row), keys, bound, bound.plan(batch))


def _paged(
    q_lens: list[int],
    kv_lens: list[int],
    pages: list[torch.Tensor | None],
    host: list[torch.Tensor | None],
    device: torch.device,
) -> Batch:
    """A paged batch from rows of page tables that are on the device already."""
    known = all(h is not None or p is None for h, p in zip(host, pages))

    def starts(lens: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(device)

    return Batch(
        cu_seqlens_q=starts(q_lens),
        seqlens_k=torch.tensor(kv_lens, dtype=torch.int32).to(device),
        page_table=_stack(pages, device),
        total_q=sum(q_lens),
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(kv_lens),
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        host_page_table=_stack(host, torch.device("cpu")) if known else None,
    )


def _stack(rows: list[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    width = max(0 if row is None else row.shape[0] for row in rows)
    table = torch.full((len(rows), width), -1, dtype=torch.int32, device=device)
    for target, row in zip(table, rows):
        if row is not None:
            target[: row.shape[0]] = row
    return table


__all__ = [
    "Call",
    "Run",
    "Span",
    "Spans",
    "Work",
    "bind",
    "cut_runs",
    "length",
    "plan_calls",
    "refuse_positions",
]
