"""Continuous batching (``generate_batch``) gives the tokens of one request at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

from attn_backends import UnsupportedCallError
from attn_backends.engines.transformers import attention as plug
from attn_backends.engines.transformers import enable
from attn_backends.engines.transformers.packed import PackedLengths, update_cache

NEW = 4
HAS_PAGED_NAMES = "paged|sdpa" in AttentionInterface._global_mapping  # until 5.18


def batch(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The new tokens of each prompt; 16 tokens a step, so prompts are cut and joined by decodes."""
    config = ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=16)
    if hasattr(config, "auto_switch_to_flash"):
        config.auto_switch_to_flash = False
    settings = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    out = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=config,
        progress_bar=False,
    )
    order = sorted(out, key=lambda request: int(request.rsplit("_", 1)[1]))
    assert not any(out[request].error for request in order)
    return [list(out[request].generated_tokens) for request in order]


def one_by_one(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy decoding by eager attention, without generate()."""
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


@pytest.fixture
def prompts(tokens) -> list[list[int]]:
    return [tokens(length, seed=length).tolist() for length in (5, 19, 1, 3)]


@pytest.mark.parametrize(
    "name, start, override",
    [
        ("llama", "sdpa", "sdpa"),
        ("qwen3", "sdpa", "sdpa"),
        ("gemma2", "eager", "paged|eager"),
        ("gpt_oss", "eager", "paged|eager"),
    ],
)
def test_overridden_names_give_the_tokens_of_eager(
    model_of, prompts, monkeypatch, name, start, override
):
    want = one_by_one(model_of(name), prompts)
    packed = []
    make = PackedLengths.batch
    monkeypatch.setattr(
        PackedLengths, "batch", lambda self, *a: packed.append(self) or make(self, *a)
    )
    with enable(backend="torch_native", override=(override,)):
        got = batch(model_of(name, start), prompts)
    assert got == want
    assert len({token for answer in got for token in answer}) > 5
    assert packed and all(lengths.paged for lengths in packed)


def test_our_own_name_works_where_the_release_has_paged_names(model_of, prompts):
    with enable(backend="torch_native") as handle:
        model = model_of("llama", handle.name)
        if HAS_PAGED_NAMES:
            assert batch(model, prompts) == one_by_one(model_of("llama"), prompts)
        else:
            with pytest.raises(ValueError, match="not supported for continuous batching"):
                batch(model, prompts)
    assert not any("attn_backends" in name for name in AttentionInterface._global_mapping)


def test_layers_of_a_step_share_a_plan_and_steps_do_not(model_of, prompts, monkeypatch):
    planned, calls = [], []
    make, spec = PackedLengths.batch, plug._spec
    monkeypatch.setattr(
        PackedLengths, "batch", lambda self, *a: planned.append(self) or make(self, *a)
    )
    monkeypatch.setattr(plug, "_spec", lambda *a: calls.append(a) or spec(*a))
    with enable(backend="torch_native", override=("sdpa",)):
        batch(model_of("llama", "sdpa", num_hidden_layers=3), prompts)
    assert len(calls) == 3 * len(planned)
    assert len(planned) >= NEW


def test_lengths_that_were_written_to_are_not_the_same():
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    make = lambda: PackedLengths(starts, starts, 3, 3, 2, 2, True, None)  # noqa: E731
    first = make()
    assert first == make() and hash(first) == hash(make())
    starts[1] = 1
    assert first != make()
    with torch.inference_mode():  # such tensors do not count their writes
        starts = torch.tensor([0, 2, 3], dtype=torch.int32)
        assert make() != make()


class _Cache:
    """The update of 5.17 and 5.18 (``read_index``), or of 5.19 and 5.20 (the arguments whole)."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}


class _IndexCache(_Cache):
    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        self.seen = dict(layer_idx=layer_idx, read_index=read_index, write_index=write_index)
        return key_states[0].transpose(0, 1) + 1, value_states[0].transpose(0, 1) + 2


class _KwargsCache(_Cache):
    def update(self, key_states, value_states, layer_idx, kwargs):
        self.seen = dict(layer_idx=layer_idx, **kwargs)
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"]["full_attention"]
        return key_states + 1, value_states + 2


@pytest.mark.parametrize("kind", [_IndexCache, _KwargsCache])
def test_caches_that_leave_the_update_to_us_are_updated(kind):
    cache, starts = kind(), torch.tensor([0, 3])
    module = torch.nn.Module()
    module.layer_idx, module.config = 7, type("Config", (), {})()
    kwargs = dict(
        cache=cache,
        read_index=["r"],
        write_index=["w"],
        cu_seq_lens_k={"full_attention": starts, "sliding_attention": None},
    )
    key, value = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    k, v = update_cache("name", module, key, value, kwargs)
    assert cache.seen["layer_idx"] == 7
    assert cache.seen["read_index"] == ["r"] and cache.seen["write_index"] == ["w"]
    assert torch.equal(k, key + 1) and torch.equal(v, value + 2)
    assert kwargs["cu_seq_lens_k"] is starts


def test_layer_types_that_lengths_cannot_say_are_refused():
    module = torch.nn.Module()
    module.layer_idx = 0
    module.config = type("Config", (), {"layer_types": ["chunked_attention"]})()
    arguments = dict(cache=_IndexCache(), read_index=[], write_index=[], cu_seq_lens_k={})
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedCallError, match="layer_type=chunked_attention"):
        update_cache("name", module, x, x, arguments)
