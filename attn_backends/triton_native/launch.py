"""Launch a Triton kernel with as little host time as its compiled form allows.

``kernel[grid](...)`` binds and inspects every argument of every call. A ``Launcher`` remembers the
compiled kernel per signature and hands it raw addresses. It is used only where the compiled form
is certain to fit: every address is a multiple of 16, and the integers that the compiler may
specialise on are part of the signature. Everything else takes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.runtime import driver

try:  # without these hooks the fast way is still right, but profilers would not see its launches
    from triton import knobs
except ImportError:  # Triton < 3.4
    knobs = None  # type: ignore[assignment]


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter, on the host."""
    return not isinstance(kernel, triton.JITFunction)


def _hooked() -> bool:
    """Whether somebody, such as a profiler, asked to be called around launches."""
    if knobs is None:
        return True
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    # A hook is a chain of calls in Triton 3.6 and later, None or a function before.
    return any(getattr(hook, "calls", hook) for hook in hooks)


class Launcher:
    """One kernel with fixed compile-time arguments.

    Args:
        kernel: The jitted kernel; its arguments are tensors, then numbers, then constants.
        constants: Compile-time arguments by name, in the order of the kernel's signature.
        warps: Warps per program.
        stages: Depth of the load pipeline.
        pdl: Launch so that it may start before the kernel ahead of it has ended.
    """

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        *,
        warps: int = 4,
        stages: int = 2,
        pdl: bool = False,
    ) -> None:
        self.kernel = kernel
        self.constants = constants
        self.options = {"num_warps": warps, "num_stages": stages}
        if pdl:
            self.options["launch_pdl"] = True
        self._values = tuple(constants.values())
        self._compiled: dict[Any, Any] = {}
        self._fast = not is_interpreted(kernel) and knobs is not None

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
        index = torch._C._cuda_getDevice() if self._fast else -1
        compiled = self._compiled.get((index, signature))
        if compiled is None or _hooked():
            return False
        compiled.run(
            grid[0], grid[1], grid[2], driver.active.get_current_stream(index),
            compiled.function, compiled.packed_metadata, None, None, None,
            *addresses, *numbers, *self._values,
        )  # fmt: skip
        return True

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
        if hasattr(compiled, "run") and hasattr(compiled, "packed_metadata"):
            self._compiled[torch._C._cuda_getDevice(), signature] = compiled
        else:  # a Triton whose compiled kernels look otherwise
            self._fast = False


__all__ = ["Launcher", "is_interpreted"]
