"""Numbers as people read them."""

from __future__ import annotations


def gib(count: float) -> str:
    """Bytes in GiB, or in MiB or KiB where GiB would read as zero."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size / 10:
            return f"{count / size:.3f} {unit}"
    return f"{count:.0f} B"


def ms(value: float) -> str:
    """Milliseconds, or microseconds below a tenth of one."""
    return f"{value:.2f} ms" if value >= 0.1 else f"{value * 1e3:.2f} µs"


__all__ = ["gib", "ms"]
