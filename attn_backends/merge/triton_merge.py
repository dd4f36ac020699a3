"""The Triton path: launch shapes and arguments for ``triton_kernels``.

What a layout fixes is prepared once, the compiled kernel included; a launch then passes addresses
to the driver, past Triton's own argument handling, which costs more than the kernel. Under
``TRITON_INTERPRET=1`` kernels run in Triton's interpreter, on CPU tensors too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .. import driver
from ..errors import Reason
from .cuda_merge import has_pdl, resident_threads

MAX_BLOCK_D = 1024
MAX_UNROLL = 8  # states that a program reads without a loop


class Tuning(NamedTuple):
    """Launch shape; ``python -m attn_backends.bench.merge sweep`` compares shapes.

    Attributes:
        warps: Per program.
        large_warps: The same for a two-way merge of an output of more bytes than the first of
            ``large_sizes`` and no more than the second.
        large_sizes: See there.
        vectors: 16-byte vectors of each side that a thread holds.
        pdl: Let a kernel start while the one ahead of it still runs, where the device can.
        fetch: Have a two-way merge bring what it reads to L2 while it waits for the kernel ahead.
    """

    warps: int = 4
    vectors: int = 1
    pdl: bool = True
    large_warps: int = 8
    large_sizes: tuple[int, int] = (1 << 20, 1 << 25)
    fetch: bool = True

    def pair(self, size: int) -> Tuning:
        """The shape of a two-way merge of an output of ``size`` bytes."""
        least, most = self.large_sizes
        return self._replace(warps=self.large_warps) if least < size <= most else self


TUNING = Tuning()


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """``(module, None)``, or ``(None, why Triton does not load)``."""
    try:
        from . import triton_kernels

        return triton_kernels, None
    except Exception as error:  # a broken install may raise anything
        return None, f"{type(error).__name__}: {error}"


def missing() -> list[Reason]:
    """Reasons for which this path cannot run in this process."""
    error = _kernels()[1]
    return [] if error is None else [Reason("triton", error, "installed", "pip install triton")]


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, as decided when it was imported."""
    module = _kernels()[0]
    if module is None:
        return False
    return type(module.merge_pair_any).__name__ != "JITFunction"


