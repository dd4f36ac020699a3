"""Steps of SGLang through the plug: every query sees its own request's keys, and all of them."""

from __future__ import annotations

import pytest
import torch

import attn_backends as ab


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_extend_over_a_shared_prefix_then_decode(serve, page_size) -> None:
    with ab.use("torch_native"):
        server = serve(page_size=page_size, layers=({}, {}))
        server.step("EXTEND", {"a": 70, "b": 1})
        server.share("a", "c", 64)
        server.step("EXTEND", {"c": 3, "d": 17})
        server.step("DECODE", {"a": 1, "b": 1, "c": 1, "d": 1})
        server.step("MIXED", {"b": 1, "d": 5, "a": 1})
        server.step("DECODE", {"d": 1})


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_same_through_triton(serve, page_size) -> None:
    with ab.use("triton"):
        server = serve(page_size=page_size, heads=2, kv_heads=1)
        server.step("EXTEND", {"a": 66, "b": 1})
        server.share("a", "c", 64)
        server.step("MIXED", {"c": 3, "b": 1})
        server.step("DECODE", {"a": 1, "b": 1, "c": 1})


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_prompts_in_chunks_of_any_size(serve, page_size) -> None:
    with ab.use("torch_native"):
        server = serve(page_size=page_size)
        for chunk in (1, 15, 16, 17, 3):
            server.step("EXTEND", {"a": chunk, "b": 4})
            server.step("SPLIT_PREFILL", {"b": 1})


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (5, 1), (6, 3), (7, 7), (24, 4)])
@pytest.mark.parametrize("dim, dim_v", [(16, None), (24, 40), (80, None)])
def test_any_heads_and_widths(serve, heads, kv_heads, dim, dim_v) -> None:
    with ab.use("torch_native"):
        server = serve(page_size=4, heads=heads, kv_heads=kv_heads, dim=dim, dim_v=dim_v)
        server.step("EXTEND", {"a": 9, "b": 2})
        server.step("DECODE", {"a": 1, "b": 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(serve, dtype) -> None:
    with ab.use("torch_native"):
        server = serve(page_size=16, dtype=dtype)
        server.step("EXTEND", {"a": 33, "b": 7})
        server.step("DECODE", {"b": 1, "a": 1})


def test_lengths_that_stay_on_the_device(serve) -> None:
    with ab.use("torch_native"):
        server = serve(page_size=16)
        server.step("EXTEND", {"a": 20, "b": 3}, extend_seq_lens_cpu=None, seq_lens_cpu=None)
        server.step("EXTEND", {"a": 2, "b": 5}, extend_prefix_lens_cpu=None)
        server.step("DECODE", {"a": 1, "b": 1}, seq_lens_cpu=None)


def test_a_step_without_requests_gives_an_empty_result(serve) -> None:
    server = serve()
    batch = server.batch("IDLE", {})
    server.backend.init_forward_metadata(batch)
    q, k, v = server.draw(server.layers[0], 0)
    assert server.backend.forward(q, k, v, server.layers[0], batch).shape == (0, 64)


def test_padding_after_the_last_request_is_zero(serve) -> None:
    with ab.use("torch_native"):
        server = serve(page_size=4)
        layer = server.layers[0]
        batch = server.batch("EXTEND", {"a": 3})
        server.backend.init_forward_metadata(batch)
        q, k, v = server.draw(layer, 5)
        server.pool.set_kv_buffer(layer, batch.out_cache_loc, k[:3].clone(), v[:3].clone())
        server.remember(layer, {"a": 3}, k[:3], v[:3])
        o, lse = server.backend.forward(q, None, None, layer, batch, False, return_lse=True)
        want = server.exact(layer, {"a": 3}, q[:3])
        server.check((o[:3], lse[:3]), want, lse=True)
        assert not o[3:].any() and bool((lse[3:] == float("-inf")).all())


def test_queries_may_come_in_three_dims(serve) -> None:
    with ab.use("torch_native"):
        server = serve()
        layer = server.layers[0]
        batch = server.batch("EXTEND", {"a": 3})
        server.backend.init_forward_metadata(batch)
        q, k, v = server.draw(layer, 3)
        flat = server.backend.forward(q, k, v, layer, batch)
        heads = server.backend.forward(q.view(3, 4, 16), k, v, layer, batch)
        assert torch.equal(flat, heads)


def test_a_layer_reads_the_keys_that_another_wrote(serve) -> None:
    """``save_kv_cache=False`` without keys: the layer shares another's place in the pool."""
    with ab.use("torch_native"):
        server = serve(layers=({}, {"layer_id": 0}))
        first, second = server.layers
        batch = server.batch("EXTEND", {"a": 6})
        server.backend.init_forward_metadata(batch)
        q, k, v = server.draw(first, 6)
        server.backend.forward(q, k, v, first, batch)
        server.remember(first, {"a": 6}, k, v)
        q, other_k, other_v = server.draw(second, 6)
        want = server.exact(second, {"a": 6}, q)
        server.check(server.backend.forward(q, None, None, second, batch, False), want)
        # Given but not to be saved: they are in the pool already, as fused writers leave them.
        got = server.backend.forward(q, other_k, other_v, second, batch, save_kv_cache=False)
        server.check(got, want)


def test_a_step_plans_once_for_layers_alike(serve) -> None:
    with ab.use("torch_native"):
        server = serve(layers=({}, {}, {"logit_cap": 5.0}, {}))
        server.step("EXTEND", {"a": 4})
        assert len(server.backend.forward_metadata.plans) == 2
