"""What float32 thinks of a text, as the measure of engines that compute in less.

Two kernels in bfloat16 part at near ties, and neither is right there by itself. Transformers reads
the same text once, computing in float32 over weights rounded as the engine has them, and says of
every step which token is best and how far the others lie behind. Against it an engine and the
reference are measured alike: at how many steps each chooses another token than float32, how much
that gives up, and how far off gaps are.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Protocol

Step = dict[str, float]  # log-probability by token, of some tokens


class Scorer(Protocol):
    """Answers ``{"score": ...}``; see ``transformers_engine``."""

    def ask(self, command: dict[str, Any], deadline: float) -> dict[str, Any] | None:
        """The answer, or None if there is none in time."""


@dataclass
class Judged:
    """Choices and gaps of an engine beside those of float32.

    Attributes:
        steps: How many were judged.
        given_up: Log-probability between float32's best token and the one chosen, of those steps
            at which they differ; infinite if float32 was not asked about it.
        errors: How far the engine's gap between two tokens lies from float32's, of every step.
    """

    steps: int = 0
    given_up: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def add(self, chosen: int, pair: tuple[str, str], own: Step, true: Step) -> None:
        """One step.

        Args:
            chosen: The engine's token.
            pair: The two tokens between which the gap lies.
            own: What the engine thought.
            true: What float32 thinks, its best token among the rest.
        """
        self.steps += 1
        best = max(true, key=lambda token: true[token])
        if str(chosen) != best:
            self.given_up.append(true[best] - true.get(str(chosen), float("-inf")))
        first, second = pair
        if first in own and second in own:
            self.errors.append(abs((own[first] - own[second]) - (true[first] - true[second])))

    def facts(self) -> dict[str, Any]:
        """For a row of results."""
        finite = [x for x in self.given_up if x != float("inf")]
        return {
            "steps": self.steps,
            "other_choice": len(self.given_up),
            "beyond_asked": len(self.given_up) - len(finite),
            "given_up_max": max(finite, default=0.0),
            "given_up_median": statistics.median(finite) if finite else 0.0,
            "gap_error_median": statistics.median(self.errors) if self.errors else 0.0,
            "gap_error_max": max(self.errors, default=0.0),
        }


def score(
    scorer: Scorer,
    prompts: list[list[int]],
    reference: dict[str, Any],
    dtype: str,
    deadline: float,
) -> list[list[Step]] | None:
    """What float32 thinks of every step of the reference's text.

    Args:
        scorer: Transformers in float32.
        prompts: Token ids.
        reference: The reference's tokens, and the log-probabilities of its best few.
        dtype: That the engines have the weights in.
        deadline: When it is too late.

    Returns:
        By prompt and step: log-probabilities of the reference's best few and of float32's own
        best few; None without an answer.
    """
    command = {
        "score": [[*p, *t] for p, t in zip(prompts, reference["tokens"])],
        "weights": dtype,
        "counts": [len(t) for t in reference["tokens"]],
        "among": [[[int(t) for t in step] for step in text] for text in reference["logprobs"]],
    }
    answer = scorer.ask(command, deadline)
    return None if answer is None else answer["logprobs"]


__all__ = ["Judged", "Scorer", "Step", "score"]
