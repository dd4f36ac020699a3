"""From a case to tensors: logical sequences first, then wherever the layout puts them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from ..batch import Batch
from ..spec import FP8_DTYPES, AttentionSpec
from .cases import Case
from .oracle import Extras, Sequence

#: What unused slots hold unless a check poisons them: finite, and far too large to go unnoticed.
GARBAGE = 300.0
#: Page ids past the length: never to be dereferenced.
JUNK_PAGE = 2**31 - 1


@dataclass
class Inputs:
    """A case's tensors.

    Attributes:
        spec: The spec.
        batch: The batch, with exact host facts.
        q: ``[T, H, D]``, of the case's layout.
        k: ``[Tk, HK, D]`` or ``[num_pages, page_size, HK, D]``.
        v: The same with DV lanes, or None.
        kwargs: Optional inputs of ``run``.
        sequences: What the tensors mean.
        extras: The same for the optional inputs.
        used: ``[rows]`` or ``[num_pages, page_size]`` bool: slots that belong to a sequence.
    """

    spec: AttentionSpec
    batch: Batch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    kwargs: dict[str, Any]
    sequences: list[Sequence]
    extras: Extras
    used: torch.Tensor
    holders: list[torch.Tensor] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every input tensor, by name; buffers that views were cut from are included."""
        found = {"q": self.q, "k": self.k}
        if self.v is not None:
            found["v"] = self.v
        for name in ("cu_seqlens_q", "seqlens_k", "cu_seqlens_k", "page_table", "mask_indptr"):
            value = getattr(self.batch, name)
            if value is not None:
                found[f"batch.{name}"] = value
        found |= {n: x for n, x in self.kwargs.items() if isinstance(x, torch.Tensor)}
        return found | {f"buffer {i}": x for i, x in enumerate(self.holders)}


def build(case: Case, spec: AttentionSpec, device: torch.device) -> Inputs:
    """The tensors of a case."""
    rng = torch.Generator().manual_seed(case.stable_seed())
    sequences = [
        _sequence(case, spec, q_len, kv_len, rng)
        for q_len, kv_len in zip(case.q_lens, case.kv_lens)
    ]
    extras, kwargs = _extras(case, spec, sequences, rng)
    sequences = [_to(seq, device) for seq in sequences]
    extras = Extras(*(None if x is None else x.to(device) for x in _fields(extras)))
    kwargs = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    return place(case, spec, sequences, extras, kwargs, device)


def place(
    case: Case,
    spec: AttentionSpec,
    sequences: list[Sequence],
    extras: Extras,
    kwargs: dict[str, Any],
    device: torch.device,
) -> Inputs:
    """Lay logical sequences out as the case says."""
    q_rows = sum(case.q_lens)
    q, q_buffer = empty_rows((q_rows,), spec.num_heads, spec.head_dim, spec.dtype, case, device)
    for start, seq in zip(accumulate(case.q_lens, initial=0), sequences):
        put(q, torch.arange(start, start + len(seq.q), device=device), seq.q)
    slots, shape, batch = _slots(case, spec, device)
    k, v, buffers = empty_kv(shape, spec, case, device)
    used = torch.zeros(shape, dtype=torch.bool, device=device)
    flat = used.view(-1)
    for seq, where in zip(sequences, slots):
        flat[where] = True
        put(k, where, seq.k)
        if v is not None:
            put(v, where, seq.v)
    return Inputs(
        spec, batch, q, k, v, kwargs, sequences, extras, used, holders=[q_buffer, *buffers]
    )


