"""Attention over long keys in chunks: a bounded part at a time, merged into what came before.

Every sequence's keys are cut at multiples of ``chunk_size``. A chunk holds as many consecutive
pieces as fit into ``chunk_size`` keys: one piece of a long sequence, or several short ones. Each
chunk gives a state of the queries that see any of it, which is merged into theirs. So keys need
never be at hand all at once: paged ones can be gathered into a bounded workspace for a backend that
knows no pages, and compressed ones (MLA) expanded there. A sequence without cached keys has only
its own tokens' piece; one without any key keeps the state of no keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from .backend import AttentionBackend
from .batch import Batch
from .errors import AttnBackendsError, InvalidInputError
from .forms import spec_of
from .output import AttentionOutput
from .pieces import BackendLike, Call, Work, bind, plan_calls, refuse_positions
from .running import RunningState
from .spec import FP8_DTYPES, AttentionSpec
from .validation import check_batch

#: Bytes of keys and values at hand at once, unless the caller says otherwise.
WORKSPACE_BYTES = 256 << 20

#: From stored rows ``[n, HK', D']`` of keys and of values to what attention reads.
Expand = Callable[..., tuple[torch.Tensor, "torch.Tensor | None"]]


class Piece(NamedTuple):
    """Consecutive keys of one sequence.

    Attributes:
        sequence: Index of the sequence.
        start: Position of the first key.
        stop: One past the last.
    """

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """Keys that are at hand together.

    Attributes:
        pieces: Which keys, of consecutive sequences.
        calls: Attention over them.
        pages: ``[n]`` int64 page of each key, if they are gathered from pages.
        slots: ``[n]`` int64 slot of each key in its page.
        rows: Ragged keys: where the pieces lie in ``k``.
    """

    pieces: tuple[Piece, ...]
    calls: tuple[Call, ...]
    pages: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    rows: tuple[slice, ...] = ()

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """The chunk's keys, one after the other: ``[n, HK, D]``.

        Args:
            x: A cache ``[num_pages, page_size, HK, D]``, or ragged rows ``[Tk, HK, D]``.

        Returns:
            A copy, or a view where the rows lie together.
        """
        if self.pages is None:
            parts = [x[rows] for rows in self.rows]
            return parts[0] if len(parts) == 1 else _cat(parts)
        if x.dtype in FP8_DTYPES:  # indexing is not defined for every fp8 dtype on every device
            return x.view(torch.uint8)[self.pages, self.slots].view(x.dtype)
        return x[self.pages, self.slots]


class ChunkedPlan:
    """The chunks of one step and their plans; made once per step, reused by every layer.

    Attributes:
        spec: What the layer fixes.
        chunk_size: Most keys at hand at once.
        gather: Whether keys are copied into a workspace, else read where they lie.
        chunks: In the order they are merged.
        total_q: T, the query rows of a run.
        page_ids: Smallest and largest page that is read, if known.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        chunk_size: int,
        gather: bool,
        chunks: tuple[Chunk, ...],
        total_q: int,
        page_ids: tuple[int, int] | None,
    ) -> None:
        self.spec = spec
        self.chunk_size = chunk_size
        self.gather = gather
        self.chunks = chunks
        self.total_q = total_q
        self.page_ids = page_ids

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        expand: Expand | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> AttentionOutput:
        """Attention of one layer over the planned batch, chunk by chunk.

        Args:
            q: ``[T, H, D]``.
            k: Ragged keys or a cache, as the spec says; with ``expand``, of any head shape.
            v: As ``k``; None takes the first DV lanes of ``k``, or leaves values to ``expand``.
            expand: Makes keys and values of a chunk from its stored rows: called with
                ``(k [n, ...], v [n, ...] or None)``, returns ``(k [n, HK, D], v [n, HK, DV])``.
                Only with ``gather``.
            sinks: ``[H]`` float32, merged once at the end.
            k_scale: For fp8 keys, as in ``AttentionBackend.run``.
            v_scale: The same for values.
            out: ``(o [T, H, DV], lse [T, H])`` to write into.

        Returns:
            The state over all keys, ``o [T, H, DV]`` and ``lse [T, H]``.

        Raises:
            InvalidInputError: An input does not fit the plan; the message names it.
        """
        if q.shape[0] != self.total_q:
            raise InvalidInputError.of("q.shape[0]", q.shape[0], f"{self.total_q}, the batch's")
        if expand is not None and not self.gather:
            fix = "plan with gather=True"
            raise InvalidInputError.of("expand", "given", "None without a workspace", fix)
        self._check_cache(k, v)
        state = RunningState(self.spec, q.shape[0], q.device)
        for chunk in self.chunks:
            keys, values = k, v
            if self.gather:
                keys, values = chunk.read(k), None if v is None else chunk.read(v)
                if expand is not None:
                    keys, values = expand(keys, values)
            for call in chunk.calls:
                part = call.run(q, keys, values, k_scale=k_scale, v_scale=v_scale)
                state.add(part, call.rows)
        return state.finish(sinks, out)

    def _check_cache(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """The shape that gathering relies on; backends check the rest of what they are given."""
        size = self.spec.page_size
        if size is None or not self.gather:
            return
        for name, x in (("k_cache", k), ("v_cache", v)):
            if x is not None and (x.dim() < 3 or x.shape[1] != size):
                want = f"[num_pages, {size}, ...]"
                raise InvalidInputError.of(f"{name}.shape", list(x.shape), want)
            if x is not None and self.page_ids is not None and self.page_ids[1] >= x.shape[0]:
                allowed = f"0..{x.shape[0] - 1} (num_pages - 1)"
                raise InvalidInputError.of("page_table", self.page_ids[1], allowed)


def chunk_size_for(spec: AttentionSpec, workspace_bytes: int) -> int:
    """The most keys whose keys and values fit into a workspace, whole pages if at all possible.

    Args:
        spec: What the layer fixes.
        workspace_bytes: Bytes for keys and values.

    Returns:
        A ``chunk_size``.

    Raises:
        InvalidInputError: Not even one key fits.
    """
    size = spec.num_kv_heads * (spec.head_dim + spec.dv) * spec.kv.itemsize
    keys = workspace_bytes // size
    if keys < 1:
        raise InvalidInputError.of("workspace_bytes", workspace_bytes, f">= {size}, one key")
    page = spec.page_size or 1
    return keys // page * page or keys


def plan_chunked(
    spec: AttentionSpec,
    batch: Batch,
    *,
    chunk_size: int | None = None,
    workspace_bytes: int | None = None,
    backend: BackendLike = None,
    gather: bool | None = None,
) -> ChunkedPlan:
    """Plan attention over long keys, a bounded number of them at a time.

    Args:
        spec: What the layer fixes. ``page_size`` tells where keys lie, also if they are gathered.
        batch: A batch with exact lengths on the host (``Batch.from_lengths``).
        chunk_size: Most keys at hand at once, over all sequences; any number >= 1.
        workspace_bytes: The same as bytes of keys and values; default 256 MiB.
        backend: A name, a backend whose class and options are taken, or None to choose.
        gather: Copy the keys of each chunk into a workspace. None: only if they cannot be read
            where they lie, because the backend knows no pages or chunks would split them.

    Returns:
        A plan whose ``run`` serves every layer with this spec.

    Raises:
        UnsupportedCallError: The spec has a window, ALiBi or a mask, or the backend cannot do it.
        InvalidInputError: An argument is out of range, or the batch lacks lengths on the host.
    """
    refuse_positions(spec, "chunked attention")
    size = _chunk_size(spec, chunk_size, workspace_bytes)
    if batch.q_lens is None or batch.kv_lens is None:
        raise InvalidInputError.of("batch", "no lengths on the host", "a Batch.from_lengths")
    check_batch(batch, spec)
    if gather is None:
        gather = spec.page_size is not None and not _reads_pages(spec, batch, size, backend)
    elif not gather and spec.page_size is not None and size % spec.page_size:
        fix = "pass gather=True, or None"
        allowed = f"a multiple of page_size={spec.page_size} without gathering"
        raise InvalidInputError.of("chunk_size", size, allowed, fix)
    inner = replace(spec, page_size=None) if gather else spec
    k_starts = None if batch.is_paged else _ragged_starts(batch)
    q_starts = [0, *accumulate(batch.q_lens)]
    chunks = []
    for pieces in _pack(batch.q_lens, batch.kv_lens, size):
        work, key = [], 0
        for piece in pieces:
            b = piece.sequence
            first = batch.kv_lens[b] - batch.q_lens[b]
            own = Work(
                queries=[(first, batch.kv_lens[b])],
                keys=[(piece.start, piece.stop)],
                row=q_starts[b],
                key=key if gather else (k_starts[b] + piece.start if k_starts else 0),
            )
            if not gather and spec.page_size is not None:
                own = replace(own, **_pages_of(batch, piece, spec.page_size))
            work.append(own)
            key += piece.stop - piece.start
        calls = tuple(plan_calls(inner, work, backend, batch.device))
        places: dict[str, Any] = {}
        if gather and k_starts is None:
            places = _places(batch, pieces, spec.page_size or 1)
        elif gather and k_starts is not None:
            at = [(k_starts[p.sequence] + p.start, p.stop - p.start) for p in pieces]
            places = {"rows": tuple(slice(row, row + n) for row, n in at)}
        chunks.append(Chunk(tuple(pieces), calls, **places))
    ids = None if spec.page_size is None else batch.page_id_range(spec.page_size)
    return ChunkedPlan(spec, size, gather, tuple(chunks), batch.total_q, ids)


def chunked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    batch: Batch,
    *,
    causal: bool = True,
    softcap: float | None = None,
    sm_scale: float | None = None,
    head_dim_v: int | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    chunk_size: int | None = None,
    workspace_bytes: int | None = None,
    backend: BackendLike = None,
    gather: bool | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> AttentionOutput:
    """Attention over long keys in one call; see ``plan_chunked`` and ``ChunkedPlan.run``.

    Args:
        q: ``[T, H, D]``.
        k: ``[Tk, HK, D]``, or a cache ``[num_pages, page_size, HK, D]``, as the batch says.
        v: As ``k`` with width DV; None takes the first ``head_dim_v`` lanes of ``k``.
        batch: A batch with exact lengths on the host.
        causal: Bottom-right causal.
        softcap: c in ``c * tanh(s / c)``, or None.
        sm_scale: Factor on ``q . k``; None is ``1 / sqrt(D)``.
        head_dim_v: DV, if ``v`` is None.
        sinks: ``[H]`` float32, merged once at the end.
        k_scale: For fp8 keys, as in ``AttentionBackend.run``.
        v_scale: The same for values.
        chunk_size: Most keys at hand at once.
        workspace_bytes: The same in bytes.
        backend: A name, a backend, or None.
        gather: Copy keys into a workspace, or not; None goes by need.
        out: ``(o [T, H, DV], lse [T, H])`` to write into.

    Returns:
        The state over all keys, ``o [T, H, DV]`` and ``lse [T, H]``.

    Raises:
        InvalidInputError: An input is malformed; the message names it.
        UnsupportedCallError: No backend, or not the one asked for, can do the call.
    """
    spec = spec_of(
        q,
        k,
        v,
        batch.is_paged,
        head_dim_v=head_dim_v,
        causal=causal,
        softcap=softcap,
        sm_scale=sm_scale,
    )
    plan = plan_chunked(
        spec,
        batch,
        chunk_size=chunk_size,
        workspace_bytes=workspace_bytes,
        backend=backend,
        gather=gather,
    )
    return plan.run(q, k, v, sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out)


def _chunk_size(spec: AttentionSpec, chunk_size: Any, workspace_bytes: Any) -> int:
    if chunk_size is not None and workspace_bytes is not None:
        raise InvalidInputError.of("chunk_size, workspace_bytes", "both", "one of them")
    given = {"chunk_size": chunk_size, "workspace_bytes": workspace_bytes}
    for name, value in given.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise InvalidInputError.of(name, repr(value), "an int >= 1")
    if chunk_size is not None:
        return int(chunk_size)
    return chunk_size_for(spec, WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes)


def _reads_pages(spec: AttentionSpec, batch: Batch, size: int, backend: BackendLike) -> bool:
    """Whether every chunk can be read where it lies."""
    if spec.page_size is None or size % spec.page_size:
        return False
    phase = "decode" if batch.max_seqlen_q <= 1 else "prefill"
    if isinstance(backend, AttentionBackend):
        return not type(backend).unsupported_reasons(spec, phase, batch.device, backend.options)
    try:
        bind(backend, spec, phase, batch.device)
    except AttnBackendsError:
        return False
    return True


def _pack(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], size: int) -> list[list[Piece]]:
    """Pieces at multiples of ``size`` in each sequence, as many to a chunk as fit, in order."""
    chunks: list[list[Piece]] = []
    room = 0
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        for start in range(0, kv_len if q_len else 0, size):
            piece = Piece(b, start, min(start + size, kv_len))
            need = piece.stop - piece.start
            # A second piece of a sequence never fits: the one before it filled the chunk.
            if need > room:
                chunks.append([])
                room = size
            chunks[-1].append(piece)
            room -= need
    return chunks


