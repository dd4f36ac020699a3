"""What vLLM asks for is computed: chunks, shared prefixes, decode, every feature of a layer."""

from __future__ import annotations

import pytest
import torch

from attn_backends.errors import AttnBackendsError

GENERATIONS = ("0.20", "0.33")


def check(out, want, *, rtol=1e-5):
    """Rows of tokens agree; rows of padding are not looked at."""
    got = out[: len(want)].double()
    assert not got.isnan().any()
    error = (got - want).abs().max().item()
    assert error <= rtol * max(1.0, want.abs().max().item()), error


def serve(engine):
    """Chunked prefill, a request on a shared prefix, a mixed step, then decode."""
    a = engine.request(23)
    check(*engine.step([(a, 9)]))
    check(*engine.step([(a, 8)], padding=3))
    b = engine.request(14, share=a, shared=2)
    check(*engine.step([(a, 1), (b, 5)]))
    c = engine.request(6)
    check(*engine.step([(a, 1), (b, 1), (c, 2)]))
    for _ in range(3):
        check(*engine.step([(a, 1), (c, 1)]))


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"sliding_window": 5},
        {"sliding_window": 1},
        {"logits_soft_cap": 2.0},
        {"logits_soft_cap": 0.0},
        {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
        {"sinks": torch.tensor([0.0, 1.0, -2.0, 3.0])},
        {"sinks": torch.tensor([0.5, 1.0, -2.0, 3.0]), "sliding_window": 6},
        {"heads": 3, "kv_heads": 1, "dim": 24},
        {"heads": 4, "kv_heads": 4},
    ],
    ids=lambda layer: "-".join(layer) or "plain",
)
def test_steps_give_attention_over_the_cache(engine, layer, generation):
    serve(engine(generation=generation, **layer))


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("scales", [(0.5, 2.0), "per head"])
def test_a_float8_cache_is_written_and_read_with_its_scales(engine, generation, scales):  # F25
    made = engine(generation=generation, kv_cache_dtype="fp8")
    if scales == "per head":
        made.layer._k_scale = torch.tensor([0.5, 0.25])
        made.layer._v_scale = torch.tensor([1.0, 2.0])
        per_head = [s[:, None] for s in (made.layer._k_scale, made.layer._v_scale)]
        made.expected = with_scales(made, *per_head)
    else:
        made.layer._k_scale, made.layer._v_scale = map(torch.tensor, scales)
    serve(made)


def with_scales(made, k_scale, v_scale):
    """``Engine.expected`` for scales that broadcast over ``[T, HK, D]``."""
    plain = type(made).expected

    def expected(q, news):
        kept = made.layer._k_scale, made.layer._v_scale
        made.layer._k_scale, made.layer._v_scale = k_scale, v_scale
        try:
            return plain(made, q, news)
        finally:
            made.layer._k_scale, made.layer._v_scale = kept

    return expected


@pytest.mark.parametrize(
    "backend, decode",
    [("triton", "triton"), ("torch_native", "triton"), ("triton", "torch_native")],
)
def test_the_triton_backend_stands_behind_it_too(engine, backend, decode):
    made = engine(backend, decode)
    assert made.builder.reorder_batch_threshold == (None if backend == decode else 1)
    serve(made)


def test_two_backends_share_a_mixed_step(engine):
    made = engine("torch_native", "triton")
    a, b, c = made.request(9), made.request(12), made.request(7)
    made.step([(a, 8)])
    made.step([(b, 4)])
    common = made.metadata([(a, 1), (b, 1), (c, 7)])
    step = made.builder.build(0, common)
    (parts,) = step.parts.values()
    assert [(p.backend.name, p.start, p.stop) for p in parts] == [
        ("triton", 0, 2),
        ("torch_native", 2, 9),
    ]
    assert [p.plan.batch.q_lens for p in parts] == [(1, 1), (7,)]
    check(*made.step([(a, 1), (b, 1), (c, 7)]))


def test_padding_of_a_graph_gets_zeros_and_harms_nobody(engine):  # F23
    made = engine("triton")
    a, b = made.request(8), made.request(11)
    made.step([(a, 7), (b, 10)])
    common = made.metadata([(a, 1), (b, 1)], num_reqs=4, rows=4)
    out, want = made.step([(a, 1), (b, 1)], metadata=common)
    check(out, want)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))


def test_a_captured_step_is_refilled_for_other_requests(engine):
    made = engine("triton")
    a, b, c = made.request(30), made.request(21), made.request(9)
    made.step([(a, 3), (b, 17), (c, 5)])
    common = made.metadata([(a, 1), (b, 1), (c, 1)], num_reqs=4, rows=4)
    out, want = made.step(
        [(a, 1), (b, 1), (c, 1)],
        metadata=common,
        build=made.builder.build_for_cudagraph_capture,
    )
    check(out, want)
    (plan,) = made.builder._captured.values()
    assert plan.batch.seqlens_k.data_ptr() == common.seq_lens.data_ptr()

    # The engine refills its own tensors; the step finds the plan of the graph again.
    later = made.metadata([(b, 1), (a, 1)], num_reqs=4, rows=4)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
        getattr(common, name).copy_(getattr(later, name))
        setattr(later, name, getattr(common, name))
    step = made.builder.build(0, later)
    (parts,) = step.parts.values()
    assert [part.plan for part in parts] == [plan]
    check(*made.step([(b, 1), (a, 1)], metadata=later))

    # Tensors of another step's own are copied into the graph's.
    other = made.metadata([(c, 1), (a, 1), (b, 1)], num_reqs=4, rows=4)
    check(*made.step([(c, 1), (a, 1), (b, 1)], metadata=other))
    assert list(made.builder._captured.values()) == [plan]
    # A step of another size belongs to no graph.
    (parts,) = made.builder.build(0, made.metadata([(a, 1), (b, 1)])).parts.values()
    assert parts[0].plan is not plan and parts[0].plan.capacity is None


