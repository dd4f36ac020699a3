"""The Hopper prefill compiles for sm_90a without a GPU, without spills, and with its overlap."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from attn_backends.triton_native import hopper_compat
from attn_backends.triton_native.hopper_offline import read_sass

#: Exponentials of half a step: of a score tile of 64 rows over 128 threads. As many sums.
EXPECTED = {
    "d64": [32, 32], "d128": [32, 32], "d128-turns": [32, 32], "d192": [32, 32],
    "d256-p16": [16, 16], "d128-p1": [32, 32],
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    if hopper_compat.REASON is not None:
        pytest.skip(str(hopper_compat.REASON))
    # A process of its own: here Triton may be in its interpreter, which does not compile.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-m", "attn_backends.triton_native.hopper_offline", *EXPECTED],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {row.pop("name"): row for row in rows}


@pytest.mark.parametrize("name", EXPECTED)
def test_it_compiles_without_serialized_tensor_cores(reports, name):
    report = reports[name]
    assert report["registers"] == 168  # more, and warps could not trade up to 240
    assert report["shared"] <= 232448
    assert not report["serialized"]


@pytest.mark.parametrize("name", EXPECTED)
def test_its_arguments_can_be_handed_to_the_driver(reports, name):
    assert reports[name]["direct"]


@pytest.mark.parametrize("name", EXPECTED)
def test_exponentials_and_sums_stand_between_the_two_waits(reports, name):
    if reports[name]["overlap"] is None:
        pytest.skip("no disassembler beside this Triton")
    for found in (reports[name]["overlap"], reports[name]["sums"]):
        assert all(a >= 0.85 * b for a, b in zip(found, EXPECTED[name], strict=True))


@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_is_spilled(reports, name):
    report = reports[name]
    if report["local"] is None:
        pytest.skip("no disassembler beside this Triton")
    assert report["hot_local"] == 0
    # Between two tiles, not within: the producer that gathers keeps a few invariants in local
    # memory, and so do later versions at D = 192 and 256.
    gathers, later = name == "d128-p1", hopper_compat.triton_version() > (3, 6)
    if not (gathers or later):
        assert report["local"] == 0
    assert report["local"] <= 8 or later


def _line(offset: int, text: str) -> str:
    return f"        /*{offset:04x}*/                   {text} ;"


def test_a_lost_overlap_and_a_spill_are_seen():
    good = ["WARPGROUP.DEPBAR.LE gsb0, 0x1", "MUFU.EX2 R1, R2", "@!P0 MUFU.EX2 R1, R2",
            "FADD R1, R1, R2", "WARPGROUP.DEPBAR.LE gsb0, 0x0"]  # fmt: skip
    bad = ["LDL R1, [R2]", "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0",
           "MUFU.EX2 R1, R2"]  # fmt: skip
    spilled = ["WARPGROUP.DEPBAR.LE gsb0, 0x1", "STL [R2], R1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"]

    def read(lines: list[str]) -> tuple:
        return read_sass("\n".join(_line(16 * i, x) for i, x in enumerate(lines)))

    assert read(good) == (0, 0, (2,), (1,))
    assert read(bad) == (1, 0, (0,), (0,))
    assert read(spilled) == (1, 1, (0,), (0,))
