"""Decode of requests that share a prefix: a cascade beside plain paged decode.

Both read one paged cache. Plain decode reads the shared pages once per request, a cascade once; its
roofline is counted with the shared keys once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..backend import AttentionBackend
from ..batch import Batch
from ..cascade import level_specs, plan_cascade
from ..errors import InvalidInputError
from ..prefixes import split_prefixes
from ..spec import AttentionSpec
from .attention_cases import DTYPES
from .backend_ways import (
    backend_way,
    capacity_of,
    chooser,
    every_backend,
    no_graph,
    parse,
    why_not,
)
from .gate import check, limit_of, reference
from .graph_timer import copies_for
from .roofline import find_gpu
from .runner import GRAPH, Call, Found, Point, Way, measure_point


@dataclass(frozen=True)
class CascadeCase:
    """One query of each request over ``prefix`` shared keys and ``suffix`` own ones."""

    batch: int = 64
    prefix: int = 32768
    suffix: int = 256
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("batch", "suffix", "page_size"):
            if getattr(self, name) < 1:
                raise InvalidInputError.of(name, getattr(self, name), "an int >= 1")
        if self.prefix < self.page_size or self.prefix % self.page_size:
            allowed = f"a multiple of page_size={self.page_size}, since only whole pages are shared"
            raise InvalidInputError.of("prefix", self.prefix, allowed)

    @property
    def label(self) -> str:
        """A short name for tables."""
        lengths = f"{self.batch} x ({self.prefix} shared + {self.suffix})"
        return f"{lengths} H{self.num_heads}/{self.num_kv_heads} D{self.head_dim}"

    @property
    def kv_len(self) -> int:
        """Keys that each request sees."""
        return self.prefix + self.suffix

    def grid(self, batches: Sequence[int], prefixes: Sequence[int]) -> list[CascadeCase]:
        """The same case for other numbers of requests and shared keys; empty keeps its own."""
        return [
            replace(self, batch=b, prefix=n)
            for b in batches or (self.batch,)
            for n in prefixes or (self.prefix,)
        ]

    def row(self) -> dict[str, Any]:
        """The case as it stands in results files."""
        return {**asdict(self), "q_len": 1, "kv_len": self.kv_len}


class CascadeInputs:
    """One cache, and a page table whose rows begin with the same pages."""

    def __init__(self, case: CascadeCase, device: torch.device, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case, self.device = case, device
        self.spec = AttentionSpec(
            case.num_heads, case.num_kv_heads, case.head_dim, dtype=DTYPES[case.dtype],
            page_size=case.page_size,
        )  # fmt: skip
        self.shared, own = case.prefix // case.page_size, -(-case.suffix // case.page_size)
        pages = torch.randperm(self.shared + case.batch * own).int()
        table = torch.cat(
            [
                pages[: self.shared].expand(case.batch, -1),
                pages[self.shared :].view(case.batch, own),
            ],
            dim=1,
        )
        lengths = [1] * case.batch, [case.kv_len] * case.batch
        self.batch = Batch.from_lengths(*lengths, page_table=table.contiguous(), device=device)
        self.levels = split_prefixes(self.batch, case.page_size)
        # Memory rounds the last page of each request up; traffic does not.
        keys = case.prefix + case.batch * case.suffix
        shape = (pages.numel(), case.page_size, case.num_kv_heads, case.head_dim)
        size = self.spec.kv.itemsize
        self.kv_bytes = 2 * keys * case.num_kv_heads * case.head_dim * size
        self.copies = copies_for(self.kv_bytes) if device.type == "cuda" else 1
        rows = (case.batch, case.num_heads, case.head_dim)

        def rand(*dims: int) -> torch.Tensor:
            return torch.randn(dims, device=device).to(self.spec.dtype)

        self.q = [rand(*rows) for _ in range(self.copies)]
        self.k = [rand(*shape) for _ in range(self.copies)]
        self.v = [rand(*shape) for _ in range(self.copies)]

    def point(self) -> Point:
        """What a cascade must move and compute at least."""
        case = self.case
        rows = case.batch * case.num_heads * case.head_dim
        moved = (
            self.kv_bytes + 2 * rows * self.spec.dtype.itemsize + case.batch * case.num_heads * 4
        )
        flops = 4 * rows * case.kv_len
        cuda = self.device.type == "cuda"
        gpu = find_gpu(torch.cuda.get_device_name(self.device)) if cuda else None
        return Point(
            "cascade", case.row(), case.label, moved, flops, case.dtype, self.copies, self.device,
            gpu,
        )  # fmt: skip


def cascade_way(backend: AttentionBackend, x: CascadeInputs) -> Way:
    """Our cascade with one backend at every level, planned once."""

    def planned(with_capacity: bool) -> Call:
        capacities = [capacity_of(level) for level in x.levels] if with_capacity else None
        plan = plan_cascade(x.spec, x.levels, backend=backend.name, capacities=capacities)
        return lambda i: plan.run(x.q[i], x.k[i], x.v[i])

    return Way(lambda: planned(False), lambda: planned(True), no_graph=no_graph(backend))


def flashinfer_cascade(x: CascadeInputs) -> Call:
    """FlashInfer's cascade of two levels over the same cache; planned outside the timed part."""
    import flashinfer

    case, table, device = x.case, x.batch.host_page_table, x.device
    assert table is not None
    own = table.shape[1] - x.shared
    last = case.suffix - (own - 1) * case.page_size

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    wrapper.plan(
        [ints([0, case.batch]), ints(range(case.batch + 1))],
        [ints([0, x.shared]), ints(itertools.accumulate([own] * case.batch, initial=0))],
        [ints(table[0, : x.shared].tolist()), ints(table[:, x.shared :].flatten().tolist())],
        [ints([case.page_size]), ints([last] * case.batch)],
        case.num_heads, case.num_kv_heads, case.head_dim, case.page_size,
        q_data_type=x.spec.dtype, kv_data_type=x.spec.kv,
    )  # fmt: skip
    return lambda i: wrapper.run(x.q[i], (x.k[i], x.v[i]))