def _ragged_starts(batch: Batch) -> list[int]:
    assert batch.cu_seqlens_k is not None and batch.kv_lens is not None
    if batch.total_k == sum(batch.kv_lens):  # no room between sequences: no need to ask the device
        return [0, *accumulate(batch.kv_lens)]
    starts: list[int] = batch.cu_seqlens_k.tolist()
    return starts


def _pages_of(batch: Batch, piece: Piece, page_size: int) -> dict[str, Any]:
    """The part of a sequence's page table that a piece, which starts a page, lies on."""
    pages = slice(piece.start // page_size, -(-piece.stop // page_size))
    assert batch.page_table is not None
    host = batch.host_page_table
    return {
        "pages": batch.page_table[piece.sequence, pages],
        "host_pages": None if host is None else host[piece.sequence, pages],
    }


def _places(batch: Batch, pieces: list[Piece], page_size: int) -> dict[str, Any]:
    """Page and slot of every key of a chunk, worked out on the device."""
    assert batch.page_table is not None
    pages, slots = [], []
    for b, start, stop in pieces:
        position = torch.arange(start, stop, device=batch.device)
        pages.append(batch.page_table[b, position // page_size].long())
        slots.append(position % page_size)
    return {"pages": torch.cat(pages), "slots": torch.cat(slots)}


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    if parts[0].dtype in FP8_DTYPES:
        return torch.cat([x.view(torch.uint8) for x in parts]).view(parts[0].dtype)
    return torch.cat(parts)


__all__ = [
    "Chunk",
    "ChunkedPlan",
    "Piece",
    "chunk_size_for",
    "chunked_attention",
    "plan_chunked",
]
