"""Orders of backends that were measured: written by ``python -m attn_backends.bench.ship``."""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    """What a tuning file says of an architecture.

    Attributes:
        gpu: Where it was measured.
        date: When.
        commit: Of this library.
        file: The tuning file.
        orders: Backends by phase, best first over all rows.
        rows: Microseconds by backend, for each phase and kind of shape (``shape_bucket``).
    """

    gpu: str
    date: str
    commit: str
    file: str
    orders: dict[str, tuple[str, ...]]
    rows: dict[tuple[str, str], dict[str, float]]


MEASURED: dict[str, Measured] = {}
