"""The CUDA path: which kernel of ``merge.cu`` a call needs, and its arguments.

A kernel is specialised for dtypes, head dim and layout class. What a layout fixes, grid and
strides included, is prepared once; a launch passes pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import nvrtc

SOURCE = Path(__file__).with_name("merge.cu")
TYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}
TILE_TOKENS = 8  # one 32-byte sector of a token-major LSE


class Tuning(NamedTuple):
    """Launch shape of the kernels; ``python -m attn_backends.bench.merge sweep`` compares shapes.

    Attributes:
        threads: Per block.
        small_unroll: Vectors per thread and side in the kernel for small problems, which loads
            both sides before the weights are known.
        large_unroll: The same for large problems, where a side of weight 0 is not read.
        small_limit: Most vectors of an output that count as small.
        split: Groups of threads that share the states of a row in an n-way merge of few rows.
        split_limit: Most vectors of an output for which they do.
    """

    threads: int = 256
    small_unroll: int = 2
    large_unroll: int = 4
    small_limit: int = 1 << 20
    split: int = 8
    split_limit: int = 1 << 16


TUNING = Tuning()


def macros(
    dtype: torch.dtype, out_dtype: torch.dtype, head_dim: int, **more: int
) -> dict[str, int]:
    """Macros that every kernel of ``merge.cu`` needs, and ``more``."""
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


def pair_macros(vectors: int, tuning: Tuning) -> dict[str, int]:
    """Macros of the two-way kernels for rows of ``vectors`` vectors."""
    return {
        "MANY": 0,
        "THREADS": tuning.threads,
        "SMALL_UNROLL": tuning.small_unroll,
        "SMALL_ROWS": rows_per_block(vectors, tuning.threads * tuning.small_unroll),
        "LARGE_UNROLL": tuning.large_unroll,
        "LARGE_ROWS": rows_per_block(vectors, tuning.threads * tuning.large_unroll),
    }


def many_macros(vectors: int, tuning: Tuning) -> dict[str, int]:
    """Macros of the n-way kernels for rows of ``vectors`` vectors."""
    return {
        "MANY": 1,
        "THREADS": tuning.threads,
        "LONG_SPLIT": tuning.split,
        "LONG_ROWS": rows_per_block(vectors, tuning.threads // tuning.split),
        "WIDE_ROWS": rows_per_block(vectors, tuning.threads),
    }


def rows_per_block(vectors: int, reach: int) -> int:
    """Whole rows among ``reach`` vectors, or one row that takes several passes."""
    return max(1, reach // vectors)


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
        addresses for tensors, 0 for none.
    """
    tokens, heads, head_dim = o_a.shape
    vectors = head_dim * o_a.element_size() // 16
    lses = [lse_a, lse_b]
    layout = _layout([o_a, lse_a, o_b, lse_b, out_o, out_lse], lses)
    defines = macros(o_a.dtype, out_dtype, head_dim, HAS_B=int(o_b is not None), **layout)
    defines |= pair_macros(vectors, tuning)
    strides: tuple[int, ...] = ()
    if layout["STRIDED"]:
        fresh = heads * head_dim, head_dim
        strides = (*_strides(o_a, fresh), *_strides(lse_a, (heads, 1)), *_strides(o_b, fresh))
        strides += (*_strides(lse_b, (heads, 1)), *_strides(out_o, fresh))
        strides += _strides(out_lse, (heads, 1))
    small = tokens * heads * vectors <= tuning.small_limit
    rows = defines["SMALL_ROWS" if small else "LARGE_ROWS"]
    name = "merge_pair_small" if small else "merge_pair_large"
    grid = _grid(tokens, heads, rows, layout["TILE_TOKENS"])
    launch = nvrtc.launcher(o_a.device, grid, tuning.threads)
    kernels = _Variants(o_a.device.index, ("merge_pair_small", "merge_pair_large"), name, defines)

    def run(o_a, lse_a, o_b, lse_b, o, lse, num_prefix, scale, in_place):  # type: ignore
        where, number = 0, 1.0
        if isinstance(scale, torch.Tensor):
            where = scale.data_ptr()
        elif scale is not None:
            number = float(scale)
        args = (o_a, lse_a, o_b, lse_b, o, lse, tokens, heads, num_prefix, where, number)
        launch(kernels.get(in_place), *args, *strides)

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
        ``launch(os, lses, counts, out_o, out_lse)``.
    """
    states = os.shape[0]
    o_n, lse_n = os.stride(0), lses.stride(0)
    run = _prepare_many(os[0], lses[0], states, counts, out_o, out_lse, out_dtype, False, tuning)
    o_span, lse_span = os.stride(0) * states * os.element_size(), lse_n * states * 4

    def launch(os, lses, counts, o, lse):  # type: ignore
        p_o, p_lse = os.data_ptr(), lses.data_ptr()
        in_place = p_o <= o.data_ptr() < p_o + o_span or p_lse <= lse.data_ptr() < p_lse + lse_span
        run(in_place, (p_o, o_n, p_lse, lse_n), counts, o, lse)

    return launch


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
        ``launch(os, lses, counts, out_o, out_lse)``.
    """
    states, padding = len(os), 8 - len(os)
    run = _prepare_many(os[0], lses[0], states, None, out_o, out_lse, out_dtype, True, tuning)

    def launch(os, lses, counts, o, lse):  # type: ignore
        ps, ls = [x.data_ptr() for x in os], [x.data_ptr() for x in lses]
        in_place = o.data_ptr() in ps or lse.data_ptr() in ls
        run(in_place, (*ps, *ps[:1] * padding, *ls, *ls[:1] * padding), None, o, lse)

    return launch


