"""The input forms of ``attention`` brought to the two of the contract: ragged and paged.

A dense ``[B, S, H, D]`` is ragged with equal lengths. Where only the first ``q_lens[b]`` rows of a
dense query are real, the rest become a sequence of their own without keys: its state is empty,
which is what a padding row must give.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .batch import INDEX_DTYPES, Batch, table_of
from .errors import InvalidInputError
from .spec import AttentionSpec


class Lengths(NamedTuple):
    """Where queries and keys of each sequence lie, as index tensors and bounds.

    Attributes:
        cu_seqlens_q: ``[B+1]`` starts of queries.
        seqlens_k: ``[B]`` visible keys.
        cu_seqlens_k: ``[B+1]`` starts of ragged keys; None if paged.
        page_table: ``[B, max_pages]``; None if ragged.
        max_seqlen_q: Longest query count, or an upper bound.
        max_seqlen_k: Longest key count, or an upper bound.
        on_host: The tensors are on the CPU with readable values, wherever the queries are.
    """

    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    page_table: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    on_host: bool

    def batch(self, device: torch.device, rows: int) -> Batch:
        """The batch on a device, for ``rows`` query rows; validated where values can be read."""
        if not self.on_host:
            return Batch(
                cu_seqlens_q=self.cu_seqlens_q,
                seqlens_k=self.seqlens_k,
                cu_seqlens_k=self.cu_seqlens_k,
                page_table=self.page_table,
                total_q=rows,
                max_seqlen_q=self.max_seqlen_q,
                max_seqlen_k=self.max_seqlen_k,
            )
        starts = self.cu_seqlens_q.tolist()
        return Batch.from_lengths(
            [end - start for start, end in pairwise(starts)],
            self.seqlens_k,
            page_table=self.page_table,
            cu_seqlens_k=self.cu_seqlens_k,
            device=device,
        )


@lru_cache(maxsize=64)
def uniform_batch(num_seqs: int, q_len: int, kv_len: int, device: torch.device) -> Batch:
    """The batch of a dense call without lengths; the same shapes share one."""
    return Batch.from_lengths([q_len] * num_seqs, [kv_len] * num_seqs, device=device)


def spec_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, is_paged: bool, *,
    head_dim_v: int | None, causal: bool, softcap: float | None, sm_scale: float | None,
) -> AttentionSpec:  # fmt: skip
    """The spec that tensors of a call stand for.

    Args:
        q: ``[T, H, D]``.
        k: ``[Tk, HK, D]``, or pages ``[num_pages, page_size, HK, D]``.
        v: As ``k`` with DV lanes; None where values are the first ``head_dim_v`` lanes of keys.
        is_paged: Whether keys lie in pages.
        head_dim_v: DV where ``v`` is None.
        causal: Bottom-right.
        softcap: Cap of the scores.
        sm_scale: Scale of the scores; None is ``D**-0.5``.

    Raises:
        InvalidInputError: An input is no tensor of that many dims, or the spec is malformed.
    """
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, torch.Tensor) or x.dim() < 3:
            raise InvalidInputError.of(name, getattr(x, "shape", type(x).__name__), "[.., H, D]")
    return AttentionSpec(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=head_dim_v if v is None else v.shape[-1],
        dtype=q.dtype,
        kv_dtype=k.dtype,
        page_size=k.shape[1] if is_paged else None,
        causal=causal,
        softcap=softcap,
        sm_scale=sm_scale,
    )


class Given(NamedTuple):
    """What the caller said about lengths, as it was said."""

    q_lens: Any = None
    kv_lens: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqlens_k: Any = None
    page_table: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether nothing was said at all."""
        return all(value is None for value in self)


