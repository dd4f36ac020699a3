"""Promises over several calls: same bits in any company, plans that serve, graphs that replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...batch import Batch
from ...capacity import Capacity
from ...output import AttentionOutput
from ...plan import Plan
from ...spec import AttentionSpec
from ..cases import Case, case
from ..inputs import Inputs, on_device_only, place
from ..oracle import Sequence
from ..target import Target, nan_out, require, require_lse, require_o, require_same_bits
from .base import check


def _invariance_cases(level: str) -> list[Case]:
    own = {"batch_invariant": True, "num_heads": 4, "num_kv_heads": 2}
    found = [
        case("decode", (1,), (70,), keys="paged", tags={"others": ((17, 20), (1, 3))}, **own),
        case("extend", (5,), (40,), keys="paged", tags={"others": ((1, 90), (7, 7))}, **own),
        case("ragged", (7,), (7,), keys="ragged", tags={"others": ((1, 70), (9, 20))}, **own),
    ]
    if level == "full":
        many = tuple((1, 97 * n % 1900) for n in range(31))
        found += [
            case("decode-1000", (1,), (1000,), keys="paged", tags={"others": ((129, 129),)}, **own),
            case("decode-in-32", (1,), (1000,), keys="paged", tags={"others": many}, **own),
            case("extend-in-32", (9,), (700,), keys="paged", tags={"others": many}, **own),
            case("prefill", (130,), (130,), tags={"others": ((1, 4000), (300, 300))}, **own),
            case("window", (1,), (1000,), keys="paged", window=(99, 0),
                 tags={"others": many}, **own),
            case("sinks", (1,), (1000,), keys="paged", sinks=True, tags={"others": many}, **own),
        ]  # fmt: skip
    return found


@check("batch_invariance", _invariance_cases)
def check_batch_invariance(target: Target, case: Case) -> None:
    """With ``batch_invariant`` a sequence's bits depend on nothing but the sequence.

    Alone, in front of others, behind them, with loose host bounds, and run twice: the same bits.
    """
    alone = target.inputs(case)
    want = target.call(alone)
    require_o(want.o, target.expected(case), alone.spec)
    require_same_bits("a second run", target.call(alone), want)

    loose = replace(on_device_only(alone.batch), max_seqlen_k=50 * max(case.kv_lens))
    require_same_bits("a loose max_seqlen_k", target.call(replace(alone, batch=loose)), want)

    (own,) = alone.sequences
    rows = case.q_lens[0]
    others = case.tag("others")
    company = replace(
        case,
        q_lens=tuple(q for q, _ in others),
        kv_lens=tuple(n for _, n in others),
        sinks=False,
    )
    neighbors = target.inputs(company).sequences
    places = {"first": 0, "last": len(neighbors), "middle": len(neighbors) // 2}
    for where, at in places.items():
        sequences: list[Sequence] = [*neighbors[:at], own, *neighbors[at:]]
        lens = [(len(s.q), len(s.k)) for s in sequences]
        full = replace(case, q_lens=tuple(a for a, _ in lens), kv_lens=tuple(b for _, b in lens))
        placed = place(full, alone.spec, sequences, alone.extras, alone.kwargs, target.device)
        got = target.call(placed)
        start = sum(a for a, _ in lens[:at])
        part = AttentionOutput(got.o[start : start + rows], got.lse[start : start + rows])
        require_same_bits(f"batch mates, {where} in the batch", part, want)


def _plan_cases(level: str) -> list[Case]:
    return [
        case("decode", (1, 1), (20, 7), keys="paged"),
        case("extend", (3, 1), (20, 7)),
    ]


@check("plan_reuse", _plan_cases)
def check_plan_reuse(target: Target, case: Case) -> None:
    """One plan serves every layer, and every instance with an equal spec; runs do not wear it."""
    spec = case.spec(target.base)
    first, second = target.make(spec), target.make(spec)
    inputs = target.inputs(case)
    plan = first.plan(inputs.batch)
    for layer, backend in enumerate((first, second, first)):
        own = target.inputs(replace(case, name=f"{case.name}-layer-{layer}"))
        # Every layer's keys lie where the shared page table says.
        data = place(case, spec, own.sequences, own.extras, own.kwargs, target.device)
        got = target.call(data, backend=backend, plan=plan)
        want = target.expected_of(spec, data.sequences, data.extras)
        require_o(got.o, want, spec)
        require_lse(got.lse, want)


CAPACITY = {"num_seqs": 5, "total_q": 12, "max_seqlen_q": 9, "max_seqlen_k": 70}

STEPS = {
    "decode": (((1, 1), (5, 70)), ((1, 1, 1, 1), (16, 3, 0, 64)), ((1,), (1,))),
    "extend": (((3, 1), (20, 7)), ((9, 2, 1), (60, 2, 33)), ((1, 1, 1, 1, 1), (4, 3, 2, 1, 0))),
}


def _capacity_cases(level: str) -> list[Case]:
    found = []
    for name, (first, *_) in STEPS.items():
        for keys in ("ragged", "paged"):
            if level == "smoke" and (name, keys) not in (("decode", "paged"), ("extend", "ragged")):
                continue
            tags = {"steps": name}
            found.append(case(f"{keys}-{name}", *first, keys=keys, tags=tags))
    if level == "full":
        own = {"keys": "paged", "tags": {"steps": "decode"}}
        found += [
            case("window", *STEPS["decode"][0], window=(20, 0), **own),
            case("sinks", *STEPS["decode"][0], sinks=True, **own),
            case("invariant", *STEPS["decode"][0], batch_invariant=True, **own),
        ]
    return found


@check("capacity", _capacity_cases, feature="cuda_graph")
def check_capacity(target: Target, case: Case) -> None:
    """A plan with a capacity serves every batch within it after ``update``.

    Lengths and numbers of sequences may change. On CUDA one captured graph is replayed; elsewhere
    ``run`` is called again. A batch beyond the capacity is refused and changes nothing.
    """
    spec = case.spec(target.base)
    runner = _Replay(target, case, spec)
    for q_lens, kv_lens in (*STEPS[case.tag("steps")], STEPS[case.tag("steps")][0]):
        step = replace(case, q_lens=q_lens, kv_lens=kv_lens)
        runner.step(step)
    runner.refuses_too_much()


class _Replay:
    """One plan with a capacity, and on CUDA the graph captured over it."""

    def __init__(self, target: Target, case: Case, spec: AttentionSpec) -> None:
        self.target, self.spec = target, spec
        bounds: dict[str, Any] = dict(CAPACITY)
        if case.tag("steps") == "decode":
            bounds["max_seqlen_q"] = 1
        pages = -(-bounds["max_seqlen_k"] // spec.page_size) if spec.page_size else 0
        self.capacity = Capacity(**bounds, max_pages=pages)
        self.rows = bounds["total_q"]
        self.backend = target.make(spec)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.plan: Plan | None = None
        self.buffers: list[torch.Tensor] = []

    def step(self, case: Case) -> None:
        inputs = self.target.inputs(case, self.spec)
        batch = on_device_only(inputs.batch)
        live = inputs.q.shape[0]
        if self.plan is None:
            self._prepare(inputs, batch)
        else:
            self.plan.update(batch)
        q, k, v = self.buffers
        for buffer, value in ((q, inputs.q), (k, inputs.k), (v, inputs.v)):
            assert value is not None
            buffer.fill_(1.0)
            buffer[: len(value)].copy_(value)
        self.out.o.fill_(float("nan"))
        self.out.lse.fill_(float("nan"))
        self._go(inputs.kwargs)
        want = self.target.expected(case, self.spec)
        how = f"lengths q={case.q_lens} kv={case.kv_lens}"
        try:
            require_o(self.out.o[:live], want, self.spec)
            require_lse(self.out.lse[:live], want)
            require(bool((self.out.o[live:] == 0).all()), "o of a padding row is not 0")
        except AssertionError as error:
            raise type(error)(f"after update to {how}: {error}") from None

    def _prepare(self, inputs: Inputs, batch: Batch) -> None:
        ragged = self.spec.page_size is None
        slots = self.capacity.max_seqlen_k if ragged else self.capacity.max_pages
        lead = self.capacity.num_seqs * slots + 8

        def grow(x: torch.Tensor, n: int) -> torch.Tensor:
            return torch.ones((n, *x.shape[1:]), device=x.device).to(x.dtype)

        assert inputs.v is not None
        self.buffers = [grow(inputs.q, self.rows), grow(inputs.k, lead), grow(inputs.v, lead)]
        self.out = nan_out(replace(inputs, q=self.buffers[0]))
        self.plan = self.backend.plan(batch, self.capacity)
        self.kwargs = inputs.kwargs

    def _go(self, kwargs: dict[str, Any]) -> None:
        if self.target.device.type != "cuda":
            self._run(kwargs)
            return
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                self.kwargs[name].copy_(value)
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()
        torch.cuda.synchronize(self.target.device)

    def _run(self, kwargs: dict[str, Any]) -> None:
        q, k, v = self.buffers
        assert self.plan is not None
        self.backend.run(q, k, v, self.plan, **kwargs, out=self.out)

    def _capture(self) -> None:
        stream = torch.cuda.Stream(self.target.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.target.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile and warm up outside the capture
                self._run(self.kwargs)
        torch.cuda.current_stream(self.target.device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self._run(self.kwargs)
        self.out.o.fill_(float("nan"))
        self.out.lse.fill_(float("nan"))

    def refuses_too_much(self) -> None:
        wide, size = self.capacity.max_seqlen_k + 1, self.spec.page_size
        table = None if size is None else [[0] * -(-wide // size)]
        beyond = Batch.from_lengths([1], [wide], page_table=table, device=self.target.device)
        assert self.plan is not None
        before = self.plan.batch.seqlens_k.clone()
        try:
            self.plan.update(beyond)
        except ValueError:
            same = torch.equal(self.plan.batch.seqlens_k, before)
            require(same, "a refused update changed the plan")
            return
        require(False, f"update took max_seqlen_k={wide}, beyond the capacity of {wide - 1}")


def _sync_cases(level: str) -> list[Case]:
    return [
        case("decode", (1, 1, 1), (20, 7, 300), keys="paged"),
        case("extend", (3, 1), (20, 7), keys="paged"),
        case("ragged", (3, 9), (20, 9), keys="ragged"),
        case("sinks", (1, 1), (20, 7), keys="paged", sinks=True),
    ]


@check("no_sync", _sync_cases, devices=("cuda",), feature="cuda_graph")
def check_no_sync(target: Target, case: Case) -> None:
    """Neither ``plan`` nor ``run`` waits for the device.

    A backend that declares ``host_lengths`` is given them; others have nothing but the device's.
    """
    inputs = target.inputs(case)
    backend = target.make(inputs.spec)
    if not backend.capabilities.host_lengths:
        inputs = replace(inputs, batch=on_device_only(inputs.batch))
    out = nan_out(inputs)

    def go() -> None:
        plan = backend.plan(inputs.batch)
        backend.run(inputs.q, inputs.k, inputs.v, plan, **inputs.kwargs, out=out)

    go()  # compiling may sync, serving may not
    torch.cuda.synchronize(target.device)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        go()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize(target.device)
    want = target.expected(case)
    require_o(out.o, want, inputs.spec)


def _stream_cases(level: str) -> list[Case]:
    return [
        case("decode", (1, 1, 1), (20, 7, 300), keys="paged"),
        case("extend", (3, 1), (20, 7)),
    ]


@check("streams", _stream_cases, devices=("cuda",))
def check_streams(target: Target, case: Case) -> None:
    """Work is ordered on the caller's current stream: inputs made late on it are seen."""
    inputs = target.inputs(case)
    want = target.call(inputs)
    torch.cuda.synchronize(target.device)
    late = replace(inputs, q=torch.zeros_like(inputs.q))
    stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
    backend = target.make(inputs.spec)
    plan = backend.plan(inputs.batch)
    target.call(late, backend=backend, plan=plan)
    torch.cuda.synchronize(target.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # some ten milliseconds
        late.q.copy_(inputs.q)
        got = target.call(late, backend=backend, plan=plan)
    stream.synchronize()
    require_same_bits("a side stream", got, want)


__all__ = [
    "check_batch_invariance",
    "check_capacity",
    "check_no_sync",
    "check_plan_reuse",
    "check_streams",
]