def put(rows: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values [n, heads, width]`` to flat slots of ``[rows...]`` leading dims."""
    if not len(where):
        return
    if rows.dtype.itemsize == 1:  # indexed writes are not defined for every fp8 dtype
        rows, values = rows.view(torch.uint8), values.contiguous().view(torch.uint8)
    if rows.dim() == 4:
        size = rows.shape[1]
        rows[where // size, where % size] = values
    else:
        rows[where] = values


def empty_rows(
    lead: Seq[int], heads: int, width: int, dtype: torch.dtype, case: Case, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A view ``[*lead, heads, width]`` of the case's layout, and its buffer, full of garbage."""
    if case.layout == "heads_first":
        buffer = garbage((*lead[:-1], heads, lead[-1], width), dtype, device)
        return buffer.transpose(-2, -3), buffer
    if case.layout == "packed":  # one fused buffer, of which this is the first part
        buffer = garbage((*lead, heads + 2, width), dtype, device)
        return buffer[..., :heads, :], buffer
    if case.layout == "wide":
        buffer = garbage((*lead, heads, width + 16), dtype, device)
        return buffer[..., :width], buffer
    if case.layout == "odd":  # rows that start at no round address
        buffer = garbage((*lead, heads, width + 1), dtype, device)
        return buffer[..., 1:], buffer
    if case.layout == "gaps":
        buffer = garbage((2 * lead[0], *lead[1:], heads, width), dtype, device)
        return buffer[::2], buffer
    buffer = garbage((*lead, heads, width), dtype, device)
    return buffer, buffer


def empty_kv(
    lead: Seq[int], spec: AttentionSpec, case: Case, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """Views for keys and values of the case's layout, and the buffers below them."""
    heads, dim, dv = spec.num_kv_heads, spec.head_dim, spec.dv
    if case.v_from_k:
        k, buffer = empty_rows(lead, heads, dim, spec.kv, case, device)
        return k, None, [buffer]
    if case.layout == "packed" and dim == dv:
        buffer = garbage((lead[0], 2, *lead[1:], heads, dim), spec.kv, device)
        return buffer[:, 0], buffer[:, 1], [buffer]
    if case.layout == "packed":
        buffer = garbage((*lead, heads, dim + dv), spec.kv, device)
        return buffer[..., :dim], buffer[..., dim:], [buffer]
    k, k_buffer = empty_rows(lead, heads, dim, spec.kv, case, device)
    v, v_buffer = empty_rows(lead, heads, dv, spec.kv, case, device)
    return k, v, [k_buffer, v_buffer]


def garbage(shape: Seq[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of large finite numbers."""
    return torch.full(tuple(shape), GARBAGE).to(dtype).to(device)


def normal(
    shape: Seq[int], dtype: torch.dtype, rng: torch.Generator, amplitude: float = 1.0
) -> torch.Tensor:
    """Normal numbers, rounded to ``dtype``."""
    return (torch.randn(tuple(shape), generator=rng) * amplitude).to(dtype)


def _sequence(
    case: Case, spec: AttentionSpec, q_len: int, kv_len: int, rng: torch.Generator
) -> Sequence:
    q_shape = (q_len, spec.num_heads, spec.head_dim)
    if case.data == "probe":
        position = torch.arange(kv_len, dtype=torch.float32)[:, None, None]
        v = position.expand(kv_len, spec.num_kv_heads, spec.dv).to(spec.kv)
        k = torch.zeros(kv_len, spec.num_kv_heads, spec.head_dim).to(spec.kv)
        return Sequence(torch.zeros(q_shape).to(spec.dtype), k, v)
    # Stored fp8 numbers stand for themselves times the scale; wider spread fills their range.
    spread = 2.0 if spec.kv in FP8_DTYPES else 1.0
    q = normal(q_shape, spec.dtype, rng, case.amplitude)
    k = normal((kv_len, spec.num_kv_heads, spec.head_dim), spec.kv, rng, spread)
    if case.v_from_k:
        v = k[..., : spec.dv]
    else:
        v = normal((kv_len, spec.num_kv_heads, spec.dv), spec.kv, rng, spread)
    mask = None
    if spec.has_mask:
        mask = torch.rand(q_len, kv_len, generator=rng) < 0.6
        if q_len > 1:
            mask[q_len // 2] = False  # a row that the mask hides altogether
    return Sequence(q, k, v, mask)


def _extras(
    case: Case, spec: AttentionSpec, sequences: list[Sequence], rng: torch.Generator
) -> tuple[Extras, dict[str, Any]]:
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    kwargs: dict[str, Any] = {}
    sinks = slopes = None
    scales: list[torch.Tensor | None] = [None, None]
    if case.sinks:
        kwargs["sinks"] = sinks = torch.randn(heads, generator=rng)
    if spec.has_alibi:
        kwargs["alibi_slopes"] = slopes = 0.05 + 0.4 * torch.rand(heads, generator=rng)
    if spec.has_mask:
        flat = [seq.mask.reshape(-1) for seq in sequences if seq.mask is not None]
        kwargs["mask"] = torch.cat(flat) if flat else torch.zeros(0, dtype=torch.bool)
    if case.kv_scale != "none":
        for n, name in enumerate(("k_scale", "v_scale")):
            value = 0.25 + 0.5 * torch.rand(kv_heads, generator=rng)
            if case.kv_scale != "head":
                value = value[:1].expand(kv_heads).contiguous()
            scales[n] = value
            kwargs[name] = {
                "float": float(value[0]),
                "scalar": value[0].clone(),
                "head": value,
            }[case.kv_scale]
    return Extras(sinks, slopes, scales[0], scales[1]), kwargs


def _slots(
    case: Case, spec: AttentionSpec, device: torch.device
) -> tuple[list[torch.Tensor], tuple[int, ...], Batch]:
    """Per sequence the flat slots of its keys, the leading shape of the store, and the batch."""
    index = torch.int64 if case.int64 else torch.int32
    kv_lens, rng = case.kv_lens, torch.Generator().manual_seed(case.stable_seed("pages"))
    if spec.page_size is None:
        starts = list(accumulate((n + case.spare for n in kv_lens), initial=0))
        slots = [torch.arange(a, a + n, device=device) for a, n in zip(starts, kv_lens)]
        cu_seqlens_k = starts if case.spare else None
        batch = Batch.from_lengths(case.q_lens, kv_lens, cu_seqlens_k=cu_seqlens_k, device=device)
        return slots, (starts[-1],), as_index(batch, index)
    size = spec.page_size
    counts = [-(-n // size) for n in kv_lens]
    num_pages = sum(counts) + 3  # three that nobody owns
    order = torch.randperm(num_pages, generator=rng).tolist()
    width = max(counts, default=0) + case.spare
    table = torch.full((len(kv_lens), width), JUNK_PAGE, dtype=torch.int64)
    slots = []
    for b, (count, n) in enumerate(zip(counts, kv_lens)):
        own = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
        table[b, :count] = own
        position = torch.arange(n)
        slots.append((own[position // size] * size + position % size).to(device))
    batch = Batch.from_lengths(case.q_lens, kv_lens, page_table=table.to(index), device=device)
    return slots, (num_pages, size), as_index(batch, index)


def as_index(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch as an engine builds it whose index tensors are of ``dtype``."""
    if dtype == torch.int32:
        return batch
    wide = {
        name: getattr(batch, name).to(dtype)
        for name in ("cu_seqlens_q", "seqlens_k", "cu_seqlens_k", "page_table")
        if getattr(batch, name) is not None
    }
    return replace(batch, **wide)


def on_device_only(batch: Batch) -> Batch:
    """The same batch without exact host facts, as an engine builds it from device tensors."""
    return replace(batch, q_lens=None, kv_lens=None, host_page_table=None)


def _fields(extras: Extras) -> tuple[torch.Tensor | None, ...]:
    return extras.sinks, extras.slopes, extras.k_scale, extras.v_scale


def _to(seq: Sequence, device: torch.device) -> Sequence:
    mask = None if seq.mask is None else seq.mask.to(device)
    return Sequence(seq.q.to(device), seq.k.to(device), seq.v.to(device), mask)


__all__ = ["GARBAGE", "JUNK_PAGE", "Inputs", "as_index", "build", "on_device_only", "place", "put"]
