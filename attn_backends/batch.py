"""What a step fixes: which tokens belong to which sequence, and where its keys lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from .errors import InvalidInputError
from .spec import check_device, check_present

INDEX_DTYPES = (torch.int32, torch.int64)
_INT32_MAX = 2**31 - 1

#: Stands for bounds that nobody gave: without them a kernel would find nothing to do.
_MISSING: Any = None

Lengths: TypeAlias = Sequence[int] | torch.Tensor


def _host_list(name: str, value: Any) -> list[int]:
    """Lengths as Python ints; a tensor on a device is copied (people's path, not engines')."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in INDEX_DTYPES or value.dim() != 1:
            got = f"{value.dtype} {list(value.shape)}"
            raise InvalidInputError.of(name, got, "int32 or int64, shape [B]")
        return value.tolist()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidInputError.of(name, repr(value), "one int for each sequence, as in [1, 1]")
    out = []
    for i, item in enumerate(value):
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise InvalidInputError.of(f"{name}[{i}]", repr(item), "an int")
        out.append(item.__index__())
    return out


def _check_range(name: str, values: Sequence[int], low: int, high: int) -> None:
    for i, value in enumerate(values):
        if not low <= value <= high:
            raise InvalidInputError.of(f"{name}[{i}]", value, f"{low}..{high}")


