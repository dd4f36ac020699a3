"""Launch a Triton kernel with as little host time as its compiled form allows.

``kernel[grid](...)`` binds and inspects every argument of every call. A ``Launcher`` remembers the
compiled kernel per signature and hands the driver raw addresses. It does so only where the compiled
form is certain to fit: every address is a multiple of 16, and the integers that the compiler may
specialise on are part of the signature. Everything else takes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from .. import driver
from ..triton_compiled import Form, form_of, is_hooked


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter, on the host."""
    return not isinstance(kernel, triton.JITFunction)


class Launcher:
    """One kernel with fixed compile-time arguments.

    Args:
        kernel: The jitted kernel; its arguments are tensors, then numbers, then constants.
        constants: Compile-time arguments by name, in the order of the kernel's signature.
        warps: Warps per program.
        stages: Depth of the load pipeline.
        pdl: Launch so that it may start before the kernel ahead of it has ended.
        registers: Most registers of a thread; 0 leaves it to the compiler.
    """

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        *,
        warps: int = 4,
        stages: int = 2,
        pdl: bool = False,
        registers: int = 0,
    ) -> None:
        self.kernel = kernel
        self.constants = constants
        self.options = {"num_warps": warps, "num_stages": stages}
        if pdl:
            self.options["launch_pdl"] = True
        if registers:
            self.options["maxnreg"] = registers
        self.values = tuple(constants.values())
        self._known: dict[Any, tuple[Form, driver.Launch]] = {}
        self._fast = not is_interpreted(kernel) and driver.current_device is not None

    def again(
        self,
        grid: tuple[int, int, int],
        addresses: tuple[int, ...],
        numbers: tuple[int | float, ...],
        signature: Any,
    ) -> bool:
        """Repeat a launch whose compiled form is known, on the current device and stream.

        Args:
            grid: Programs per dimension.
            addresses: ``data_ptr()`` of the pointer arguments, each a multiple of 16.
            numbers: The numeric arguments.
            signature: Hashable; fixes dtypes and every integer that is not ``do_not_specialize``.

        Returns:
            Whether it was launched; if not, ``first`` must be called.
        """
        index = driver.current_device() if self._fast else -1
        known = self._known.get((index, signature))
        if known is None or is_hooked():
            return False
        form, launch = known
        stream = driver.current_stream(index)
        launch.anew(grid, stream, form.arguments((*addresses, *numbers, *self.values)))
        return True

    def form(self, signature: Any) -> Form | None:
        """The compiled form that ``first`` remembered for the current device, or None."""
        known = self._known.get((driver.current_device(), signature)) if self._fast else None
        return None if known is None else known[0]

    def first(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor],
        numbers: tuple[int | float, ...],
        signature: Any = None,
    ) -> None:
        """Launch the ordinary way; remember the compiled form if a signature is given."""
        compiled = self.kernel[grid](*tensors, *numbers, **self.constants, **self.options)
        if signature is None or not self._fast:
            return
        form = form_of(compiled)
        if form is None:  # Triton alone knows how to launch it
            self._fast = False
            return
        # In the place of a tensor map, its bytes, its shape and its strides.
        blank = [(b"", *x.shape, *x.strides) if hasattr(x, "block_shape") else 0 for x in tensors]
        values = (*blank, *numbers, *self.values)
        launch = driver.Launch(
            form.function, grid, form.threads, form.formats, form.arguments(values), 0,
            shared=form.shared, pdl=form.pdl, owner=compiled,
        )  # fmt: skip
        self._known[driver.current_device(), signature] = (form, launch)


def launch(
    launcher: Launcher, grid: tuple[int, int, int], addresses: tuple[int, ...], numbers: tuple,
    signature: Any, tensors: Callable[[], tuple[Any, ...]],
) -> None:  # fmt: skip
    """Launch from addresses if they allow the remembered form, else from the tensors."""
    bits = 0
    for address in addresses:
        if type(address) is int:  # else a tensor map, or None
            bits |= address
    if bits & 15:  # the compiler may specialise on alignment: leave it to Triton
        launcher.first(grid, tensors(), numbers)
    elif not launcher.again(grid, addresses, numbers, signature):
        launcher.first(grid, tensors(), numbers, signature)


__all__ = ["Launcher", "is_interpreted", "launch"]
