"""Whatever the plug cannot honour is refused by name, and what it honours has an effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

import attn_backends as ab
from attn_backends import UnsupportedCallError
from attn_backends.engines.transformers import capture_lse, enable
from attn_backends.registry.registry import TABLE
from attn_backends.torch_native.backend import TorchNativeBackend

B, H, HK, D = 2, 4, 2, 8


@pytest.fixture
def call() -> Iterator[Callable[..., Any]]:
    """Call the registered function as a model's layer does."""

    def run(
        q_len: int = 3, kv_len: int = 3, *, mask: Any = None, batch: int = B, **kwargs: Any
    ) -> Any:
        generator = torch.Generator().manual_seed(0)
        draw = lambda heads, length: torch.randn(  # noqa: E731
            batch, heads, length, D, generator=generator
        )
        q, k, v = draw(H, q_len), draw(HK, kv_len), draw(HK, kv_len)
        module = SimpleNamespace(**{"is_causal": True, **kwargs.pop("module", {})})
        function = AttentionInterface._global_mapping["attn_backends"]
        with torch.no_grad(), capture_lse() as lses:
            out, weights = function(module, q, k, v, mask, **kwargs)
        assert weights is None and out.is_contiguous()
        return out, lses[0], (q, k, v)

    with enable(backend="torch_native"):
        yield run


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[B, Sq, H, D]`` and LSE ``[B, Sq, H]`` by the definition, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(H // HK, dim=1) for x in (k, v))
    s = q @ k.transpose(2, 3) * options.get("scaling", 1 / math.sqrt(D))
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    s = s.masked_fill(~seen, float("-inf"))
    if "s_aux" in options:
        sink = options["s_aux"].double()[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], dim=3)
    lse = s.logsumexp(3)
    weights = (s - lse[..., None]).exp()[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2), lse.transpose(1, 2)


def assert_equal(got: Any, seen: torch.Tensor, **options: Any) -> None:
    out, lse, tensors = got
    want, want_lse = expected(*tensors, seen, **options)
    assert torch.allclose(out.double(), want, atol=1e-5)
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)


CAUSAL = torch.ones(3, 3).tril().bool()
OPTIONS = {
    "scaling": 0.7,
    "softcap": 0.5,
    "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16),
}


def test_causal_without_a_mask(call):
    assert_equal(call(), CAUSAL)


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_has_its_effect(call, option):
    arguments = {option: OPTIONS[option]}
    assert_equal(call(**arguments), CAUSAL, **arguments)
    assert not torch.allclose(call(**arguments)[0], call()[0], atol=1e-3)


def test_is_causal_as_argument_goes_before_the_modules(call):
    everything = torch.ones(3, 3).bool()
    assert_equal(call(is_causal=False), everything)
    assert_equal(call(module={"is_causal": False}), everything)
    assert_equal(call(module={"is_causal": False}, is_causal=True), CAUSAL)


def test_one_query_sees_every_key(call):
    assert_equal(call(1, 5), torch.ones(1, 5).bool())


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_sliding_window_without_a_mask(call, tokens):
    # F12: W tokens, the query's own included
    assert_equal(call(sliding_window=tokens), CAUSAL.triu(1 - tokens))
    both = torch.ones(3, 3).triu(1 - tokens).tril(tokens - 1).bool()
    assert_equal(call(sliding_window=tokens, is_causal=False), both)


def test_packed_lengths_separate_the_sequences(call):
    starts_q, starts_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 4, 6, 9])
    seen = torch.zeros(5, 9).bool()
    seen[:2, :4] = torch.ones(2, 4).tril(2).bool()
    seen[2:, 6:] = CAUSAL
    packed = dict(cu_seq_lens_q=starts_q, cu_seq_lens_k=starts_k)
    assert_equal(call(5, 9, batch=1, **packed), seen)
    assert_equal(call(5, 9, batch=1, **packed, max_length_q=3, max_length_k=4), seen)
    seen[:2, :4] = seen[2:, 6:] = True
    assert_equal(call(5, 9, batch=1, is_causal=False, **packed), seen)


def test_a_query_shared_by_all_entries_is_broadcast(call):
    function = AttentionInterface._global_mapping["attn_backends"]
    q, k = torch.randn(1, H, 2, D), torch.randn(3, HK, 4, D)
    with torch.no_grad():
        out, _ = function(SimpleNamespace(is_causal=False), q, k, k, None)
    want, _ = expected(q.expand(3, -1, -1, -1), k, k, torch.ones(2, 4).bool())
    assert torch.allclose(out.double(), want, atol=1e-5)


