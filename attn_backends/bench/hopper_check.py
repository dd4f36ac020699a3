"""Correctness of the Hopper prefill on a GPU, against attention in float64.

Cases come in groups; each group is meant for a process of its own, since a deadlock hangs. Unused
memory holds NaN: gaps between sequences, slots past a length, pages of nobody, and the outputs.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..triton_native.hopper_prefill import hopper_prefill, hopper_work
from ..triton_native.hopper_variant import Variant, choose_variant

RAGGED = ([100, 333, 64, 1, 200], [100, 333, 64, 1, 200])
UNEQUAL = ([130, 5, 0, 700, 128, 1], [1000, 3, 50, 650, 0, 129])
LONG = ([3000, 4097, 1, 2500], [5000, 4097, 1000, 9001])
SHORT = ([64, 3, 1, 17, 40, 64], [900, 4097, 77, 17, 0, 64])


@dataclass(frozen=True)
class CheckCase:
    """One call: lengths, shapes, features, the variant, and how its tensors lie in memory."""

    name: str
    lens: tuple[list[int], list[int]] = RAGGED
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 128
    head_dim_v: int = 0
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    page_size: int | None = None
    layout: str = "NHD"
    spare: int = 0
    listed: int = 0
    expired: bool = False
    views: bool = False
    logits: float = 0.0
    variant: dict[str, Any] = field(default_factory=dict)
    forced: bool = True


def _base(head_dim: int) -> Variant:
    return Variant(block_n=64 if head_dim == 256 else 128, q_stages=1 if head_dim > 128 else 2)


class CheckInputs:
    """The tensors of a case, poisoned wherever nothing may be read or written."""

    def __init__(self, case: CheckCase, device: str = "cuda", seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.case = case
        self.q_lens, self.kv_lens = case.lens
        heads, kv_heads = case.heads
        dim, nan = case.head_dim, float("nan")
        self.dv = case.head_dim_v or dim
        self.total_q = sum(self.q_lens) + case.spare

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen).to(case.dtype)

        q = rand(self.total_q, heads, dim)
        keys = [rand(n, kv_heads, dim) for n in self.kv_lens]
        self.values = [rand(n, kv_heads, self.dv) for n in self.kv_lens]
        self.sinks = 2 * torch.randn(heads, generator=gen).to(device) if case.sinks else None
        if case.logits:
            # Scores around `logits`, spread by a few: a running maximum reset to 0 would show.
            shift = math.sqrt(abs(case.logits) / dim * math.sqrt(dim))
            q = (q * 0.1 + shift).to(case.dtype)
            sign = math.copysign(shift, case.logits)
            keys = [(x * 0.1 + sign).to(case.dtype) for x in keys]
        q[sum(self.q_lens) :] = nan
        self.keys = keys
        gone = self.expired() if case.expired else [0] * len(keys)
        self.table = self.starts_k = None
        starts = []
        if case.page_size is None:
            room = [n + 5 for n in self.kv_lens]
            k = torch.full((sum(room) + 3, kv_heads, dim), nan, dtype=case.dtype)
            v = torch.full((sum(room) + 3, kv_heads, self.dv), nan, dtype=case.dtype)
            at = 0
            for x, y, n, lost in zip(keys, self.values, room, gone):
                starts.append(at)
                k[at + lost : at + len(x)], v[at + lost : at + len(x)] = x[lost:], y[lost:]
                at += n
            self.starts_k = torch.tensor([*starts, at], dtype=torch.int32, device=device)
            k, v = k.to(device), v.to(device)
        else:
            k, v = self._paged(gen, nan, device, gone)
        self.q, self.k, self.v = q.to(device), k, v
        if case.views:
            packed = torch.full((self.total_q, heads + 3, dim + 8), nan, dtype=case.dtype)
            packed = packed.to(device)
            packed[:, 1 : heads + 1, :dim] = self.q
            self.q = packed[:, 1 : heads + 1, :dim]
        self.starts_q = torch.tensor([0, *self.q_lens], device=device).cumsum(0).to(torch.int32)
        self.lens_k = torch.tensor(self.kv_lens, dtype=torch.int32, device=device)
        self.scale = 1.0 / math.sqrt(dim) if case.scale is None else case.scale
        self.outputs(device)

    def outputs(self, device: str) -> None:
        """Outputs full of NaN, with rows around them that nobody may write."""
        case, heads = self.case, self.case.heads[0]
        nan = float("nan")
        self.o_room = torch.full(
            (self.total_q + 128, heads, self.dv), nan, dtype=case.dtype, device=device
        )
        if case.views:
            self.lse_room = torch.full((heads, self.total_q + 128), nan, device=device).t()
        else:
            self.lse_room = torch.full((self.total_q + 128, heads), nan, device=device)
        self.o = self.o_room[64 : 64 + self.total_q]
        self.lse = self.lse_room[64 : 64 + self.total_q]

    def expired(self) -> list[int]:
        """Keys of each sequence that lie before the window of its first query: somebody else's."""
        assert self.case.window is not None and self.case.window[0] is not None
        left = self.case.window[0]
        return [max(kv - q - left, 0) for q, kv in zip(self.q_lens, self.kv_lens)]

    def _paged(
        self, gen: torch.Generator, nan: float, device: str, gone: list[int]
    ) -> tuple[torch.Tensor, ...]:
        case, size = self.case, self.case.page_size
        assert size is not None
        kv_heads = case.heads[1]
        counts = [-(-n // size) for n in self.kv_lens]
        width = max(counts) + 2
        pages = torch.randperm(sum(counts) + 4, generator=gen)
        shape = (len(pages), size, kv_heads, case.head_dim)
        if self.dv != case.head_dim:  # two caches: neither layout below can hold both
            assert case.layout == "NHD"
            k = torch.full(shape, nan, dtype=case.dtype)
            v = torch.full((*shape[:3], self.dv), nan, dtype=case.dtype)
        elif case.layout == "packed":
            both = torch.full((len(pages), 2, *shape[1:]), nan, dtype=case.dtype)
            k, v = both[:, 0], both[:, 1]
        elif case.layout == "HND":
            both = torch.full((2, len(pages), kv_heads, size, case.head_dim), nan, dtype=case.dtype)
            k, v = both[0].transpose(1, 2), both[1].transpose(1, 2)
        else:
            both = torch.full((2, *shape), nan, dtype=case.dtype)
            k, v = both[0], both[1]
        table = torch.full((len(counts), width), 2**31 - 1, dtype=torch.int32)
        table[:, -1] = -1
        at = 0
        for b, (x, y) in enumerate(zip(self.keys, self.values)):
            for i in range(counts[b]):
                page = int(pages[at])
                at += 1
                start, stop = max(i * size, gone[b]), min((i + 1) * size, len(x))
                if start < stop:  # else the page is given to others, and its entry is void
                    table[b, i] = page
                    slots = slice(start - i * size, stop - i * size)
                    k[page, slots], v[page, slots] = x[start:stop], y[start:stop]
        self.table = table.to(device)
        if self.dv != case.head_dim:
            return k.to(device), v.to(device)
        both = both.to(device)
        if case.layout == "packed":
            return both[:, 0], both[:, 1]
        if case.layout == "HND":
            return both[0].transpose(1, 2), both[1].transpose(1, 2)
        return both[0], both[1]

    def variant(self) -> Variant:
        """The variant of the case: forced, or as the launcher would choose."""
        case = self.case
        if case.forced:
            return replace(_base(case.head_dim), **case.variant)
        chosen = choose_variant(
            head_dim=case.head_dim, num_heads=case.heads[0], num_kv_heads=case.heads[1],
            max_seqlen_q=max(self.q_lens), total_q=self.total_q, num_seqs=len(self.q_lens),
            num_sms=torch.cuda.get_device_properties(0).multi_processor_count,
            max_seqlen_k=max(self.kv_lens), causal=case.causal, paged=case.page_size is not None,
        )  # fmt: skip
        return replace(chosen, **case.variant)

    def make_work(self, variant: Variant, out: torch.Tensor | None = None) -> torch.Tensor:
        """The work list for a variant."""
        return hopper_work(
            variant, cu_seqlens_q=self.starts_q, seqlens_k=self.lens_k,
            cu_seqlens_k=self.starts_k, total_q=self.total_q + self.case.listed,
            causal=self.case.causal, window=self.case.window, out=out,
        )  # fmt: skip

    def run(self, variant: Variant, work: torch.Tensor | None) -> None:
        """One launch into ``o`` and ``lse``."""
        case = self.case
        hopper_prefill(
            self.q, self.k, self.v, cu_seqlens_q=self.starts_q, seqlens_k=self.lens_k,
            cu_seqlens_k=self.starts_k, page_table=self.table, max_seqlen_q=max(self.q_lens),
            scale=self.scale, causal=case.causal, window=case.window, softcap=case.softcap,
            sinks=self.sinks, o=self.o, lse=self.lse, variant=variant, work=work,
        )  # fmt: skip

    def reference(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per sequence: first row, end, o, lse, and the mean magnitude of the values it weighs."""
        case = self.case
        group = case.heads[0] // case.heads[1]
        left, right = case.window or (None, None)
        right = 0 if case.causal else right
        start = 0
        for q_len, kv_len, k, v in zip(self.q_lens, self.kv_lens, self.keys, self.values):
            q = self.q[start : start + q_len].double()
            k = k.to(q.device).double().repeat_interleave(group, 1)
            v = v.to(q.device).double().repeat_interleave(group, 1)
            s = torch.einsum("ihd,jhd->hij", q, k) * self.scale
            if case.softcap is not None:
                s = case.softcap * torch.tanh(s / case.softcap)
            i = torch.arange(q_len, device=q.device)[:, None] + kv_len - q_len
            j = torch.arange(kv_len, device=q.device)[None, :]
            keep = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
            if left is not None:
                keep &= j >= i - left
            if right is not None:
                keep &= j <= i + right
            s = s.masked_fill(~keep, -math.inf)
            if self.sinks is not None:  # one more key, of value 0
                sink = self.sinks.double()[:, None, None].expand(-1, q_len, 1)
                s = torch.cat([s, sink], -1)
                v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
            some = s.shape[-1] > 0
            lse = torch.logsumexp(s, -1) if some else s.new_full(s.shape[:2], -math.inf)
            p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
            o = torch.einsum("hij,jhd->ihd", p, v)
            size = torch.einsum("hij,jhd->ihd", p, v.abs())
            yield start, start + q_len, o, lse.t(), size
            start += q_len


def compare(x: CheckInputs) -> dict[str, float]:
    """Errors of the outputs in units of their bound; above 1 is a failure.

    The bound on o is two roundings of the dtype on the weighed magnitudes (the probabilities are
    rounded once, the output once), and float32 noise; on lse, float32 noise.
    """
    unit = 2.0**-8 if x.case.dtype == torch.bfloat16 else 2.0**-11
    worst = {"o": 0.0, "lse": 0.0}
    for first, end, o, lse, size in x.reference():
        if first == end:
            continue
        got, got_lse = x.o[first:end].double(), x.lse[first:end].double()
        bound = 1.5 * unit * size + unit * o.abs() + 1e-5
        error = ((got - o).abs() / bound).nan_to_num(math.inf)
        worst["o"] = max(worst["o"], error.max().item())
        empty = lse == -math.inf
        assert torch.equal(got_lse == -math.inf, empty), "empty rows differ"
        assert (got[empty] == 0).all(), "an empty row is not 0"
        error = (got_lse - lse).abs() / (2e-5 * (1 + lse.abs()) + 2e-5)
        error = error.masked_fill(empty, 0.0).nan_to_num(math.inf)
        worst["lse"] = max(worst["lse"], error.max().item())
    left_over = slice(sum(x.q_lens), x.total_q)
    assert (x.o[left_over] == 0).all(), "rows after the last sequence are not 0"
    none = -math.inf if x.sinks is None else x.sinks
    assert torch.allclose(x.lse[left_over], torch.as_tensor(none, device=x.lse.device)), (
        "rows after the last sequence: lse"
    )
    for room in (x.o_room, x.lse_room):
        assert room[:64].isnan().all() and room[64 + x.total_q :].isnan().all(), "wrote outside"
    return worst


def check(case: CheckCase) -> dict[str, Any]:
    """Run a case three times on one work list, compare, and demand the same bits each time."""
    x = CheckInputs(case)
    variant = x.variant()
    work = x.make_work(variant)
    x.run(variant, work)
    torch.cuda.synchronize()
    assert int(work[1]) == 0, f"the counter is {int(work[1])} after a launch"
    worst = compare(x)
    first_o, first_lse = x.o.clone(), x.lse.clone()
    for _ in range(2):
        x.outputs("cuda")
        x.run(variant, work)
        same = torch.equal(x.o, first_o) and torch.equal(x.lse, first_lse)
        assert same, "two launches differ in bits"
    x.outputs("cuda")
    x.run(variant, None)
    assert torch.equal(x.o, first_o), "without a work list the bits differ"
    assert worst["o"] <= 1 and worst["lse"] <= 1, f"errors {worst} in units of their bounds"
    return worst


def check_graph() -> dict[str, Any]:
    """Capture one launch, then replay it with other lengths and a refilled work list."""
    case = CheckCase("graph", lens=([200, 300], [200, 500]))
    x = CheckInputs(case)
    variant = x.variant()
    work = x.make_work(variant)
    x.run(variant, work)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.make_work(variant, out=work)
        x.run(variant, work)
    graph.replay()
    worst = compare(x)
    for lens in (([400, 100], [450, 120]), ([1, 499], [1, 499])):
        y = CheckInputs(replace(case, lens=lens), seed=3)
        rows = min(len(x.k), len(y.k))
        assert x.total_q == y.total_q
        x.k.fill_(float("nan"))
        x.v.fill_(float("nan"))
        x.k[:rows], x.v[:rows] = y.k[:rows], y.v[:rows]
        x.q.copy_(y.q)
        x.starts_q.copy_(y.starts_q)
        x.lens_k.copy_(y.lens_k)
        x.starts_k.copy_(y.starts_k)
        x.q_lens, x.kv_lens, x.keys, x.values = y.q_lens, y.kv_lens, y.keys, y.values
        x.o_room.fill_(float("nan"))
        x.lse_room.fill_(float("nan"))
        graph.replay()
        worst = {k: max(v, worst[k]) for k, v in compare(x).items()}
    assert worst["o"] <= 1 and worst["lse"] <= 1, f"errors {worst} in units of their bounds"
    return worst


def check_streams() -> dict[str, Any]:
    """Launches on two streams at once, each with its own work list."""
    inputs = [CheckInputs(CheckCase("streams", lens=LONG), seed=s) for s in (0, 1)]
    streams = [torch.cuda.Stream() for _ in inputs]
    variant = inputs[0].variant()
    works = [x.make_work(variant) for x in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        for x, stream, work in zip(inputs, streams, works):
            with torch.cuda.stream(stream):
                x.run(variant, work)
    torch.cuda.synchronize()
    found = [compare(x) for x in inputs]
    worst = {k: max(f[k] for f in found) for k in ("o", "lse")}
    assert worst["o"] <= 1 and worst["lse"] <= 1, f"errors {worst} in units of their bounds"
    return worst


def check_invariant() -> dict[str, Any]:
    """Each sequence alone gives the bits that it gives in a batch."""
    case = CheckCase("together", UNEQUAL)
    x = CheckInputs(case)
    variant = x.variant()
    x.run(variant, None)
    worst, start = compare(x), 0
    for b, (q_len, kv_len) in enumerate(zip(x.q_lens, x.kv_lens)):
        y = CheckInputs(replace(case, lens=([q_len], [kv_len])))
        at = int(x.starts_k[b])
        y.k[:kv_len], y.v[:kv_len] = x.k[at : at + kv_len], x.v[at : at + kv_len]
        y.q.copy_(x.q[start : start + q_len])
        if q_len:
            y.run(variant, None)
        rows = slice(start, start + q_len)
        assert torch.equal(y.o, x.o[rows]) and torch.equal(y.lse, x.lse[rows]), f"sequence {b}"
        start += q_len
    return worst


def groups() -> dict[str, list[CheckCase]]:
    """All cases; those of one group mostly share their compiled kernels."""
    half = torch.float16
    c = CheckCase
    return {
        "causal": [
            c("ragged"), c("unequal", UNEQUAL), c("long", LONG), c("one", ([1], [1])),
            c("no keys", ([100, 3], [0, 0])), c("mha", UNEQUAL, (4, 4)), c("group7", heads=(28, 4)),
            c("group8", UNEQUAL, (8, 1)), c("spare rows", UNEQUAL, spare=300),
            c("views", UNEQUAL, views=True), c("long list", UNEQUAL, listed=500),
            c("long list, spare rows", spare=70, listed=100), c("scale 0", scale=0.0),
            c("low logits", UNEQUAL, logits=-300.0), c("high logits", UNEQUAL, logits=300.0),
            c("head groups", LONG, (16, 8), variant={"head_group": 4}),
        ],
        "full": [
            c("full", causal=False), c("full unequal", UNEQUAL, causal=False),
            c("full long", LONG, causal=False), c("full low", UNEQUAL, causal=False, logits=-300.0),
        ],
        "half": [c("fp16", dtype=half), c("fp16 full", UNEQUAL, causal=False, dtype=half)],
        "d64": [
            c("d64", head_dim=64), c("d64 unequal", UNEQUAL, head_dim=64),
            c("d64 3 stages", LONG, head_dim=64, variant={"stages": 3}),
            c("d64 4 stages", UNEQUAL, head_dim=64, variant={"stages": 4}),
            c("d64 full", UNEQUAL, head_dim=64, causal=False),
        ],
        "d256": [
            c("d256", head_dim=256), c("d256 unequal", UNEQUAL, head_dim=256),
            c("d256 long", LONG, head_dim=256), c("d256 full", UNEQUAL, head_dim=256, causal=False),
        ],
        "schedule": [
            c("static", LONG, variant={"dynamic": False}),
            c("snake", LONG, variant={"dynamic": False, "snake": True}),
            c("ping pong", LONG, variant={"ping_pong": True}),
            c("one slot of queries", LONG, variant={"q_stages": 1}),
            c("one slot of queries ragged", variant={"q_stages": 1}),
            c("one slot, ping pong, lazy", LONG,
              variant={"q_stages": 1, "ping_pong": True, "lazy": True}),
            c("snake, ping pong, lazy", LONG,
              variant={"dynamic": False, "snake": True, "ping_pong": True, "lazy": True}),
            c("mbarriers", LONG, variant={"named_empty": False}),
            c("mbarriers ragged", variant={"named_empty": False}),
        ],
        "single": [
            c("one consumer", LONG, variant={"consumers": 1, "block_n": 64, "q_stages": 1}),
            c("one consumer ragged", UNEQUAL, variant={"consumers": 1, "block_n": 64}),
            c("narrow tiles", UNEQUAL, variant={"block_n": 64, "stages": 3}),
            c("one consumer d64", LONG, head_dim=64, variant={"consumers": 1}),
        ],
        "paged16": [
            c("p16", page_size=16), c("p16 unequal", UNEQUAL, page_size=16),
            c("p16 long", LONG, page_size=16), c("p16 HND", UNEQUAL, page_size=16, layout="HND"),
            c("p16 packed", UNEQUAL, page_size=16, layout="packed"),
            c("p16 spare", UNEQUAL, page_size=16, spare=200, views=True),
            c("p16 no keys", ([100, 3], [0, 0]), page_size=16),
        ],
        "paged": [
            c(f"p{n}", UNEQUAL, page_size=n) for n in (32, 64, 128, 256)
        ] + [c("p64 HND long", LONG, page_size=64, layout="HND")],
        "paged_dims": [
            c("p16 d64", UNEQUAL, head_dim=64, page_size=16),
            c("p16 d256", UNEQUAL, head_dim=256, page_size=16),
            c("p64 d256 full", UNEQUAL, head_dim=256, page_size=64, causal=False),
        ],
        "packed": [
            c("pack 4", SHORT, variant={"pack": 4}),
            c("pack 4 long", LONG, variant={"pack": 4}),
            c("pack 8 of 7", SHORT, (28, 4), variant={"pack": 8}),
            c("pack 8", SHORT, (16, 2), variant={"pack": 8}, page_size=16),
            c("pack 4 p64", SHORT, variant={"pack": 4}, page_size=64),
            c("pack 4 d64", SHORT, head_dim=64, variant={"pack": 4}),
        ],
        "window": [
            c("window", LONG, window=(300, 0)), c("window 0", UNEQUAL, window=(0, 0)),
            c("window p16", UNEQUAL, window=(100, 0), page_size=16),
            c("window both", UNEQUAL, causal=False, window=(70, 33)),
            c("window right", UNEQUAL, causal=False, window=(None, 33)),
            c("window pack", SHORT, window=(50, 0), variant={"pack": 4}),
        ],
        "expired": [
            c("expired p16", LONG, window=(300, 0), page_size=16, expired=True),
            c("expired p64", LONG, window=(300, 0), page_size=64, expired=True),
            c("expired p256", LONG, window=(300, 0), page_size=256, expired=True),
            c("expired p1", LONG, window=(300, 0), page_size=1, expired=True),
            c("expired ragged", LONG, window=(300, 0), expired=True),
            c("expired short", SHORT, window=(50, 0), page_size=16, expired=True),
            c("expired pack", SHORT, window=(50, 0), expired=True, variant={"pack": 4}),
            c("expired both", UNEQUAL, causal=False, window=(70, 33), expired=True),
            c("expired d64", SHORT, head_dim=64, window=(3, 0), page_size=16, expired=True),
            c("expired d256", LONG, head_dim=256, window=(300, 0), page_size=16, expired=True),
            c("expired d192", LONG, (4, 4), 192, 128, window=(300, 0), expired=True),
            c("expired one consumer", SHORT, window=(50, 0), expired=True,
              variant={"consumers": 1, "block_n": 64}),
        ],
        "softcap": [
            c("softcap", UNEQUAL, softcap=30.0), c("softcap full", causal=False, softcap=5.0),
            c("softcap window", LONG, softcap=50.0, window=(1000, 0)),
        ],
        "d192": [
            c("d192", head_dim=192, head_dim_v=128),
            c("d192 unequal", UNEQUAL, head_dim=192, head_dim_v=128),
            c("d192 long", LONG, (4, 4), 192, 128), c("d192 views", UNEQUAL, (4, 4), 192, 128,
                                                      views=True),
            c("d192 full", UNEQUAL, (4, 4), 192, 128, causal=False),
            c("d192 low", UNEQUAL, (4, 4), 192, 128, logits=-300.0),
            c("d192 fp16", UNEQUAL, (4, 4), 192, 128, half),
        ],
        "d192_more": [
            c("d192 p16", UNEQUAL, (4, 4), 192, 128, page_size=16),
            c("d192 p64 long", LONG, (4, 4), 192, 128, page_size=64),
            c("d192 one consumer", UNEQUAL, (4, 4), 192, 128,
              variant={"consumers": 1, "block_n": 64}),
            c("d192 pack", SHORT, (8, 2), 192, 128, variant={"pack": 4}),
            c("d192 p1", UNEQUAL, (4, 4), 192, 128, page_size=1),
            c("d192 chosen", UNEQUAL, (4, 4), 192, 128, forced=False),
        ],
        "gather": [
            c("p1", page_size=1), c("p1 unequal", UNEQUAL, page_size=1),
            c("p1 long", LONG, page_size=1), c("p1 HND", UNEQUAL, page_size=1, layout="HND"),
            c("p1 packed", UNEQUAL, page_size=1, layout="packed"),
            c("p1 spare", UNEQUAL, page_size=1, spare=200, views=True),
            c("p1 no keys", ([100, 3], [0, 0]), page_size=1),
            c("p1 full", UNEQUAL, page_size=1, causal=False),
            c("p1 window", LONG, page_size=1, window=(300, 0)),
        ],
        "gather_sizes": [
            c(f"p{n}", UNEQUAL, page_size=n) for n in (3, 5, 24, 48, 192)
        ] + [
            c("p48 HND long", LONG, page_size=48, layout="HND"),
            c("p7 packed", UNEQUAL, page_size=7, layout="packed"),
        ],
        "gather_dims": [
            c("p1 d64", UNEQUAL, head_dim=64, page_size=1),
            c("p1 d64 3 stages", LONG, head_dim=64, page_size=1, variant={"stages": 3}),
            c("p1 d256", UNEQUAL, head_dim=256, page_size=1),
            c("p1 fp16", UNEQUAL, page_size=1, dtype=half),
            c("p1 one consumer", LONG, page_size=1, variant={"consumers": 1, "block_n": 64}),
            c("p1 pack", SHORT, page_size=1, variant={"pack": 4}),
            c("p5 mbarriers", LONG, page_size=5, variant={"named_empty": False}),
            c("p1 static", LONG, page_size=1, variant={"dynamic": False}),
        ],
        "sinks": [
            c("sinks", sinks=True), c("sinks unequal", UNEQUAL, sinks=True),
            c("sinks no keys", ([100, 3], [0, 0]), sinks=True),
            c("sinks spare", UNEQUAL, sinks=True, spare=200),
            c("sinks window", LONG, sinks=True, window=(300, 0)),
            c("sinks pack", SHORT, sinks=True, variant={"pack": 4}),
            c("sinks pack 8 of 7", SHORT, (28, 4), sinks=True, variant={"pack": 8}, page_size=16),
            c("sinks low", UNEQUAL, sinks=True, logits=-300.0),
            c("sinks d64 p1", UNEQUAL, head_dim=64, sinks=True, page_size=1),
        ],
        "lazy": [
            c("lazy", variant={"lazy": True}), c("lazy long", LONG, variant={"lazy": True}),
            c("lazy unequal", UNEQUAL, variant={"lazy": True}),
            c("lazy low", UNEQUAL, logits=-300.0, variant={"lazy": True}),
            c("lazy high", UNEQUAL, logits=300.0, variant={"lazy": True}),
            c("lazy steep", LONG, scale=1.0, variant={"lazy": True}),
            c("lazy scale 0", scale=0.0, variant={"lazy": True}),
            c("lazy window", LONG, window=(300, 0), variant={"lazy": True}),
            c("lazy softcap", UNEQUAL, softcap=30.0, variant={"lazy": True}),
            c("lazy sinks", UNEQUAL, sinks=True, variant={"lazy": True}),
            c("lazy fp16", LONG, dtype=half, scale=0.5, variant={"lazy": True}),
            c("lazy pack", SHORT, page_size=16, variant={"lazy": True, "pack": 4}),
            c("lazy d256", LONG, head_dim=256, scale=0.5, variant={"lazy": True}),
            c("lazy d64", LONG, head_dim=64, scale=0.5, variant={"lazy": True}),
            c("lazy d192", LONG, (4, 4), 192, 128, scale=0.5, variant={"lazy": True}),
        ],
        "chosen": [
            c("chosen ragged", forced=False), c("chosen short", SHORT, (32, 8), forced=False),
            c("chosen long", LONG, (32, 8), forced=False),
            c("chosen p16", SHORT, (32, 8), page_size=16, forced=False),
            c("chosen d64", UNEQUAL, head_dim=64, forced=False),
            c("chosen d256", SHORT, (16, 8), head_dim=256, forced=False),
        ],
        "graph": [],
        "streams": [],
        "invariant": [],
    }  # fmt: skip


def run_group(name: str) -> None:
    """Run the cases of a group and print one line of JSON each, as soon as it is known."""
    special = {"graph": check_graph, "streams": check_streams, "invariant": check_invariant}
    if name in special:
        calls = [(name, special[name])]
    else:
        calls = [(case.name, lambda case=case: check(case)) for case in groups()[name]]
    for label, call in calls:
        row: dict[str, Any] = {"group": name, "case": label}
        print(json.dumps({**row, "status": "started"}), flush=True)
        try:
            row |= {"status": "passed", **call()}
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            row |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:300]}
            row["where"] = where
        print(json.dumps(row), flush=True)


__all__ = ["CheckCase", "CheckInputs", "check", "compare", "groups", "run_group"]
