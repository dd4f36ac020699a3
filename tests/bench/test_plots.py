"""Pictures: every measured point is drawn, with its roofline, and ratios say who is faster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from attn_backends import InvalidInputError
from attn_backends.bench import gallery_data, plots
from attn_backends.bench.plots import label_of, plot

pytest.importorskip("matplotlib", reason="plots need the extra [bench]")


def _row(backend: str, batch: int, kv_len: int, median: float, **more: Any) -> dict[str, Any]:
    case = {
        "batch": batch, "q_len": 1, "kv_len": kv_len, "num_heads": 8, "num_kv_heads": 2,
        "head_dim": 64, "dtype": "bf16", "kv_dtype": "bf16",
    }  # fmt: skip
    work = batch * kv_len * 1e3
    return {
        "bench": "decode", "case": case, "backend": backend, "mode": "graph_cold",
        "median_us": median, "p25_us": median * 0.9, "p75_us": median * 1.2, "gbps": work / median,
        "tflops": 1.0, "floor_us": median / 2, "right": True, **more,
    }  # fmt: skip


ROWS = [
    _row("triton", 1, 64, 10.0),
    _row("other", 1, 64, 20.0),
    _row("triton", 1, 128, 12.0),
    _row("other", 1, 128, 6.0),
    _row("triton", 8, 64, 40.0),
]


def test_ratios_are_times_over_ours() -> None:
    names, points, table = plots._ratios(ROWS, "triton")
    assert names == ["other"] and points == ["1x64 H8", "1x128 H8", "8x64 H8"]
    assert table[0][:2] == [2.0, 0.5] and math.isnan(table[0][2])
    assert plots._ratios(ROWS, "absent")[0] == []


def test_lines_join_points_that_differ_in_length_alone() -> None:
    panels = plots._panels(ROWS)
    assert [(title, len(rows), joined) for title, rows, joined in panels] == [
        ("batch 1, 8/2 heads, D 64, bf16", 4, True),
        ("single points", 1, False),
    ]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path: Path, ending: str) -> None:
    path = plot(
        {"meta": {"gpu": "NVIDIA H200"}, "rows": ROWS}, tmp_path / f"p.{ending}", own="triton"
    )
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(start) and path.stat().st_size > 5000


def test_a_picture_shows_backends_units_ratios_and_the_roofline(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        eager = [dict(row, mode="eager") for row in ROWS]
        path = plot(
            {"meta": {"device": "cpu"}, "rows": ROWS + eager}, tmp_path / "p.svg", own="triton"
        )
    text = path.read_text()
    for word in (
        "decode on cpu",
        "GB/s",
        "roofline",
        "other",
        "graph_cold",
        "eager",
        "2.00",
        "0.50",
    ):
        assert word in text, word
    assert "time over that of triton" in text


def test_without_rates_there_is_no_roofline(tmp_path: Path) -> None:
    import matplotlib

    rows = [
        {k: v for k, v in row.items() if k not in ("floor_us", "p25_us", "p75_us")} for row in ROWS
    ]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = plot({"meta": {}, "rows": rows}, tmp_path / "p.svg", own="triton").read_text()
    assert "roofline" not in text


def test_wrong_answers_are_not_drawn(tmp_path: Path) -> None:
    wrong = {
        "bench": "decode",
        "case": ROWS[0]["case"],
        "backend": "x",
        "mode": "e",
        "right": False,
    }
    with pytest.raises(InvalidInputError, match="rows=none"):
        plot({"meta": {}, "rows": [wrong]}, tmp_path / "p.png", own="triton")
    with pytest.raises(InvalidInputError, match=r"p\.xyz"):
        plot({"meta": {}, "rows": ROWS}, tmp_path / "p.xyz", own="triton")
    assert list(tmp_path.iterdir()) == []


def test_labels_tell_cases_apart() -> None:
    merge = {"tokens": 4, "num_heads": 2, "head_dim": 8, "dtype": "bf16", "states": 2}
    cases = [
        merge, {**merge, "states": 8}, {**merge, "lse_layout": "head"}, {**merge, "empty": 0.5},
        {**merge, "dtype": "fp32"}, ROWS[0]["case"], {**ROWS[0]["case"], "q_len": 4},
        {**ROWS[0]["case"], "ragged": True}, {**ROWS[0]["case"], "kv_dtype": "fp8"},
        {**ROWS[0]["case"], "prefix": 64, "suffix": 8},
    ]  # fmt: skip
    assert len({label_of(case) for case in cases}) == len(cases)


def test_points_that_differ_in_heads_cache_or_pages_are_told_apart() -> None:
    base = {
        "batch": 1, "q_len": 1, "kv_len": 8192, "num_heads": 32, "num_kv_heads": 8,
        "head_dim": 64, "page_size": 16, "dtype": "bf16", "kv_dtype": "bf16",
    }  # fmt: skip
    changes = ({}, {"num_heads": 8}, {"kv_dtype": "fp8"}, {"page_size": 1}, {"head_dim": 128})
    labels = gallery_data.point_labels([{**base, **change} for change in changes])
    assert len(set(labels)) == len(labels)
    assert labels[2] == "1 x 8192, 32/8 heads, D 64, fp8 keys, page 16"
    assert gallery_data.point_labels([base]) == ["1 x 8192"]
