"""What an adapter adds to a library's own call: host microseconds of a ``run``.

    python -m attn_backends.bench.adapter_overhead --json docs/results/h200/adapter-overhead.json

For each library, ``run`` is watched once to see what it calls, and with what. That call is then
repeated as it was, with the same tensors and the same planned wrapper, in turn with ``run``. So
the difference is the adapter: checks, choices, views, the LSE's base and shape. Outputs that the
adapter allocates are left to the library in its own call, which allocates them too.

Kernels for equal lengths know no pages, and their LSE lies by heads: whoever calls them copies.
What these copies cost alone, added to the library's call, is a column of its own.

Both are queued and not waited for. Only answers that are right have times.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..adapters import torch_flex, torch_sdpa, torch_varlen
from ..backend import AttentionBackend
from ..plan import Plan
from .attention_cases import Case, Inputs
from .backend_ways import chooser, why_not
from .gate import check, limit_of, reference
from .graph_timer import Times
from .report import save
from .wall_timer import sync_of

#: An adapter may add so much to a run.
AIM_US = 10.0
#: Calls of a sample: few enough that the queue of the device never fills, and that a disturbance of
#: the machine spoils one sample and not most of them.
CALLS = 5

#: Points that the device works off faster than they are queued.
CASES = {
    "decode": Case("adapter", 8, 1, 512, page_size=256),
    "prefill": Case("adapter", 2, 128, 128, page_size=None),
    "extend": Case("adapter", 2, 64, 512, page_size=256),
}
BACKENDS = (
    'flash_attention:version="2",source=package',
    'flash_attention:version="2",source=vllm',
    'flash_attention:version="3",source=package',
    'flash_attention:version="3",source=vllm,finite_cache=true',
    'flash_attention:version="4",finite_cache=true',
    "flashinfer:kernel=fa2",
    "flashinfer:kernel=fa3",
    "torch_varlen",
    "torch_sdpa",
    "torch_flex",
)


class Seen(NamedTuple):
    """A call of a library as it was made.

    Attributes:
        function: What was called.
        args: Positional arguments.
        kwargs: Arguments by name, without outputs to write into.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self) -> Any:
        """The same call."""
        return self.function(*self.args, **self.kwargs)


@contextmanager
def watched(owner: Any, name: str, seen: list[Seen]) -> Iterator[None]:
    """Note every call of an attribute of ``owner``, in a list."""
    own = name in getattr(owner, "__dict__", {})
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if name == "run":  # a planned wrapper, which is handed outputs
            kept = {k: v for k, v in kwargs.items() if k not in ("out", "lse")}
        else:
            kept = dict(kwargs)
        seen.append(Seen(function, args, kept))
        return function(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, function)
        else:
            delattr(owner, name)


def entries(backend: AttentionBackend, plan: Plan) -> list[tuple[Any, str]]:
    """Where an adapter may enter its library: objects and attributes that can be watched."""
    if backend.name == "flashinfer":
        return [(plan.wrapper, "run")]  # type: ignore[attr-defined]
    if backend.name == "flash_attention":
        module = backend.build.module  # type: ignore[attr-defined]
        names = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
        return [(module, name) for name in names if hasattr(module, name)]
    if backend.name == "torch_varlen":
        return [(torch_varlen.probe_varlen().module, "varlen_attn")]
    if backend.name == "torch_sdpa":
        return [(torch, name) for name in torch_sdpa.OPERATORS.values()]
    if backend.name == "torch_flex":
        return [(torch_flex, "flex_attention")]
    raise ValueError(f"{backend.name} is no adapter")


def library_call(backend: AttentionBackend, x: Inputs) -> Seen:
    """What a run of the adapter asks of its library.

    Raises:
        RuntimeError: The run made no call or several: there is nothing to compare with.
    """
    seen: list[Seen] = []
    plan = backend.plan(x.batch)
    managers = [watched(owner, name, seen) for owner, name in entries(backend, plan)]
    for manager in managers:
        manager.__enter__()
    try:
        if backend.name != "flashinfer":  # whose wrapper belongs to the plan that is watched
            plan = backend.plan(x.batch)
        backend.run(x.q[0], x.k[0], x.v[0], plan)
    finally:
        for manager in managers:
            manager.__exit__(None, None, None)
    if len(seen) != 1:
        raise RuntimeError(f"run called the library {len(seen)} times, not once")
    call = seen[0]
    if backend.name == "torch_flex":  # its own entry only chooses between two
        fast, *tensors = call.args
        name = call.function.__name__
        function = getattr(torch_flex.flex_module(), name)
        if fast:
            function = torch_flex.compiled(name).__wrapped__  # type: ignore[attr-defined]
        # As the adapter calls it: with gradients it would be compiled once more.
        call = Seen(torch.no_grad()(function), tuple(tensors), call.kwargs)
    return call


