"""The Hopper prefill bound to tensors of one layout, so that a call has only addresses to pass."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

from .hopper_launch import HopperLauncher, Kept, Source
from .hopper_maps import MapForm
from .hopper_variant import (
    Variant,
    bounds,
    compile_arguments,
    key_box,
    pack_size,
    query_box,
    split_lanes,
)

_LOG2E = 1.4426950408889634
#: Scale 0 weighs all keys alike; but 0 times the -inf of a masked key would be NaN.
_SMALLEST_SCALE = 1e-30


@lru_cache(maxsize=16)
def device_facts(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors of a CUDA device."""
    facts = torch.cuda.get_device_properties(index)
    return (facts.major, facts.minor), facts.multi_processor_count


def on_device(device: torch.device) -> Any:
    """Make a device current, unless it is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def sources(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dv: int, variant: Variant,
    page_size: int | None,
) -> tuple[Source | None, ...]:  # fmt: skip
    """The kernel's first five arguments: how queries, keys and ``dv`` lanes of values are read."""

    def queries(first: int, lanes: int) -> Source:
        box = query_box(variant, lanes)
        return Source(0, MapForm.of(q, (*q.shape[:2], lanes), q.stride(), box, first))

    def keys(operand: int, first: int, lanes: int) -> Source:
        """Pages, slots, heads and lanes; ragged keys are one page."""
        x, box = (k, v)[operand - 1], key_box(variant, lanes, page_size)
        if x.dim() == 3:
            shape, strides = (1, *x.shape[:2], lanes), (16, *x.stride())
        else:
            shape, strides = (*x.shape[:3], lanes), x.stride()
        return Source(operand, MapForm.of(x, shape, strides, box, first))

    d, d1 = split_lanes(q.shape[-1])
    first = queries(0, d), queries(d, d1) if d1 else None
    if variant.gathers(page_size):
        return (*first, Source(1, None), None, Source(2, None))
    return (*first, keys(1, 0, d), keys(1, d, d1) if d1 else None, keys(2, 0, dv))


class HopperCall:
    """The prefill for tensors of one layout: everything but their addresses, bound once.

    Args:
        q: ``[T, H, D]`` bfloat16 or float16, D and DV as in ``HEAD_DIMS``.
        k: ``[Tk, HK, D]``, or ``[num_pages, page_size, HK, D]``.
        v: As ``k``, of DV lanes or more; only the first DV are read.
        o: ``[T, H, DV]`` output, any strides over tokens and heads.
        lse: ``[T, H]`` float32 output, natural log.
        variant: What to launch.
        num_seqs: B.
        page_table: ``[B, max_pages]`` int32, or None if keys are ragged.
        scale: Factor on ``q . k``.
        causal: Bottom-right causal mask.
        window: ``(left, right)`` inclusive bounds, None unbounded.
        softcap: c in ``c * tanh(s / c)``, or None.
        sinks: Whether calls give sinks.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
        lse: torch.Tensor, *, variant: Variant, num_seqs: int, page_table: torch.Tensor | None,
        scale: float, causal: bool, window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None, sinks: bool = False,
    ) -> None:  # fmt: skip
        from .hopper_kernel import _hopper_prefill_kernel

        total_q, num_heads, head_dim = q.shape
        num_kv_heads, paged = k.shape[-2], page_table is not None
        assert paged == (k.dim() == 4) and q.dtype == k.dtype == v.dtype == o.dtype
        assert page_table is None or page_table.stride(1) == 1 or page_table.shape[1] == 1
        dv = o.shape[-1]
        assert o.shape[:2] == (total_q, num_heads) and o.stride(-1) == 1 and dv <= v.shape[-1]
        assert lse.shape == (total_q, num_heads) and lse.dtype == torch.float32
        assert variant.pack in (1, pack_size(num_heads // num_kv_heads))
        # No key anywhere: every tile is empty, but a tensor map needs an address.
        self._spare = None
        if k.numel() == 0:
            k, v = self._spare = tuple(q.new_zeros((1, *x.shape[1:])) for x in (k, v))
        page_size = k.shape[1] if paged else None
        constants = compile_arguments(
            variant, head_dim, dv, page_size, causal, window, softcap, sinks
        )
        tiles = total_q // variant.tile + num_seqs + 1
        heads = num_heads if variant.pack == 1 else num_kv_heads
        head_group = variant.head_group
        if head_group < 1 or heads % head_group:
            head_group = heads
        softcap_in = 0.0
        scale = max(scale, _SMALLEST_SCALE)
        if softcap is not None:
            softcap_in = 2.0 * _LOG2E * scale / softcap
            scale = 1.0
        left, right = bounds(causal, window)
        steps: tuple[int, ...] = (0,) * 6
        if variant.gathers(page_size):
            steps = tuple(s // 8 for s in (*k.stride()[:3], *v.stride()[:3]))
        self._device, self._empty = q.device, total_q == 0
        if self._empty:
            return
        _, num_sms = device_facts(q.device.index)
        programs = num_sms * (2 if variant.consumers == 1 else 1)
        numbers = (
            scale * _LOG2E, scale, softcap_in, 0.0 if softcap is None else float(softcap),
            *lse.stride(), page_table.stride(0) if page_table is not None else 0, total_q,
            left or 0, 0 if right is None else right + 1,
            heads, num_heads // num_kv_heads, head_group, variant.order, *steps,
        )  # fmt: skip
        self._launcher = HopperLauncher(
            _hopper_prefill_kernel, min(programs, tiles * heads),
            sources(q, k, v, dv, variant, page_size), numbers, o.stride()[:2],
            constants, variant.max_registers,
        )  # fmt: skip

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
        lse: torch.Tensor, *, work: torch.Tensor, page_table: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launch on tensors of the layout.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            o: Output to write.
            lse: LSE to write.
            work: The step's list from ``hopper_work`` for the variant.
            page_table: Entries past the last key of a sequence are never read.
            sinks: ``[H]`` float32 logits of one more key of value 0, if calls give them.
        """
        if self._empty:
            return
        if self._spare is not None:
            k, v = self._spare
        table = work if page_table is None else page_table
        with on_device(self._device):
            self._launcher.launch((q, k, v), (o, lse, work, table, lse if sinks is None else sinks))

    def kept(
        self, q: torch.Tensor, work: torch.Tensor, page_table: torch.Tensor | None
    ) -> Kept | None:
        """The same for raw addresses on the current device, see ``hopper_launch.Kept``, or None.

        Args:
            q: Any queries of the layout.
            work: As in a call.
            page_table: As in a call.
        """
        if self._empty or self._spare is not None:
            return None
        at, table = work.data_ptr(), (work if page_table is None else page_table).data_ptr()
        return None if (at | table) & 15 else self._launcher.kept(q.dtype, at, table)


__all__ = ["HopperCall", "device_facts", "on_device", "sources"]
