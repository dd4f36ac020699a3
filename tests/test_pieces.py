"""Runs: every query sees exactly the keys up to its position, each in one run."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from attn_backends.pieces import Run, cut_runs


@st.composite
def spans(draw: st.DrawFn, low: int = 0) -> list[tuple[int, int]]:
    steps = draw(st.lists(st.integers(0, 6), min_size=0, max_size=8))
    at = list(accumulate(steps, initial=low))
    return list(zip(at[::2], at[1::2]))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(queries=spans(low=-3), keys=spans(), causal=st.booleans())
def test_runs_show_each_query_the_keys_up_to_it(queries, keys, causal) -> None:
    rows = [p for a, z in queries for p in range(a, z)]
    held = [p for a, z in keys for p in range(a, z)]
    seen = [0] * len(rows)
    for run in cut_runs(queries, keys, causal):
        assert 0 <= run.first < run.stop <= len(rows) and 0 < run.keys <= len(held)
        for row in range(run.first, run.stop):
            assert seen[row] == 0  # no query is in two runs
            seen[row] = run.keys - (run.stop - 1 - row if run.causal else 0)
    want = [sum(k <= p for k in held) if causal else len(held) for p in rows]
    assert seen == want


def test_a_rank_of_the_zigzag_needs_one_run_per_step() -> None:
    own, earlier, later = [(4, 8), (24, 28)], [(0, 4), (28, 32)], [(8, 12), (20, 24)]
    assert cut_runs(own, own, True) == [Run(0, 8, 8, True)]
    assert cut_runs(own, earlier, True) == [Run(0, 8, 4, False)]
    assert cut_runs(own, later, True) == [Run(4, 8, 8, False)]