def copies(
    backend: AttentionBackend, plan: Plan, x: Inputs, found: Any
) -> Callable[[], Any] | None:
    """The copies that a kernel for equal lengths needs around it; None if it needs none.

    Args:
        backend: An adapter.
        plan: A plan of it.
        x: What it computes.
        found: What the library's own call gave.
    """
    if backend.name not in ("torch_sdpa", "torch_flex"):
        return None
    padded = plan.padded if hasattr(plan, "padded") else plan.groups[0].padded  # type: ignore
    pages, k, v = padded.pages, x.k[0], x.v[0]
    lse = getattr(found[1], "lse", found[1])
    apart = lse.shape[0] > 1 and lse.shape[2] > 1

    def call() -> None:
        if pages is not None:
            pages.take(k)
            pages.take(v)
        if apart:
            lse.transpose(1, 2).contiguous()

    return call if apart or pages is not None else None


def compare(
    direct: Callable[[], Any], ours: Callable[[], Any], device: torch.device, samples: int
) -> tuple[Times, Times, Times]:
    """Host microseconds of two calls in turn, and of their difference within each turn."""
    sync = sync_of(device)
    times: tuple[list[float], list[float]] = ([], [])
    for call in (direct, ours) * 3:
        call()
    collected = gc.isenabled()
    gc.collect()
    gc.disable()  # as timeit does: a collection in the middle is nobody's cost
    try:
        for turn in range(samples):
            pair = [(0, direct), (1, ours)]
            for i, call in pair if turn % 2 == 0 else pair[::-1]:
                sync()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                times[i].append((time.perf_counter() - start) / CALLS * 1e6)
    finally:
        if collected:
            gc.enable()
    sync()
    gaps = [b - a for a, b in zip(*times)]
    return Times.of(times[0]), Times.of(times[1]), Times.of(gaps)


def measure(
    names: Sequence[str], device: torch.device, samples: int = 401, cases: dict[str, Case] = CASES
) -> Iterator[dict[str, Any]]:
    """A row for every library that can be asked, and the reasons of those that cannot.

    Args:
        names: Backends, as ``backend_ways.parse`` takes them.
        device: Where they run; on a CPU a run computes, so that nothing can be said of its cost.
        samples: Turns of each comparison.
        cases: Points by phase.

    Yields:
        Rows of a results file; those with a ``reason`` were refused.
    """
    for phase, case in cases.items():
        x = Inputs(case, device=device)
        want = reference(x)
        limit = limit_of(want.o, x.spec.dtype)
        for name in names:
            point = {"phase": phase, "backend": name}
            why = why_not(name, x.spec, case.phase, device)
            if not why:
                try:
                    yield {**point, **_row(name, x, want, limit, samples)}
                    continue
                except Exception as error:  # foreign code may raise anything
                    why = f"{type(error).__name__}: {error}"
            yield {**point, "reason": why[:600]}


def _row(name: str, x: Inputs, want: Any, limit: float, samples: int) -> dict[str, Any]:
    backend = chooser(name, x.spec, x.case.phase, x.device)()
    seen = library_call(backend, x)
    plan = backend.plan(x.batch)
    q, k, v = x.q[0], x.k[0], x.v[0]
    row: dict[str, Any] = {"bench": "adapter-overhead", "case": x.case.row()}
    build = getattr(backend, "build", None)
    row["library"] = build.label if build is not None else version_of(backend)
    if not check(lambda _: backend.run(q, k, v, plan), want, limit).right:
        return {**row, "right": False}
    direct, ours, gap = compare(seen.again, lambda: backend.run(q, k, v, plan), x.device, samples)
    needed = copies(backend, plan, x, seen.again())
    if needed is not None:
        _, _, more = compare(seen.again, lambda: (seen.again(), needed()), x.device, samples)
        row["copies_us"] = round(more.median_us, 2)
    return {
        **row, "right": True, "direct_us": round(direct.median_us, 2),
        "ours_us": round(ours.median_us, 2), "overhead_us": round(gap.median_us, 2),
        "p25_us": round(gap.p25_us, 2), "p75_us": round(gap.p75_us, 2), "samples": gap.samples,
        "aim_us": AIM_US, "met": gap.median_us < AIM_US,
    }  # fmt: skip


def version_of(backend: AttentionBackend) -> str:
    """The library behind an adapter and its release."""
    from ..packages import installed_version

    package = backend.packages[0]  # type: ignore[attr-defined]
    return f"{package} {torch.__version__ if package == 'torch' else installed_version(package)}"


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    if "reason" in row:
        return f"  {row['phase']}, {row['backend']}: {row['reason'][:120]}"
    found = "WRONG"
    if row["right"]:
        found = f"{row['direct_us']:7.1f} {row['ours_us']:7.1f} {row['overhead_us']:+7.1f} us"
        found += "" if row["met"] else f"  (aim {AIM_US:.0f})"
    return f"{row['phase']:8s}{row['backend']:52s}{found}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 1 if an answer was wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="Host time that adapters add to their libraries.")
    parser.add_argument("--json", help="results file")
    parser.add_argument("--backend", action="append", help="name or name:option=value,...")
    parser.add_argument("--samples", type=int, default=401)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("needs a GPU: on a CPU a run computes while it is called", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for row in measure(chosen.backend or BACKENDS, device, chosen.samples):
        (refused if "reason" in row else rows).append(row)
        print(line(row), flush=True)
        save(chosen.json, "attn_backends.bench.adapter_overhead", rows, refused=refused)
    return int(any(not row["right"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
