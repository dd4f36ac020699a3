from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_backends as ab
from attn_backends.registry import TuningFile, TuningRow, load_tuning, shape_bucket
from attn_backends.registry.ranking import SHIPPED

Register = Callable[..., Any]


def _row(spec: ab.AttentionSpec, phase: str = "decode", **median_us: float) -> dict[str, Any]:
    return {
        "device": "cpu",
        "phase": phase,
        "bucket": shape_bucket(spec),
        "median_us": median_us,
    }


@pytest.fixture
def tuning(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: dict[str, Any], **fields: Any) -> Path:
        path = tmp_path / "tuning.json"
        path.write_text(json.dumps({"version": 1, "rows": rows, **fields}))
        return path

    return write


def test_the_fastest_measured_goes_before_the_shipped_ranking(
    spec: ab.AttentionSpec, register: Register, tuning: Callable[..., Path]
) -> None:
    register("fast")
    register("slow")
    path = tuning(_row(spec, fast=1.5, torch_native=20.0, slow=30, uninstalled=0.1))
    config = ab.AttentionConfig(tuning_file=str(path))
    chosen = ab.select(spec, phase="decode", device="cpu", config=config)
    assert chosen.name == "fast" and "measured on cpu, decode" in (chosen.ranking or "")
    assert ab.select(spec, phase="prefill", device="cpu", config=config).name == "torch_native"
    choice = ab.explain(spec, phase="decode", device="cpu", config=config)
    slow = "median_us=30 (supported: < 1.5); fast was measured faster"
    assert str(choice.rejected["slow"][0]) == slow
    assert "fast 1.5 us" in str(choice)


def test_a_measured_backend_that_cannot_do_the_call_is_passed(
    spec: ab.AttentionSpec, register: Register, tuning: Callable[..., Path]
) -> None:
    register("fast", head_dims=ab.IntSet((64,)))
    register("middle")
    path = tuning(_row(spec, fast=1.0, middle=2.0, torch_native=3.0))
    config = ab.AttentionConfig(tuning_file=str(path))
    chosen = ab.select(spec, phase="decode", device="cpu", config=config)
    assert chosen.name == "middle"
    assert [str(r) for r in chosen.considered["fast"]] == ["head_dim=16 (supported: 64)"]


def test_another_shape_or_device_does_not_take_the_row(
    spec: ab.AttentionSpec, register: Register, tuning: Callable[..., Path]
) -> None:
    register("fast")
    path = tuning(_row(spec, fast=1.0))
    config = ab.AttentionConfig(tuning_file=str(path))
    others = [
        replace(spec, head_dim=32),
        replace(spec, num_heads=8),
        replace(spec, page_size=16),
        replace(spec, dtype=torch.float16),
        replace(spec, head_dim_v=8),
        replace(spec, kv_dtype=torch.float8_e4m3fn),
    ]
    assert len({shape_bucket(s) for s in (spec, *others)}) == len(others) + 1
    for other in others:
        chosen = ab.select(other, phase="decode", device="cpu", config=config)
        assert chosen.name == "torch_native" and "no row for cpu" in (chosen.ranking or "")
    wider = replace(spec, num_heads=8, num_kv_heads=4, window=(3, 0))
    assert ab.select(wider, phase="decode", device="cpu", config=config).name == "fast"


def test_the_file_may_come_from_the_environment_and_a_change_is_seen(
    spec: ab.AttentionSpec,
    register: Register,
    tuning: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register("fast")
    path = tuning(_row(spec, fast=1.0, torch_native=2.0))
    monkeypatch.setenv("ATTN_BACKENDS_TUNING_FILE", str(path))
    assert ab.select(spec, phase="decode", device="cpu").name == "fast"
    tuning(_row(spec, fast=3.0, torch_native=2.0))
    os.utime(path, ns=(1, 1))
    assert ab.select(spec, phase="decode", device="cpu").name == "torch_native"
    path.unlink()
    with pytest.raises(ab.InvalidInputError, match="tuning_file"):
        ab.select(spec, phase="decode", device="cpu")
    assert ab.select(spec, phase="decode", device="cpu", backend="fast").name == "fast"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["JSON"]),
        ('{"version": 2, "rows": []}', ["version=2", "1"]),
        ('{"rows": [], "row": 1}', ["row=1", "only the fields version, meta, rows"]),
        ('{"version": 1}', ["rows", "required"]),
        (
            '{"rows": [{"device": "cpu", "phase": "both", "bucket": "x", "median_us": {"a": 1}}]}',
            ["rows.0.phase='both'"],
        ),
        (
            '{"rows": [{"device": "cpu", "phase": "decode", "bucket": "x", "median_us": {}}]}',
            ["rows.0.median_us"],
        ),
        (
            '{"rows": [{"device": "c", "phase": "decode", "bucket": "x", "median_us": {"a": 0}}]}',
            ["rows.0.median_us.a=0", "greater than 0"],
        ),
        (
            '{"rows": [{"device": "c", "phase": "decode", "bucket": "", "median_us": {"a": "1"}}]}',
            ["rows.0.median_us.a='1'"],
        ),
    ],
)
def test_a_malformed_file_names_file_and_field(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(ab.InvalidInputError) as caught:
        load_tuning(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_repeated_rows_are_refused(spec: ab.AttentionSpec, tuning: Callable[..., Path]) -> None:
    with pytest.raises(ab.InvalidInputError, match="repeats"):
        load_tuning(tuning(_row(spec, a=1.0), _row(spec, b=1.0)))


def test_what_is_written_can_be_read(tmp_path: Path, spec: ab.AttentionSpec) -> None:
    row = TuningRow(device="cpu", phase="decode", bucket=shape_bucket(spec), median_us={"a": 1.0})
    written = TuningFile(meta={"command": "tune"}, rows=[row])
    path = tmp_path / "tuning.json"
    path.write_text(written.model_dump_json())
    assert load_tuning(path) == written


def test_the_shipped_ranking_is_whole_and_ends_in_the_reference_on_gpus() -> None:
    for key, phases in SHIPPED.items():
        assert set(phases) == {"prefill", "decode"}
        for names in phases.values():
            assert len(set(names)) == len(names)
            assert names[0 if key in ("cpu", "other") else -1] == "torch_native"


@pytest.mark.gpu
def test_the_architecture_of_a_gpu_has_a_ranking(spec: ab.AttentionSpec) -> None:
    chosen = ab.select(spec, device="cuda")
    assert "shipped ranking for " in (chosen.ranking or "")
