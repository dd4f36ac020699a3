"""What kernels are told of the tensors and options of a run: strides, factors, features."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from ..backend import RunExtras
from ..batch import Batch
from ..output import AttentionOutput
from ..spec import AttentionSpec
from . import primitives
from .configs import split_lanes
from .device import Formats

LOG2E = 1.4426950408889634
TINY_SCALE = primitives.TINY_SCALE.value
#: Elements that offsets of 32 bits reach, with room to spare.
NARROW_ELEMENTS = 2**30

COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def scale_kind(scale: Any) -> int:
    """0: a number or none; 1: one value on the device; 1 + n: one per KV head, n elements apart."""
    if not isinstance(scale, torch.Tensor):
        return 0
    return 1 + (scale.stride(0) if scale.numel() > 1 else 0)


def alignment(sizes: tuple[int, ...]) -> int:
    """Largest power of two up to 16 that divides every size."""
    bits = 16
    for size in sizes:
        bits |= size
    return bits & -bits


def extent(x: torch.Tensor) -> int:
    """Elements from a tensor's first to its last."""
    return sum((n - 1) * s for n, s in zip(x.shape, x.stride()) if n)


class Operands:
    """Tensors of one layout and options of one kind, as kernels take them; none is kept.

    Attributes:
        key: Hashable: all that the compiler may specialise on, beside the constants.
        share: Whether values are the first lanes of the tile of keys.
        scale: Of scores; it includes log2(e) unless there is a softcap.
        softcap: Of scores; 1 if there is none.
        bytes: Whether fp8 travels as bytes.
        narrow: How far offsets of 32 bits reach, as ``primitives.full_strides`` counts it.
        whole_vectors: Whether keys and values are loaded 16 bytes at a time.
        table: Page table; of ragged keys, any tensor.
        strides: Of all tensors, in the kernels' order; those of keys and values in units.
        out_strides: Of the outputs alone.
        left: Bound of the window; 0 if there is none, like ``right``.
        right: The other bound.
        k_step: Elements from the scale of a KV head's keys to the next's.
        v_step: The same for values.
    """

    def __init__(
        self, spec: AttentionSpec, batch: Batch, formats: Formats, q: torch.Tensor,
        k: torch.Tensor, v: torch.Tensor, out: AttentionOutput, extras: RunExtras, share: bool,
        form: Any,
    ) -> None:  # fmt: skip
        self._spec, self._formats = spec, formats
        paged = spec.page_size is not None
        stride_table = batch.page_table.stride(0) if paged else 0
        reach = max(extent(k), extent(v)) < NARROW_ELEMENTS
        # Whether one kernel takes all queries, each alone in its sequence.
        alone = batch.max_seqlen_q <= 1 and not spec.batch_invariant
        self.key = (form, stride_table, reach, alone)
        self.table = batch.page_table if paged else batch.seqlens_k
        self._d = split_lanes(spec.head_dim)
        self._dv = split_lanes(spec.dv)
        self.share = share and self._d[0] == self._dv[0] == spec.dv
        left, right = spec.bounds
        self.left, self.right = left or 0, right or 0
        # A query alone sees up to the last key.
        ends = right is not None and right >= 0 and alone
        self._bounded = left is not None, not (right is None or ends)
        softcap = spec.softcap
        scale = max(spec.scale, TINY_SCALE)
        self.scale = scale if softcap is not None else scale * LOG2E
        self.softcap = 1.0 if softcap is None else softcap
        self.bytes = formats.fp8 == 2
        ks = (k.stride(0), k.stride(1), k.stride(2)) if paged else (0, k.stride(0), k.stride(1))
        vs = (v.stride(0), v.stride(1), v.stride(2)) if paged else (0, v.stride(0), v.stride(1))
        # With room to spare for the lanes of a row, which are added later.
        narrow = int(paged and spec.page_size * max(ks[1], vs[1]) < NARROW_ELEMENTS)
        self.narrow = 2 if reach else narrow
        align = min(alignment(ks), alignment(vs))
        # Loads of less than 16 bytes are not pipelined; the products then stay off the
        # warpgroup instructions, which two warps cannot issue (see ``Call._warps``).
        width = min(align, alignment((spec.head_dim,)), alignment((spec.dv,)))
        self.whole_vectors = width * k.element_size() >= 16
        self.out_strides = (*out.o.stride()[:2], *out.lse.stride())
        self.strides = (
            *q.stride()[:2], *[s // align for s in (*ks, *vs)], *self.out_strides, stride_table
        )  # fmt: skip
        self._align, self._same_strides = align, ks == vs
        self._k_scale, self._v_scale = scale_kind(extras.k_scale), scale_kind(extras.v_scale)
        self.k_step, self.v_step = max(self._k_scale - 1, 0), max(self._v_scale - 1, 0)
        self._sinks = extras.sinks is not None

    @property
    def plain_rows(self) -> bool:
        """Whether keys and values are ragged, of one power-of-two width each, and no fp8."""
        return self._spec.page_size is None and not (self._d[1] or self._dv[1] or self._formats.fp8)

    def widths(self) -> tuple[tuple[str, Any], ...]:
        """Compile-time arguments: head dims, and the tiles that they are kept in."""
        spec = self._spec
        return (
            ("D", spec.head_dim), ("D0", self._d[0]), ("D1", self._d[1]),
            ("DV", spec.dv), ("DV0", self._dv[0]), ("DV1", self._dv[1]),
        )  # fmt: skip

    def ends(self) -> tuple[tuple[str, Any], ...]:
        """Compile-time arguments of kernels that finish rows."""
        return ("HAS_SINKS", self._sinks), ("HAS_V_SCALE", self._v_scale > 0)

    def flags(self) -> tuple[tuple[str, Any], ...]:
        """Compile-time arguments of kernels that read keys: all that is not the plan's choice."""
        spec, formats = self._spec, self._formats
        return (
            ("HAS_LEFT", self._bounded[0]), ("HAS_RIGHT", self._bounded[1]),
            ("HAS_SOFTCAP", spec.softcap is not None), ("HAS_ALIBI", spec.has_alibi),
            ("HAS_MASK", spec.has_mask), ("HAS_SINKS", self._sinks),
            ("HAS_K_SCALE", self._k_scale > 0), ("HAS_V_SCALE", self._v_scale > 0),
            ("PAGE_SIZE", spec.page_size or 0), ("SHARE_KV", self.share),
            ("SAME_STRIDES", self._same_strides), ("NARROW", self.narrow),
            ("KV_ALIGN", self._align), ("COMPUTE", COMPUTE[formats.compute]),
            ("FP8", formats.fp8), ("FP8_Q", formats.fp8_q), ("ROW_SCALE", formats.row_scale),
        )  # fmt: skip


__all__ = ["TINY_SCALE", "Operands", "scale_kind"]
