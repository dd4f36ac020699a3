"""The CUDA path: which kernel of ``pair.cu`` or ``many.cu`` a call needs, and its arguments.

A kernel is specialised for dtypes, head dim and layout class. What a layout fixes, grid and
strides included, is prepared once; a launch passes pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import driver
from . import nvrtc

SOURCES = {f"merge_{name}": Path(__file__).with_name(f"{name}.cu") for name in ("pair", "many")}
TYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}
TILE_TOKENS = 8  # one 32-byte sector of a token-major LSE


class Tuning(NamedTuple):
    """Launch shape of the kernels; ``python -m attn_backends.bench.merge sweep`` compares shapes.

    Attributes:
        threads: Aimed at per block; rows of odd widths take what wastes fewer.
        unroll: Rows of which a thread of a two-way merge loads vectors at once.
        split: Most groups of threads that share the states of a row in an n-way merge of few rows.
        split_limit: Most bytes of an output for which they do.
        pdl: Let a kernel start while the one ahead of it still runs, where the device can.
        large_threads: The same for a two-way merge of more than ``large_from`` bytes of output.
        large_from: See there.
        fetch: Have a kernel bring what it will read to L2 while it waits for the one ahead.
        ahead: Have a two-way merge bring LSEs to L2 that later blocks will read.
    """

    threads: int = 128
    unroll: int = 1
    split: int = 8
    split_limit: int = 1 << 20
    pdl: bool = True
    large_threads: int = 256
    large_from: int = 1 << 20
    fetch: bool = True
    ahead: bool = True

    def pair_threads(self, size: int) -> int:
        """Threads aimed at for a two-way merge of an output of ``size`` bytes."""
        return self.large_threads if size > self.large_from else self.threads


TUNING = Tuning()
MOST_BATCH = 8  # states that a thread has in flight
PDL_CAPABILITY = (9, 0)  # first with programmatic dependent launch
PDL_DRIVER = 12030  # first that captures it into graphs


def macros(
    dtype: torch.dtype, out_dtype: torch.dtype, head_dim: int, **more: int
) -> dict[str, int]:
    """Macros that every kernel of ``rows.cuh`` needs, and ``more``."""
    base = {
        "IN_TYPE": TYPE_CODES[dtype],
        "OUT_TYPE": TYPE_CODES[out_dtype],
        "HEAD_DIM": head_dim,
        "HAS_B": 1,
        "IN_PLACE": 0,
        "STRIDED": 0,
        "TILE_TOKENS": 0,
    }
    return {**base, **more}


def pair_macros(
    vectors: int, size: int, tile_tokens: int = 0, *, pdl: bool, resident: int, tuning: Tuning
) -> dict[str, int]:
    """Macros of the two-way kernel for rows of ``vectors`` vectors.

    Args:
        vectors: Of a row.
        size: Bytes of the output.
        tile_tokens: Tokens of a tile, or 0.
        pdl: Whether the kernel may start while the one ahead of it still runs.
        resident: Threads that the device runs at once.
        tuning: Launch shape.
    """
    rows, threads = block(vectors, tuning.pair_threads(size), tile_tokens)
    return {
        "THREADS": threads, "PASS_ROWS": rows, "UNROLL": tuning.unroll,
        "PDL": int(pdl), "FETCH": int(pdl and tuning.fetch),
        "AHEAD": int(tuning.ahead),
        "RESIDENT": max(1, resident // (threads * tuning.unroll)),
    }  # fmt: skip


def many_macros(
    vectors: int, states: int, size: int, tile_tokens: int = 0, *, counted: bool = False,
    pdl: bool, resident: int, tuning: Tuning,
) -> dict[str, int]:  # fmt: skip
    """Macros of the n-way kernel for rows of ``vectors`` vectors; arguments as ``pair_macros``."""
    split = 1
    while size <= tuning.split_limit and split < tuning.split and states > split * MOST_BATCH:
        split *= 2
    batch = min(states, MOST_BATCH)
    most = 1024 // split
    aim = min(max(tuning.threads // split, vectors, 32), most)
    rows, threads = block(vectors, aim, tile_tokens, most)
    return {
        "THREADS": threads * split, "PASS_ROWS": rows, "SPLIT": split,
        "BATCH": batch, "SHORT": int(states <= batch * split),
        "FULL": int(states == batch * split and not counted), "PDL": int(pdl),
        "FETCH": int(pdl and tuning.fetch),
        "RESIDENT": max(1, resident // (2 * threads * split)),  # they take more registers
    }  # fmt: skip


def block(vectors: int, threads: int, tile_tokens: int = 0, most: int = 1024) -> tuple[int, int]:
    """Rows and threads of a block with one thread per vector: full warps, near ``threads``.

    Args:
        vectors: Of a row.
        threads: Aimed at; up to twice as many are taken.
        tile_tokens: Tokens of a tile, or 0; whole tiles if that many rows fit.
        most: Threads that a block can have.

    Returns:
        Rows and threads; fewer threads than vectors if a row does not fit.
    """
    fit = min(2 * threads, most) // vectors
    if not fit:
        return 1, threads
    choices = range(1, fit + 1)
    if tile_tokens and fit >= tile_tokens:
        choices = range(tile_tokens, fit + 1, tile_tokens)

    def waste(rows: int) -> tuple[float, int]:
        used = rows * vectors
        return -used / (-(-used // 32) * 32), abs(used - threads)

    rows = min(choices, key=waste)
    return rows, rows * vectors


def prepare_pair(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor | None,
    lse_b: torch.Tensor,
    out_o: torch.Tensor | None,
    out_lse: torch.Tensor | None,
    out_dtype: torch.dtype,
    tuning: Tuning = TUNING,
) -> Callable[..., None]:
    """Prepare a two-way merge of tensors laid out like these; outputs None are contiguous.

    Returns:
        ``launch(o_a, lse_a, o_b, lse_b, out_o, out_lse, num_prefix, scale, in_place)``, with
        addresses for tensors, 0 for none. ``launch.ready[in_place]`` is the ``driver.Launch`` of a
        plain merge (every token has a prefix, no scale) once there was one.
    """
    tokens, heads, head_dim = o_a.shape
    vectors = head_dim * o_a.element_size() // 16
    layout = _layout([o_a, lse_a, o_b, lse_b, out_o, out_lse], [lse_a, lse_b])
    tile, pdl = layout["TILE_TOKENS"], tuning.pdl and has_pdl(o_a.device)
    size = o_a.numel() * o_a.element_size()
    resident = resident_threads(o_a.device)
    defines = macros(o_a.dtype, out_dtype, head_dim, HAS_B=int(o_b is not None), **layout)
    defines |= pair_macros(vectors, size, tile, pdl=pdl, resident=resident, tuning=tuning)
    strides: tuple[int, ...] = ()
    if layout["STRIDED"]:
        fresh = heads * head_dim, head_dim
        strides = (*_strides(o_a, fresh), *_strides(lse_a, (heads, 1)), *_strides(o_b, fresh))
        strides += (*_strides(lse_b, (heads, 1)), *_strides(out_o, fresh))
        strides += _strides(out_lse, (heads, 1))
    grid = _grid(tokens, heads, defines["PASS_ROWS"] * defines["UNROLL"], tile)
    launches = _Launches("merge_pair", o_a.device, grid, defines, "Q" * 6 + "qqqQd", strides)
    plain = (tokens, heads, -1, 0, 1.0)

    def run(o_a, lse_a, o_b, lse_b, o, lse, num_prefix, scale, in_place):  # type: ignore
        six = (o_a, lse_a, o_b, lse_b, o, lse)
        if num_prefix < 0 and scale is None:
            run.ready[in_place] = launches.run(in_place, plain, 6, six)  # type: ignore
            return
        where, number = 0, 1.0
        if isinstance(scale, torch.Tensor):
            where = scale.data_ptr()
        elif scale is not None:
            number = float(scale)
        launches.run(in_place, (), 11, (*six, tokens, heads, num_prefix, where, number))

    run.ready = [None, None]  # type: ignore[attr-defined]
    return run


def prepare_stacked(
    os: torch.Tensor,
    lses: torch.Tensor,
    counts: torch.Tensor | None,
    out_o: torch.Tensor | None,
    out_lse: torch.Tensor | None,
    out_dtype: torch.dtype,
    tuning: Tuning = TUNING,
) -> Callable[..., None]:
    """Prepare an n-way merge of stacked states ``[n, T, H, DV]``.

    Returns:
        ``launch(os, lses, counts, out_o, out_lse)``, which tells whether it merged in place.
        ``launch.ready[in_place]`` is the ``driver.Launch`` once there was one, and
        ``launch.pack(*addresses)`` gives its arguments.
    """
    jumps = os.stride(0), lses.stride(0)
    run = _prepare_many(
        os[0], lses[0], os.shape[0], counts, out_o, out_lse, out_dtype, jumps, False, tuning
    )
    o_span, lse_span = jumps[0] * os.shape[0] * os.element_size(), jumps[1] * os.shape[0] * 4

    def launch(os, lses, counts, o, lse):  # type: ignore
        p_o, p_lse = os.data_ptr(), lses.data_ptr()
        in_place = p_o <= o.data_ptr() < p_o + o_span or p_lse <= lse.data_ptr() < p_lse + lse_span
        where = 0 if counts is None else counts.data_ptr()
        launch.ready[in_place] = run(in_place, (p_o, p_lse, where, o.data_ptr(), lse.data_ptr()))
        return in_place

    launch.ready = [None, None]  # type: ignore[attr-defined]
    launch.pack = _pack_stacked if counts is None else _pack_counted  # type: ignore[attr-defined]
    return launch


def _pack_stacked(p_o: int, p_lse: int, out_o: int, out_lse: int) -> tuple[int, ...]:
    return p_o, p_lse, 0, out_o, out_lse


def _pack_counted(p_o: int, p_lse: int, counts: int, out_o: int, out_lse: int) -> tuple[int, ...]:
    return p_o, p_lse, counts, out_o, out_lse


def prepare_separate(
    os: tuple[torch.Tensor, ...],
    lses: tuple[torch.Tensor, ...],
    counts: None,
    out_o: torch.Tensor | None,
    out_lse: torch.Tensor | None,
    out_dtype: torch.dtype,
    tuning: Tuning = TUNING,
) -> Callable[..., None]:
    """Prepare an n-way merge of up to 8 separate states of one layout.

    Returns:
        As ``prepare_stacked``.
    """
    states, padding = len(os), 8 - len(os)
    run = _prepare_many(os[0], lses[0], states, None, out_o, out_lse, out_dtype, (), True, tuning)

    def pack(*at: int) -> tuple[int, ...]:
        rest = (at[0],) * padding, (at[states],) * padding
        return (*at[:states], *rest[0], *at[states : 2 * states], *rest[1], 0, *at[2 * states :])

    def launch(os, lses, counts, o, lse):  # type: ignore
        at = [x.data_ptr() for x in (*os, *lses, o, lse)]
        in_place = at[-2] in at[:states] or at[-1] in at[states : 2 * states]
        launch.ready[in_place] = run(in_place, pack(*at))
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
    jumps: tuple[int, ...],
    separate: bool,
    tuning: Tuning,
) -> Callable[..., Any]:
    """``run(in_place, addresses)``, which returns its ``driver.Launch``."""
    tokens, heads, head_dim = o_0.shape
    vectors = head_dim * o_0.element_size() // 16
    layout = _layout([o_0, lse_0, out_o, out_lse], [lse_0])
    tile, pdl = layout["TILE_TOKENS"], tuning.pdl and has_pdl(o_0.device)
    size = o_0.numel() * o_0.element_size()
    defines = macros(o_0.dtype, out_dtype, head_dim, SEPARATE=int(separate), **layout)
    defines["COUNT_BYTES"] = 0 if counts is None else counts.element_size()
    defines |= many_macros(
        vectors, states, size, tile, counted=counts is not None, pdl=pdl,
        resident=resident_threads(o_0.device), tuning=tuning,
    )  # fmt: skip
    strides: tuple[int, ...] = ()
    if layout["STRIDED"]:
        fresh = heads * head_dim, head_dim
        strides = (*_strides(o_0, fresh), *_strides(lse_0, (heads, 1)))
        strides += (*_strides(out_o, fresh), *_strides(out_lse, (heads, 1)))
    grid = _grid(tokens, heads, defines["PASS_ROWS"], tile)
    addresses = 19 if separate else 5
    fixed = (*jumps, states, tokens, heads)
    formats = "Q" * addresses + "q" * len(fixed)
    launches = _Launches("merge_many", o_0.device, grid, defines, formats, strides)

    def run(in_place, at):  # type: ignore
        return launches.run(in_place, fixed, addresses, at)

    return run


class _Launches:
    """Launches of a kernel, for disjoint outputs and for merging in place, made when needed.

    Args:
        name: Of the kernel.
        device: Where it runs.
        grid: Blocks.
        defines: Macros.
        formats: Of the arguments before the strides, see ``driver.Launch``.
        strides: The last arguments.
    """

    def __init__(
        self, name: str, device: torch.device, grid: int, defines: dict[str, int], formats: str,
        strides: tuple[int, ...],
    ) -> None:  # fmt: skip
        self._name, self._index, self._grid = name, device.index, grid
        self._defines, self._formats, self._strides = defines, formats, strides
        self._found: dict[tuple[bool, int], Any] = {}

    def run(
        self, in_place: bool, fixed: tuple[Any, ...], changing: int, args: tuple[Any, ...]
    ) -> driver.Launch:
        """Launch on the current stream of the device.

        Args:
            in_place: Whether an output is an input.
            fixed: The arguments between ``args`` and the strides.
            changing: How many arguments ``args`` has.
            args: The first arguments.

        Returns:
            The launch, for repeating it on the device of the tensors while that is current.
        """
        launch = self._found.get((in_place, changing))
        index = self._index
        if launch is None:
            defines = {**self._defines, "IN_PLACE": int(in_place)}
            function, kernel = nvrtc.load_kernel(SOURCES[self._name], index, self._name, defines)
            launch = self._found[in_place, changing] = driver.Launch(
                function, (self._grid, 1, 1), defines["THREADS"],
                self._formats + "q" * len(self._strides), (*args, *fixed, *self._strides),
                changing, pdl=bool(defines["PDL"]), owner=kernel,
            )  # fmt: skip
        if driver.current_device() == index:
            launch(driver.current_stream(index), *args)
        else:
            with torch.cuda.device(index):
                launch(driver.current_stream(index), *args)
        return launch


@lru_cache(maxsize=64)
def has_pdl(device: torch.device) -> bool:
    """Whether kernels of this device may start while the one ahead still runs, in graphs too."""
    if driver.version() < PDL_DRIVER:
        return False
    return torch.cuda.get_device_capability(device) >= PDL_CAPABILITY


@lru_cache(maxsize=64)
def resident_threads(device: torch.device) -> int:
    """Threads that a device can run at once."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count * found.max_threads_per_multi_processor


