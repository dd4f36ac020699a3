"""Drawn checkpoints test attention: leaving a feature out changes the tokens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends.bench import serving_models, transformers_engine, vllm_prompts, vllm_run

transformers = pytest.importorskip("transformers")

PROMPTS = [p[:220] for p in vllm_prompts.random_ids(1000)[:2]]
ASKED = {"prompts": PROMPTS, "max_tokens": 12}


def drawn(name: str, tmp_path: Path) -> Path:
    """A model of ``vllm_run`` with few layers and words, as wide as it is."""
    family, shape, embedding = vllm_run.MODELS[name].drawn
    small = shape | {"vocab_size": 1000, "num_hidden_layers": 2}
    if "layer_types" in shape:
        small["layer_types"] = ["sliding_attention", "full_attention"]
    return serving_models.drawn_folder(family, small, "cpu", tmp_path / name, 0.05, embedding)


def tokens(folder: Path, attention: str, **change: Any) -> list[list[int]]:
    options = {"model": str(folder), "dtype": "float32", "attention": attention}
    model = transformers_engine.build(options)
    for name, value in change.items():
        if name == "sinks":
            for parameter, weight in model.named_parameters():
                if parameter.endswith("sinks"):
                    weight.data.fill_(value)
    return transformers_engine.generate(model, ASKED)["tokens"]


def without(folder: Path, **change: Any) -> list[list[int]]:
    """Tokens under another configuration of the same weights."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in change.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    return tokens(folder, "eager")


@pytest.mark.parametrize(
    "name, change",
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"sliding_window": 4096}),
        ("gpt-oss", {"sliding_window": 4096}),
    ],
    ids=["softcap", "windows", "windows under sinks"],
)
def test_a_softcap_or_a_window_left_out_changes_the_tokens(name, change, tmp_path):
    folder = drawn(name, tmp_path)
    assert tokens(folder, "eager") != without(folder, **change)


def test_sinks_or_a_narrower_cache_change_the_tokens(tmp_path):
    folder = drawn("gpt-oss", tmp_path)
    assert tokens(folder, "eager") != tokens(folder, "eager", sinks=-1e4)
    folder = drawn("llama-fp8", tmp_path)
    plain = tokens(folder, "sdpa")
    assert plain == tokens(folder, "eager")
    assert plain != tokens(folder, vllm_run.MODELS["llama-fp8"].attention)


def test_a_cache_in_float8_makes_the_last_bits_of_float32_visible(tmp_path):
    """Keys near the middle of two float8 numbers round either way, which is 6 % of them."""
    folder = drawn("llama-fp8", tmp_path)
    ids = torch.tensor(PROMPTS[:1])

    def scores(attention: str, change: float) -> torch.Tensor:
        options = {"model": str(folder), "dtype": "float32", "attention": attention}
        model = transformers_engine.build(options)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + change * torch.randn(weight.shape, generator=generator))
            return model(ids).logits[0]

    moved = {}
    for attention in ("sdpa", vllm_run.MODELS["llama-fp8"].attention):
        plain, other = scores(attention, 0.0), scores(attention, 1e-7)
        moved[attention] = float((plain - other).abs().median())
    plain, rounded = moved.values()
    assert 0 < plain < 1e-5 and rounded > 10 * plain


def test_the_mark_comes_last_and_is_waited_for(tmp_path):
    waiting = threading.Thread(target=serving_models.wait_until_ready, args=(tmp_path / "llama",))
    waiting.start()
    shape = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 8}
    folder = serving_models.drawn_folder("Llama", shape, "cpu", tmp_path / "llama")
    waiting.join(10)
    assert not waiting.is_alive()
    mark = (folder / serving_models.READY).stat().st_mtime_ns
    assert all(path.stat().st_mtime_ns <= mark for path in folder.iterdir())
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.isfinite(weight).all() for weight in weights.values())
