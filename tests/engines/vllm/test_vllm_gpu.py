"""On a GPU: steps through the real kernels, and decode steps replayed from a CUDA graph."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

LAYERS = {
    "plain": {},
    "window": {"sliding_window": 6},
    "softcap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, 1.0, -2.0, 3.0])},
    "fp8": {"kv_cache_dtype": "fp8"},
    "heads of 80": {"dim": 80, "kv_heads": 1},
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
#: Outputs are averages of normal numbers: a few roundings of the dtype.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-3}


def check(made, out, want):
    got = out[: len(want)].double()
    assert not got.isnan().any()
    assert (got - want).abs().max().item() <= TOLERANCE[made.dtype]


@each_layer
@pytest.mark.parametrize("generation", ["0.20", "0.33"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_give_attention_over_the_cache(engine, dtype, generation, layer):
    made = engine("triton", dtype=dtype, generation=generation, device="cuda", **layer)
    a = made.request(44)
    for n in (17, 9, 1):
        check(made, *made.step([(a, n)]))
    b = made.request(30, share=a, shared=3)
    check(made, *made.step([(a, 1), (b, 16)], padding=5))
    check(made, *made.step([(a, 1), (b, 1)]))


@each_layer
def test_a_graph_is_captured_once_and_replayed_for_other_requests(engine, layer):
    made = engine("triton", dtype=torch.bfloat16, device="cuda", **layer)
    a, b, c = made.request(44), made.request(21), made.request(13)
    made.step([(a, 3), (b, 15), (c, 9)])
    common = made.metadata([(a, 1), (b, 1), (c, 1)], num_reqs=4, rows=4)
    step = made.builder.build_for_cudagraph_capture(common)
    q, k, v = made.inputs([(a, 1), (b, 1), (c, 1)], 4)
    out = torch.full_like(q, float("nan"))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.graph(graph):
        made.impl.do_kv_cache_update(made.layer, k, v, made.cache, common.slot_mapping)
        made.impl.forward(made.layer, q, k, v, made.cache, step, out)

    rounds = ([a, b, c], [c, a], [b], [a, b, c], [b, c])
    for requests in rounds:
        news = [(request, 1) for request in requests]
        later = made.metadata(news, num_reqs=4, rows=4)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            getattr(common, name).copy_(getattr(later, name))
            setattr(later, name, getattr(common, name))
        for target, source in zip((q, k, v), made.inputs(news, 4)):
            target.copy_(source)
        made.builder.build(0, later)
        out.fill_(float("nan"))
        graph.replay()
        check(made, out, made.expected(q[: len(news)], news))
        assert not out[len(news) :].any()
        for request in requests:
            request.computed += 1
    assert len(made.builder._captured) == 1


def test_building_a_replayed_step_does_not_wait_for_the_device(engine):
    made = engine("triton", dtype=torch.bfloat16, device="cuda")
    a, b = made.request(30), made.request(21)
    made.step([(a, 3), (b, 15)])
    common = made.metadata([(a, 1), (b, 1)])
    made.builder.build_for_cudagraph_capture(common)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.builder.build(0, common)
    finally:
        torch.cuda.set_sync_debug_mode("default")