HARMLESS = {
    "position_ids": torch.arange(3),
    "use_cache": True,
    "cache_position": torch.arange(3),
    "output_attentions": False,
    "output_hidden_states": True,
    "output_router_logits": True,
    "position_bias": None,
    "anything": None,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_arguments_that_change_nothing_pass(call, name):
    assert torch.equal(call(**{name: HARMLESS[name]})[0], call()[0])


REFUSED = {
    "dropout": (0.1, r"dropout=0.1 \(supported: 0.0\); call model.eval\(\)"),
    "output_attentions": (True, r"output_attentions=True \(supported: False\).*eager"),
    "position_bias": (torch.zeros(1, H, 3, 3), r"position_bias=Tensor\[1, 4, 3, 3\] .*sdpa"),
    "head_mask": (torch.ones(H), r"head_mask=Tensor\[4\]"),
    "indices": (torch.zeros(1), r"indices=Tensor\[1\] \(supported: None\).*ignore=\('indices',\)"),
    "sliding_window": (0, r"sliding_window=0 \(supported: >= 1\)"),
    "block_table": (torch.zeros(1, 1), r"block_table=given .*max_blocks_per_request=0"),
    "cu_seq_lens_q": (torch.tensor([0, 3]), r"cu_seq_lens_q, cu_seq_lens_k=Tensor, NoneType"),
    "mask": (torch.ones(B, H, 3, 3).bool(), r"attention_mask.shape=\[2, 4, 3, 3\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(call, name):
    value, message = REFUSED[name]
    with pytest.raises(UnsupportedCallError, match=message) as caught:
        call(**{name: value})
    assert caught.value.reasons


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.zeros(B, 1, 3, 3).masked_fill(~CAUSAL, -3.0), "attention_mask=other values"),
        (torch.ones(B, 1, 3, 3).int(), "attention_mask.dtype=torch.int32"),
        (torch.ones(B, 1, 3, 4).bool(), r"attention_mask.shape=\[2, 1, 3, 4\]"),
        (torch.ones(B, 3).bool(), r"attention_mask.shape=\[2, 3\]"),
    ],
)
def test_masks_of_another_kind_are_refused(call, mask, message):
    with pytest.raises(UnsupportedCallError, match=message):
        call(mask=mask)


def test_every_reason_is_told_at_once(call):
    with pytest.raises(UnsupportedCallError, match=r"dropout=0.5.*; head_mask=.*; odd=1") as caught:
        call(dropout=0.5, head_mask=torch.ones(H), odd=1)
    assert [reason.argument for reason in caught.value.reasons] == ["dropout", "head_mask", "odd"]


def test_causal_keys_without_true_lengths_are_refused(call):
    # F16: K may be a static cache of which most slots are empty.
    with pytest.raises(UnsupportedCallError, match="None with 3 queries and 32 keys"):
        call(3, 32)


def test_packed_lengths_beside_a_dense_mask_are_refused(call):
    starts = torch.tensor([0, 1, 3])
    with pytest.raises(UnsupportedCallError, match="leave cu_seq_lens_q out"):
        call(batch=1, mask=CAUSAL[None, None], cu_seq_lens_q=starts, cu_seq_lens_k=starts)


def test_packed_lengths_of_several_entries_are_refused(call):
    starts = torch.tensor([0, 1, 3])
    with pytest.raises(UnsupportedCallError, match="batch_size=2"):
        call(cu_seq_lens_q=starts, cu_seq_lens_k=starts)


def test_training_is_refused_with_the_way_out(model_of, tokens):
    ids = tokens(1, 4)
    with enable(backend="torch_native"):
        model = model_of("llama", "attn_backends")
        with pytest.raises(UnsupportedCallError, match=r"requires_grad=True.*no_grad.*'sdpa'"):
            model(ids)
        model = model_of("llama", "attn_backends", attention_dropout=0.1).train()
        with torch.no_grad(), pytest.raises(UnsupportedCallError, match=r"dropout=0\.1"):
            model(ids)
        with torch.no_grad():
            assert model.eval()(ids).logits.isfinite().all()
        with torch.inference_mode():
            assert model.eval()(ids).logits.isfinite().all()


def test_attention_weights_are_refused_not_left_out(model_of, tokens):
    with torch.no_grad(), enable(backend="torch_native"):
        model = model_of("llama", "attn_backends")
        with pytest.raises(UnsupportedCallError, match="output_attentions=True"):
            model(tokens(1, 4), output_attentions=True)


def test_a_window_of_no_tokens_is_refused_by_the_mask(model_of, tokens):
    with torch.no_grad(), enable(backend="torch_native"):
        model = model_of("mistral", "attn_backends", sliding_window=4)
        model.config.sliding_window = 0
        with pytest.raises(UnsupportedCallError, match="sliding_window=0"):
            model(tokens(1, 4))


def test_ignore_lets_a_named_argument_pass(model_of, tokens):
    ids = tokens(1, 4)
    with torch.no_grad(), enable(backend="torch_native", ignore=("odd",)):
        model = model_of("llama", "attn_backends")
        assert torch.equal(model(ids, odd=1).logits, model(ids).logits)
        with pytest.raises(UnsupportedCallError, match="even=1"):
            model(ids, even=1)


def test_a_backend_that_cannot_do_the_call_refuses_with_its_reasons(monkeypatch):
    monkeypatch.setattr(TABLE, "entries", dict(TABLE.entries))  # nothing stays registered

    class NoMask(TorchNativeBackend):
        name = "no_mask"
        capabilities = ab.Capabilities(
            devices=("cpu",), dtypes=(torch.float32,), features=frozenset({"ragged", "causal"})
        )

    ab.register_attention_backend("no_mask", NoMask)
    with enable("other", backend="no_mask"):
        function = AttentionInterface._global_mapping["other"]
        q, k = torch.randn(1, H, 3, D), torch.randn(1, HK, 3, D)
        module = SimpleNamespace(is_causal=True)
        with torch.no_grad():
            function(module, q, k, k, None)
            with pytest.raises(UnsupportedCallError, match="has_mask=True"):
                function(module, q, k, k, CAUSAL[None, None])