def test_a_step_where_the_last_one_lay_needs_no_batch(engine, monkeypatch):
    from attn_backends.engines.vllm.steps import Requests

    made = engine("triton")
    a, b = made.request(30), made.request(21)
    made.step([(a, 3), (b, 17)])
    common = made.metadata([(a, 1), (b, 1)])
    first = made.builder.build_for_cudagraph_capture(common)

    def batch(requests):
        raise LookupError

    monkeypatch.setattr(Requests, "batch", batch)
    assert made.builder.build(0, common) is first
    for change in ({"max_seq_len": 10_000}, {"seq_lens": common.seq_lens.clone()}):
        kept = {name: getattr(common, name) for name in change}
        for name, value in change.items():
            setattr(common, name, value)
        with pytest.raises(LookupError):  # the ordinary way, which checks the batch
            made.builder.build(0, common)
        for name, value in kept.items():
            setattr(common, name, value)
    common.causal = False
    with pytest.raises(AttnBackendsError, match="causal"):
        made.builder.build(0, common)


def test_speculative_steps_are_decode_with_longer_queries(engine):
    made = engine("torch_native", "triton", speculative=2)
    assert made.builder.longest_decode == 3
    a, b = made.request(12), made.request(16)
    made.step([(a, 6), (b, 8)])
    common = made.metadata([(a, 3), (b, 3)])
    (parts,) = made.builder.build(0, common).parts.values()
    assert [part.backend.name for part in parts] == ["triton"]
    assert parts[0].plan.batch.kv_lens is None  # lengths on the host are only bounds then
    check(*made.step([(a, 3), (b, 3)]))


def test_lengths_on_the_host_are_used_where_they_are_exact(engine):
    made = engine()
    a, b = made.request(9), made.request(5)
    made.step([(a, 4)])
    (parts,) = made.builder.build(0, made.metadata([(a, 2), (b, 5)])).parts.values()
    assert parts[0].plan.batch.q_lens == (2, 5)
    assert parts[0].plan.batch.kv_lens == (6, 5)
    padded = made.metadata([(a, 2), (b, 5)], num_reqs=3, rows=8)
    (parts,) = made.builder.build(0, padded).parts.values()
    assert parts[0].plan.batch.q_lens is None


def test_the_run_that_measures_memory_gives_zeros(engine):
    made = engine()
    q = made.random(5, made.heads, made.dim)
    out = torch.full_like(q, float("nan"))
    assert made.impl.forward(made.layer, q, q, q, torch.tensor([]), None, out) is out
    assert not out.any()


def test_graphs_are_offered_as_far_as_the_decode_backend_has_them(engine):
    from vllm.v1.attention.backend import AttentionCGSupport

    assert graphs(engine("triton")) == AttentionCGSupport.UNIFORM_BATCH
    assert graphs(engine("torch_native", "triton")) == AttentionCGSupport.UNIFORM_BATCH
    assert graphs(engine("triton", "torch_native")) == AttentionCGSupport.NEVER


def graphs(made):
    return made.builder_class.get_cudagraph_support(made.config, None)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"attn_type": "encoder_only"}, "attn_type=encoder_only (supported: decoder)"),
        ({"chunk_lookback": 2}, "chunk_lookback=2 (supported: -1)"),
        ({"qk_gain": 3}, "qk_gain=3 (supported: None)"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype=int8_per_token_head"),
        ({"kv_cache_dtype": "fp8_e5m2", "backend": "triton"}, "kv_dtype=float8_e5m2"),
        ({"kv_cache_dtype": "float16"}, "kv_dtype=torch.float16"),
        ({"sliding_window": 0}, "window=(-1, 0)"),
        ({"backend": "flash_attention"}, "chosen by ATTN_BACKENDS_PREFILL"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_layer_that_cannot_be_honoured_is_refused_with_its_reason(engine, change, text):
    with pytest.raises(AttnBackendsError) as error:
        engine(**change)
    assert text in str(error.value)


def test_a_step_that_cannot_be_honoured_is_refused_with_its_reason(engine):
    made = engine()
    common = made.metadata([(made.request(4), 4)])
    common.causal = False
    with pytest.raises(AttnBackendsError, match=r"causal=False \(supported: True\)"):
        made.builder.build(0, common)
    common.causal = True
    with pytest.raises(AttnBackendsError, match=r"common_prefix_len=16 \(supported: 0\)"):
        made.builder.build(16, common)
    q = made.random(4, made.heads, made.dim)
    with pytest.raises(AttnBackendsError, match=r"output_scale=given \(supported: None\)"):
        made.impl.forward(
            made.layer, q, q, q, made.cache, None, q.clone(), output_scale=torch.ones(1)
        )
    assert made.builder.use_cascade_attention(256, [1], 4, 2, False, False, False, 132, 1) is False


def test_values_of_another_width_are_refused(engine):
    made = engine()
    made.layer.head_size_v = 8
    with pytest.raises(AttnBackendsError, match=r"head_size_v=8 \(supported: head_size=16\)"):
        _ = made.builder


def test_layers_of_other_backends_in_a_group_are_left_alone(engine):
    made = engine()
    made.config.compilation_config.static_forward_context["mamba"] = object()
    kv_spec = type("Spec", (), {"block_size": 4})
    built = made.builder_class(kv_spec, ["mamba", "layer"], made.config, torch.device("cpu"))
    assert list(built.phases) == [made.impl.spec]
