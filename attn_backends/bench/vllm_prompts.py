"""Prompts for engines: 64 that share prefixes, and the shapes that throughput is measured on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

PREFIXES = 4
PROMPTS = 64

_SUBJECTS = ("The ferry", "A small library", "Her telescope", "The old bridge", "Our orchard")
_VERBS = ("stood near", "was built after", "could be seen from", "had once belonged to")
_PLACES = ("the harbour", "a quiet valley", "the second station", "an island in the north")
_ASKS = (
    "Summarise the text above in one sentence.",
    "Which place is mentioned first?",
    "Continue the story.",
    "List three things that the text says nothing about.",
)


def sentences(rng: random.Random, count: int) -> str:
    """Plain sentences, so that a small language model has something to go on."""
    made = [
        f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_PLACES)} "
        f"in the year {rng.randrange(1700, 2000)}."
        for _ in range(count)
    ]
    return " ".join(made)


def texts() -> list[str]:
    """64 prompts: four long beginnings, sixteen different ends each."""
    rng = random.Random(20)
    starts = [sentences(rng, 20 + 6 * i) for i in range(PREFIXES)]
    return [
        f"{starts[i % PREFIXES]} {sentences(rng, 1 + i // 4)} {rng.choice(_ASKS)}"
        for i in range(PROMPTS)
    ]


def tokenized(folder: Path) -> list[list[int]]:
    """``texts()`` as token ids of the model in a folder."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return [list(tokenizer(text)["input_ids"]) for text in texts()]


def random_ids(vocabulary: int) -> list[list[int]]:
    """The same shape as ``texts()``, of random tokens."""
    rng = random.Random(21)

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(count)]

    starts = [ids(240 + 75 * i) for i in range(PREFIXES)]
    return [starts[i % PREFIXES] + ids(20 + 3 * i) for i in range(PROMPTS)]


def uniform(vocabulary: int, length: int, count: int) -> list[list[int]]:
    """Prompts of one length that share nothing."""
    rng = random.Random(22)
    return [[rng.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]


__all__ = ["PROMPTS", "random_ids", "texts", "tokenized", "uniform"]
