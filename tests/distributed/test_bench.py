"""The benchmark of context parallelism: a rehearsal on CPUs, and a short run on two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_backends.bench.distributed_cost import measured_table, model_table

ROOT = Path(__file__).resolve().parents[2]


def run(out: Path, *arguments: str) -> list[dict]:
    """Rows of a run of the benchmark in its own processes."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "attn_backends.bench.distributed", "--json", str(out)]
    done = subprocess.run(
        [*command, *arguments], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    return json.loads(out.read_text())["rows"]


def check(rows: list[dict]) -> None:
    assert all(r["median_us"] > 0 for r in rows)
    assert all(r.get("right", True) for r in rows)
    benches = {r["bench"] for r in rows}
    pieces = {"ring-piece", "cp-decode-piece", "ring-hop", "cp-exchange"}
    assert benches == {"ring-prefill", "cp-decode", *pieces}
    for r in rows:
        if "efficiency" in r:
            assert r["gpus"] == 2 and 0 <= r["exposed_share"] < 1
    assert len(measured_table(rows)) > 2


@pytest.mark.xdist_group("gloo-2")
def test_a_rehearsal_on_cpus_measures_everything(tmp_path: Path) -> None:
    small = ("--prefill", "128", "--decode", "1024", "--rounds", "1")
    check(run(tmp_path / "cpu.json", "--device", "cpu", *small))


@pytest.mark.multi_gpu
def test_two_gpus_agree_with_one_under_nccl(tmp_path: Path) -> None:
    small = ("--prefill", "16384", "--decode", "131072", "--rounds", "3", "--gpus", "2")
    rows = run(tmp_path / "gpu.json", *small)
    check(rows)
    assert model_table(rows)
