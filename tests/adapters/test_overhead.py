"""The benchmark of what adapters add: the library's own call is really that, and honestly timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from standin_flash import flash_attn_2
from standin_flashinfer import flashinfer
from standin_varlen import varlen

from attn_backends.bench import adapter_overhead as bench
from attn_backends.bench.attention_cases import Case, Inputs
from attn_backends.bench.backend_ways import chooser
from attn_backends.bench.tables import table

CPU = torch.device("cpu")
FA2 = 'flash_attention:version="2",source=package'
SMALL: dict[str, Any] = dict(num_heads=4, num_kv_heads=2, head_dim=64, head_dim_v=64, dtype="fp16")
SMALL["kv_dtype"] = "fp16"
DECODE = Case("adapter", 3, 1, 20, page_size=256, **SMALL)
PREFILL = Case("adapter", 2, 9, 9, page_size=None, **SMALL)


@pytest.fixture
def libraries(install: Any, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins of three libraries."""
    modules = {
        "flash_attn": flash_attn_2(),
        "torch.nn.attention.varlen": varlen("2.13"),
        **flashinfer(),
    }
    install(**modules)
    monkeypatch.setattr(bench, "CALLS", 2)
    return modules


def test_every_library_that_can_be_asked_gets_a_row_and_the_others_a_reason(
    libraries: dict[str, Any],
) -> None:
    names = (FA2, "flashinfer:kernel=fa2,workspace_mb=1", "torch_varlen", "torch_sdpa")
    names += ('flash_attention:version="3"',)
    cases = {"decode": DECODE, "prefill": PREFILL}
    rows = list(bench.measure(names, CPU, samples=2, cases=cases))
    assert len(rows) == len(names) * len(cases)
    measured = {(r["backend"], r["phase"]) for r in rows if "reason" not in r}
    assert measured == {(n, p) for n in names[:4] for p in cases}
    for row in rows:
        if "reason" in row:
            assert "not installed" in row["reason"]
            continue
        assert row["right"] and row["direct_us"] > 0 and row["ours_us"] > 0
        assert row["met"] == (row["overhead_us"] < 10.0) and row["samples"] == 2
        assert bench.line(row).startswith(row["phase"])


def test_the_call_is_the_library_s_own_with_the_arguments_that_it_was_given(
    libraries: dict[str, Any],
) -> None:
    x = Inputs(DECODE, device=CPU)
    backend = chooser(FA2, x.spec, "decode", CPU)()
    module = libraries["flash_attn"]
    before = module.flash_attn_with_kvcache
    seen = bench.library_call(backend, x)
    assert seen.function is before and module.flash_attn_with_kvcache is before
    assert torch.equal(seen.kwargs["cache_seqlens"], x.batch.seqlens_k)
    got = backend.run(x.q[0], x.k[0], x.v[0], backend.plan(x.batch))
    o, lse = seen.again()
    assert torch.equal(o.squeeze(1), got.o) and torch.equal(lse.squeeze(2), got.lse)


def test_outputs_are_left_to_the_library(libraries: dict[str, Any]) -> None:
    x = Inputs(DECODE, device=CPU)
    backend = chooser("flashinfer:workspace_mb=1", x.spec, "decode", CPU)()
    seen = bench.library_call(backend, x)
    assert not {"out", "lse"} & set(seen.kwargs) and seen.kwargs["return_lse"] is True
    assert torch.equal(seen.kwargs["q"], x.q[0])


def test_a_run_of_several_calls_has_nothing_to_be_compared_with() -> None:
    x = Inputs(Case("adapter", 2, 1, 300, page_size=None, ragged=True, **SMALL), device=CPU)
    backend = chooser("torch_sdpa", x.spec, "decode", CPU)()
    with pytest.raises(RuntimeError, match="2 times, not once"):
        bench.library_call(backend, x)


def test_a_wrong_answer_has_no_time(
    libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = libraries["flash_attn"]
    right = module.flash_attn_with_kvcache

    def wrong(**arguments: Any) -> Any:
        o, lse = right(**arguments)
        return o + 1, lse

    monkeypatch.setattr(module, "flash_attn_with_kvcache", wrong)
    (row,) = bench.measure([FA2], CPU, samples=2, cases={"decode": DECODE})
    assert row["right"] is False and "ours_us" not in row
    assert bench.line(row).endswith("WRONG")


def test_the_difference_is_taken_within_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    drift = [1.0]

    def takes(us: float) -> Any:
        def call() -> None:
            now[0] += us * 1e-6 * drift[0]

        return call

    def clock() -> float:
        drift[0] += 0.01  # a machine that slows down must not look like an adapter's cost
        return now[0]

    monkeypatch.setattr(bench.time, "perf_counter", clock)
    direct, ours, gap = bench.compare(takes(20), takes(25), CPU, 41)
    assert ours.median_us > direct.median_us > 20
    assert 4.5 < gap.median_us / (direct.median_us / 20) < 5.5


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert bench.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_the_table_tells_what_is_added_and_whether_the_aim_was_met(
    libraries: dict[str, Any],
) -> None:
    rows = list(bench.measure([FA2], CPU, samples=2, cases={"decode": DECODE}))
    wrong = {**rows[0], "right": False}
    meta = {"command": "bench", "date": "2026-01-01", "packages": {}}
    text = table({"meta": meta, "rows": [*rows, wrong]}).splitlines()
    assert text[-3].split(" | ")[-1] == "< 10 us |"
    assert text[-1].startswith(f"| `{FA2}` | FlashAttention 2 (flash-attn 2.8.3) | decode |")
    assert text[-1].endswith("| yes |" if rows[0]["met"] else "| no |") and len(text) == 7