def index_tensor(name: str, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an index tensor as contiguous int32 on ``device``; int64 is converted once."""
    if not isinstance(value, torch.Tensor):
        raise InvalidInputError.of(name, type(value).__name__, "a torch.Tensor")
    if value.dtype not in INDEX_DTYPES:
        raise InvalidInputError.of(name, value.dtype, "int32 or int64")
    if value.device != device:
        raise InvalidInputError.of(f"{name}.device", value.device, f"{device}, as the batch")
    return value.to(torch.int32).contiguous()


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's sequences: device tensors for kernels, host facts for planning.

    Build it with ``from_lengths``, which validates everything, or directly from an engine's
    device tensors, which never copies to the host. Host facts may then be upper bounds; lengths on
    the device alone decide what is visible.

    Attributes:
        cu_seqlens_q: ``[B+1]`` int32, where each sequence's queries start in ``q [T, H, D]``.
        seqlens_k: ``[B]`` int32, keys visible to each sequence.
        cu_seqlens_k: ``[B+1]`` int32, where each sequence's keys start in ragged ``k``; the room
            between two starts may exceed ``seqlens_k``. None if paged.
        page_table: ``[B, max_pages]`` int32, page ids in order of key position. None if ragged.
            Entries past the last visible key are never read.
        total_q: Number of query tokens, or an upper bound. Must be given, like the two below.
        total_k: Rows that ragged ``k`` must have at least; 0 if unknown or paged.
        max_seqlen_q: Longest query count, or an upper bound.
        max_seqlen_k: Longest key count, or an upper bound.
        q_lens: Exact query counts on the host, if known.
        kv_lens: Exact key counts on the host, if known.
        host_page_table: ``page_table`` on the host, if known; lets runs check page ids for free.
        mask_indptr: ``[B+1]`` int64, where each sequence's ``q_len * kv_len`` mask starts in the
            flattened mask. None: derived from the lengths when a spec has a mask.

    Raises:
        InvalidInputError: A tensor or fact is malformed; the message names it.
    """

    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    total_q: int = _MISSING
    total_k: int = 0
    max_seqlen_q: int = _MISSING
    max_seqlen_k: int = _MISSING
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    host_page_table: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    _page_id_cache: dict[int, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.cu_seqlens_q, torch.Tensor):
            got = type(self.cu_seqlens_q).__name__
            raise InvalidInputError.of("cu_seqlens_q", got, "a torch.Tensor, shape [B+1]")
        device = self.cu_seqlens_q.device
        for name in ("cu_seqlens_q", "seqlens_k", "cu_seqlens_k", "page_table"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, index_tensor(name, value, device))
        if self.mask_indptr is not None:
            starts = self.mask_indptr
            index_tensor("mask_indptr", starts, device)
            object.__setattr__(self, "mask_indptr", starts.to(torch.int64).contiguous())
        if self.cu_seqlens_q.dim() != 1 or self.cu_seqlens_q.shape[0] < 1:
            shape = list(self.cu_seqlens_q.shape)
            raise InvalidInputError.of("cu_seqlens_q.shape", shape, "[B+1]")
        self._check_shapes(self.cu_seqlens_q.shape[0] - 1)
        for name in ("total_q", "total_k", "max_seqlen_q", "max_seqlen_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                fix = "an upper bound will do" if value is None else None
                raise InvalidInputError.of(name, repr(value), "an int >= 0", fix)

    def _check_shapes(self, num_seqs: int) -> None:
        shapes = {
            "seqlens_k": (self.seqlens_k, [num_seqs]),
            "cu_seqlens_k": (self.cu_seqlens_k, [num_seqs + 1]),
            "mask_indptr": (self.mask_indptr, [num_seqs + 1]),
        }
        for name, (value, want) in shapes.items():
            if value is not None and list(value.shape) != want:
                raise InvalidInputError.of(f"{name}.shape", list(value.shape), f"{want}")
        table = self.page_table
        if table is not None and (table.dim() != 2 or table.shape[0] != num_seqs):
            allowed = f"[{num_seqs}, max_pages]"
            raise InvalidInputError.of("page_table.shape", list(table.shape), allowed)
        if (table is None) == (self.cu_seqlens_k is None):
            given = "both" if table is not None else "neither"
            allowed = "one of page_table (paged) and cu_seqlens_k (ragged)"
            raise InvalidInputError.of("page_table, cu_seqlens_k", given, allowed)

    @property
    def num_seqs(self) -> int:
        """B, the number of sequences, empty ones included."""
        return self.seqlens_k.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the index tensors live."""
        return self.seqlens_k.device

    @property
    def is_paged(self) -> bool:
        """Whether keys are found through a page table."""
        return self.page_table is not None

    def page_id_range(self, page_size: int) -> tuple[int, int] | None:
        """Smallest and largest page id within the lengths, from host facts.

        Args:
            page_size: Tokens per page.

        Returns:
            ``(smallest, largest)``; ``(0, -1)`` without visible keys; None if the lengths or the
            table are not known on the host.
        """
        if self.host_page_table is None or self.kv_lens is None:
            return None
        if page_size not in self._page_id_cache:
            table = self.host_page_table
            used = (
                torch.tensor(self.kv_lens)
                .add_(page_size - 1)
                .div_(page_size, rounding_mode="floor")
            )
            seen = table[torch.arange(table.shape[1])[None] < used[:, None]]
            bounds = (int(seen.min()), int(seen.max())) if seen.numel() else (0, -1)
            self._page_id_cache[page_size] = bounds
        return self._page_id_cache[page_size]

    @classmethod
    def from_lengths(
        cls,
        q_lens: Lengths,
        kv_lens: Lengths,
        *,
        page_table: Any = None,
        cu_seqlens_k: Lengths | None = None,
        device: torch.device | str | None = None,
    ) -> Batch:
        """Build and validate a batch from per-sequence lengths.

        Args:
            q_lens: Query tokens of each sequence, B ints >= 0 (list or int tensor).
            kv_lens: Visible keys of each sequence, B ints >= 0.
            page_table: ``[B, max_pages]`` page ids (nested lists or an int tensor); None is ragged.
            cu_seqlens_k: Ragged only: B+1 starts, if sequences have room beyond ``kv_lens``.
            device: Where kernels run; default: the page table's device, else the CPU.

        Returns:
            A batch whose host facts are exact, so that runs can check page ids without a sync.

        Raises:
            InvalidInputError: Lengths are negative, disagree in number or exceed their room.
        """
        q, kv = _host_list("q_lens", q_lens), _host_list("kv_lens", kv_lens)
        if len(q) != len(kv):
            raise InvalidInputError.of("kv_lens", f"{len(kv)} lengths", f"{len(q)}, as q_lens")
        _check_range("q_lens", q, 0, _INT32_MAX)
        _check_range("kv_lens", kv, 0, _INT32_MAX)
        if sum(q) > _INT32_MAX:
            raise InvalidInputError.of("sum(q_lens)", sum(q), f"0..{_INT32_MAX}")
        table = host_table = None
        if page_table is not None:
            table = table_of(page_table)
            if table.dtype not in INDEX_DTYPES:
                raise InvalidInputError.of("page_table", table.dtype, "int32 or int64")
            host_table = table.cpu()
        if device is None:
            device = table.device if table is not None else "cpu"
        where = check_device(device)
        check_present(where)
        starts = None
        if table is None:
            starts = _ragged_starts(kv, cu_seqlens_k)
        elif cu_seqlens_k is not None:
            raise InvalidInputError.of("cu_seqlens_k", "given", "None beside a page_table")

        def make(ints: list[int]) -> torch.Tensor:
            return torch.tensor(ints, dtype=torch.int32).to(where)

        return cls(
            cu_seqlens_q=make([0, *accumulate(q)]),
            seqlens_k=make(kv),
            cu_seqlens_k=None if starts is None else make(starts),
            page_table=None if table is None else table.to(device=where, dtype=torch.int32),
            total_q=sum(q),
            total_k=0 if starts is None else starts[-1],
            max_seqlen_q=max(q, default=0),
            max_seqlen_k=max(kv, default=0),
            q_lens=tuple(q),
            kv_lens=tuple(kv),
            host_page_table=host_table,
        )


def table_of(page_table: Any) -> torch.Tensor:
    """A page table as a tensor, where rows may be nested lists, empty ones too.

    Raises:
        InvalidInputError: Rows differ in width, or hold something else than page ids.
    """
    if isinstance(page_table, torch.Tensor):
        return page_table
    try:
        table = torch.as_tensor(page_table)
    except (ValueError, TypeError, RuntimeError) as error:
        fix = f"fill shorter rows up with -1, which is not read ({error})"
        allowed = "[B, max_pages], rows of one width"
        raise InvalidInputError.of("page_table", repr(page_table), allowed, fix) from None
    if table.numel() or table.dim() > 2:
        return table
    return table.int().reshape(table.shape[0], 0)  # of nothing torch makes floats


def _ragged_starts(kv: list[int], cu_seqlens_k: Any) -> list[int]:
    if cu_seqlens_k is None:
        starts = [0, *accumulate(kv)]
    else:
        starts = _host_list("cu_seqlens_k", cu_seqlens_k)
        if len(starts) != len(kv) + 1:
            raise InvalidInputError.of("cu_seqlens_k", f"{len(starts)} starts", f"{len(kv) + 1}")
        if starts[0] != 0:
            raise InvalidInputError.of("cu_seqlens_k[0]", starts[0], "0")
        for i, length in enumerate(kv):
            room = starts[i + 1] - starts[i]
            if room < 0:
                allowed = f">= cu_seqlens_k[{i}]={starts[i]}"
                raise InvalidInputError.of(f"cu_seqlens_k[{i + 1}]", starts[i + 1], allowed)
            if length > room:
                raise InvalidInputError.of(f"kv_lens[{i}]", length, f"0..{room}, the room it has")
    if starts[-1] > _INT32_MAX:
        raise InvalidInputError.of("cu_seqlens_k[-1]", starts[-1], f"0..{_INT32_MAX}")
    return starts


__all__ = ["Batch", "index_tensor", "table_of"]