PEERS: dict[str, Callable[[CascadeInputs], Call]] = {"flashinfer-cascade": flashinfer_cascade}


def cascade_ways(
    x: CascadeInputs, names: Sequence[str], peers: Sequence[str]
) -> tuple[dict[str, Way], dict[str, str]]:
    """The cascade and plain decode of each backend, peers, and the reasons of the rest.

    Args:
        x: The inputs.
        names: Backends without options; empty is every registered one.
        peers: Names of ``PEERS``.

    Raises:
        UnknownBackendError: A name that no backend has.
        InvalidInputError: A name with options, which a cascade does not take.
    """
    ways, refused = {}, {}
    shared = level_specs(x.spec, 2)[0]
    for name in names or every_backend():
        if parse(name)[1]:
            raise InvalidInputError.of("backend", repr(name), "a name without options for cascade")
        if why := why_not(name, x.spec, "decode", x.device):
            refused[name] = why
            continue
        backend = chooser(name, x.spec, "decode", x.device)()
        ways[f"plain-{name}"] = backend_way(backend, x)
        if why := why_not(name, shared, "prefill", x.device):
            refused[f"cascade-{name}"] = why
        else:
            ways[f"cascade-{name}"] = cascade_way(backend, x)
    for name in peers:
        ways[name] = Way(lambda make=PEERS[name]: make(x))  # type: ignore[misc]
    # Cascades first: ratios are taken to the first row.
    return dict(sorted(ways.items(), key=lambda item: item[0].startswith("plain-"))), refused


def measure_cascade(
    x: CascadeInputs,
    ways: dict[str, Way],
    *,
    modes: tuple[str, ...] = (GRAPH,),
    rounds: int = 24,
    limit_s: float | None = None,
) -> Found:
    """Check and time ways to do a case, all in turn."""
    want = reference(x)
    limit = limit_of(want.o, x.spec.dtype)
    return measure_point(
        x.point(), ways, lambda call: check(call, want, limit),
        modes=modes, rounds=rounds, limit_s=limit_s,
    )  # fmt: skip


__all__ = ["PEERS", "CascadeCase", "CascadeInputs", "cascade_ways", "measure_cascade"]
