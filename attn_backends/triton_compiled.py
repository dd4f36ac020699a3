"""Kernels that Triton compiled, as launches of the driver.

Which arguments a compiled kernel still has, and where, differs between versions of Triton: the
driver is asked, and where it does not agree with the kernel's signature, Triton launches.
"""

from __future__ import annotations

from typing import Any

from . import driver

_FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
#: Scratch memory that Triton's kernels take as last arguments, none of it used here.
_MOST_SCRATCH = 2

try:  # without the hooks a profiler would not see launches of the driver: leave all to Triton
    from triton import knobs

    _RUNTIME: Any = knobs.runtime
    _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook  # noqa: B018
except Exception:  # no Triton, a broken one, or one before 3.4
    _RUNTIME = None


def is_hooked() -> bool:
    """Whether somebody, such as a profiler, asked to be called around launches."""
    if _RUNTIME is None:
        return True
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    # A hook is a chain of calls in Triton 3.6 and later, None or a function before.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch_of(
    compiled: Any, grid: tuple[int, int, int], values: tuple[Any, ...], changing: int
) -> driver.Launch | None:
    """A launch of a compiled kernel; None where only Triton knows how to launch it.

    Args:
        compiled: What ``kernel[grid](...)`` or ``kernel.warmup(...)`` returned.
        grid: Programs per dimension.
        values: All arguments in order, constants included; addresses for tensors.
        changing: How many of the first each launch passes anew; none of them may be constants.
    """
    if not driver.available():
        return None
    try:
        meta, signature = compiled.metadata, list(compiled.src.signature.values())
        compiled.run  # noqa: B018  loads the kernel, on the current device
        function = compiled.function
        plain = not (meta.global_scratch_size or meta.profile_scratch_size)
        plain = plain and meta.num_ctas == 1 and not meta.launch_cooperative_grid
        threads, shared, pdl = meta.num_warps * 32, meta.shared, bool(meta.launch_pdl)
    except AttributeError:  # a Triton whose compiled kernels look otherwise
        return None
    if not plain or len(signature) != len(values) or "constexpr" in signature[:changing]:
        return None
    formats, kept = "", []
    for kind, value in zip(signature, values):
        if kind == "constexpr":
            continue
        letter = "Q" if isinstance(kind, str) and kind[0] == "*" else _FORMATS.get(kind)
        if letter is None:
            return None
        formats += letter
        kept.append(value)
    known = driver.parameters(function)
    if known is None or not 0 <= (extra := len(known) - len(formats)) <= _MOST_SCRATCH:
        return None
    formats += "Q" * extra
    if known != [(at, driver.SIZES[f]) for at, f in zip(driver.offsets(formats), formats)]:
        return None
    return driver.Launch(
        function, grid, threads, formats, (*kept, *(0,) * extra), changing, shared=shared,
        pdl=pdl, owner=compiled,
    )  # fmt: skip


__all__ = ["is_hooked", "launch_of"]
