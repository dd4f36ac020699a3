"""Tokens per second of engines that take turns, and their ratios within a turn.

A host is busy with other things at times, which slows whoever runs just then. Engines are therefore
compared within a turn, where they run one after the other: the median of those ratios holds still
while rates swing. The order within a turn goes round and round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from .serving import Engine, Served
from .vllm_prompts import uniform

#: Longest prompts of the workloads here, and tokens after them.
LONG, AFTER = 1536, 128


def workloads(model: Served, prompts: list[list[int]]) -> dict[str, tuple[dict[str, Any], int]]:
    """By name: the command, and the tokens that its rate counts.

    Args:
        model: Whose vocabulary random prompts draw from.
        prompts: Those of ``mixed``, which share prefixes.

    Returns:
        ``prefill`` of 48 prompts of 1,024 tokens; ``decode`` of 64 requests after 32 tokens;
        ``long decode`` of 64 requests after 1,536 tokens, which are in the cache already; and
        ``mixed``, prompts and answers together.
    """
    size = model.vocabulary
    long, short = uniform(size, 1024, 48), uniform(size, 32, 64)
    after = {"prompts": uniform(size, LONG, 64), "max_tokens": AFTER, "cached": True}
    return {
        "prefill": ({"prompts": long, "max_tokens": 1}, 48 * 1024),
        "decode": ({"prompts": short, "max_tokens": 192}, 64 * 192),
        "long decode": (after, 64 * AFTER),
        "mixed": ({"prompts": prompts, "max_tokens": 96}, len(prompts) * 96),
    }


def throughput(
    bench: str,
    engines: list[Engine],
    prompts: list[list[int]],
    turns: int,
    deadline: float,
    chosen: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Tokens per second, the engines taking turns; the first engine is the reference.

    Args:
        bench: Name of the rows.
        engines: Of one model and dtype.
        prompts: Of the workload ``mixed``.
        turns: How often each engine does each workload, if there is time; one more warms up.
        deadline: When to stop: no turn begins that would not end by then.
        chosen: Names of workloads; None takes all.

    Returns:
        A row for each engine and workload: the median over turns, the slowest and the fastest, the
        median ratio to the reference within a turn, and its quartiles.
    """
    work = workloads(engines[0].model, prompts)
    work = {name: work[name] for name in (work if chosen is None else chosen)}
    seconds: dict[tuple[str, str], list[float]] = {
        (name, each.backend): [] for name in work for each in engines
    }
    cached: dict[tuple[str, str], int] = {}
    longest = 0.0
    for turn in range(turns + 1):
        begin = time.monotonic()
        if begin + 1.2 * longest > deadline:
            break
        answers: dict[tuple[str, str], float] = {}
        for name, (command, _) in work.items():
            for engine in _order(engines, turn):
                answer = engine.ask({**command, "tokens": False}, deadline)
                if answer is not None:
                    answers[name, engine.backend] = answer["seconds"]
                    cached[name, engine.backend] = answer.get("cached", 0)
        longest = max(longest if turn > 1 else 0.0, time.monotonic() - begin)
        if turn and len(answers) == len(seconds):  # the first one warms up
            for key, taken in answers.items():
                seconds[key].append(taken)
    rows = []
    for (name, backend), times in seconds.items():
        if times:
            case = {**engines[0].case, "workload": name}
            ratios = [a / b for a, b in zip(seconds[name, engines[0].backend], times)]
            rows.append(
                {
                    "bench": bench,
                    "case": case,
                    "backend": backend,
                    "reference": engines[0].backend,
                    **rates(times, work[name][1]),
                    **spread(ratios),
                    "cached_prompt_tokens": cached[name, backend],
                    "turns": len(times),
                    "seconds": [round(t, 4) for t in times],
                }
            )
    return rows


def _order(engines: Sequence[Engine], turn: int) -> list[Engine]:
    """Another one first every turn, and the other way round every other time."""
    shift = (turn // 2) % len(engines)
    order = [*engines[shift:], *engines[:shift]]
    return order if turn % 2 == 0 else order[::-1]


def rates(times: Sequence[float], counted: int) -> dict[str, float]:
    """Median, slowest and fastest rate of some turns."""
    found = sorted(counted / t for t in times)
    return {"tokens_per_s": statistics.median(found), "slowest": found[0], "fastest": found[-1]}


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the rate over the reference's."""
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * [*ratios]
    )
    return {"ratio": middle, "ratio_p25": low, "ratio_p75": high}


__all__ = ["rates", "spread", "throughput", "workloads"]