def lengths(q: torch.Tensor, k: torch.Tensor, given: Given) -> Lengths:
    """Work out the lengths of a call.

    Args:
        q: ``[B, S, H, D]`` or ``[T, H, D]``.
        k: ``[B, Sk, HK, D]``, ``[Tk, HK, D]``, or a cache ``[num_pages, page_size, HK, D]``.
        given: What the caller said.

    Raises:
        InvalidInputError: Something is missing, given twice, or does not fit; names it.
    """
    _check_pairs(given)
    index = _Index(q.device, given)
    table = given.page_table
    if table is not None:
        table = index.table(table)
    num_seqs = _num_seqs(q, k, table, given)
    dense_q = q.dim() == 4
    rows = q.shape[1] if dense_q else q.shape[0]
    room = k.shape[1] if table is None and k.dim() == 4 else None
    if table is not None:
        longest = table.shape[1] * k.shape[1]
    else:
        longest = room if room is not None else k.shape[0]
    kv_lens, k_starts = _keys(index, k, given, num_seqs, room, longest)
    if not dense_q:
        q_starts = _query_starts(index, given, num_seqs, rows)
    elif given.q_lens is None:
        q_starts = index.arange(num_seqs + 1) * rows
    else:
        q_lens = index.lens("q_lens", given.q_lens, num_seqs, rows)
        return _with_padding(index, q_lens, kv_lens, k_starts, table, rows, longest, given)
    return _bounded(index, q_starts, kv_lens, k_starts, table, rows, longest, given)


def _check_pairs(given: Given) -> None:
    for a, b in (("q_lens", "cu_seqlens_q"), ("kv_lens", "seqlens_k")):
        if getattr(given, a) is not None and getattr(given, b) is not None:
            raise InvalidInputError.of(f"{a}, {b}", "both", "one of them: they say the same")
    if given.page_table is not None and given.cu_seqlens_k is not None:
        raise InvalidInputError.of("cu_seqlens_k", "given", "None beside a page_table")


def _num_seqs(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor | None, given: Given) -> int:
    """B, from whatever says it; the other sources are checked against it."""
    if q.dim() == 4:
        if given.cu_seqlens_q is not None:
            raise InvalidInputError.of("cu_seqlens_q", "given", "q_lens, for q [B, S, H, D]")
        if table is None and k.dim() == 4 and given.cu_seqlens_k is not None:
            raise InvalidInputError.of("cu_seqlens_k", "given", "kv_lens, for k [B, Sk, HK, D]")
        return q.shape[0]
    if table is not None:
        return table.shape[0]
    for name in ("cu_seqlens_q", "cu_seqlens_k", "q_lens", "kv_lens", "seqlens_k"):
        value = getattr(given, name)
        if value is not None:
            return len(value) - 1 if name.startswith("cu_") else len(value)
    return 1


