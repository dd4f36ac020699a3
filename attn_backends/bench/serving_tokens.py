"""Whether two engines say the same, and where not, how near a tie it was.

Greedy tokens of whole sequences come first. One other choice changes all that follows, so every
step is compared under the reference's own text too: where an engine parts from the reference, it
goes on from the reference's token instead of its own. The *gap* of a step is how far the
reference's best token lies before its second, in log-probability. An engine may choose otherwise
only where its rounding moves a gap by more than the gap itself; how far roundings do move gaps is
measured on the engine's own backends, and steps with a larger gap count as decided.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .serving import OURS, Engine, Note
from .serving_truth import Judged, Step, score

LOGPROBS = 8
NEW_TOKENS = 64
#: Times that sequences go on from the reference's token; what is left then was not compared.
RESUMES = 40

Answer = dict[str, Any]


@dataclass
class Compared:
    """Steps of an engine against those of the reference, under the reference's text.

    Attributes:
        gaps: The reference's gap of every step.
        parted: The gaps of those steps at which the engine chose otherwise.
        moved: How far the engine moved the gap of a step, where it saw both tokens.
        drift: How far log-probabilities of the reference's tokens lie apart.
        judged: The same steps beside float32, if it was asked.
        reference: The reference at these steps beside float32.
    """

    gaps: list[float] = field(default_factory=list)
    parted: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    judged: Judged = field(default_factory=Judged)
    reference: Judged = field(default_factory=Judged)

    def add(
        self, wanted: int, chosen: int, reference: Step, own: Step, true: Step | None = None
    ) -> None:
        """One step: the reference's token, the engine's, and what was thought of them."""
        gap = gap_of(wanted, reference)
        self.gaps.append(gap)
        second = runner_up(wanted, reference)
        if str(wanted) in own:
            self.drift.append(abs(reference[str(wanted)] - own[str(wanted)]))
            if second in own:
                self.moved.append(abs(gap - (own[str(wanted)] - own[second])))
        if true is not None:
            self.judged.add(chosen, (str(wanted), second), own, true)
            self.reference.add(wanted, (str(wanted), second), reference, true)
        if chosen != wanted:
            # How much worse the reference thinks of what was chosen; at least its lead.
            self.parted.append(
                reference[str(wanted)] - reference[str(chosen)]
                if str(chosen) in reference
                else float("inf")
            )

    def facts(self) -> dict[str, Any]:
        """For a row of results."""
        finite = [gap for gap in self.parted if gap != float("inf")]
        return {
            "steps": len(self.gaps),
            "parted": len(self.parted),
            "parted_at_ties": sum(gap == 0.0 for gap in self.parted),
            "beyond_top": len(self.parted) - len(finite),
            "max_gap": max(finite, default=0.0),
            "median_gap": statistics.median(finite) if finite else 0.0,
            "gap_moved_median": statistics.median(self.moved) if self.moved else 0.0,
            "gap_moved_max": max(self.moved, default=0.0),
            "max_logprob_difference": max(self.drift, default=0.0),
        }


def runner_up(token: int, step: Step) -> str:
    """The best token of a step beside one."""
    return max((t for t in step if t != str(token)), key=lambda t: step[t])


def gap_of(token: int, step: Step) -> float:
    """How far a token lies before the best of the others."""
    return step[str(token)] - step[runner_up(token, step)]


def whole_sequences(reference: Answer, answer: Answer) -> dict[str, Any]:
    """How far greedy tokens agree, each engine going its own way."""
    same, tokens, agreed = 0, 0, 0
    for a, b in zip(reference["tokens"], answer["tokens"]):
        first = first_difference(a, b)
        tokens, same = tokens + len(a), same + (first is None)
        agreed += len(a) if first is None else first
    return {
        "sequences": len(reference["tokens"]),
        "equal_sequences": same,
        "tokens": tokens,
        "equal_tokens": agreed / max(tokens, 1),
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two sequences part."""
    return next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), None)


