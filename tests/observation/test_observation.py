"""Watching plans and calls tells what happened, and costs nothing while nobody watches."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_backends as ab
from attn_backends import environment, observation
from attn_backends.registry import selection
from attn_backends.torch_native.backend import TorchNativeBackend

ROOT = Path(ab.__file__).resolve().parent.parent
SPEC = ab.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
DECODE, PREFILL = ([1, 1], [5, 3]), ([4, 1], [6, 3])


@pytest.fixture(autouse=True)
def unobserved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("attn_backends")
    level, handlers = logger.level, list(logger.handlers)
    ab.stats(reset=True)
    selection._cache.clear()
    selection._logged.clear()
    yield
    for name in ("LOG", "STATS", "RANGES"):
        monkeypatch.delenv(f"ATTN_BACKENDS_{name}", raising=False)
    observation._asked.clear()
    ab.select(SPEC, device="cpu")
    assert observation._now == observation.Observed()
    logger.setLevel(level)
    logger.handlers[:] = handlers
    ab.stats(reset=True)


def step(lengths: tuple[list[int], list[int]]) -> Callable[[], ab.AttentionOutput]:
    """A planned call."""
    q_lens, kv_lens = lengths
    backend = TorchNativeBackend(SPEC)
    plan = backend.plan(ab.Batch.from_lengths(q_lens, kv_lens))
    q, kv = torch.zeros(sum(q_lens), 4, 8), torch.zeros(sum(kv_lens), 2, 8)
    return lambda: backend.run(q, kv, kv, plan)


def python_calls(function: Callable[[], Any]) -> list[tuple[str, str]]:
    """File and name of every Python function that a call enters."""
    entered: list[tuple[str, str]] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            entered.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered


def test_a_run_that_nobody_watches_enters_no_function_for_it() -> None:
    run = step(DECODE)
    run()
    before = python_calls(run)
    with ab.observed(stats=True, ranges=True, log="trace"):
        watched = python_calls(run)
    after = python_calls(run)
    ours = {Path(observation.__file__).name, "counters.py"}
    assert any(Path(file).name in ours for file, _ in watched), "the measurement sees functions"
    assert after == before and len(watched) > len(before)
    assert not [file for file, _ in before if Path(file).name in ours | {"environment.py"}]


def test_a_run_that_nobody_watches_is_the_method_as_it_is_written() -> None:
    plain = observation._PLAIN[ab.AttentionBackend, "run"]
    assert ab.AttentionBackend.run is plain and plain.__module__ == "attn_backends.backend"
    with ab.observed(stats=True):
        assert ab.AttentionBackend.run is not plain
    assert ab.AttentionBackend.run is plain
    with ab.observed(log="info"):
        assert ab.AttentionBackend.run is plain, "choices are logged without watching runs"


def test_watching_is_not_even_loaded_before_it_is_wanted() -> None:
    code = (
        "import os, sys, torch, attn_backends as ab\n"
        "q = torch.zeros(2, 2, 8)\n"
        "ab.attention(q, q, q)\n"
        "before = 'attn_backends.observation' in sys.modules\n"
        "os.environ['ATTN_BACKENDS_STATS'] = '1'\n"
        "ab.attention(q, q, q)\n"
        "print(before, ab.stats().calls)"
    )
    env = {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "ATTN_BACKENDS_BACKEND": "torch_native",
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False {'torch_native.prefill': 1}", done.stderr


def test_plans_and_calls_are_counted_by_backend_and_phase() -> None:
    with ab.observed(stats=True):
        decode, prefill = step(DECODE), step(PREFILL)
        for call in (decode, decode, prefill):
            call()
        found = ab.stats(reset=True)
    assert found.counting
    assert found.calls == {"torch_native.decode": 2, "torch_native.prefill": 1}
    assert found.plans == {"torch_native.decode": 1, "torch_native.prefill": 1}
    assert set(found.plan_seconds) == set(found.plans)
    assert all(0 < seconds < 60 for seconds in found.plan_seconds.values())
    assert found.fallbacks == 0 and not found.refusals and not found.mistakes
    assert found.as_dict()["calls"] == {"torch_native.decode": 2, "torch_native.prefill": 1}
    empty = ab.stats()
    assert not empty.calls and not empty.plan_seconds and not empty.counting
    decode()
    assert not ab.stats().calls, "nobody counts now"


def test_refills_of_a_plan_are_counted_apart() -> None:
    capacity = ab.Capacity(num_seqs=2, total_q=2, max_seqlen_q=1, max_seqlen_k=8)

    class Graphed(TorchNativeBackend):
        name = "graphed"
        capabilities = ab.Capabilities(
            devices=("cpu",),
            dtypes=(torch.float32,),
            features=frozenset({"ragged", "causal", "cuda_graph"}),
        )
        _plan = ab.AttentionBackend._plan  # type: ignore[assignment]

    batch = ab.Batch.from_lengths(*DECODE)
    with ab.observed(stats=True):
        plan = Graphed(SPEC).plan(batch, capacity)
        plan.update(batch)
        plan.update(batch)
        found = ab.stats()
    assert found.plans == {"graphed.decode": 1} and found.updates == {"graphed.decode": 2}


def test_choices_refusals_and_mistakes_are_counted() -> None:
    ab.select(SPEC, device="cpu", backend="torch_native")
    ab.select(SPEC, device="cpu", backend="torch_native")  # from the cache
    with pytest.raises(ab.BackendUnavailableError):
        ab.select(SPEC, device="cpu", backend="flashinfer")
    plain = TorchNativeBackend(SPEC)
    batch = ab.Batch.from_lengths(*DECODE)
    with ab.observed(stats=True):
        capacity = ab.Capacity(num_seqs=2, total_q=2, max_seqlen_q=1, max_seqlen_k=8)
        with pytest.raises(ab.UnsupportedCallError):
            plain.plan(batch, capacity)
        with pytest.raises(ab.InvalidInputError):
            plain.run(torch.zeros(1), torch.zeros(1), None, plain.plan(batch))
        with pytest.raises(ab.InvalidInputError):
            plain.run(torch.zeros(1), torch.zeros(1), None, None)  # type: ignore[arg-type]
    found = ab.stats()
    assert found.choices == {"torch_native.prefill": 1}
    assert found.refusals == {"flashinfer": 1, "torch_native": 1}
    assert found.mistakes == {"torch_native": 2}
    assert not found.calls and found.fallbacks == 0


def test_a_backend_other_than_the_one_asked_for_would_count_as_a_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The contract has no fallbacks; one that slipped in would show."""
    other = ab.select(SPEC, device="cpu", backend="torch_flex")
    monkeypatch.setattr(selection, "choose", lambda *_: other)
    assert ab.stats().fallbacks == 0
    ab.select(SPEC, device="cpu", backend="torch_native")
    assert ab.stats().fallbacks == 1


