"""Comparing results: slower means beyond the threshold and outside of the noise."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from attn_backends import InvalidInputError
from attn_backends.bench.compare import compare, read_results

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200"


def _row(backend: str = "triton", median: float = 100.0, spread: float = 2.0, **more: Any) -> dict:
    row = {
        "bench": "decode", "case": {"batch": 1, "kv_len": 64}, "backend": backend,
        "mode": "eager", "median_us": median, "p20_us": median - 2 * spread,
        "p25_us": median - spread, "p75_us": median + spread, "p80_us": median + 2 * spread,
        "right": True,
    }  # fmt: skip
    return {**row, **more}


def _file(*rows: dict, device: str = "cpu") -> dict[str, Any]:
    return {"meta": {"device": device}, "rows": list(rows)}


def _verdict(old: dict, new: dict, **options: Any) -> str:
    return compare(_file(old), _file(new), **options).changes[0].verdict


@pytest.mark.parametrize(
    ("median", "spread", "verdict"),
    [
        (104.9, 0.1, "same"),  # below the threshold
        (110.0, 2.0, "slower"),
        (110.0, 9.0, "same"),  # quartiles overlap: noise
        (200.0, 99.0, "same"),
        (90.0, 2.0, "faster"),
        (90.0, 9.0, "same"),
        (95.5, 0.1, "same"),
    ],
)
def test_both_the_threshold_and_the_quartiles_decide(
    median: float, spread: float, verdict: str
) -> None:
    assert _verdict(_row(), _row(median=median, spread=spread)) == verdict


def test_the_threshold_is_the_callers() -> None:
    slower = _row(median=110.0)
    assert _verdict(_row(), slower, threshold=0.2) == "same"
    assert _verdict(_row(), _row(median=101.0, spread=0.0), threshold=0.0) == "same"  # in the band
    assert _verdict(_row(spread=0.0), _row(median=101.0, spread=0.0), threshold=0.0) == "slower"
    with pytest.raises(InvalidInputError, match="threshold"):
        _verdict(_row(), slower, threshold=-0.1)


def test_files_without_quartiles_have_a_wider_band() -> None:
    old = {k: v for k, v in _row().items() if k not in ("p25_us", "p75_us")}
    assert _verdict(old, _row(median=107.0, spread=3.5)) == "same"  # 103.5 is under 104
    assert _verdict(old, _row(median=107.0, spread=2.0)) == "slower"


def test_a_lost_answer_is_worse_than_a_slow_one() -> None:
    wrong = {k: v for k, v in _row().items() if not k.endswith("_us")} | {"right": False}
    assert _verdict(_row(), wrong) == "wrong"
    assert _verdict(wrong, wrong) == "same"
    assert _verdict(wrong, _row()) == "new"
    result = compare(_file(_row(), _row("fa3")), _file(_row()))
    assert [c.verdict for c in result.changes] == ["same", "missing"] and not result.ok
    result = compare(_file(_row()), _file(_row(), _row("fa3")))
    assert [c.verdict for c in result.changes] == ["same", "new"] and result.ok
    assert result.counts() == {
        "slower": 0, "faster": 0, "same": 1, "wrong": 0, "missing": 0, "new": 1,
    }  # fmt: skip


def test_a_field_that_a_case_did_not_have_yet_is_off() -> None:
    new = _row(case={"batch": 1, "kv_len": 64, "ragged": False, "window": None})
    assert _verdict(_row(), new) == "same"
    ragged = _row(case={"batch": 1, "kv_len": 64, "ragged": True})
    with pytest.raises(InvalidInputError, match="no row in common"):
        compare(_file(_row()), _file(ragged))


def test_devices_must_agree() -> None:
    files = _file(_row(), device="cpu"), _file(_row(), device="NVIDIA H200")
    with pytest.raises(InvalidInputError, match="across-devices"):
        compare(*files)
    assert compare(*files, across_devices=True).ok


def test_a_row_that_stands_twice_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"new file=twice decode, triton, eager"):
        compare(_file(_row()), _file(_row(), _row()))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "readable JSON"),
        ("[]", "rows that have"),
        ('{"rows": [{"bench": "x"}]}', "rows that have"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(InvalidInputError, match=r"r\.json"):
        read_results(path)
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=word):
        read_results(path)


@pytest.mark.parametrize("name", ["decode", "prefill-plain", "extend", "mla", "merge", "host"])
def test_published_results_can_be_compared(name: str, tmp_path: Path) -> None:
    old = read_results(RESULTS / f"{name}.json")
    assert compare(old, old).ok
    new = copy.deepcopy(old)
    slowed = next(r for r in new["rows"] if r.get("right", True))
    for field in ("median_us", "p20_us", "p25_us", "p75_us", "p80_us"):
        if field in slowed:
            slowed[field] *= 1.5
    path = tmp_path / "new.json"
    path.write_text(json.dumps(new))
    result = compare(old, read_results(path))
    assert result.counts()["slower"] == 1 and not result.ok
    bad = next(c for c in result.changes if c.bad)
    assert bad.backend == slowed["backend"] and bad.ratio == pytest.approx(1.5)
