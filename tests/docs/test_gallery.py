"""The gallery shows the results as they are, and says so when it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attn_backends.bench import gallery, gallery_distributed
from attn_backends.bench.gallery_data import Source, families, panels, ratios, read, timed

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "docs/gallery"


def test_gallery_is_drawn_from_the_results() -> None:
    problems = gallery.stale(GALLERY, gallery.pictures(ROOT / "docs/results"))
    assert not problems, f"run python -m attn_backends.bench.gallery docs/gallery: {problems}"


def attention_row(backend: str, batch: int, kv_len: int, us: float, **more: Any) -> dict[str, Any]:
    case = {
        "batch": batch, "q_len": 1, "kv_len": kv_len, "num_heads": 8, "num_kv_heads": 2,
        "head_dim": 64, "head_dim_v": 64, "dtype": "bf16",
    }  # fmt: skip
    row = {"bench": "decode", "case": case, "backend": backend, "mode": "graph_cold"}
    return {**row, "median_us": us, "gbps": 1e6 / us, "right": True, **more}


ROWS = [
    *(attention_row("triton", 1, n, n / 100) for n in (1024, 2048, 4096)),
    *(attention_row("fa3", 1, n, n / 50) for n in (1024, 2048, 4096)),
    attention_row("triton", 64, 2048, 50.0),
    attention_row("fa3", 64, 2048, 40.0),
    attention_row("fa3", 64, 4096, 1.0, right=False),
]


def results(folder: Path, rows: list[dict[str, Any]], name: str = "decode") -> Path:
    meta = {"command": "bench", "date": "2026-01-01", "gpu": "NVIDIA H200", "commit": "abc"}
    path = folder / "results" / "h200" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta, "rows": rows}))
    return path


def test_points_that_differ_in_length_only_make_a_line() -> None:
    sweep, rest = panels(timed(ROWS), "gbps")
    assert sweep.sweep and sweep.labels == (1024, 2048, 4096)
    assert set(sweep.series) == {"triton", "fa3"}
    assert not rest.sweep and rest.labels == ("64 x 2048",)


def test_a_wrong_answer_has_no_speed_and_is_counted(tmp_path: Path) -> None:
    path = results(tmp_path, ROWS)
    (decode, _) = gallery.pictures(tmp_path / "results")
    assert "1 rows without a right answer" in decode.text
    assert all(row["right"] for row in timed(read(path).rows))


def test_ratios_compare_ours_with_the_fastest_rival_of_each_point() -> None:
    found = ratios(Source(Path("decode.json"), {}, ROWS))
    assert found is not None and found.rivals == ("fa3",)
    assert found.best == (2.0, 2.0, 2.0, 0.8)
    assert "ahead at 3, level at 0, behind at 1" in found.sentence


def test_a_file_of_another_kind_gives_no_picture(tmp_path: Path) -> None:
    results(tmp_path, [{"bench": "tests", "passed": 3}], "tests")
    results(tmp_path, [], "empty")
    (tmp_path / "results/h200/doctor.json").write_text('{"ok": true}')
    assert gallery.pictures(tmp_path / "results") == []


def test_changed_data_make_a_picture_stale_and_drawing_makes_it_fresh(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "gallery"
    results(tmp_path, ROWS)
    found = gallery.pictures(tmp_path / "results")
    assert gallery.stale(folder, found) == [
        "h200-decode.png is missing", "h200-ratios.png is missing",
        "index.md is not what the results give",
    ]  # fmt: skip
    assert gallery.main([str(folder), "--check"]) == 1
    assert gallery.main([str(folder)]) == 0
    assert gallery.main([str(folder), "--check"]) == 0
    assert gallery.write(folder, found) == []  # nothing to do

    results(tmp_path, [*ROWS, attention_row("triton", 64, 4096, 99.0)])
    changed = gallery.pictures(tmp_path / "results")
    assert gallery.stale(folder, changed)[0] == "h200-decode.png shows other data"
    (tmp_path / "results/h200/decode.json").unlink()
    left = gallery.stale(folder, gallery.pictures(tmp_path / "results"))
    assert "h200-decode.png is of no results" in left
    gallery.write(folder, [])
    assert not list(folder.glob("*.png"))


def test_every_name_and_value_is_in_the_picture(tmp_path: Path) -> None:
    """Drawn once more without a file: the axes hold what the rows say."""
    pytest.importorskip("matplotlib")
    results(tmp_path, ROWS)
    speed, heat = gallery.pictures(tmp_path / "results")
    figure = speed.draw()
    sweep, points = ({x.get_label(): x for x in axes.lines} for axes in figure.axes)
    assert list(sweep["triton"].get_ydata()) == [1e8 / n for n in (1024, 2048, 4096)]
    assert list(points["fa3"].get_xdata()) == [1e6 / 40]
    legend = {text.get_text() for text in figure.legends[0].texts}
    assert {"triton", "fa3", "memory, data sheet: 4800 GB/s"} == legend
    cells = {text.get_text() for axes in heat.draw().axes for text in axes.texts}
    assert cells == {"2.00", "0.80"}


def test_throughput_of_an_engine_shows_median_and_range(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    case = {"model": "a model", "dtype": "bfloat16", "workload": "decode"}
    rows = [
        {"bench": "tokens", "case": {"model": "a model"}, "backend": "ours", "tokens": 9},
        {"bench": "throughput", "case": case, "backend": "ours", "tokens_per_s": 2000.0,
         "slowest": 1500.0, "fastest": 2200.0, "turns": 5},
    ]  # fmt: skip
    results(tmp_path, rows, "engine-model")
    (picture,) = gallery.pictures(tmp_path / "results")
    assert "median and range of 5 turns" in picture.text
    (axes,) = picture.draw().axes
    drawn, middle = axes.lines
    assert list(drawn.get_xdata()) == [1500.0, 2200.0] and list(middle.get_xdata()) == [2000.0]

    theirs = {**rows[1], "backend": "theirs", "ratio": 1.0, "reference": "theirs"}
    rows = [theirs, {**rows[1], "ratio": 1.25, "reference": "theirs"}]
    results(tmp_path, rows, "engine-model")
    (picture,) = gallery.pictures(tmp_path / "results")
    assert "median ratio to theirs within a turn" in picture.text
    (axes,) = picture.draw().axes
    assert [text.get_text() for text in axes.texts] == ["1.250x"]


def test_many_variants_are_shown_as_the_fastest_and_the_slowest_of_each_point() -> None:
    rows = [
        attention_row(f"ours[{i}]", 1, n, us)
        for i in range(12)
        for n, us in ((1024, 10.0 + i), (2048, 50.0 - i), (4096, 30.0))
    ]
    rows += [attention_row("fa3", 1, n, 20.0) for n in (1024, 2048, 4096)]
    (few,) = families(panels(timed(rows), "gbps"))
    assert set(few.series) == {"ours: fastest of 12", "ours: slowest of 12", "fa3"}
    assert few.series["ours: fastest of 12"][:2] == (1e6 / 10, 1e6 / 39)
    assert few.series["ours: slowest of 12"][:2] == (1e6 / 21, 1e6 / 50)
    (all_of_them,) = families(panels(timed(rows[:9] + rows[-3:]), "gbps"))
    assert set(all_of_them.series) == {"ours[0]", "ours[1]", "ours[2]", "fa3"}


def test_a_single_point_is_drawn_as_bars_with_their_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results(tmp_path, [attention_row("triton", 1, 64, 10.0), attention_row("fa3", 1, 64, 20.0)])
    (axes,) = gallery.pictures(tmp_path / "results")[0].draw().axes
    assert [bar.get_width() for bar in axes.patches] == [5e4, 1e5]
    assert {text.get_text() for text in axes.texts} == {"5e+04", "1e+05"}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fa3", "triton"]


def test_efficiency_on_several_gpus_is_shown_beside_the_model() -> None:
    pytest.importorskip("matplotlib")
    (source,) = [read(p) for p in (ROOT / "docs/results").glob("*/distributed.json")]
    wholes = [r for r in source.rows if "efficiency" in r]
    shown = gallery_distributed.bars(source.rows)
    assert [bar.efficiency for bar in shown] == [r["efficiency"] for r in wholes]
    for bar in shown:
        assert 0 < bar.compute <= bar.whole and bar.efficiency * bar.gpus * bar.whole < 1.01
    prefill, decode = gallery_distributed.bands(source.rows)
    for band in (prefill, decode):
        assert band.gpus[0] == 1 and band.low[0] == band.high[0] == 1.0
        assert all(low <= high for low, high in zip(band.low, band.high))
        assert [n for n, _ in band.measured] == [2]
    from attn_backends.bench.gallery_plots import efficiency

    left, _ = efficiency("title", shown, [prefill, decode]).axes
    drawn = [text.get_text().strip() for text in left.texts]
    assert drawn == [f"{r['efficiency']:.1%}" for r in wholes]
