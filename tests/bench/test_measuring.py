"""Timing and the gate before it: no figure without a right answer, nothing left out unsaid."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from attn_backends import AttentionOutput, InvalidInputError, UnknownBackendError
from attn_backends.bench.attention_cases import Case, Inputs
from attn_backends.bench.attention_point import measure_case, peer_ways
from attn_backends.bench.backend_ways import backend_ways, capacity_of, parse
from attn_backends.bench.gate import Checked, check, limit_of, reference
from attn_backends.bench.graph_timer import LEAST_ROUNDS, Times, Variant
from attn_backends.bench.roofline import GPUS, find_gpu
from attn_backends.bench.runner import EAGER, Point, Way, default_modes, measure_point
from attn_backends.bench.wall_timer import measure_eager, measure_host, one_thread

CPU = torch.device("cpu")
SMALL = Case("decode", 2, 1, 33, num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=16)


def test_times_are_the_median_and_percentiles_of_the_samples() -> None:
    times = Times.of([float(n) for n in reversed(range(101))])
    assert (times.median_us, times.p25_us, times.p75_us) == (50.0, 25.0, 75.0)
    assert (times.p20_us, times.p80_us, times.samples) == (20.0, 80.0, 101)
    assert Times.of([3.0]) == Times(3.0, 3.0, 3.0, 3.0, 3.0, 1)
    row = Times.of([1.23456, 1.23456]).row(digits=3)
    assert row["median_us"] == 1.235 and row["samples"] == 2
    assert set(row) == {"median_us", "p20_us", "p25_us", "p75_us", "p80_us", "samples"}


def test_eager_calls_take_turns_and_rotate_over_the_copies() -> None:
    seen: list[tuple[str, int]] = []

    def variant(name: str) -> Variant:
        def call(i: int) -> None:
            seen.append((name, i))
            torch.zeros(50_000).sum()  # longer than a sample needs to be one call

        return Variant(name, call)

    times = measure_eager([variant("a"), variant("b")], copies=3, device=CPU, rounds=4)
    assert {t.samples for t in times.values()} == {4}
    assert {i for _, i in seen} == {0, 1, 2}
    timed = [name for name, _ in seen[4:]]
    order = [n for i, n in enumerate(timed) if i == 0 or timed[i - 1] != n]
    assert order == ["a", "b", "a", "b", "a"]  # forward, backward, forward, backward: joined


def test_a_limit_of_time_leaves_the_least_rounds() -> None:
    variant = Variant("slow", lambda i: torch.zeros(200_000).sort())
    times = measure_eager([variant], 1, CPU, rounds=1000, limit_s=0.0)
    assert times["slow"].samples == LEAST_ROUNDS


def test_host_time_is_per_call() -> None:
    count = [0]

    def call() -> None:
        count[0] += 1

    times = measure_host({("x", "plan"): call}, CPU, samples=5, calls=7)
    assert times["x", "plan"].samples == 5
    assert count[0] == 1 + 5 * 7


def test_a_cpu_measures_in_one_thread_and_gives_them_back() -> None:
    torch.set_num_threads(2)
    with one_thread(CPU):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def _want() -> AttentionOutput:
    torch.manual_seed(0)
    return AttentionOutput(torch.randn(3, 2, 8), torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.5, 0]]))


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda o, lse: AttentionOutput(o, lse), True),
        (lambda o, lse: (o.bfloat16(), None), True),
        (lambda o, lse: AttentionOutput(o * 1.05, lse), False),
        (lambda o, lse: AttentionOutput(torch.full_like(o, math.nan), lse), False),
        (lambda o, lse: AttentionOutput(o, lse / math.log(2)), False),
        (lambda o, lse: AttentionOutput(o, torch.full_like(lse, math.nan)), False),
        (lambda o, lse: AttentionOutput(o, lse + 0.1), False),
        (lambda o, lse: o.reshape(1, 3, 2, 8), True),
    ],
)
def test_the_gate_lets_only_right_answers_through(change: Callable, right: bool) -> None:
    want = _want()
    checked = check(lambda i: change(*want), want, limit_of(want.o, torch.bfloat16))
    assert checked.right is right


def test_the_gate_knows_that_an_empty_row_has_no_mass() -> None:
    want = _want()
    want.lse[0] = -math.inf
    limit = limit_of(want.o, torch.float32)
    assert check(lambda i: want, want, limit).right
    filled = AttentionOutput(want.o, want.lse.nan_to_num(neginf=-1e30))
    assert not check(lambda i: filled, want, limit).right


def test_the_limit_grows_with_the_narrowest_dtype_and_the_values() -> None:
    want = torch.tensor([0.5, -2.0])
    limits = [limit_of(want, d) for d in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)]
    assert limits == sorted(limits) and len(set(limits)) == 3
    assert limit_of(want, torch.bfloat16, torch.float8_e4m3fn) == limits[2]
    assert limit_of(want * 2, torch.bfloat16) == 2 * limits[1]


def test_a_wrong_answer_has_a_row_without_any_time(register: Callable[..., str]) -> None:
    names = [register("toy_scaled", scale=1.3), register("toy_base2", lse_scale=1.5)]
    x = Inputs(SMALL, device=CPU)
    ways, _ = backend_ways(x, ["torch_native", *names])
    found = measure_case(x, ways, modes=(EAGER,), rounds=2)
    rows = {row["backend"]: row for row in found.rows}
    assert rows["torch_native"]["right"] and rows["torch_native"]["median_us"] > 0
    for name in names:
        assert not rows[name]["right"]
        assert not {"median_us", "gbps", "tflops", "roofline_pct"} & set(rows[name])
    assert rows["toy_scaled"]["max_err"] > rows["toy_scaled"]["limit"]
    assert rows["torch_native"]["device"] == "cpu" and rows["torch_native"]["clock"] == "wall"


def test_what_cannot_be_measured_is_kept_with_its_reason(register: Callable[..., str]) -> None:
    register("toy_raises", error="ptxas fatal")
    x = Inputs(SMALL, device=CPU)
    ways, against = backend_ways(x, ["toy_raises", "torch_varlen"])
    assert "device=cpu (supported: cuda)" in against["torch_varlen"]
    found = measure_case(x, ways, modes=(EAGER,), rounds=2)
    assert found.rows == []
    [item] = found.refused
    assert item["backend"] == "toy_raises" and "RuntimeError: ptxas fatal" in item["reason"]
    assert item["case"] == SMALL.row()


def test_without_names_every_backend_is_asked() -> None:
    ways, against = backend_ways(Inputs(SMALL, device=CPU), [])
    assert {"torch_native", "torch_sdpa"} <= set(ways)
    assert {"flash_attention", "flashinfer"} <= set(against)
    assert not set(ways) & set(against)


def test_a_name_may_carry_options_and_is_checked() -> None:
    name = "torch_flex:compile=never"
    assert parse(name) == ("torch_flex", {"compile": "never"})
    assert parse("triton:hopper=false,num_splits=4")[1] == {"hopper": False, "num_splits": 4}
    assert parse("flash_attention:version=3")[1] == {"version": "3"}  # one of several words
    ways, _ = backend_ways(Inputs(SMALL, device=CPU), [name])
    assert list(ways) == [name]
    with pytest.raises(UnknownBackendError):
        parse("tritom")
    with pytest.raises(InvalidInputError, match="option=value"):
        parse("triton:hopper")
    with pytest.raises(InvalidInputError, match="hoper"):
        backend_ways(Inputs(SMALL, device=CPU), ["torch_flex:hoper=false"])


def test_peers_are_asked_on_a_gpu_only() -> None:
    assert peer_ways(Inputs(SMALL, device=CPU)) == {}
    assert default_modes(CPU) == (EAGER,)
    assert len(default_modes(torch.device("cuda"))) == 2


def test_percent_of_roofline_is_the_floor_over_the_median() -> None:
    # 4.8e9 bytes take 1 ms at 4.8 TB/s, 989.4e9 FLOP take 1 ms at 989.4 TFLOP/s.
    for moved, flops, floor in ((4.8e9, 1, 1000.0), (1, 2 * 989.4e9, 2000.0)):
        point = Point("b", {}, "l", int(moved), int(flops), "bf16", 1, CPU, GPUS["h200"])
        assert point.floor_us == pytest.approx(floor)
        row = point.row("x", EAGER, Times.of([4000.0]), Checked(0.0, 1.0, True))
        assert row["roofline_pct"] == pytest.approx(floor / 40, abs=0.1)
        assert row["floor_us"] == pytest.approx(floor)
    unknown = Point("b", {}, "l", 1, 1, "bf16", 1, CPU, None)
    assert unknown.floor_us is None
    assert "roofline_pct" not in unknown.row("x", EAGER, Times.of([1.0]), Checked(0, 1, True))


def test_a_gpu_is_known_by_its_whole_name_only() -> None:
    assert find_gpu("NVIDIA H200") is GPUS["h200"]
    for name in ("NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA L40S", ""):
        assert find_gpu(name) is None


def test_a_way_may_bring_a_gate_of_its_own() -> None:
    point = Point("b", {}, "l", 1, 1, "fp32", 1, CPU)

    def never(call: object) -> Checked:
        return Checked(9.0, 1.0, False)

    ways = {
        "copy": Way(lambda: lambda i: None, gate=lambda call: Checked(0.0, 0.0, True)),
        "other": Way(lambda: lambda i: None),
    }
    found = measure_point(point, ways, never, modes=(EAGER,), rounds=1)
    assert {r["backend"]: r["right"] for r in found.rows} == {"copy": True, "other": False}


def test_inputs_count_what_a_case_moves_and_computes() -> None:
    case = Case("prefill", 2, 3, 5, 4, 2, 16, 8, page_size=None, dtype="fp16", kv_dtype="fp16")
    x = Inputs(case, device=CPU)
    pairs = 2 * (3 + 4 + 5)
    assert x.flops == 2 * pairs * 4 * (16 + 8)
    assert x.bytes == 2 * 5 * 2 * (16 + 8) * 2 + 2 * 3 * 4 * 16 * 2 + 2 * 3 * 4 * (8 * 2 + 4)
    assert x.copies == 1
    assert limit_of(reference(x).o, torch.float16) > 0


def test_a_capacity_just_holds_its_batch() -> None:
    x = Inputs(SMALL, device=CPU)
    capacity = capacity_of(x.batch)
    assert (capacity.num_seqs, capacity.total_q, capacity.max_seqlen_k) == (2, 2, 33)
    assert capacity.max_pages == 3


# --- CUDA graphs, without a GPU: what is captured, and what happens if that fails ----------------


def _graphs(monkeypatch: pytest.MonkeyPatch, broken: set[int]) -> list[str]:
    """Capture by calling once; calls that return a number in ``broken`` cannot be captured."""
    captured: list[str] = []

    def capture(variant: Variant, copies: int) -> None:
        if variant.call(0) in broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        captured.append(variant.name)
        variant.graph = object()  # type: ignore[assignment]

    def measure(variants: list[Variant], rounds: int, limit_s: float | None) -> dict:
        assert all(v.graph is not None for v in variants)
        return {v.name: Times.of([float(v.call(0))]) for v in variants}  # type: ignore[arg-type]

    monkeypatch.setattr("attn_backends.bench.runner.capture", capture)
    monkeypatch.setattr("attn_backends.bench.runner.measure", measure)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    return captured


def _right(call: Callable) -> Checked:
    return Checked(0.0, 1.0, call(0) < 100)


def test_graphs_are_tried_as_planned_then_with_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = _graphs(monkeypatch, broken={1, 2, 3})
    point = Point("b", {}, "l", 1, 1, "bf16", 1, CPU)

    def way(first: int, later: int | None = None, why: str = "") -> Way:
        other = None if later is None else (lambda: lambda i: later)
        return Way(lambda: lambda i: first, other, no_graph=why)

    ways = {
        "plain": way(10),
        "capacity": way(1, 20),
        "never": way(2),
        "both fail": way(2, 3),
        "wrong later": way(2, 200),
        "undeclared": way(30, why="it does not declare cuda_graph"),
    }
    found = measure_point(point, ways, _right, modes=("graph_cold",), rounds=1)
    assert captured == ["plain", "capacity"]
    assert {r["backend"]: r["median_us"] for r in found.rows} == {"plain": 10.0, "capacity": 20.0}
    reasons = {item["backend"]: item["reason"] for item in found.refused}
    assert set(reasons) == set(ways) - {"plain", "capacity"}
    assert all(item["mode"] == "graph_cold" for item in found.refused)
    assert "capturing" in reasons["never"] and "the answer is wrong" in reasons["wrong later"]
    assert "declare" in reasons["undeclared"]


def test_what_cannot_be_captured_still_has_its_eager_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _graphs(monkeypatch, broken={1})
    point = Point("b", {}, "l", 1, 1, "bf16", 1, CPU)
    ways = {"x": Way(lambda: lambda i: 1)}
    found = measure_point(point, ways, _right, modes=("graph_cold", EAGER), rounds=1)
    assert [row["mode"] for row in found.rows] == [EAGER]
    assert [item["mode"] for item in found.refused] == ["graph_cold"]


def test_only_declared_backends_are_captured() -> None:
    x = Inputs(SMALL, device=CPU)
    assert "cuda_graph" in backend_ways(x, ["torch_native"])[0]["torch_native"].no_graph
    spec = SMALL.spec
    from attn_backends.bench.backend_ways import no_graph
    from attn_backends.triton_native.backend import TritonBackend

    assert no_graph(TritonBackend(spec)) == ""
