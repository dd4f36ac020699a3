"""The kernels by name, each bound to compile-time arguments once for all plans."""

from __future__ import annotations

from functools import cache

from .decode import _merge_fwd_kernel, _split_fwd_kernel
from .launch import Launcher
from .prefill import _prefill_fwd_kernel
from .schedule import _schedule_kernel


@cache
def launcher_of(
    kernel_name: str, constants: tuple, warps: int, stages: int, pdl: bool, registers: int = 0
) -> Launcher:
    """The launcher of a kernel with these compile-time arguments; one for all plans."""
    kernels = {
        "split": _split_fwd_kernel,
        "merge": _merge_fwd_kernel,
        "prefill": _prefill_fwd_kernel,
        "schedule": _schedule_kernel,
    }
    return Launcher(
        kernels[kernel_name], dict(constants), warps=warps, stages=stages, pdl=pdl,
        registers=registers,
    )  # fmt: skip


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


__all__ = ["launcher_of", "next_power_of_2"]
