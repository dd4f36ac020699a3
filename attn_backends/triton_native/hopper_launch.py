"""Launch the Hopper prefill with its tensor maps kept, where Triton's launcher lets us.

Triton encodes every tensor map anew in Python on each launch, and inspects each argument. Here the
first launch of a kind goes through Triton; later ones hand the compiled kernel's C launcher raw
addresses and maps kept per address, shape and strides. A map holds nothing but those numbers, so
an old one is right again when its address is reused. Only Triton 3.6 is known to look like this
inside; other versions, and launches that a profiler's hooks watch, take the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import hopper_compat

#: Set to False to launch through Triton always.
ENABLED = True

_MOST_MAPS = 4096
_maps: dict[Any, Any] = {}
_kernels: dict[Any, tuple[Any, Callable[..., None], list[Any]] | None] = {}


class Map:
    """A tensor as TMA will see it: where it is, its shape and strides, the box of one copy.

    Args:
        x: The tensor.
        shape: Its shape, of up to five dimensions.
        strides: Strides in elements; the last is 1.
        box: Shape of one copy.
        first: The lane of ``x`` that is the first of the map.
    """

    __slots__ = ("box", "first", "key", "shape", "strides", "x")

    def __init__(
        self,
        x: torch.Tensor,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        first: int = 0,
    ) -> None:
        # The stride of a dimension of one element says nothing, but TMA still checks it.
        self.strides = (*(16 if n == 1 else s for n, s in zip(shape[:-1], strides)), 1)
        self.x, self.shape, self.box, self.first = x, tuple(shape), box, first
        self.key = (x.data_ptr() + first * x.element_size(), x.dtype, self.shape, self.strides, box)

    def descriptor(self) -> Any:
        """Triton's own description, which it encodes when it launches."""
        gl = hopper_compat.gl
        element = gl.bfloat16 if self.x.dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for(list(self.box), element)
        return hopper_compat.TensorDescriptor(
            self.x[..., self.first :], list(self.shape), list(self.strides), list(self.box), layout
        )


def _encoded(view: Map, meta: dict[str, Any]) -> Any:
    """The encoded tensor map, kept."""
    key = (view.key, meta["swizzle"])
    found = _maps.get(key)
    if found is None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(_maps) >= _MOST_MAPS:
            _maps.clear()
        found = _maps[key] = make_tensordesc_arg(view.descriptor(), meta)[0]
    return found


def _c_launcher(compiled: Any) -> tuple[Callable[..., None], list[Any]] | None:
    """The C launcher behind a compiled kernel and what it knows of its maps, if it is as in 3.6."""
    try:
        if hopper_compat.triton_version() != (3, 6):
            return None
        run = compiled.run
        inner = run.launch
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__))
        launcher = cells["launcher"].cell_contents
        metas = cells["tensordesc_meta"].cell_contents
        plain = not (run.global_scratch_size or run.profile_scratch_size)
        plain = plain and not (run.launch_cooperative_grid or run.launch_pdl) and run.num_ctas == 1
        if not plain or not metas or None in metas:
            return None
        return launcher, metas
    except Exception:  # looks otherwise inside: the ordinary way is always right
        return None


def _hooked() -> bool:
    """Whether somebody, such as a profiler, asked to be called around launches."""
    from triton import knobs

    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


def launch(
    kernel: Any,
    programs: int,
    sources: tuple[Map | torch.Tensor | None, ...],
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[int | float, ...],
    specialized: tuple[int, ...],
    constants: dict[str, Any],
    max_registers: int,
) -> None:
    """Launch on the current stream.

    Args:
        kernel: The jitted kernel; its arguments are sources, tensors, numbers, ``specialized``
            numbers, then constants.
        programs: Grid size.
        sources: Descriptors, pointers, or None for none.
        tensors: Pointer arguments.
        numbers: Numbers that the compiler does not specialise on.
        specialized: Integers that it does, placed where the kernel's signature has them: after the
            first four numbers.
        constants: Compile-time arguments by name, in the order of the signature.
        max_registers: Registers per thread at launch.
    """
    values = (*numbers[:4], *specialized, *numbers[4:])
    fast = ENABLED and not _hooked()
    if fast:
        from triton.runtime import driver

        device = torch.cuda.current_device()
        addresses = tuple(t.data_ptr() for t in tensors)
        kinds = tuple(x.box if isinstance(x, Map) else x is None for x in sources)
        key = (
            device, tensors[0].dtype, specialized, tuple(a % 16 for a in addresses), kinds,
            max_registers, *constants.values(),
        )  # fmt: skip
        known = _kernels.get(key)
        if known is not None:
            compiled, c_launch, metas = known
            described: list[Any] = []
            left = iter(metas)
            for x in sources:
                if isinstance(x, Map):
                    described += (_encoded(x, next(left)), *x.shape, *x.strides)
                else:
                    described.append(x if x is None else x.data_ptr())
            c_launch(
                programs, 1, 1, driver.active.get_current_stream(device), compiled.function,
                False, False, None, None, compiled.packed_metadata, None, None, None,
                *described, *addresses, *values, *constants.values(),
            )  # fmt: skip
            return
    compiled = kernel[(programs,)](
        *(x.descriptor() if isinstance(x, Map) else x for x in sources), *tensors, *values,
        **constants,
        num_warps=4, maxnreg=max_registers,
    )  # fmt: skip
    if fast and key not in _kernels:
        found = _c_launcher(compiled)
        _kernels[key] = None if found is None else (compiled, *found)


__all__ = ["ENABLED", "Map", "launch"]