def test_counts_from_many_threads_add_up() -> None:
    with ab.observed(stats=True):
        run = step(DECODE)
        threads = [threading.Thread(target=lambda: [run() for _ in range(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ab.stats().calls == {"torch_native.decode": 80}


def test_ranges_name_backend_and_phase_in_a_trace() -> None:
    with ab.observed(ranges=True), torch.profiler.profile() as trace:
        step(DECODE)()
        step(PREFILL)()
    names = {e.key: e.count for e in trace.key_averages() if e.key.startswith("attn_backends.")}
    assert names == {
        "attn_backends.torch_native.plan": 2,
        "attn_backends.torch_native.decode": 1,
        "attn_backends.torch_native.prefill": 1,
    }
    with torch.profiler.profile() as trace:
        step(DECODE)()
    assert not [e.key for e in trace.key_averages() if e.key.startswith("attn_backends.")]


def test_each_level_of_the_log_tells_more(caplog: pytest.LogCaptureFixture) -> None:
    def lines(level: str) -> list[str]:
        caplog.clear()
        selection._cache.clear()
        selection._logged.clear()
        with ab.observed(log=level), caplog.at_level(environment.log_level(level, "log")):
            ab.select(SPEC, device="cpu", backend="torch_native")
            step(DECODE)()
        return [r.getMessage() for r in caplog.records if r.name == "attn_backends"]

    assert lines("warning") == []
    (choice,) = lines("info")
    assert choice == "torch_native chosen by backend='torch_native' for prefill on cpu"
    _, plan = lines("debug")
    assert plan.startswith("torch_native plans decode in ") and "2 sequences" in plan
    _, _, call = lines("trace")
    assert call.startswith("torch_native.decode runs: q float32[2, 4, 8] strides (32, 8, 1) on cpu")
    assert "k float32[8, 2, 8]" in call and "max_seqlen_k 5" in call and "head_dim=8" in call


def test_inputs_are_in_the_log_before_the_launch(caplog: pytest.LogCaptureFixture) -> None:
    class Crashing(TorchNativeBackend):
        name = "crashing"

        def _run(self, *args: Any) -> Any:
            raise RuntimeError("an illegal memory access was encountered")

    backend = Crashing(SPEC)
    plan = backend.plan(ab.Batch.from_lengths([1], [2]))
    with ab.observed(log="trace"), caplog.at_level(environment.TRACE):
        with pytest.raises(RuntimeError, match="illegal"):
            backend.run(torch.zeros(1, 4, 8), torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), plan)
    assert [r.getMessage()[:22] for r in caplog.records] == ["crashing.decode runs: "]


def test_variables_turn_watching_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    run = step(DECODE)
    monkeypatch.setenv("ATTN_BACKENDS_STATS", "1")
    monkeypatch.setenv("ATTN_BACKENDS_RANGES", "yes")
    ab.select(SPEC, device="cpu")
    run()
    assert ab.stats().calls == {"torch_native.decode": 1} and observation._now.ranges
    with ab.observed(stats=False):  # an argument goes before a variable
        run()
        assert not ab.stats().counting
    assert ab.stats().counting
    monkeypatch.setenv("ATTN_BACKENDS_STATS", "0")
    ab.select(SPEC, device="cpu")
    run()
    assert ab.stats().calls == {"torch_native.decode": 1} and not ab.stats().counting


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"log": "loud"}, "log='loud' (allowed: trace, debug, info, warning, error)"),
        ({"stats": 1}, "stats=1 (allowed: True or False)"),
        ({"ranges": "yes"}, "ranges='yes' (allowed: True or False)"),
    ],
)
def test_a_wrong_request_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ab.InvalidInputError) as error:
        ab.observe(**given)
    assert str(error.value) == words
    assert observation._now == observation.Observed()


@pytest.mark.parametrize("name", ["STATS", "RANGES"])
def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"ATTN_BACKENDS_{name}", "2")
    with pytest.raises(ab.InvalidInputError, match=f"ATTN_BACKENDS_{name}='2'"):
        ab.select(SPEC, device="cpu")
    monkeypatch.delenv(f"ATTN_BACKENDS_{name}")
    ab.select(SPEC, device="cpu")


def test_watched_calls_give_the_same_answer() -> None:
    torch.manual_seed(0)
    backend = TorchNativeBackend(SPEC)
    plan = backend.plan(ab.Batch.from_lengths(*PREFILL))
    q, k, v = torch.randn(5, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    sinks = torch.randn(4)
    want = backend.run(q, k, v, plan, sinks=sinks)
    with ab.observed(stats=True, ranges=True, log="trace"):
        out = ab.AttentionOutput(torch.empty_like(q), torch.empty(5, 4))
        got = backend.run(q, k, v, plan, sinks=sinks, out=out)
    assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)
    assert got.o is out.o
