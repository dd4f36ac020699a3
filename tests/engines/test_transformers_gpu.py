"""The plug on a GPU: half precision, compiled decoding on a static cache, continuous batching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from attn_backends.engines.transformers import attention as plug
from attn_backends.engines.transformers import enable
from attn_backends.engines.transformers.packed import PackedLengths

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


#: How continuous batching reads its keys, and whether it replays CUDA graphs.
ROUTES = {"pages": (True, False), "gathered": (False, False), "graphs": (True, True)}
CONTINUOUS = [
    *(
        ("triton", name, route)
        for name in DECODERS
        for route in ROUTES
        if (name, route) != ("gpt_oss", "graphs")  # its experts are counted on the host
    ),
    *(("torch_native", name, "pages") for name in ("llama", "qwen3")),
]


def generate_batch(model: Any, prompts: list[list[int]], graphs: bool) -> list[list[int]]:
    config = ContinuousBatchingConfig(block_size=8, num_blocks=64, max_batch_tokens=16)
    config.use_cuda_graph = graphs
    if hasattr(config, "auto_switch_to_flash"):
        config.auto_switch_to_flash = False
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=config,
        progress_bar=False,
    )
    assert not any(one.error for one in out.values()), [one.error for one in out.values()]
    order = sorted(out, key=lambda request: int(request.rsplit("_", 1)[1]))
    return [list(out[request].generated_tokens) for request in order]


@pytest.mark.parametrize("backend, name, route", CONTINUOUS)
def test_continuous_batching_gives_the_tokens_of_transformers(
    model_of, tokens, monkeypatch, backend, name, route
):
    prompts = [tokens(length, seed=length).tolist() for length in (5, 19, 1, 3)]
    read_pages, graphs = ROUTES[route]
    seen: list[PackedLengths] = []
    make = plug.packed_lengths
    monkeypatch.setattr(plug, "packed_lengths", lambda *a: seen.append(x := make(*a)) or x)
    model = model_of(name).cuda()
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        want.append(out[0, len(prompt) :].tolist())
    override = "paged|eager" if name in ("gemma2", "gpt_oss") else "sdpa"
    model.set_attn_implementation("eager" if override == "paged|eager" else "sdpa")
    with enable(backend=backend, override=(override,), paged=read_pages):
        got = generate_batch(model, prompts, graphs)
    assert got == want
    assert any(lengths.capturing for lengths in seen) == graphs
    has_full_layers = name != "mistral"
    assert any(lengths.page_size == 8 for lengths in seen) == (read_pages and has_full_layers)


def test_a_backend_that_cannot_be_captured_says_so(model_of, tokens, caplog):
    prompts = [tokens(5, seed=5).tolist()]
    with enable(backend="torch_native", override=("sdpa",)):
        try:
            generate_batch(model_of("llama", "sdpa").cuda(), prompts, True)
            text = caplog.text
        except (Exception, AssertionError) as error:
            text = f"{error} {caplog.text}"
    assert "use_cuda_graph=True with torch_native (supported: triton)" in text