def _layout(tensors: list[torch.Tensor | None], lses: list[torch.Tensor]) -> dict[str, int]:
    """The layout macros: whether any tensor is strided, and the tile for token-major LSEs."""
    strided = any(x is not None and not x.is_contiguous() for x in tensors)
    token_major = any(
        x.shape[0] > 1 and x.shape[1] > 1 and x.stride(0) == 1 and x.stride(1) > 1 for x in lses
    )
    return {"STRIDED": int(strided), "TILE_TOKENS": TILE_TOKENS if token_major else 0}


def _strides(x: torch.Tensor | None, fresh: tuple[int, int]) -> tuple[int, int]:
    """Token and head stride in elements."""
    return fresh if x is None else (x.stride(0), x.stride(1))


def _grid(tokens: int, heads: int, rows: int, tile_tokens: int) -> int:
    """Blocks that cover all rows; mirrors ``Tile`` in rows.cuh."""
    if not tile_tokens:
        return -(-tokens * heads // rows)
    tile = min(tile_tokens, rows)
    return -(-tokens // tile) * -(-heads // (rows // tile))


__all__ = [
    "TUNING",
    "Tuning",
    "block",
    "has_pdl",
    "macros",
    "many_macros",
    "pair_macros",
    "prepare_pair",
    "prepare_separate",
    "prepare_stacked",
]
