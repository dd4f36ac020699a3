"""The measurement of continuous batching, rehearsed on a CPU."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from attn_backends.bench import transformers_run
from attn_backends.bench.tables import table

pytest.importorskip("transformers")
TINY = ["--device", "cpu", "--requests", "2", "--prompt", "9", "--new", "2", "--turns", "1"]


def test_every_route_has_the_tokens_of_sdpa_and_a_rate(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert transformers_run.main([*TINY, "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    tokens = [r for r in results["rows"] if r["bench"] == "transformers_tokens"]
    assert [r["equal_tokens"] for r in tokens] == [1.0, 1.0]
    assert all(r["tokens"] == 4 for r in tokens)
    rates = [r for r in results["rows"] if r["bench"] == "transformers_throughput"]
    assert len(rates) == 3 and all(r["tokens_per_s"] > 0 for r in rates)
    assert rates[0]["ratio"] == 1.0
    assert "within a turn" in table(results)


def test_a_route_that_fails_is_told_and_taken_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = Namespace(device="cpu", requests=1, prompt=5, new=1)
    ways = transformers_run.routes("flashinfer", graphs=False)[:2]
    assert transformers_run.tokens(options, ways) == []
    said = capsys.readouterr().out
    assert said.count("FAILED: ") == 1 and "flashinfer" in said
    assert [route.name for route in ways] == ["sdpa"]
