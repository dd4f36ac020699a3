"""Finding keys that sequences share, from page tables, and telling whether a cascade pays."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batch import Batch
from .errors import InvalidInputError
from .spec import AttentionSpec

#: What one further launch is taken to cost, in bytes of traffic: 4 us at 4 TB/s, an assumption.
LAUNCH_BYTES = 16 << 20


@dataclass(frozen=True)
class PrefixGroup:
    """Consecutive sequences whose keys begin with the same pages.

    Attributes:
        first: Index of the first sequence.
        stop: One past the last.
        skip_pages: Pages that coarser levels already cover.
        pages: Pages shared beyond those.
    """

    first: int
    stop: int
    skip_pages: int
    pages: int


@dataclass(frozen=True)
class CascadeEstimate:
    """Traffic that a cascade saves against what it adds, for one layer.

    Attributes:
        bytes_saved: Keys and values not read again.
        bytes_added: Partial states written and merged, and launches at their price in traffic.
    """

    bytes_saved: int
    bytes_added: int

    @property
    def pays(self) -> bool:
        """Whether the cascade moves less."""
        return self.bytes_saved > self.bytes_added


def find_prefix_groups(batch: Batch, page_size: int, levels: int = 2) -> list[list[PrefixGroup]]:
    """Groups of consecutive sequences that share leading pages, coarsest level first.

    Only whole pages that lie before every query of their group are shared.

    Args:
        batch: A paged batch built on the host (``Batch.from_lengths``).
        page_size: Tokens per page.
        levels: Levels of the cascade, the suffix level included; at most this many are used.

    Returns:
        For each shared level, groups that partition all sequences; a group without shared pages
        has ``pages = 0``. Trailing levels that share nothing are left out.

    Raises:
        InvalidInputError: The batch has no host page table, or ``levels < 1``.
    """
    if batch.host_page_table is None or batch.kv_lens is None or batch.q_lens is None:
        raise InvalidInputError.of("batch", "no host facts", "a paged Batch.from_lengths")
    if levels < 1:
        raise InvalidInputError.of("levels", levels, ">= 1")
    table = batch.host_page_table.tolist()
    room = [max(0, kv - q) // page_size for q, kv in zip(batch.q_lens, batch.kv_lens)]
    found: list[list[PrefixGroup]] = []
    parents = [PrefixGroup(0, batch.num_seqs, 0, 0)]
    for _ in range(levels - 1):
        groups = [g for p in parents for g in _split(p, table, room)]
        if not any(g.pages for g in groups):
            break
        found.append(groups)
        parents = groups
    return found


def _split(parent: PrefixGroup, table: list[list[int]], room: list[int]) -> list[PrefixGroup]:
    """Runs of sequences in ``parent`` with the same next page, each as long as it goes."""
    depth = parent.skip_pages + parent.pages
    groups: list[PrefixGroup] = []
    first = parent.first
    while first < parent.stop:
        stop = first + 1
        while (
            stop < parent.stop
            and min(room[first], room[stop]) > depth
            and table[stop][depth] == table[first][depth]
        ):
            stop += 1
        shared = 0
        if stop - first > 1:
            limit = min(room[first:stop])
            rows = table[first:stop]
            ends = (at for at in range(depth, limit) if any(r[at] != rows[0][at] for r in rows))
            shared = next(ends, limit) - depth
        groups.append(PrefixGroup(first, stop, depth, shared))
        first = stop
    return groups


def split_prefixes(batch: Batch, page_size: int, levels: int = 2) -> list[Batch]:
    """Cut a paged batch into the levels of a cascade.

    Args:
        batch: A paged batch built on the host.
        page_size: Tokens per page.
        levels: Most levels, the suffix level included.

    Returns:
        One batch per level, most shared first; just ``[batch]`` if nothing is shared.

    Raises:
        InvalidInputError: As ``find_prefix_groups``.
    """
    shared = find_prefix_groups(batch, page_size, levels)
    if not shared:
        return [batch]
    assert batch.host_page_table is not None and batch.q_lens is not None
    assert batch.kv_lens is not None
    table, q_lens, device = batch.host_page_table, batch.q_lens, batch.device
    out = []
    covered = [0] * batch.num_seqs
    for groups in shared:
        rows = [table[g.first, g.skip_pages : g.skip_pages + g.pages] for g in groups]
        for g in groups:
            covered[g.first : g.stop] = [g.skip_pages + g.pages] * (g.stop - g.first)
        out.append(
            Batch.from_lengths(
                [sum(q_lens[g.first : g.stop]) for g in groups],
                [g.pages * page_size for g in groups],
                page_table=_pad(rows),
                device=device,
            )
        )
    rows = [table[b, covered[b] :] for b in range(batch.num_seqs)]
    own = [kv - pages * page_size for kv, pages in zip(batch.kv_lens, covered)]
    out.append(Batch.from_lengths(q_lens, own, page_table=_pad(rows), device=device))
    return out


@dataclass(frozen=True)
class PrefixCut:
    """The levels that a step is cut into, and why those.

    Attributes:
        batches: One per level, most shared first; the step itself where a cascade is not taken.
        reason: What decided, in words.
    """

    batches: tuple[Batch, ...]
    reason: str


def cut_where_it_pays(spec: AttentionSpec, batch: Batch, levels: int = 2) -> PrefixCut:
    """Cut a step into as many levels as save most by the estimate, or leave it whole.

    Args:
        spec: The layer.
        batch: The step.
        levels: Most levels, the suffix level included.

    Returns:
        The levels, and the estimate or the obstacle that decided.

    Raises:
        InvalidInputError: ``levels < 1``.
    """
    if levels < 1:
        raise InvalidInputError.of("levels", levels, ">= 1")
    obstacle = _obstacle(spec, batch)
    if obstacle is not None:
        return PrefixCut((batch,), f"one level: {obstacle}")
    assert spec.page_size is not None
    groups = find_prefix_groups(batch, spec.page_size, levels)
    if not groups:
        return PrefixCut((batch,), "one level: no leading pages are shared")
    estimates = [estimate_cascade(spec, batch, groups[: n + 1]) for n in range(len(groups))]
    net = [e.bytes_saved - e.bytes_added for e in estimates]
    best = net.index(max(net))
    saved, added = (n / 2**20 for n in (estimates[best].bytes_saved, estimates[best].bytes_added))
    weighed = f"saves {saved:.4g} MiB of keys and values, adds {added:.4g} MiB"
    if not estimates[best].pays:
        return PrefixCut((batch,), f"one level: a cascade {weighed}")
    cut = split_prefixes(batch, spec.page_size, best + 2)
    return PrefixCut(tuple(cut), f"{len(cut)} levels: {weighed}")


def _obstacle(spec: AttentionSpec, batch: Batch) -> str | None:
    """Why shared keys cannot or must not be taken together, or None."""
    if spec.page_size is None:
        return "ragged keys have no pages to share"
    if batch.host_page_table is None or batch.kv_lens is None or batch.q_lens is None:
        return "lengths or the page table are not on the host"
    if spec.window is not None or spec.has_alibi:
        return "windows and ALiBi need a query's distance to shared keys"
    if spec.has_mask:
        return "a mask is over all keys of its sequence"
    if spec.batch_invariant:
        return "with batch_invariant, who shares a prefix may move no bit"
    return None


def _pad(rows: list[torch.Tensor]) -> torch.Tensor:
    width = max(row.shape[0] for row in rows)
    table = torch.full((len(rows), width), -1, dtype=torch.int32)
    for target, row in zip(table, rows):
        target[: row.shape[0]] = row
    return table


def estimate_cascade(
    spec: AttentionSpec, batch: Batch, groups: list[list[PrefixGroup]]
) -> CascadeEstimate:
    """Weigh the key reads that a cascade saves against its extra states and launches.

    A model of traffic, not a measurement: plain decode reads shared keys once per sequence, a
    cascade once per group; each level writes a float-sized state per query row that the merge
    reads, and each level and the merge are launches of about ``LAUNCH_BYTES``.

    Args:
        spec: The layer.
        batch: The step.
        groups: From ``find_prefix_groups``.

    Returns:
        Bytes saved and added; ``pays`` compares them.
    """
    page_size = spec.page_size or 1
    token = spec.num_kv_heads * (spec.head_dim + spec.dv) * spec.kv.itemsize
    saved = sum(
        (g.stop - g.first - 1) * g.pages * page_size * token for level in groups for g in level
    )
    state = batch.total_q * spec.num_heads * (spec.dv * spec.out_dtype.itemsize + 4)
    added = (2 * state + LAUNCH_BYTES) * len(groups) + LAUNCH_BYTES if groups else 0
    return CascadeEstimate(saved, added)


__all__ = [
    "LAUNCH_BYTES",
    "CascadeEstimate",
    "PrefixCut",
    "PrefixGroup",
    "cut_where_it_pays",
    "estimate_cascade",
    "find_prefix_groups",
    "split_prefixes",
]