def _prepare_many(
    o_0: torch.Tensor,
    lse_0: torch.Tensor,
    states: int,
    counts: torch.Tensor | None,
    out_o: torch.Tensor | None,
    out_lse: torch.Tensor | None,
    out_dtype: torch.dtype,
    separate: bool,
    tuning: Tuning,
) -> Callable[..., None]:
    """``run(in_place, state_args, counts, out_o, out_lse)``."""
    tokens, heads, head_dim = o_0.shape
    vectors = head_dim * o_0.element_size() // 16
    layout = _layout([o_0, lse_0, out_o, out_lse], [lse_0])
    defines = macros(o_0.dtype, out_dtype, head_dim, SEPARATE=int(separate), **layout)
    defines["COUNT_BYTES"] = 0 if counts is None else counts.element_size()
    defines |= many_macros(vectors, tuning)
    strides: tuple[int, ...] = ()
    if layout["STRIDED"]:
        fresh = heads * head_dim, head_dim
        strides = (*_strides(o_0, fresh), *_strides(lse_0, (heads, 1)))
        strides += (*_strides(out_o, fresh), *_strides(out_lse, (heads, 1)))
    few = states > 4 and tokens * heads * vectors <= tuning.split_limit
    rows = defines["LONG_ROWS" if few else "WIDE_ROWS"]
    name = "merge_many_long" if few else "merge_many_wide"
    grid = _grid(tokens, heads, rows, layout["TILE_TOKENS"])
    launch = nvrtc.launcher(o_0.device, grid, tuning.threads)
    kernels = _Variants(o_0.device.index, ("merge_many_long", "merge_many_wide"), name, defines)

    def run(in_place, state_args, counts, o, lse):  # type: ignore
        where = 0 if counts is None else counts.data_ptr()
        args = (where, o.data_ptr(), lse.data_ptr(), states, tokens, heads)
        launch(kernels.get(in_place), *state_args, *args, *strides)

    return run


class _Variants:
    """A kernel for disjoint outputs and one for merging in place, compiled when first needed."""

    def __init__(
        self, device: int, names: tuple[str, str], name: str, defines: dict[str, int]
    ) -> None:
        self._device, self._names, self._name, self._defines = device, names, name, defines
        self._found: list[Any] = [None, None]

    def get(self, in_place: bool) -> Any:
        kernel = self._found[in_place]
        if kernel is None:
            defines = {**self._defines, "IN_PLACE": int(in_place)}
            kernel = nvrtc.load_kernels(SOURCE, self._device, self._names, defines)[self._name]
            self._found[in_place] = kernel
        return kernel


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
    """Blocks that cover all rows; mirrors ``Tile`` in merge.cu."""
    if not tile_tokens:
        return -(-tokens * heads // rows)
    tile = min(tile_tokens, rows)
    return -(-tokens // tile) * -(-heads // (rows // tile))


__all__ = [
    "TUNING",
    "Tuning",
    "macros",
    "many_macros",
    "pair_macros",
    "prepare_pair",
    "prepare_separate",
    "prepare_stacked",
    "rows_per_block",
]
