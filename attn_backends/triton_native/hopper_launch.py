"""Launch the Hopper prefill at little cost to the host.

Triton encodes every tensor map anew in Python on each launch, and inspects each argument. Here the
first launch of a kind goes through Triton; later ones hand the driver raw addresses and maps that
are kept. Where the driver does not agree with what the compiled kernel is thought to take, and
where a profiler's hooks watch, Triton launches.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from .. import driver
from ..triton_compiled import is_hooked
from .hopper_maps import Encoder, MapForm, encoder_of

logger = logging.getLogger("attn_backends")
#: Set to False to launch through Triton always.
ENABLED = True

_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}
#: Scratch memory that Triton's kernels take as last arguments, none of it used here.
_MOST_SCRATCH = 2


class Source(NamedTuple):
    """How the kernel reads an operand.

    Attributes:
        operand: 0 for queries, 1 for keys, 2 for values.
        form: Of its tensor map; None where the kernel takes a pointer.
    """

    operand: int
    form: MapForm | None


class _Compiled(NamedTuple):
    """A compiled kernel as the driver sees it: formats per argument of the source, "" for none."""

    kernel: Any
    formats: tuple[str, ...]
    scratch: int


_known: dict[Any, _Compiled | None] = {}


def _format(kind: Any) -> str | None:
    """How an argument is passed: as nothing, a map with its shape and strides, or one number."""
    if kind == "constexpr":
        return ""
    if kind.startswith("tensordesc"):
        rank = kind.split("[", 1)[1].split("]", 1)[0].count(",") + 1
        return "M" + "i" * rank + "q" * rank
    return "Q" if kind[0] == "*" else _FORMATS.get(kind)


def formats_of(
    signature: dict[str, Any], known: list[tuple[int, int]]
) -> tuple[tuple[str, ...], int] | None:
    """Formats per argument of the source, and null pointers behind them; None if in doubt.

    Args:
        signature: Of the source, by argument.
        known: Offset and size of each parameter of the compiled kernel. The driver is told where
            each value is, and puts it to its offset; what has to agree are the sizes.
    """
    formats = [_format(kind) for kind in signature.values()]
    if None in formats:
        return None
    text = "".join(f for f in formats if f)
    scratch = len(known) - len(text)
    if not 0 <= scratch <= _MOST_SCRATCH:
        return None
    text += "Q" * scratch
    if [size for _, size in known] != [driver.SIZES[f] for f in text]:
        return None
    return tuple(f or "" for f in formats), scratch


def compiled_form(compiled: Any) -> _Compiled | None:
    """What a compiled kernel takes; None where only Triton can launch it."""
    if not driver.available():
        return None
    try:
        meta = compiled.metadata
        maps = meta.tensordesc_meta or []
        compiled.run  # noqa: B018  loads the kernel, on the current device
        known = driver.parameters(compiled.function)
        plain = not (meta.global_scratch_size or meta.profile_scratch_size)
        plain = plain and meta.num_ctas == 1
        plain = plain and not (meta.launch_cooperative_grid or meta.launch_pdl)
        plain = plain and all(m is not None and not m["fp4_padded"] for m in maps)
    except (AttributeError, KeyError, TypeError):  # a Triton that looks otherwise inside
        return None
    found = None if known is None or not plain else formats_of(compiled.src.signature, known)
    return None if found is None else _Compiled(compiled, *found)


class Kept:
    """A launch of which addresses alone change.

    Args:
        launch: Takes sources, outputs, work list, page table and sinks anew.
        sources: Operand, encoder or None for a pointer, and what follows the map.
        own: Addresses of the work list and the page table.
    """

    __slots__ = ("_launch", "_own", "_sources")

    def __init__(
        self, launch: driver.Launch, sources: list[tuple[int, Encoder | None, tuple[int, ...]]],
        own: tuple[int, int],
    ) -> None:  # fmt: skip
        self._launch, self._sources, self._own = launch, sources, own

    def __call__(
        self, stream: int, q: int, k: int, v: int, o: int, lse: int, sinks: int | None = None
    ) -> None:
        """Launch from addresses, each a multiple of 16, on a stream of the current device."""
        operands = (q, k, v)
        values: list[Any] = []
        for operand, encode, rest in self._sources:
            address = operands[operand]
            values.append(address if encode is None else encode(address))
            values += rest
        self._launch(stream, *values, o, lse, *self._own, lse if sinks is None else sinks)


class HopperLauncher:
    """The kernel with everything fixed but its tensors.

    Args:
        kernel: The jitted kernel; its arguments are sources, tensors, numbers, ``specialized``
            numbers, then constants.
        programs: Grid size.
        sources: Of the first arguments; None for none.
        numbers: Numbers that the compiler does not specialise on.
        specialized: Integers that it does, placed where the kernel's signature has them: after the
            first four numbers.
        constants: Compile-time arguments by name, in the order of the signature.
        max_registers: Registers per thread at launch.
    """

    def __init__(
        self, kernel: Any, programs: int, sources: tuple[Source | None, ...],
        numbers: tuple[int | float, ...], specialized: tuple[int, ...],
        constants: dict[str, Any], max_registers: int,
    ) -> None:  # fmt: skip
        self._kernel, self._programs, self._sources = kernel, programs, sources
        self._values = (*numbers[:4], *specialized, *numbers[4:])
        self._constants, self._registers = constants, max_registers
        kinds = tuple(None if s is None else s.form and (s.form.dtype, s.form.box) for s in sources)
        self._key = (specialized, kinds, max_registers, *constants.values())

    def launch(self, operands: tuple[torch.Tensor, ...], tensors: tuple[torch.Tensor, ...]) -> None:
        """Launch on the current stream.

        Args:
            operands: Queries, keys and values.
            tensors: The other pointer arguments: o, lse, work list, page table, sinks.
        """
        addresses = [t.data_ptr() for t in tensors]
        kept = None
        if not any(a & 15 for a in addresses):
            kept = self.kept(operands[0].dtype, addresses[2], addresses[3])
        if kept is not None and not is_hooked():
            at = [x.data_ptr() for x in operands]
            stream = driver.current_stream(driver.current_device())
            kept(stream, *at, addresses[0], addresses[1], addresses[4])
            return
        described = [
            x if s is None or s.form is None else s.form.descriptor(x)
            for s, x in ((s, None if s is None else operands[s.operand]) for s in self._sources)
        ]
        compiled = self._kernel[(self._programs,)](
            *described, *tensors, *self._values, **self._constants,
            num_warps=4, maxnreg=self._registers,
        )  # fmt: skip
        if driver.current_device is None or any(a & 15 for a in addresses):
            return
        key = (driver.current_device(), operands[0].dtype, self._key)
        if key not in _known:
            found = _known[key] = compiled_form(compiled)
            if found is None:
                logger.debug("Triton launches %s: the driver cannot be told its arguments",
                             getattr(compiled, "name", "a kernel"))  # fmt: skip

    def kept(self, dtype: torch.dtype, work: int, table: int) -> Kept | None:
        """The launch for the driver, with a work list and a page table; None if not known yet.

        Args:
            dtype: Of the operands.
            work: Address of the work list.
            table: Address of the page table.
        """
        if not ENABLED or driver.current_device is None:
            return None
        known = _known.get((driver.current_device(), dtype, self._key))
        if known is None:
            return None
        compiled, formats, scratch = known
        metas = iter(compiled.metadata.tensordesc_meta)
        sources: list[tuple[int, Encoder | None, tuple[int, ...]]] = []
        for source in self._sources:
            if source is not None and source.form is not None:
                encoder = encoder_of(source.form, next(metas))
                sources.append((source.operand, encoder, encoder.rest))
            elif source is not None:
                sources.append((source.operand, None, ()))
        # All arguments up to the sinks change; the others are fixed here.
        first = len(self._sources) + 5
        changing = sum(map(len, formats[:first]))
        fixed = (*self._values, *self._constants.values())
        kept = [x for x, f in zip(fixed, formats[first:]) if f]
        blank = [b"" if f == "M" else 0 for f in "".join(formats[:first])]
        launch = driver.Launch(
            compiled.function, (self._programs, 1, 1), compiled.metadata.num_warps * 32,
            "".join(formats) + "Q" * scratch, (*blank, *kept, *(0,) * scratch), changing,
            shared=compiled.metadata.shared, owner=compiled,
        )  # fmt: skip
        return Kept(launch, sources, (work, table))


__all__ = ["ENABLED", "HopperLauncher", "Kept", "Source", "compiled_form", "formats_of"]
