"""Correctness of the Hopper prefill on a GPU, against attention in float64.

Cases come in groups; each group is meant for a process of its own, since a deadlock hangs. Unused
memory holds NaN: gaps between sequences, slots past a length, pages of nobody, and the outputs.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ..triton_native.hopper_prefill import hopper_prefill, hopper_work
from ..triton_native.hopper_variant import Variant, base_variant, choose_variant
from .hopper_cases import LONG, UNEQUAL, CheckCase, groups


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
            return replace(base_variant(case.head_dim), **case.variant)
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


__all__ = ["CheckInputs", "check", "compare", "run_group"]
