"""The plug on a GPU: half precision, compiled decoding on a static cache, continuous batching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from attn_backends.engines.transformers import enable

pytestmark = pytest.mark.gpu
DECODERS = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss"]
LEFT = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("backend", ["torch_native", "triton", "auto"])
@pytest.mark.parametrize("name", DECODERS)
def test_bf16_logits_stay_within_the_models_own_error(model_of, tokens, name, backend):
    ids, padding = tokens(2, 7).cuda(), torch.tensor(LEFT, device="cuda")
    real = padding.bool()
    with torch.no_grad(), enable() as handle:
        want = model_of(name).cuda()(ids, attention_mask=padding).logits[real]
        model = model_of(name).cuda().to(torch.bfloat16)
        own = (model(ids, attention_mask=padding).logits[real].float() - want).abs().max()
        model.set_attn_implementation(handle.names.get(backend, handle.name))
        got = model(ids, attention_mask=padding).logits[real].float()
    assert got.isfinite().all()
    assert (got - want).abs().max() <= 2 * own


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_static_cache_gives_the_tokens_of_eager(model_of, tokens, name, compiled):
    ids, padding = tokens(2, 7).cuda(), torch.tensor(LEFT, device="cuda")
    arguments: dict[str, Any] = dict(
        attention_mask=padding,
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        cache_implementation="static",
    )
    model = model_of(name).cuda()
    with torch.no_grad(), enable(backend="torch_native"):
        want = model.generate(ids, **arguments, disable_compile=True)
        model.set_attn_implementation("attn_backends")
        got = model.generate(ids, **arguments, disable_compile=not compiled)
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_continuous_batching_gives_the_tokens_of_sdpa(model_of, tokens, name, backend):
    prompts = [tokens(length, seed=length).tolist() for length in (5, 19, 1, 3)]
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def batch() -> dict[str, list[int]]:
        config = ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=16)
        if hasattr(config, "auto_switch_to_flash"):
            config.auto_switch_to_flash = False
        out = (
            model_of(name, "sdpa")
            .cuda()
            .generate_batch(
                prompts,
                generation_config=settings,
                continuous_batching_config=config,
                progress_bar=False,
            )
        )
        assert not any(one.error for one in out.values())
        return {request: list(one.generated_tokens) for request, one in out.items()}

    want = list(batch().values())
    with enable(backend=backend, override=("sdpa",)):
        got = list(batch().values())
    assert sorted(got) == sorted(want)
