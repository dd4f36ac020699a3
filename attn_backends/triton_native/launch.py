"""Launch a Triton kernel with as little host time as its compiled form allows.

``kernel[grid](...)`` binds and inspects every argument of every call. A ``Launcher`` remembers the
compiled kernel per signature and hands it raw addresses. It is used only where the compiled form
is certain to fit: every address is a multiple of 16, and the integers that the compiler may
specialise on are part of the signature. Everything else takes the ordinary way.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import triton
from triton.runtime import driver

try:  # without these hooks the fast way is still right, but profilers would not see its launches
    from triton import knobs
except ImportError:  # Triton < 3.4
    knobs = None  # type: ignore[assignment]

Arg = "torch.Tensor | int | float"


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter, on the host."""
    return not isinstance(kernel, triton.JITFunction)


def _hooked() -> bool:
    if knobs is None:
        return True
    runtime = knobs.runtime
    return runtime.launch_enter_hook is not None or runtime.launch_exit_hook is not None


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

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor],
        addresses: Sequence[int],
        numbers: tuple[int | float, ...],
        signature: Any,
    ) -> None:
        """Launch on the current device and stream.

        Args:
            grid: Programs per dimension.
            tensors: The pointer arguments.
            addresses: Their ``data_ptr()``s, each a multiple of 16; empty takes the ordinary way.
            numbers: The numeric arguments.
            signature: Hashable; fixes dtypes and every integer that is not ``do_not_specialize``.
        """
        if self._fast and addresses:
            index = torch._C._cuda_getDevice()
            compiled = self._compiled.get((index, signature))
            if compiled is not None and not _hooked():
                compiled.run(
                    grid[0], grid[1], grid[2], driver.active.get_current_stream(index),
                    compiled.function, compiled.packed_metadata, None, None, None,
                    *addresses, *numbers, *self._values,
                )  # fmt: skip
                return
            compiled = self.kernel[grid](*tensors, *numbers, **self.constants, **self.options)
            if hasattr(compiled, "run") and hasattr(compiled, "packed_metadata"):
                self._compiled[index, signature] = compiled
            else:  # a Triton whose compiled kernels look otherwise
                self._fast = False
            return
        self.kernel[grid](*tensors, *numbers, **self.constants, **self.options)


__all__ = ["Launcher", "is_interpreted"]