def same_text(
    engine: Engine,
    prompts: list[list[int]],
    reference: Answer,
    first: Answer,
    times: Times,
    truth: list[list[Step]] | None = None,
) -> Compared:
    """Compare every step under the reference's text.

    Args:
        engine: Who is asked to go on.
        prompts: Token ids.
        reference: The reference's tokens and log-probabilities for them.
        first: The engine's own.
        times: When no sequence is resumed any more, whose other steps are then left out.
        truth: What float32 thinks of the reference's text.

    Returns:
        All steps that were compared.
    """
    compared = Compared()
    at = dict.fromkeys(range(len(prompts)), 0)  # where each sequence goes on
    answer: Answer | None = first
    for _ in range(RESUMES):
        if answer is None:
            break
        resumed: dict[int, int] = {}
        for i, tokens, steps in zip(at, answer["tokens"], answer["logprobs"]):
            wanted = reference["tokens"][i][at[i] :]
            apart = first_difference(wanted, tokens)
            upto = len(wanted) if apart is None else apart + 1
            for j in range(upto):
                theirs = reference["logprobs"][i][at[i] + j]
                true = None if truth is None else truth[i][at[i] + j]
                compared.add(wanted[j], tokens[j], theirs, steps[j], true)
            if upto < len(wanted):
                resumed[i] = at[i] + upto
        if not resumed or time.monotonic() > times.until:
            break
        at = resumed
        command = {
            "prompts": [prompts[i] + reference["tokens"][i][: at[i]] for i in at],
            "max_tokens": [len(reference["tokens"][i]) - at[i] for i in at],
            "logprobs": LOGPROBS,
        }
        answer = engine.ask(command, times.late)
    return compared


@dataclass(frozen=True)
class Times:
    """When to stop waiting, on the clock of ``time.monotonic``.

    Attributes:
        until: When to leave further steps out.
        deadline: When every answer is too late.
        patience: Seconds that one answer may take.
    """

    until: float
    deadline: float
    patience: float = float("inf")

    @property
    def late(self) -> float:
        """When an answer that is asked for now is too late."""
        return min(self.deadline, time.monotonic() + self.patience)


def agreement(
    bench: str,
    engines: list[Engine],
    prompts: list[list[int]],
    times: Times,
    note: Note,
    scorer: Engine | None = None,
) -> None:
    """Every engine of a model and dtype against the first, and the first against itself.

    Rows are noted as soon as an engine has answered, and once more when it is known which steps
    are decided. The first engine against itself is given the prompts the other way round: other
    batches, by which its own roundings differ.

    Args:
        bench: Name of the rows.
        engines: The first one is the reference.
        prompts: Token ids.
        times: When to stop.
        note: Takes rows.
        scorer: Transformers in float32 with the same weights, to judge every step by.
    """
    if not engines:
        return
    command = {"prompts": prompts, "max_tokens": NEW_TOKENS, "logprobs": LOGPROBS}
    chief, rows, found = engines[0], [], []
    reference = chief.ask(command, times.late)
    if reference is None:
        return
    truth = None
    if scorer is not None:
        truth = score(scorer, prompts, reference, chief.dtype, times.late)
    for engine in [*engines[1:], chief]:
        again = engine is chief
        answer = (_turned if again else _plain)(engine, command, times.late)
        if answer is None:
            continue
        compared = same_text(engine, prompts, reference, answer, times, truth)
        found.append(compared)
        rows.append(
            {
                "bench": bench,
                "case": engine.case,
                "backend": engine.backend + (", prompts the other way round" if again else ""),
                "reference": chief.backend,
                "cached_prompt_tokens": answer["cached"],
                "prompt_tokens": sum(map(len, prompts)),
                **whole_sequences(reference, answer),
                **compared.facts(),
                **(_beside_float32(compared) if truth is not None else {}),
                **{f"steps_{kind}": n for kind, n in answer.get("steps", {}).items()},
            }
        )
        note(rows[-1:])
    decide(rows, found)
    note(rows)


def _beside_float32(compared: Compared) -> dict[str, Any]:
    """Both judged by float32, at the same steps."""
    return {
        "float32": compared.judged.facts(),
        "reference_float32": compared.reference.facts(),
    }


def decide(rows: list[dict[str, Any]], found: list[Compared]) -> None:
    """Add to each row how many steps are decided, and at how many of them the engine parted.

    Args:
        rows: As ``agreement`` notes them.
        found: The comparison behind each row.
    """
    theirs = [c for row, c in zip(rows, found) if row["backend"] != OURS]
    noise = max((move for each in theirs for move in each.moved), default=None)
    if noise is None:
        return
    for row, each in zip(rows, found):
        row["noise"] = noise
        row["decided_steps"] = sum(gap > noise for gap in each.gaps)
        row["decided_parted"] = sum(gap > noise for gap in each.parted)


def _plain(engine: Engine, command: dict[str, Any], deadline: float) -> Answer | None:
    return engine.ask(command, deadline)


def _turned(engine: Engine, command: dict[str, Any], deadline: float) -> Answer | None:
    """The answers to the prompts in reverse order, in the order of the prompts."""
    answer = engine.ask({**command, "prompts": command["prompts"][::-1]}, deadline)
    if answer is None:
        return None
    return answer | {name: answer[name][::-1] for name in ("tokens", "logprobs")}


__all__ = [
    "LOGPROBS",
    "NEW_TOKENS",
    "Compared",
    "Times",
    "agreement",
    "same_text",
    "whole_sequences",
]
