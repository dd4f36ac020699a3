"""Context parallelism over Gloo on the CPU, in 2, 3 and 4 processes.

Processes are started once per world and run every check of ``worker.py`` there; each check is a
test here.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
CHECKS = [
    node.name
    for node in ast.parse(WORKER.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]
LIMIT_S = 300


@lru_cache
def results(world: int, folder: str) -> dict[str, str]:
    """Name of each check, and what went wrong with it; empty if nothing did."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outs = [Path(folder) / f"{world}-{rank}.json" for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(r), str(world), f"{folder}/store-{world}", str(out)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for r, out in enumerate(outs)
    ]  # fmt: skip
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and any(p.poll() is None for p in ranks):
        if any(p.poll() for p in ranks):  # one failed: the others may wait for it for ever
            time.sleep(2)
            break
        time.sleep(0.05)
    for p in ranks:
        p.kill()
    said = [p.communicate()[0] for p in ranks]
    found = dict.fromkeys(CHECKS, "did not run on every rank:\n" + "\n".join(said))
    reports = [json.loads(out.read_text()) for out in outs if out.exists()]
    for name in CHECKS:
        failed = [r["failed"][name] for r in reports if name in r["failed"]]
        if failed:
            found[name] = "\n".join(failed)
        elif len(reports) == world and all(name in r["seconds"] for r in reports):
            found[name] = ""
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=pytest.mark.xdist_group(f"gloo-{n}")) for n in (2, 3, 4)]
)
def test_promise_holds_on_every_rank(world: int, name: str, folder: str) -> None:
    wrong = results(world, folder)[name]
    assert not wrong, wrong