def prepare_pair(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None,
    lse_b: torch.Tensor,
    out_o: torch.Tensor | None,
    out_lse: torch.Tensor | None,
    out_dtype: torch.dtype,
    aligned: bool,
    tuning: Tuning = TUNING,
) -> Callable[..., None]:
    """Prepare a two-way merge of tensors laid out like these; outputs None are contiguous.

    Args:
        o_a: ``[T, H, DV]``.
        lse_a: ``[T, H]``.
        o_b: ``[T, H, DV]``, or None for zeros.
        lse_b: ``[T, H]``.
        out_o: ``[T, H, DV]``, or None.
        out_lse: ``[T, H]``, or None.
        out_dtype: Of the result.
        aligned: Whether all outputs' pointers, strides and rows are whole 16-byte vectors.
        tuning: Launch shape.

    Returns:
        ``launch(o_a, lse_a, o_b, lse_b, out_o, out_lse, num_prefix, scale, in_place)``, with
        tensors or addresses. ``launch.ready[in_place]`` is the ``driver.Launch`` of a plain merge
        (every token has a prefix, no scale) once there was one.
    """
    tokens, heads, head_dim = o_a.shape
    size = o_a.numel() * o_a.element_size()
    tuning = tuning.pair(size)
    shape = _shape(o_a, aligned, tuning)
    layouts = (o_a, lse_a, o_b, lse_b, out_o, out_lse)
    strided = any(x is not None and not x.is_contiguous() for x in layouts)
    fresh = (heads * head_dim, head_dim)
    vec = shape["VEC"]
    strides = (
        *_strides(o_a, fresh, vec),
        *_strides(lse_a, (heads, 1), 1),
        *_strides(o_b, fresh, vec),
        *_strides(lse_b, (heads, 1), 1),
        *_strides(out_o, fresh, vec),
        *_strides(out_lse, (heads, 1), 1),
    )
    fixed = {**shape, "STRIDED": strided, "HAS_B": o_b is not None}
    fixed["FETCH"] = tuning.pdl and tuning.fetch and aligned and not strided
    # They take more registers than would let all threads of the device run.
    resident = 0 if interpreted() else resident_threads(o_a.device) * 3 // 4
    fixed["RESIDENT"] = max(1, resident // (32 * tuning.warps))
    fp32 = torch.float32
    pointers = (o_a.dtype, fp32, o_a.dtype, fp32, out_dtype, fp32)
    module = _kernels()[0]
    kernel = module.merge_pair_aligned if aligned else module.merge_pair_any
    grid = -(-tokens * heads // shape["ROWS"])
    launcher = _Launcher(kernel, o_a.device, grid, tuning)
    plain = (1.0, tokens, heads, -1, *strides)

    def run(o_a, lse_a, o_b, lse_b, o, lse, num_prefix, scale, in_place):  # type: ignore
        # An address must be given for what is absent; the kernels never read it.
        tensors = (o_a, lse_a, o_a if o_b is None else o_b, lse_b, o, lse)
        if num_prefix < 0 and scale is None:
            constants = {**fixed, "SCALED": 0, "IN_PLACE": in_place}
            run.ready[in_place] = launcher(  # type: ignore[attr-defined]
                in_place, constants, pointers, tensors, (None, *plain)
            )
            return
        scaled, where, number = 0, lse_a, 1.0
        if isinstance(scale, torch.Tensor):
            scaled, where = 2, scale
        elif scale is not None:
            scaled, number = 1, float(scale)
        numbers = (number, tokens, heads, num_prefix, *strides)
        constants = {**fixed, "SCALED": scaled, "IN_PLACE": in_place}
        launcher((in_place, scaled), constants, (*pointers, fp32), (*tensors, where), numbers, True)

    run.ready = [None, None]  # type: ignore[attr-defined]
    return run


def prepare_stacked(
    os: torch.Tensor,
    lses: torch.Tensor,
    counts: torch.Tensor | None,
    out_o: torch.Tensor | None,
    out_lse: torch.Tensor | None,
    out_dtype: torch.dtype,
    aligned: bool,
    tuning: Tuning = TUNING,
) -> Callable[..., None]:
    """Prepare an n-way merge of stacked states ``[n, T, H, DV]``.

    Returns:
        ``launch(os, lses, counts, out_o, out_lse)``, which tells whether it merged in place.
        ``launch.ready[in_place]`` is the ``driver.Launch`` once there was one, and
        ``launch.pack(*addresses)`` gives its arguments.
    """
    states = os.shape[0]
    run, _ = _prepare_many(
        os[0], lses[0], states, counts, out_o, out_lse, out_dtype, aligned, False, tuning
    )
    vec = _vec(os, aligned)
    jumps = (os.stride(0) // vec, lses.stride(0), *(0,) * 14)
    o_span, lse_span = os.stride(0) * states * os.element_size(), lses.stride(0) * states * 4

    def launch(os, lses, counts, o, lse):  # type: ignore
        p_o, p_lse = os.data_ptr(), lses.data_ptr()
        in_place = 0 <= o.data_ptr() - p_o < o_span or 0 <= lse.data_ptr() - p_lse < lse_span
        launch.ready[in_place] = run(os, lses, counts, o, lse, jumps, in_place)
        return in_place

    launch.ready = [None, None]  # type: ignore[attr-defined]
    launch.pack = _pack_stacked if counts is None else _pack_counted  # type: ignore[attr-defined]
    return launch


def _pack_stacked(p_o: int, p_lse: int, out_o: int, out_lse: int) -> tuple[int, ...]:
    return p_o, p_lse, p_lse, out_o, out_lse


def _pack_counted(p_o: int, p_lse: int, counts: int, out_o: int, out_lse: int) -> tuple[int, ...]:
    return p_o, p_lse, counts, out_o, out_lse


def prepare_separate(
    os: tuple[torch.Tensor, ...],
    lses: tuple[torch.Tensor, ...],
    counts: None,
    out_o: torch.Tensor | None,
    out_lse: torch.Tensor | None,
    out_dtype: torch.dtype,
    aligned: bool,
    tuning: Tuning = TUNING,
) -> Callable[..., None]:
    """Prepare an n-way merge of up to 8 separate states of one layout.

    Returns:
        As ``prepare_stacked``.
    """
    states = len(os)
    run, numbers = _prepare_many(
        os[0], lses[0], states, None, out_o, out_lse, out_dtype, aligned, True, tuning
    )
    unit, padding = os[0].element_size() * _vec(os[0], aligned), (0,) * (8 - states)

    def jumps(at: Any) -> tuple[int, ...]:
        """Where the states after the first lie, from the first."""
        o_0, lse_0 = at[0], at[states]
        o_jumps = [(p - o_0) // unit for p in at[1:states]]
        lse_jumps = [(p - lse_0) // 4 for p in at[states + 1 : 2 * states]]
        return (0, 0, *o_jumps, *padding, *lse_jumps, *padding)

    def pack(*at: int) -> tuple[int, ...]:
        return (at[0], at[states], at[states], at[-2], at[-1], *numbers(jumps(at)))

    def launch(os, lses, counts, o, lse):  # type: ignore
        at = [x.data_ptr() for x in (*os, *lses, o, lse)]
        in_place = at[-2] in at[:states] or at[-1] in at[states : 2 * states]
        launch.ready[in_place] = run(os[0], lses[0], None, o, lse, jumps(at), in_place)
        return in_place

    launch.ready, launch.pack = [None, None], pack  # type: ignore[attr-defined]
    return launch


def _prepare_many(
    o_0: torch.Tensor,
    lse_0: torch.Tensor,
    states: int,
    counts: torch.Tensor | None,
    out_o: torch.Tensor | None,
    out_lse: torch.Tensor | None,
    out_dtype: torch.dtype,
    aligned: bool,
    separate: bool,
    tuning: Tuning,
) -> tuple[Callable[..., Any], Callable[..., tuple[int, ...]]]:
    """``run(o_0, lse_0, counts, out_o, out_lse, jumps, in_place)``, and its numbers for jumps."""
    tokens, heads, head_dim = o_0.shape
    shape = _shape(o_0, aligned, tuning)
    strided = any(x is not None and not x.is_contiguous() for x in (o_0, lse_0, out_o, out_lse))
    fresh = (heads * head_dim, head_dim)
    strides = (
        *_strides(o_0, fresh, shape["VEC"]),
        *_strides(lse_0, (heads, 1), 1),
        *_strides(out_o, fresh, shape["VEC"]),
        *_strides(out_lse, (heads, 1), 1),
    )
    fixed = {
        **shape,
        "BLOCK_O": min(states, MAX_UNROLL),
        "SHORT": states <= MAX_UNROLL,
        "STRIDED": strided,
        "SEPARATE": separate,
        "HAS_COUNTS": counts is not None,
    }
    count_dtype = torch.float32 if counts is None else counts.dtype
    pointers = (o_0.dtype, torch.float32, count_dtype, out_dtype, torch.float32)
    module = _kernels()[0]
    kernel = module.merge_many_aligned if aligned else module.merge_many_any
    grid = -(-tokens * heads // shape["ROWS"])
    launcher = _Launcher(kernel, o_0.device, grid, tuning)

    def numbers(jumps: tuple[int, ...]) -> tuple[int, ...]:
        return states, tokens, heads, *jumps, *strides

    def run(o_0, lse_0, counts, o, lse, jumps, in_place):  # type: ignore
        return launcher(
            in_place,
            {**fixed, "IN_PLACE": in_place},
            pointers,
            (o_0, lse_0, lse_0 if counts is None else counts, o, lse),
            numbers(jumps),
            separate,
        )

    return run, numbers


class _Launcher:
    """Launches one kernel over one grid, compiling a variant when it is first needed."""

    def __init__(self, kernel: Any, device: torch.device, grid: int, tuning: Tuning) -> None:
        self._kernel, self._device, self._grid = kernel, device, (grid, 1, 1)
        self._interpreted = interpreted()
        # Without fusion the two sides of a merge commute bit for bit.
        self._options: dict[str, Any] = {"num_warps": tuning.warps, "enable_fp_fusion": False}
        self._pdl = tuning.pdl and not self._interpreted and has_pdl(device)
        if self._pdl:
            self._options["launch_pdl"] = True
        self._variants: dict[Any, Any] = {}

    def __call__(
        self,
        variant: Any,
        constants: dict[str, Any],
        pointers: tuple[torch.dtype | None, ...],
        tensors: tuple[Any, ...],
        numbers: tuple[Any, ...],
        vary: bool = False,
    ) -> driver.Launch | None:
        """Launch on the current stream.

        Args:
            variant: Names the constants below.
            constants: The constexpr arguments of the variant.
            pointers: Dtypes of ``tensors``.
            tensors: Pointer arguments, tensors or addresses; None is a null pointer.
            numbers: The other arguments, null pointers among them.
            vary: Whether ``numbers`` differ between launches of a variant.

        Returns:
            The launch, for repeating it while the device is current; None where Triton launches.
        """
        constants = {**constants, "PDL": self._pdl}
        if self._interpreted:
            self._kernel[self._grid](*tensors, *numbers, **constants)
            return None
        index = self._device.index
        if driver.current_device() != index:
            with torch.cuda.device(
                index
            ):  # kernels are loaded on, and launched to, the current one
                return self._launch(variant, constants, pointers, tensors, numbers, vary)
        return self._launch(variant, constants, pointers, tensors, numbers, vary)

    def _launch(
        self, variant: Any, constants: Any, pointers: Any, tensors: Any, numbers: Any, vary: bool
    ) -> driver.Launch | None:
        from ..triton_compiled import form_of, is_hooked

        tensors = tuple([x.data_ptr() if isinstance(x, torch.Tensor) else x or 0 for x in tensors])
        found = self._variants.get(variant)
        if found is None:
            compiled = self._kernel.warmup(
                *pointers, *numbers, **constants, grid=self._grid, **self._options
            )
            names = self._kernel.arg_names[len(tensors) + len(numbers) :]
            trailing = tuple(constants[name] for name in names)
            zeros = tuple(0 if x is None else x for x in numbers)
            changing = len(tensors) + (len(numbers) if vary else 0)
            form = form_of(compiled)
            launch = None
            if form is not None:
                launch = form.launch(self._grid, (*tensors, *zeros, *trailing), changing)
            found = self._variants[variant] = (compiled, trailing, launch)
        compiled, trailing, launch = found
        stream = driver.current_stream(self._device.index)
        if launch is None or is_hooked():
            launch_compiled(compiled, self._grid, stream, (*tensors, *numbers, *trailing))
            return None
        if vary:
            launch(stream, *tensors, *numbers)
        else:
            launch(stream, *tensors)
        return launch


def launch_compiled(
    compiled: Any, grid: tuple[int, int, int], stream: int, args: tuple[Any, ...]
) -> None:
    """Let Triton launch a kernel it compiled, with all arguments (constants too) in order."""
    from triton import knobs

    runtime = knobs.runtime
    enter = runtime.launch_enter_hook
    metadata = None
    if enter is not None:  # a profiler listens
        metadata = compiled.launch_metadata(grid, stream, *args)
    run = compiled.run  # loads the binary if need be; ``function`` is there afterwards
    hooks = (metadata, enter, runtime.launch_exit_hook)
    run(*grid, stream, compiled.function, compiled.packed_metadata, *hooks, *args)


def _vec(o: torch.Tensor, aligned: bool) -> int:
    return 16 // o.element_size() if aligned else 1


def _shape(o: torch.Tensor, aligned: bool, tuning: Tuning) -> dict[str, Any]:
    """Tile sizes for rows like those of ``o``."""
    block_d = min(MAX_BLOCK_D, 1 << max(0, o.shape[-1] - 1).bit_length())
    elements = tuning.warps * 32 * tuning.vectors * 16 // o.element_size()
    return {
        "HEAD_DIM": o.shape[-1],
        "BLOCK_D": block_d,
        "ROWS": max(1, elements // block_d),
        "VEC": _vec(o, aligned),
    }


def _strides(x: torch.Tensor | None, fresh: tuple[int, int], unit: int) -> tuple[int, int]:
    """Token and head stride, in units of ``unit`` elements."""
    token, head = fresh if x is None else (x.stride(0), x.stride(1))
    return token // unit, head // unit


__all__ = [
    "TUNING",
    "Tuning",
    "interpreted",
    "launch_compiled",
    "missing",
    "prepare_pair",
    "prepare_separate",
    "prepare_stacked",
]
