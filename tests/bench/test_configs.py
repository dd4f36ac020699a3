"""The table of tiles is written from the rows of sweeps: the fastest that does not spill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from attn_backends.bench import attention_forms, attention_tune
from attn_backends.triton_native import measured
from attn_backends.triton_native.backend import TritonOptions
from attn_backends.triton_native.configs import PrefillConfig

FAST, SPILLING, SLOW = ((128, n, 8, 2, True, True, True) for n in (64, 128, 32))


def _row(kv_len: int, tile: tuple[Any, ...], us: float) -> dict[str, Any]:
    case = attention_forms.Case("prefill", 2, kv_len, kv_len, page_size=None).row()
    options = {"prefill_config": tile, "short_rows": 0}
    return {
        "set": "prefill", "case": case, "trial": str(tile), "options": options, "median_us": us
    }  # fmt: skip


def test_the_fastest_tile_without_spills_is_written_for_short_and_long_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [_row(4096, FAST, 2.0), _row(4096, SLOW, 3.0), _row(4096, SPILLING, 1.0)]
    rows += [_row(8192, FAST, 4.1), _row(8192, SLOW, 4.0), _row(8192, SPILLING, 3.0)]
    rows += [_row(512, FAST, 2.0), _row(512, SLOW, 1.0)]
    rows.append({**rows[0], "trial": "shipped", "options": {"hopper": False}})
    file, module = tmp_path / "forms.json", tmp_path / "measured.py"
    file.write_text(json.dumps({"meta": {"gpu": "NVIDIA H200"}, "rows": rows}))
    monkeypatch.setattr(measured, "__file__", str(module))
    spills = lambda case, options, arch: options["prefill_config"] == list(SPILLING)  # noqa: E731
    monkeypatch.setattr(attention_tune, "_spills", spills)
    attention_tune.write_configs([str(file)])
    made: dict[str, Any] = {}
    exec(module.read_text(), made)
    assert made["PREFILL"][90, False, 128, 128, 2, 2] == FAST  # 1.00 x 1.025 against 1.5 x 1.0
    assert made["PREFILL"][90, True, 128, 128, 2, 2] == SLOW
    assert PrefillConfig(*made["PREFILL"][90, True, 128, 128, 2, 2]).block_n == 32


@pytest.mark.parametrize("name", attention_forms.SETS)
def test_every_trial_of_the_forms_is_an_option_of_the_backend(name: str) -> None:
    for case in attention_forms.points(name):
        wanted = attention_forms.trials(name, case)
        assert next(iter(wanted)) == "shipped" and len(wanted) > 2
        assert all(TritonOptions(**options) for options in wanted.values())
