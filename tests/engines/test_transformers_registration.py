"""What ``enable`` registers, what it restores, and what it refuses to register."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface

import attn_backends as ab
from attn_backends import BackendUnavailableError, InvalidInputError, UnknownBackendError
from attn_backends.engines.transformers import enable
from attn_backends.engines.transformers.registration import _short

TABLES = (AttentionInterface, AttentionMaskInterface)


def snapshot() -> list[dict[str, Any]]:
    return [dict(table._global_mapping) for table in TABLES]


@pytest.fixture(autouse=True)
def unchanged() -> Any:
    before = snapshot()
    yield
    assert snapshot() == before


def test_attention_and_mask_stand_under_every_name():
    with enable() as handle:
        assert set(handle.names) == set(ab.ATTENTION_BACKENDS)
        assert handle.names["torch_native"] == "attn_backends:torch_native"
        for name in ("attn_backends", *handle.names.values()):
            assert all(name in table._global_mapping for table in TABLES)
            assert not any(part in name for part in ("flash", "sdpa", "flex_attention", "/"))
        assert len(set(handle.names.values())) == len(handle.names)


@pytest.mark.parametrize(
    "backend, short",
    [
        ("triton", "triton"),
        ("flash_attention", "fa"),
        ("flashinfer", "fi"),
        ("torch_sdpa", "torch_dpa"),
        ("torch_flex", "torch_flex"),
        ("my_flash", "my_fl"),
    ],
)
def test_names_that_transformers_claims_are_shortened(backend, short):
    assert _short(backend) == short


def test_disable_restores_and_may_be_repeated():
    before = snapshot()
    handle = enable("mine", override=("sdpa",))
    assert handle.overridden == ("sdpa",)
    assert all(a["sdpa"] is not b["sdpa"] for a, b in zip(snapshot(), before))
    handle.disable()
    assert snapshot() == before
    handle.disable()
    assert snapshot() == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_overlapping_handles_restore_in_any_order(order):
    before = snapshot()
    handles = [enable(override=("sdpa",)), enable(override=("sdpa",))]
    second = AttentionInterface._global_mapping["sdpa"]
    handles[order[0]].disable()
    left = AttentionInterface._global_mapping["sdpa"]
    assert left is not before[0]["sdpa"] and (left is second) == (order[0] == 0)
    handles[order[1]].disable()
    assert snapshot() == before


def test_what_others_register_over_ours_stays():
    handle = enable("mine")
    theirs = lambda *args, **kwargs: None  # noqa: E731
    AttentionInterface.register("mine", theirs)
    handle.disable()
    assert AttentionInterface._global_mapping.pop("mine") is theirs


def test_the_block_is_left_disabled_even_by_an_error():
    with pytest.raises(RuntimeError, match="boom"), enable("mine"):
        raise RuntimeError("boom")


@pytest.mark.parametrize("table", TABLES, ids=["attention", "mask"])
def test_a_table_that_keeps_nothing_fails_the_registration(monkeypatch, table):
    # F16: without the mask function a model would run and ignore padding.
    monkeypatch.setattr(table, "register", classmethod(lambda cls, key, value: None))
    with pytest.raises(BackendUnavailableError, match=rf"{table.__name__} does not keep 'mine'"):
        enable("mine")


@pytest.mark.parametrize("part", ["AttentionMaskInterface", "sdpa_mask", "sliding_window_overlay"])
def test_missing_mask_hooks_fail_the_registration(monkeypatch, part):
    monkeypatch.delattr(masking_utils, part)
    with pytest.raises(BackendUnavailableError, match=rf"supported: >= 5\.17.*{part}"):
        enable()


@pytest.mark.parametrize(
    "name", ["", "eager", "org/kernel", "my_flash", "sdpa2", "flex_attention2", "paged|x", None]
)
def test_names_that_mean_something_else_are_refused(name):
    with pytest.raises(InvalidInputError, match="name="):
        enable(name)


@pytest.mark.parametrize("override", [("eager",), ("flash_attention_2",), ("nope",), "sdpa"])
def test_only_known_names_can_be_overridden(override):
    with pytest.raises(InvalidInputError, match="override="):
        enable(override=override)


def test_an_unknown_backend_is_refused_with_the_closest():
    with pytest.raises(UnknownBackendError, match="torch_native"):
        enable(backend="torch_nativ")


def test_a_name_per_backend_and_the_configured_one(model_of, tokens):
    ids = tokens(1, 5)
    with torch.no_grad(), enable() as handle:
        model = model_of("llama")
        want = model(ids).logits
        model.set_attn_implementation(handle.names["torch_native"])
        assert torch.allclose(model(ids).logits, want, atol=1e-4)
        model.set_attn_implementation(handle.name)
        with ab.use("torch_native"):
            assert torch.allclose(model(ids).logits, want, atol=1e-4)


def test_override_leads_models_of_that_name_here(model_of, tokens):
    model, ids = model_of("llama", "sdpa"), tokens(1, 5)
    with torch.no_grad(), enable(backend="torch_native", override=("sdpa",)):
        with pytest.raises(ab.UnsupportedCallError, match="'sdpa' cannot do this call: odd=1"):
            model(ids, odd=1)
        ours = model(ids).logits
    with torch.no_grad():
        assert torch.allclose(model(ids, odd=1).logits, ours, atol=1e-4)


def test_the_example_in_the_docs_runs(capsys):
    root = Path(__file__).parents[2]
    runpy.run_path(str(root / "docs" / "examples" / "transformers_plug.py"))
    printed = capsys.readouterr().out
    assert printed.count("same tokens as sdpa: True") == 2
    assert "refused: " in printed and "output_attentions=True" in printed


def test_importing_the_plug_does_not_import_transformers():
    code = (
        "import attn_backends.engines.transformers, sys; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
