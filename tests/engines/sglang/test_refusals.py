"""What cannot be honored is refused with a reason, at start-up where it is known then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attn_backends as ab
from attn_backends.errors import (
    BackendUnavailableError,
    InvalidInputError,
    UnknownBackendError,
    UnsupportedCallError,
)

AT_START = [
    ({"runner": {"use_mla_backend": True}}, "attention_arch=MLA (supported: MHA, GQA, MQA)"),
    ({"settings": {"speculative_algorithm": "EAGLE"}}, "speculative_algorithm=EAGLE (supported: N"),
    ({"settings": {"dllm_algorithm": "LowConfidence"}}, "dllm_algorithm=LowConfidence"),
    ({"settings": {"dcp_size": 2}}, "dcp_size=2 (supported: 1)"),
    ({"settings": {"attn_cp_size": 4}}, "attn_cp_size=4 (supported: 1)"),
    ({"settings": {"enable_unified_memory": True}}, "enable_unified_memory=True"),
    ({"settings": {"enable_hisparse": True}}, "enable_hisparse=True"),
    ({"settings": {"enable_mis": True}}, "enable_mis=True"),
    ({"settings": {"cuda_graph_backend_prefill": "full"}}, "cuda_graph_backend_prefill=full"),
    ({"layers": ({"is_cross_attention": True},)}, "is_cross_attention=True"),
    ({"layers": ({}, {"attn_type": "decoder_bidirectional"})}, "attn_type=decoder_bidirectional"),
    (
        {"layers": ({"logit_cap": 3.0, "logit_capping_method": "sigmoid"},)},
        "logit_capping_method=sigmoid (supported: tanh)",
    ),
    ({"layers": ({"pos_encoding_mode": "ALIBI"},)}, "pos_encoding_mode=ALIBI"),
    (
        {
            "layers": ({"use_irope": True},),
            "hf_config": SimpleNamespace(attention_chunk_size=8192),
        },
        "attention_chunk_size=set",
    ),
    (
        {"dtype": torch.float16, "kv_dtype": torch.bfloat16},
        "kv_cache_dtype=torch.bfloat16 (supported: torch.float16",
    ),
]


@pytest.mark.parametrize("facts, reason", AT_START, ids=[r.split("=")[0] for _, r in AT_START])
def test_refused_at_start(serve, facts, reason) -> None:
    with pytest.raises(UnsupportedCallError) as error:
        serve(**facts)
    assert reason in str(error.value)
    assert str(error.value).startswith("--attention-backend attn_backends cannot do this: ")


def test_every_reason_is_told_at_once(serve) -> None:
    with pytest.raises(UnsupportedCallError) as error:
        serve(settings={"dcp_size": 2, "enable_mis": True}, runner={"use_mla_backend": True})
    assert {r.argument for r in error.value.reasons} == {"attention_arch", "dcp_size", "enable_mis"}


def test_an_encoder_beside_the_decoder_is_refused(serve) -> None:
    server = serve(build=False)
    server.runner.model_config.is_encoder_decoder = True
    with pytest.raises(UnsupportedCallError, match="is_encoder_decoder=True"):
        type(serve().backend)(server.runner)


def test_a_temperature_by_length_is_refused(serve) -> None:
    server = serve(build=False)
    server.layers[0].xai_temperature_len = 1024
    with pytest.raises(UnsupportedCallError, match="xai_temperature_len=1024"):
        type(serve().backend)(server.runner)


def test_layers_without_what_is_refused_are_accepted(serve) -> None:
    """The neighbors of the refusals above: a cap that is off, irope in a model without chunks."""
    serve(layers=({"logit_capping_method": "sigmoid"}, {"use_irope": True}))
    serve(hf_config=SimpleNamespace(attention_chunk_size=8192))


def test_a_pool_of_another_kind_is_refused(serve) -> None:
    server = serve(build=False)

    class MLATokenToKVPool:
        dtype = torch.float32

    server.runner.token_to_kv_pool = MLATokenToKVPool()
    with pytest.raises(UnsupportedCallError, match="token_to_kv_pool=MLATokenToKVPool"):
        type(serve().backend)(server.runner)


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("kv_cache_layout", "vectorized_5d", "kv_cache_layout=vectorized_5d (supported: nhd, hnd)"),
        ("quant_method", SimpleNamespace(name="fp4"), "kv_cache_dtype=fp4"),
    ],
)
def test_a_pool_in_another_format_is_refused(serve, name, value, reason) -> None:
    server = serve(build=False)
    setattr(server.pool, name, value)
    with pytest.raises(UnsupportedCallError) as error:
        type(serve().backend)(server.runner)
    assert reason in str(error.value)


def test_a_pool_whose_window_part_is_a_ring_is_refused(serve) -> None:
    server = serve(layers=({"sliding_window_size": 6},) * 2, windows=(0,), build=False)
    server.pool.swa_req_ring_size = 128
    with pytest.raises(UnsupportedCallError, match="swa_req_ring_size=128"):
        type(serve().backend)(server.runner)


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND", "PREBUILT"])
def test_steps_of_other_kinds_are_refused(serve, mode) -> None:
    server = serve()
    batch = server.batch(mode, {"a": 2})
    with pytest.raises(UnsupportedCallError, match=f"forward_mode={mode}"):
        server.backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    "name, value",
    [
        ("encoder_lens", torch.tensor([3])),
        ("spec_info", SimpleNamespace()),
        ("multi_item_delimiter_indices", [torch.tensor([1])]),
    ],
)
def test_steps_with_more_than_tokens_are_refused(serve, name, value) -> None:
    server = serve()
    batch = server.batch("EXTEND", {"a": 2}, **{name: value})
    with pytest.raises(UnsupportedCallError, match=f"{name}="):
        server.backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"k_rope": torch.zeros(2, 1, 8)}, "k_rope=Tensor[2, 1, 8] (supported: None)"),
        ({"score_mod": len}, "score_mod=<built-in function len> (supported: None)"),
        ({"rel_bias": torch.zeros(2)}, "rel_bias=Tensor[2]"),
        ({"topk_indices": 3, "q_rope": 1}, "topk_indices=3 (supported: None); q_rope=1"),
    ],
)
def test_arguments_that_nobody_reads_are_refused(serve, arguments, reason) -> None:
    with ab.use("torch_native"):
        server = serve()
        batch = server.batch("EXTEND", {"a": 2})
        server.backend.init_forward_metadata(batch)
        q, k, v = server.draw(server.layers[0], 2)
        with pytest.raises(UnsupportedCallError) as error:
            server.backend.forward(q, k, v, server.layers[0], batch, **arguments)
        assert reason in str(error.value)


def test_arguments_that_ask_for_nothing_pass(serve) -> None:
    with ab.use("torch_native"):
        server = serve()
        batch = server.batch("EXTEND", {"a": 2})
        server.backend.init_forward_metadata(batch)
        q, k, v = server.draw(server.layers[0], 2)
        none = {"sinks": None, "return_lse": False, "score_mod": None, "q_rope": None}
        plain = server.backend.forward(q, k, v, server.layers[0], batch)
        assert torch.equal(plain, server.backend.forward(q, k, v, server.layers[0], batch, **none))


def test_sinks_of_another_length_are_refused(serve) -> None:
    with ab.use("torch_native"):
        server = serve()
        with pytest.raises(InvalidInputError, match="sinks"):
            server.step("EXTEND", {"a": 2}, sinks=torch.zeros(3))


def test_a_layer_before_its_metadata_is_refused(serve) -> None:
    server = serve()
    batch = server.batch("EXTEND", {"a": 2})
    q, k, v = server.draw(server.layers[0], 2)
    with pytest.raises(UnsupportedCallError, match="init_forward_metadata=not called"):
        server.backend.forward(q, k, v, server.layers[0], batch)


def test_a_layer_that_the_model_hid_is_refused_when_it_runs(serve) -> None:
    server = serve()
    hidden = serve(layers=({"pos_encoding_mode": "ALIBI"},), build=False).layers[0]
    batch = server.batch("EXTEND", {"a": 2})
    server.backend.init_forward_metadata(batch)
    q, k, v = server.draw(hidden, 2)
    with pytest.raises(UnsupportedCallError, match="pos_encoding_mode=ALIBI"):
        server.backend.forward(q, k, v, hidden, batch)


def test_a_backend_that_cannot_do_a_layer_is_refused_at_start(serve, monkeypatch) -> None:
    """The configuration's choice is used or refused, never replaced."""
    monkeypatch.setenv("ATTN_BACKENDS_DECODE", "torch_sdpa")
    with pytest.raises(UnsupportedCallError, match="ATTN_BACKENDS_DECODE"):
        serve(layers=({"logit_cap": 5.0},))
    # Not where SGLang decodes with a backend of its own.
    serve(layers=({"logit_cap": 5.0},), settings={"decode_attention_backend": "fa3"})


@pytest.mark.parametrize(
    "name, error",
    [("nope", UnknownBackendError), ("flash_attention", BackendUnavailableError)],
)
def test_a_backend_that_is_not_there_is_named_at_start(serve, monkeypatch, name, error) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", name)
    with pytest.raises(error, match=name):
        serve()
