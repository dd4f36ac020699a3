"""Launcher of the Hopper prefill: when it can be used, which variant, and how it is called.

``hopper_reasons`` says what stands against a call, ``choose_variant`` fixes tiles by shape alone,
``hopper_work`` lists the tiles of a step (reusable by every layer with the same variant), and
``hopper_prefill`` launches. Nothing here synchronizes.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ..errors import Reason
from ..spec import AttentionSpec
from . import hopper_compat
from .hopper_launch import Map, launch

#: Lanes of keys and of values.
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
DTYPES = (torch.bfloat16, torch.float16)
_INT32_MAX = 2**31 - 1
_LOG2E = 1.4426950408889634
#: Scale 0 weighs all keys alike; but 0 times the -inf of a masked key would be NaN.
_SMALLEST_SCALE = 1e-30


@dataclass(frozen=True)
class Variant:
    """What one launch is compiled for, apart from the call's own features.

    Attributes:
        block_n: Keys per tile.
        stages: Slots for tiles of keys, and as many for values.
        consumers: Warpgroups of 64 rows, up to three; with one, two programs share a
            multiprocessor.
        pack: Query heads of one KV head that share a tile, padded to a power of two; 1 is off.
        dynamic: Tiles are handed out by a counter instead of in fixed turns.
        snake: In fixed turns, every second turn runs backwards.
        head_group: Heads that finish together; 0 is all. Fewer share K and V in the L2 cache.
        ping_pong: The two consumers issue to the tensor cores in turn.
        named_empty: Slots are given back through named barriers instead of mbarriers.
        lazy: Keep a row's maximum until it is exceeded by far, and do not rescale until then.
        poly: Of 8 exponentials, how many are evaluated as polynomials.
    """

    block_n: int = 128
    stages: int = 2
    consumers: int = 2
    pack: int = 1
    dynamic: bool = True
    snake: bool = False
    head_group: int = 0
    ping_pong: bool = False
    named_empty: bool = True
    lazy: bool = False
    poly: int = 0

    @property
    def tile(self) -> int:
        """Query tokens per tile."""
        return 64 * self.consumers // self.pack

    @property
    def max_registers(self) -> int:
        """Registers per thread that the launch reserves, before warps trade them."""
        return 168 if self.consumers == 2 else 128

    def warp_registers(self, paged: bool, gather: bool = False) -> tuple[int, int]:
        """Registers per thread of consumers and producer, out of the same total."""
        if gather:
            return {1: (168, 88), 2: (208, 88), 3: (136, 104)}[self.consumers]
        if paged:
            return {1: (216, 40), 2: (232, 40), 3: (152, 56)}[self.consumers]
        return {1: (232, 24), 2: (240, 24), 3: (160, 32)}[self.consumers]

    def gathers(self, page_size: int | None) -> bool:
        """Whether boxes of TMA, one per page, cannot tile a tile of keys."""
        if page_size is None:
            return False
        if page_size >= self.block_n:
            return page_size % self.block_n > 0
        return page_size < 16 or self.block_n % page_size > 0


def split_lanes(head_dim: int) -> tuple[int, int]:
    """Lanes of the first copy and product of queries and keys, and of the second; powers of two."""
    first = 1 << (head_dim.bit_length() - 1)
    return first, head_dim - first


def pack_size(group: int) -> int:
    """Rows that the query heads of one KV head take in a packed tile."""
    return 1 << (group - 1).bit_length()


def _full_share(rows: int, tile: int = 128) -> float:
    """Share of a tile's rows that hold queries."""
    return rows / (-(-rows // tile) * tile)


def choose_variant(
    *,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    max_seqlen_q: int,
    total_q: int,
    num_seqs: int,
    num_sms: int,
    batch_invariant: bool = False,
) -> Variant:
    """The variant for a shape; host facts alone decide, so that it never needs a sync.

    Args:
        head_dim: D.
        num_heads: H.
        num_kv_heads: HK.
        max_seqlen_q: Longest query count, or a bound.
        total_q: Query tokens, or a bound.
        num_seqs: B.
        num_sms: Multiprocessors.
        batch_invariant: Let D alone decide. The bits of a row then depend on its own sequence
            only: its tiles of keys start at multiples of ``block_n``, and a tile that it does not
            see changes nothing.
    """
    variant = Variant(block_n=64 if head_dim == 256 else 128, stages=3 if head_dim == 64 else 2)
    if batch_invariant:
        return variant
    group = num_heads // num_kv_heads
    longest = max(1, min(max_seqlen_q, total_q))
    pack = pack_size(group)
    if 1 < pack <= 32:
        packed = _full_share(longest * pack) * group / pack
        if packed > 1.1 * _full_share(longest):
            variant = replace(variant, pack=pack)
    heads = num_heads if variant.pack == 1 else num_kv_heads
    tiles = min(total_q // variant.tile + num_seqs, num_seqs * -(-longest // variant.tile))
    if tiles * heads < num_sms and head_dim < 256:
        variant = replace(variant, consumers=1, block_n=128 if head_dim == 64 else 64, stages=2)
    return variant


# ----------------------------------------------------------------------------- reasons


@lru_cache(maxsize=16)
def _device_facts(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors of a CUDA device."""
    facts = torch.cuda.get_device_properties(index)
    return (facts.major, facts.minor), facts.multi_processor_count


def _tensor_reasons(name: str, x: torch.Tensor) -> list[Reason]:
    """What TMA cannot address: base and strides come in 16 bytes, coordinates in 32 bits."""
    out = []
    if x.data_ptr() % 16:
        out.append(Reason(f"{name}.data_ptr() % 16", str(x.data_ptr() % 16), "0"))
    if x.stride(-1) != 1:
        out.append(Reason(f"{name}.stride(-1)", str(x.stride(-1)), "1"))
    for dim in range(x.dim() - 1):
        step = x.stride(dim) * x.element_size()
        if x.shape[dim] > 1 and (step % 16 or not 0 < step < 2**40):
            want = f"multiples of {16 // x.element_size()} from 1"
            out.append(Reason(f"{name}.stride({dim})", str(x.stride(dim)), want))
    if max(x.shape) > _INT32_MAX:
        out.append(Reason(f"max({name}.shape)", str(max(x.shape)), f"<= {_INT32_MAX}"))
    return out


def hopper_reasons(
    spec: AttentionSpec,
    device: torch.device | None = None,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> list[Reason]:
    """Every reason against the Hopper kernel for a spec, and for the tensors of a call if given.

    Args:
        spec: What the layer fixes.
        device: Where the call runs; None leaves the device out of it.
        q: ``[T, H, D]``.
        k: ``[Tk, HK, D]`` or ``[num_pages, page_size, HK, D]``.
        v: As ``k``.
    """
    out = []
    if hopper_compat.REASON is not None:
        out.append(hopper_compat.REASON)
    if device is not None:
        if device.type != "cuda":
            out.append(Reason("device", device.type, "cuda"))
        elif torch.cuda.is_available():
            index = torch.cuda.current_device() if device.index is None else device.index
            capability, _ = _device_facts(index)
            if capability != (9, 0):
                out.append(Reason("compute_capability", "{}.{}".format(*capability), "9.0"))
        else:
            out.append(Reason("device", "cuda", "a visible CUDA device", "check the driver"))
    if spec.dtype not in DTYPES:
        out.append(Reason("dtype", str(spec.dtype).removeprefix("torch."), "bfloat16, float16"))
    if spec.kv != spec.dtype:
        want = str(spec.dtype).removeprefix("torch.")
        out.append(Reason("kv_dtype", str(spec.kv).removeprefix("torch."), want))
    widths = dict(HEAD_DIMS)
    if spec.head_dim not in widths:
        out.append(Reason("head_dim", str(spec.head_dim), ", ".join(map(str, widths))))
    elif spec.dv != widths[spec.head_dim]:
        want = f"{widths[spec.head_dim]} with head_dim={spec.head_dim}"
        out.append(Reason("head_dim_v", str(spec.dv), want))
    if spec.has_alibi:
        out.append(Reason("has_alibi", "True", "False"))
    if spec.has_mask:
        out.append(Reason("has_mask", "True", "False"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None:
            out += _tensor_reasons(name, x)
    return out


# ----------------------------------------------------------------------------- launch


def _on(device: torch.device) -> Any:
    """Make a device current, unless it is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def query_box(variant: Variant, lanes: int) -> tuple[int, ...]:
    """Tokens, heads and lanes of the queries that one copy brings a consumer."""
    return (64 // variant.pack, variant.pack, lanes)


def key_box(variant: Variant, lanes: int, page_size: int | None) -> tuple[int, ...]:
    """Pages, slots, heads and lanes of keys or values that one copy brings; ragged is one page."""
    slots = variant.block_n if page_size is None else min(page_size, variant.block_n)
    return (1, slots, 1, lanes)


def _query_map(x: torch.Tensor, variant: Variant, first: int, lanes: int) -> Map:
    """Lanes of the queries."""
    shape = (*x.shape[:2], lanes)
    return Map(x, shape, x.stride(), query_box(variant, lanes), first)


def _key_map(
    x: torch.Tensor, variant: Variant, page_size: int | None, first: int, lanes: int
) -> Map:
    """Lanes of keys or values as pages, slots, heads and lanes; ragged keys are one page."""
    box = key_box(variant, lanes, page_size)
    if x.dim() == 3:
        return Map(x, (1, *x.shape[:2], lanes), (16, *x.stride()), box, first)
    return Map(x, (*x.shape[:3], lanes), x.stride(), box, first)


def sources(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, page_size: int | None
) -> tuple[Map | torch.Tensor | None, ...]:
    """The kernel's first five arguments: how queries, keys and values are read."""
    d, d1 = split_lanes(q.shape[-1])
    queries = _query_map(q, variant, 0, d), _query_map(q, variant, d, d1) if d1 else None
    if variant.gathers(page_size):
        return (*queries, k, None, v)
    keys = _key_map(k, variant, page_size, 0, d)
    more = _key_map(k, variant, page_size, d, d1) if d1 else None
    return (*queries, keys, more, _key_map(v, variant, page_size, 0, v.shape[-1]))


def bounds(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int | None, ...]:
    """Left and right bound of what a token sees; None is unbounded."""
    left, right = (None, None) if window is None else window
    return left, 0 if causal else right


def hopper_work(
    variant: Variant,
    *,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    total_q: int,
    causal: bool,
    window: tuple[int | None, int | None] | None = None,
    skip: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The work list of a step; pass it to every ``hopper_prefill`` with the same variant.

    One list serves one stream at a time, since its counter is part of it.

    Args:
        variant: As given to ``hopper_prefill``.
        cu_seqlens_q: ``[B+1]`` int32.
        seqlens_k: ``[B]`` int32.
        cu_seqlens_k: ``[B+1]`` int32, or None if paged.
        total_q: Rows of the queries, T.
        causal: As given to ``hopper_prefill``.
        window: As given to ``hopper_prefill``.
        skip: Leave out sequences of at most this many queries.
        out: A list to refill, as before the replay of a captured graph.
    """
    from .hopper_work import work_list

    left, right = bounds(causal, window)
    with _on(seqlens_k.device):
        return work_list(
            cu_seqlens_q, seqlens_k, cu_seqlens_k, total_q=total_q, tile=variant.tile,
            block_n=variant.block_n, left=left, right=right, skip=skip,
            out=out,
        )  # fmt: skip


def hopper_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqlens_k: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    max_seqlen_q: int,
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    o: torch.Tensor,
    lse: torch.Tensor,
    variant: Variant | None = None,
    work: torch.Tensor | None = None,
) -> None:
    """Attention of ragged queries over ragged or paged keys, into ``o`` and ``lse``.

    Every row of ``o`` and ``lse`` is written, those after the last sequence too. The caller has
    asked ``hopper_reasons``; here only what a wrong call could corrupt is asserted.

    Args:
        q: ``[T, H, D]`` bfloat16 or float16, D and DV as in ``HEAD_DIMS``.
        k: ``[Tk, HK, D]``, or ``[num_pages, page_size, HK, D]`` with ``page_table``.
        v: As ``k``, of DV lanes.
        cu_seqlens_q: ``[B+1]`` int32.
        seqlens_k: ``[B]`` int32, keys of each sequence.
        cu_seqlens_k: ``[B+1]`` int32, where the keys of each sequence start; None if paged.
        page_table: ``[B, max_pages]`` int32; entries past the last key are never read.
        max_seqlen_q: Longest query count, or a bound; chooses the variant, nothing else.
        scale: Factor on ``q . k``.
        causal: Bottom-right causal mask.
        window: ``(left, right)`` inclusive bounds, None unbounded.
        softcap: c in ``c * tanh(s / c)``, or None.
        sinks: ``[H]`` float32 logits of one more key of value 0, or None.
        o: ``[T, H, DV]`` output, any strides over tokens and heads.
        lse: ``[T, H]`` float32 output, natural log.
        variant: What to launch; None chooses by shape.
        work: The step's list from ``hopper_work`` for the same variant; None makes one, which
            costs a small launch.
    """
    from .hopper_kernel import _hopper_prefill_kernel

    total_q, num_heads, head_dim = q.shape
    paged = page_table is not None
    num_kv_heads = k.shape[-2]
    num_seqs = seqlens_k.shape[0]
    assert paged == (k.dim() == 4) and (cu_seqlens_k is None) == paged
    assert q.dtype == k.dtype == v.dtype == o.dtype and lse.dtype == torch.float32
    assert page_table is None or page_table.stride(1) == 1 or page_table.shape[1] == 1
    assert o.shape == (total_q, num_heads, v.shape[-1]) and o.stride(-1) == 1
    assert lse.shape == (total_q, num_heads)
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    assert variant is None or variant.pack in (1, pack_size(num_heads // num_kv_heads))
    if total_q == 0:
        return
    _, num_sms = _device_facts(q.device.index)
    if variant is None:
        variant = choose_variant(
            head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads,
            max_seqlen_q=max_seqlen_q, total_q=total_q, num_seqs=num_seqs, num_sms=num_sms,
        )  # fmt: skip
    if work is None:
        work = hopper_work(
            variant, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k, cu_seqlens_k=cu_seqlens_k,
            total_q=total_q, causal=causal, window=window,
        )  # fmt: skip
    if k.numel() == 0:
        # No key anywhere: every tile is empty, but a tensor map needs an address.
        k, v = (q.new_zeros((1, *x.shape[1:])) for x in (k, v))
    page_size = k.shape[1] if paged else None
    constants = compile_arguments(
        variant, head_dim, v.shape[-1], page_size, causal, window, softcap, sinks is not None
    )
    tiles = total_q // variant.tile + num_seqs + 1
    programs = num_sms * (3 - variant.consumers)
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
    with _on(q.device):
        launch(
            _hopper_prefill_kernel,
            min(programs, tiles * heads),
            sources(q, k, v, variant, page_size),
            (
                o, lse, work, work if page_table is None else page_table,
                lse if sinks is None else sinks,
            ),
            (
                scale * _LOG2E, scale, softcap_in, 0.0 if softcap is None else float(softcap),
                page_table.stride(0) if page_table is not None else 0,
                left or 0, 0 if right is None else right + 1,
                heads, num_heads // num_kv_heads, head_group, *steps,
            ),
            (*o.stride()[:2], *lse.stride()),
            constants,
            variant.max_registers,
        )  # fmt: skip


@lru_cache(maxsize=256)
def compile_arguments(
    variant: Variant,
    head_dim: int,
    head_dim_v: int,
    page_size: int | None,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    sinks: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments of a launch."""
    left, right = bounds(causal, window)
    gather = variant.gathers(page_size)
    consumer, producer = variant.warp_registers(page_size is not None, gather)
    first, more = split_lanes(head_dim)
    return {
        "D": first,
        "D1": more,
        "DV": head_dim_v,
        "BLOCK_N": variant.block_n,
        "STAGES": variant.stages,
        "CONSUMERS": variant.consumers,
        "PACK": variant.pack,
        "PAGE_SIZE": page_size or 0,
        "GATHER": gather,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": sinks,
        "DYNAMIC": variant.dynamic,
        "SNAKE": variant.snake and not variant.dynamic,
        "PING_PONG": variant.ping_pong and variant.consumers == 2,
        "NAMED_EMPTY": variant.named_empty,
        "LAZY": variant.lazy,
        "POLY": variant.poly,
        "CONSUMER_REGS": consumer,
        "PRODUCER_REGS": producer,
    }


__all__ = [
    "Variant",
    "choose_variant",
    "hopper_prefill",
    "hopper_reasons",
    "hopper_work",
]
