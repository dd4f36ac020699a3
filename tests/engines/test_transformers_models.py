"""Models give the same logits and tokens through the plug as through their own attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from attn_backends.backend import AttentionBackend
from attn_backends.engines.transformers import attention as plug
from attn_backends.engines.transformers import capture_lse, enable

TOLERANCE = 1e-5
DECODERS = [
    "llama",
    "smollm",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
]
STEPPED = [name for name in DECODERS if name not in ("smollm", "qwen2")]  # as llama there
PADDING = {
    "none": None,
    "left": [[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]],
    "hole": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1]],
    "both": [[0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1]],
}


@pytest.fixture(autouse=True)
def plugged() -> Iterator[Any]:
    with torch.no_grad(), enable(backend="torch_native") as handle:
        yield handle


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attention call had to fall back on a dense mask."""
    seen: list[bool] = []
    make = plug._spec

    def spy(*fields: Any) -> Any:
        seen.append(fields[-1])
        return make(*fields)

    monkeypatch.setattr(plug, "_spec", spy)
    return seen


def padding(kind: str) -> tuple[torch.Tensor | None, torch.Tensor]:
    rows = PADDING[kind]
    mask = None if rows is None else torch.tensor(rows)
    return mask, torch.ones(2, 7, dtype=torch.bool) if mask is None else mask.bool()


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.isfinite().all()
    scale = max(1.0, want.abs().max().item())
    assert (got - want).abs().max().item() <= TOLERANCE * scale


@pytest.mark.parametrize("kind", PADDING)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_equal_eager_at_every_real_position(model_of, tokens, dense, name, kind):
    model, ids = model_of(name), tokens(2, 7)
    mask, real = padding(kind)
    want = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("attn_backends")
    got = model(ids, attention_mask=mask).logits
    assert_close(got[real], want[real])
    assert len(dense) == 2 and any(dense) == (kind == "hole")  # lengths, wherever they can say it


@pytest.mark.parametrize("kind", PADDING)
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_encoder_states_equal_eager_at_every_real_position(model_of, tokens, dense, name, kind):
    model, ids = model_of(name), tokens(2, 7)
    mask, real = padding(kind)
    want = model(ids, attention_mask=mask).last_hidden_state
    model.set_attn_implementation("attn_backends")
    got = model(ids, attention_mask=mask).last_hidden_state
    assert_close(got[real], want[real])
    assert dense and any(dense) == (kind == "hole")


@pytest.mark.parametrize("name", DECODERS)
def test_no_logit_depends_on_a_later_token(model_of, tokens, name):
    model, ids = model_of(name, "attn_backends"), tokens(1, 6)
    changed = ids.repeat(6, 1)  # row t has another token at t
    changed.diagonal().copy_((ids[0] - 5 + 1) % 90 + 5)
    before, after = model(ids).logits[0], model(changed).logits
    for t in range(6):
        if t:  # not to the bit: experts round differently when a later token is routed elsewhere
            assert_close(after[t, :t], before[:t])
        assert (after[t, t] - before[t]).abs().max() > 0.1


@pytest.mark.parametrize("name", DECODERS)
def test_single_token(model_of, tokens, name):
    model, ids = model_of(name), tokens(3, 1)
    want = model(ids).logits
    model.set_attn_implementation("attn_backends")
    assert_close(model(ids).logits, want)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static32"])
@pytest.mark.parametrize("name", STEPPED)
def test_steps_on_a_cache_equal_the_whole_sequence_at_once(model_of, tokens, dense, name, static):
    # F16: a static cache has 32 slots in K from the start; the true length is in the mask alone.
    model, ids = model_of(name), tokens(2, 11)
    want = model(ids, use_cache=False).logits
    model.set_attn_implementation("attn_backends")
    cache = (
        transformers.StaticCache(config=model.config, max_cache_len=32)
        if static
        else transformers.DynamicCache(config=model.config)
    )
    names = inspect.signature(type(model).forward).parameters
    argument = "cache" if "cache" in names else "past_key_values"
    # A prompt, three single tokens, and several tokens at once as in speculative decoding.
    for begin, end in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 11)):
        mask = torch.ones(2, end, dtype=torch.long)
        out = model(ids[:, begin:end], attention_mask=mask, use_cache=True, **{argument: cache})
        assert_close(out.logits, want[:, begin:end])
    assert dense and not any(dense)


HOW = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 3},
}
GENERATION = [
    *[(name, "static") for name in STEPPED],
    *[(name, how) for name in ("llama", "qwen3") for how in HOW if how != "static"],
]


@pytest.mark.parametrize("name, how", GENERATION)
def test_generate_gives_the_tokens_of_eager(model_of, tokens, dense, name, how):
    model, ids = model_of(name), tokens(2, 7)
    mask, _ = padding("left")
    arguments = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, **HOW[how])
    want = model.generate(ids, attention_mask=mask, **arguments)
    model.set_attn_implementation("attn_backends")
    got = model.generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(got, want)
    assert len(set(got[:, 7:].flatten().tolist())) > 2
    assert dense and not any(dense)


