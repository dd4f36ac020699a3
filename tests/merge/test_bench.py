"""The merge benchmark: its account of bytes, and on a GPU a short run of each part."""

from __future__ import annotations

import json

import pytest

from attn_backends.bench.merge import MAX_COPIES, Case, main


def test_traffic_is_what_must_move_at_least():
    assert Case(1, 1).bytes == 2 * 256 + 2 * 4 + 256 + 4  # 776 bytes and the merged LSE
    assert Case(10, 4, 64, "fp32").bytes == 40 * (3 * 256 + 12)
    assert Case(1, 1, states=8).bytes == 8 * (256 + 4) + 256 + 4
    assert Case(4, 2, empty=1.0).bytes == 8 * (256 + 8 + 256 + 4)


def test_inputs_rotate_far_enough_to_be_cold():
    for tokens in (16, 1024, 65536):
        case = Case(tokens)
        assert case.copies == MAX_COPIES or case.copies * case.bytes >= 5 * 60 * 2**20
    assert Case(1).copies == MAX_COPIES


@pytest.mark.gpu
def test_each_part_writes_checked_rows(tmp_path):
    file = tmp_path / "rows.json"
    common = ["--tokens", "16", "--no-peers", "--rounds", "4", "--json", str(file)]
    assert main(["pairs", *common]) == 0
    found = json.loads(file.read_text())
    rows = found["rows"]
    assert {r["backend"] for r in rows} >= {"cuda", "triton", "torch", "copy"}
    assert all(r["right"] and r["median_us"] > 0 for r in rows)
    assert set(found["meta"]) >= {"command", "date", "gpu", "driver", "torch", "triton", "commit"}