def _keys(
    index: _Index,
    k: torch.Tensor,
    given: Given,
    num_seqs: int,
    room: int | None,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Visible keys of each sequence, and where they start (None if paged)."""
    name = "kv_lens" if given.kv_lens is not None else "seqlens_k"
    value = getattr(given, name)
    if given.page_table is not None:
        if value is None:
            raise InvalidInputError.of("kv_lens", None, "B lengths, beside a page_table")
        return index.lens(name, value, num_seqs, longest), None
    if room is not None:
        starts = index.arange(num_seqs + 1) * room
        lens = starts.diff() if value is None else index.lens(name, value, num_seqs, room)
        return lens, starts
    if given.cu_seqlens_k is not None:
        starts = index.starts("cu_seqlens_k", given.cu_seqlens_k, num_seqs)
        lens = starts.diff() if value is None else index.lens(name, value, num_seqs, longest)
        return lens, starts
    if value is None:
        if num_seqs != 1:
            allowed = f"lengths of {num_seqs} sequences (or cu_seqlens_k), for k [Tk, HK, D]"
            raise InvalidInputError.of("kv_lens", None, allowed)
        starts = index.arange(2) * k.shape[0]
        return starts.diff(), starts
    lens = index.lens(name, value, num_seqs, longest)
    return lens, _starts(lens)


def _query_starts(index: _Index, given: Given, num_seqs: int, rows: int) -> torch.Tensor:
    """Starts of ragged queries."""
    if given.cu_seqlens_q is not None:
        return index.starts("cu_seqlens_q", given.cu_seqlens_q, num_seqs)
    if given.q_lens is not None:
        return _starts(index.lens("q_lens", given.q_lens, num_seqs, rows))
    if num_seqs == 1:
        return index.arange(2) * rows
    if given.page_table is not None and rows == num_seqs:  # the decode form: one query each
        return index.arange(num_seqs + 1)
    allowed = f"lengths of {num_seqs} sequences (or cu_seqlens_q), for q [T, H, D] with T={rows}"
    raise InvalidInputError.of("q_lens", None, allowed)


def _with_padding(
    index: _Index,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    k_starts: torch.Tensor | None,
    table: torch.Tensor | None,
    rows: int,
    longest: int,
    given: Given,
) -> Lengths:
    """Between the sequences, one without keys for the padding rows of each."""
    q_starts = _starts(torch.stack([q_lens, rows - q_lens], 1).flatten())
    kv_lens = torch.stack([kv_lens, torch.zeros_like(kv_lens)], 1).flatten()
    if k_starts is not None:
        pairs = torch.stack([k_starts[:-1], k_starts[1:]], 1).flatten()
        k_starts = torch.cat([pairs, k_starts[-1:]])
    if table is not None:
        table = table.repeat_interleave(2, dim=0)
    return _bounded(index, q_starts, kv_lens, k_starts, table, rows, longest, given)


def _bounded(
    index: _Index,
    q_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    k_starts: torch.Tensor | None,
    table: torch.Tensor | None,
    rows: int,
    longest: int,
    given: Given,
) -> Lengths:
    bounds = []
    for name, given_bound, most, lens in (
        ("max_seqlen_q", given.max_seqlen_q, rows, q_starts.diff()),
        ("max_seqlen_k", given.max_seqlen_k, longest, kv_lens),
    ):
        if given_bound is not None and not isinstance(given_bound, (int, torch.SymInt)):
            raise InvalidInputError.of(name, repr(given_bound), "an int")
        if index.on_host:
            most = max(lens.tolist(), default=0)
            if given_bound is not None and given_bound < most:
                raise InvalidInputError.of(name, given_bound, f">= {most}, the longest sequence")
        elif given_bound is not None:
            most = given_bound
        bounds.append(most)
    return Lengths(q_starts, kv_lens, k_starts, table, bounds[0], bounds[1], index.on_host)


class _Index:
    """Makes index tensors of one call, all in one place: the host if everything is known there.

    Under a compiler, values are not to be read, so everything stays on the queries' device.
    """

    def __init__(self, device: torch.device, given: Given) -> None:
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        compiling = torch.compiler.is_compiling()
        self.on_host = not compiling and all(
            type(x) is torch.Tensor and x.device.type == "cpu" for x in tensors
        )
        self.device = torch.device("cpu") if self.on_host else device

    def arange(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.device)

    def _tensor(self, name: str, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, (list, tuple)):
                raise InvalidInputError.of(name, type(value).__name__, "a list of ints or a tensor")
            for i, item in enumerate(value):
                if isinstance(item, bool) or not isinstance(item, (int, torch.SymInt)):
                    raise InvalidInputError.of(f"{name}[{i}]", repr(item), "an int")
            return torch.tensor(value, dtype=torch.int64, device=self.device)
        if value.dtype not in INDEX_DTYPES:
            raise InvalidInputError.of(f"{name}.dtype", value.dtype, "int32 or int64")
        return value.to(self.device)

    def lens(self, name: str, value: Any, num_seqs: int, most: int) -> torch.Tensor:
        """Lengths ``[B]``, checked against their range where they can be read."""
        lens = self._tensor(name, value)
        _check_shape(name, lens, num_seqs)
        if self.on_host:
            for i, item in enumerate(lens.tolist()):
                if not 0 <= item <= most:
                    raise InvalidInputError.of(f"{name}[{i}]", item, f"0..{most}")
        return lens

    def starts(self, name: str, value: Any, num_seqs: int) -> torch.Tensor:
        """Starts ``[B+1]``, checked to begin at 0 and never to fall where they can be read."""
        starts = self._tensor(name, value)
        _check_shape(name, starts, num_seqs + 1)
        if self.on_host:
            values = starts.tolist()
            if values[0] != 0:
                raise InvalidInputError.of(f"{name}[0]", values[0], "0")
            for i in range(1, len(values)):
                if values[i] < values[i - 1]:
                    raise InvalidInputError.of(f"{name}[{i}]", values[i], f">= {values[i - 1]}")
        return starts

    def table(self, value: Any) -> torch.Tensor:
        value = table_of(value)
        if value.dim() != 2 or value.dtype not in INDEX_DTYPES:
            got = f"{value.dtype} {list(value.shape)}"
            raise InvalidInputError.of("page_table", got, "int32 or int64, [B, max_pages]")
        table: torch.Tensor = value.to(self.device)
        return table


def _check_shape(name: str, x: torch.Tensor, length: int) -> None:
    if x.dim() != 1 or x.shape[0] != length:
        raise InvalidInputError.of(f"{name}.shape", list(x.shape), f"[{length}]")


def _starts(lens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0))


__all__ = ["Given", "Lengths", "lengths", "uniform_batch"]