@pytest.mark.parametrize("how", ["assistant", "prompt_lookup"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_assisted_generation_gives_the_tokens_of_sdpa(model_of, tokens, name, how):
    model, assistant = model_of(name, "sdpa"), model_of(name, "sdpa", num_hidden_layers=1)
    ids = tokens(1, 6).repeat(1, 2)
    arguments = dict(max_new_tokens=10, min_new_tokens=10, do_sample=False)
    arguments |= (
        {"assistant_model": assistant} if how == "assistant" else {"prompt_lookup_num_tokens": 3}
    )
    want = model.generate(ids, **arguments)
    model.set_attn_implementation("attn_backends")
    assistant.set_attn_implementation("attn_backends")
    assert torch.equal(model.generate(ids, **arguments), want)


def test_encoder_decoder_with_cross_attention(model_of, tokens):
    model, ids = model_of("bart"), tokens(2, 7)
    mask, _ = padding("right")
    arguments = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
    want = model.generate(ids, **arguments)
    start = torch.full((2, 1), 2)
    logits = model(ids, attention_mask=mask, decoder_input_ids=start).logits
    model.set_attn_implementation("attn_backends")
    assert torch.equal(model.generate(ids, **arguments), want)
    assert_close(model(ids, attention_mask=mask, decoder_input_ids=start).logits, logits)


def test_a_custom_4d_mask_decides_alone(model_of, tokens):
    model, ids = model_of("llama"), tokens(2, 5)
    tree = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    ).bool()[None, None]
    additive = torch.where(tree, 0.0, torch.finfo(torch.float32).min)
    want = model(ids, attention_mask=additive).logits
    model.set_attn_implementation("attn_backends")
    assert_close(model(ids, attention_mask=tree).logits, want)
    assert_close(model(ids, attention_mask=tree.expand(2, 1, 5, 5)).logits, want)
    assert_close(model(ids, attention_mask=additive).logits, want)


def test_packed_sequences_do_not_see_each_other(model_of, tokens):
    model = model_of("llama", "attn_backends")
    ids, positions = tokens(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    apart = [model(ids[:, :4]).logits, model(ids[:, 4:]).logits]
    assert_close(packed, torch.cat(apart, dim=1))


def test_bf16_stays_within_the_models_own_error(model_of, tokens):
    exact, ids = model_of("llama"), tokens(2, 9)
    want = exact(ids).logits
    model = model_of("llama").to(torch.bfloat16)
    own = (model(ids).logits.float() - want).abs().max()
    model.set_attn_implementation("attn_backends")
    got = model(ids).logits
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() <= 2 * own


def test_captured_lse_is_the_logsumexp_of_the_scores(model_of, tokens, plugged):
    model, ids = model_of("llama"), tokens(2, 6)
    scores: list[torch.Tensor] = []

    def record(module, args, kwargs, output):
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        cos, sin = kwargs["position_embeddings"]
        heads = lambda x: x.view(2, 6, -1, 16).transpose(1, 2)  # noqa: E731
        q, k = heads(module.q_proj(hidden)), heads(module.k_proj(hidden))
        rotate = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
        q, k = rotate(q, k, cos, sin)
        s = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) / 4
        scores.append(s.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf")))

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(record, with_kwargs=True)
    model.set_attn_implementation("attn_backends")
    with capture_lse() as outer, capture_lse() as lses:
        model(ids)
    model(ids)  # outside: not collected
    assert len(lses) == len(outer) == 2
    for lse, s in zip(lses, scores):
        assert lse.dtype == torch.float32 and lse.shape == (2, 6, 4)
        assert_close(lse, s.logsumexp(-1).transpose(1, 2))


def test_captured_lse_marks_padding_rows_as_empty(model_of, tokens):
    model = model_of("llama", "attn_backends")
    mask, real = padding("left")
    with capture_lse() as lses:
        model(tokens(2, 7), attention_mask=mask)
    for lse in lses:
        assert lse[real].isfinite().all()
        assert (lse[~real] == float("-inf")).all()


def test_a_compiled_model_gives_the_same_logits(model_of, tokens):
    model, ids = model_of("llama", num_hidden_layers=1), tokens(2, 7)
    mask, real = padding("left")
    want = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("attn_backends")
    got = torch.compile(model.forward, backend="eager")(ids, attention_mask=mask).logits
    assert_close(got[real], want[real])


def test_layers_of_a_step_share_one_plan(model_of, tokens, monkeypatch):
    planned = []
    plan = AttentionBackend.plan
    monkeypatch.setattr(
        AttentionBackend, "plan", lambda self, *a: planned.append(a) or plan(self, *a)
    )
    model = model_of("llama", "attn_backends", num_hidden_layers=3)
    model(tokens(2, 7))
    assert len(planned) == 1
    model(tokens(2, 8))
    assert len(planned) == 2
