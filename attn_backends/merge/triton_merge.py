"""The triton path of the merge."""

from __future__ import annotations

from ..errors import Reason


def missing() -> list[Reason]:
    """Reasons for which this path cannot run here."""
    return [Reason("triton", "not part of this build", "the torch path")]


def interpreted() -> bool:
    """Whether Triton runs its interpreter."""
    return False
