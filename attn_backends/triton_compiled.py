"""Kernels that Triton compiled, as launches of the driver.

Which arguments a compiled kernel still has, and where, differs between versions of Triton: the
driver is asked, and where it does not agree with the kernel's signature, Triton launches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain, compress
from typing import Any, NamedTuple

from . import driver

logger = logging.getLogger("attn_backends")

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


class Form(NamedTuple):
    """What a compiled kernel takes, as the driver sees it.

    Attributes:
        function: Handle of the loaded kernel.
        threads: Per program.
        shared: Bytes of shared memory.
        pdl: Whether it may start before the kernel ahead has ended.
        formats: One letter per argument, see ``driver.Launch``.
        kept: For each argument of the source, whether it is one of the compiled kernel.
        widths: For each of those that are, as how many values it is passed: more than one for a
            tensor map, which its shape and strides follow.
        scratch: Null pointers behind them.
        compiled: The kernel, which must stay alive.
    """

    function: int
    threads: int
    shared: int
    pdl: bool
    formats: str
    kept: tuple[bool, ...]
    widths: tuple[int, ...]
    scratch: int
    compiled: Any

    def arguments(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Those of a source's arguments, constants included, that the kernel takes.

        Args:
            values: By argument; a tuple for a tensor map.
        """
        taken: Iterable[Any] = compress(values, self.kept)
        if len(self.formats) - self.scratch > len(self.widths):
            taken = chain.from_iterable(
                x if width > 1 else (x,) for x, width in zip(taken, self.widths)
            )
        return (*taken, *(0,) * self.scratch)

    def launch(
        self, grid: tuple[int, int, int], values: tuple[Any, ...], changing: int
    ) -> driver.Launch | None:
        """A launch; None if an argument that changes is a constant here, or one is no number.

        Args:
            grid: Programs per dimension.
            values: All arguments in order, constants included; addresses for tensors. None for
                those that are absent, which no launch passes.
            changing: How many of the first each launch passes anew.
        """
        if len(values) != len(self.kept):
            return None
        if any(x is not None and not kept for x, kept in zip(values[:changing], self.kept)):
            return None
        arguments = self.arguments(values)
        if not all(isinstance(x, (int, float, bytes)) for x in arguments):
            logger.debug("Triton launches %s: not all that it takes is a number", self.compiled)
            return None
        letters = sum(self.widths[: sum(self.kept[:changing])])
        return driver.Launch(
            self.function, grid, self.threads, self.formats, arguments, letters,
            shared=self.shared, pdl=self.pdl, owner=self.compiled,
        )  # fmt: skip


def form_of(compiled: Any) -> Form | None:
    """The form of a kernel for the current device; None where only Triton can launch it.

    Args:
        compiled: What ``kernel[grid](...)`` or ``kernel.warmup(...)`` returned.
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
    if not plain:
        return None
    kinds = [kind for kind in signature if kind != "constexpr"]
    parts = [part for kind in kinds if (part := format_of(kind)) is not None]
    if len(parts) < len(kinds):
        return None
    formats = "".join(parts)
    known = driver.parameters(function)
    if known is None or not 0 <= (scratch := len(known) - len(formats)) <= _MOST_SCRATCH:
        return None
    formats += "Q" * scratch
    sizes = [driver.SIZES[f] for f in formats]
    if [size for _, size in known] != sizes:
        return None
    # The driver puts each value to its offset, which says more only where no map is aligned.
    if "M" not in formats and [at for at, _ in known] != driver.offsets(formats):
        return None
    kept = tuple(kind != "constexpr" for kind in signature)
    widths = tuple(map(len, parts))
    return Form(function, threads, shared, pdl, formats, kept, widths, scratch, compiled)


def format_of(kind: Any) -> str | None:
    """How an argument is passed: one number, or a tensor map with its shape and strides."""
    if not isinstance(kind, str):
        return None
    if kind.startswith("tensordesc"):
        rank = kind.split("[", 1)[1].split("]", 1)[0].count(",") + 1
        return "M" + "i" * rank + "q" * rank
    return "Q" if kind[0] == "*" else _FORMATS.get(kind)


__all__ = ["Form", "form_of", "is_hooked"]
