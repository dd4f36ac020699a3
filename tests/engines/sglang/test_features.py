"""What a layer or a call may ask for beside plain causal attention: honored, in every phase."""

from __future__ import annotations

import pytest
import torch

import attn_backends as ab

E4M3 = torch.float8_e4m3fn
EACH = pytest.mark.parametrize("backend", ["torch_native", "triton"])


#: Heads that keep the interpreter quick.
FEW = {"heads": 2, "kv_heads": 1}


def prompt_and_decode(server, **extra) -> None:
    """A prompt, a second chunk beside a prompt of one token, and a step of decode."""
    server.step("EXTEND", {"a": 21, "b": 2}, **extra)
    server.step("EXTEND", {"a": 3, "c": 1}, **extra)
    server.step("DECODE", {"c": 1, "a": 1, "b": 1}, **extra)


@pytest.mark.parametrize("left", [1, 3, 8, 200])
def test_window_is_the_number_of_keys_before_the_own(serve, left) -> None:
    """SGLang hands over W - 1 for a window of W tokens."""  # F12
    with ab.use("torch_native"):
        server = serve(page_size=4, layers=({"sliding_window_size": left}, {}))
        prompt_and_decode(server)


@EACH
def test_window_counts_keys_exactly(serve, backend) -> None:
    """Zero queries: the answer is the mean of the visible values, the LSE the log of their number.

    At the last of 30 tokens, with ``sliding_window_size=3``, keys 26 to 29 are visible.
    """
    with ab.use(backend):
        server = serve(page_size=4, layers=({"sliding_window_size": 3},), heads=2, kv_heads=1)
        layer = server.layers[0]
        for mode, count in (("EXTEND", 29), ("DECODE", 1)):
            batch = server.batch(mode, {"a": count})
            server.backend.init_forward_metadata(batch)
            q, k, v = server.draw(layer, count)
            v.copy_(torch.arange(count).view(-1, 1, 1) + (0 if mode == "EXTEND" else 29))
            o, lse = server.backend.forward(q * 0, k, v, layer, batch, return_lse=True)
        assert torch.allclose(o, torch.full_like(o, 27.5))
        assert torch.allclose(lse.exp(), torch.full_like(lse, 4.0))


@EACH
def test_softcap_and_scale(serve, backend) -> None:
    with ab.use(backend):
        layers = ({"logit_cap": 2.0, "scaling": 0.9},)
        server = serve(page_size=4, layers=layers, **FEW)
        prompt_and_decode(server)


@EACH
def test_sinks_beside_a_window(serve, backend) -> None:
    with ab.use(backend):
        server = serve(page_size=4, layers=({"sliding_window_size": 5},), **FEW)
        prompt_and_decode(server, sinks=torch.tensor([0.5, 3.0]), lse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_in_any_float_dtype(serve, dtype) -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0]).to(dtype)
    with ab.use("torch_native"):
        server = serve(page_size=4)
        prompt_and_decode(server, sinks=sinks)
        prompt_and_decode(server, sinks=torch.nn.Parameter(sinks, requires_grad=False))


def test_lse_on_request(serve) -> None:
    with ab.use("torch_native"):
        server = serve(page_size=16)
        prompt_and_decode(server, lse=True)


def test_lse_where_the_batch_asks(serve) -> None:
    with ab.use("torch_native"):
        server = serve()
        layer = server.layers[0]
        batch = server.batch("EXTEND", {"a": 3})
        batch.mha_return_lse = True
        server.backend.init_forward_metadata(batch)
        q, k, v = server.draw(layer, 3)
        got = server.backend.forward(q, k, v, layer, batch)
        server.remember(layer, {"a": 3}, k, v)
        server.check(got, server.exact(layer, {"a": 3}, q), lse=True)


@pytest.mark.parametrize("scales", [(None, None), (0.5, 2.0), (torch.tensor(0.25), 1.5)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_fp8_pool_with_scales(serve, scales, page_size) -> None:
    """The pool divides keys by their scale in place; the model's own tensors must not feel it."""
    with ab.use("torch_native"):
        server = serve(page_size=page_size, kv_dtype=E4M3, layers=({"scales": scales}, {}))
        prompt_and_decode(server, lse=True)


def test_scales_of_a_pool_that_is_not_fp8_change_nothing(serve) -> None:
    """SGLang's pool stores keys as they come then, and so they are read."""
    with ab.use("torch_native"):
        server = serve(layers=({"scales": (0.5, 2.0)},))
        prompt_and_decode(server)


@pytest.mark.parametrize("page_size", [1, 16])
def test_pool_for_sliding_windows(serve, page_size) -> None:
    """Layers with windows have a pool of their own, where the same token has another slot."""
    layers = ({"sliding_window_size": 6}, {}, {"sliding_window_size": 6})
    with ab.use("torch_native"):
        server = serve(page_size=page_size, layers=layers, windows=(0, 2))
        prompt_and_decode(server)


def test_keys_out_of_a_window_may_be_gone(serve) -> None:
    """SGLang gives slots back that no window reaches any more, and points them at the padding."""
    with ab.use("torch_native"):
        layers = ({"sliding_window_size": 6}, {})
        server = serve(page_size=4, layers=layers, windows=(0,))
        server.step("EXTEND", {"a": 40})
        row = server.requests["a"].row
        gone = server.table.req_to_token[row, :32].long()
        server.pool.full_to_swa_index_mapping[gone] = 0
        server.step("EXTEND", {"a": 3})
        server.step("DECODE", {"a": 1})


@EACH
@pytest.mark.parametrize("left", [-1, 2])
def test_encoders_see_both_sides(serve, backend, left) -> None:
    with ab.use(backend):
        layers = ({"attn_type": "encoder_only", "sliding_window_size": left},)
        server = serve(layers=layers, **FEW)
        server.step("EXTEND", {"a": 11, "b": 1})


def test_deterministic_servers_get_batch_invariant_plans(serve) -> None:
    with ab.use("triton"):
        server = serve(settings={"enable_deterministic_inference": True}, **FEW)
        server.step("EXTEND", {"a": 4})
        ((spec, _),) = server.backend.forward_metadata.plans
        assert spec.batch_invariant


def test_paged_layout_with_heads_first(serve) -> None:
    """The pool's other layout, ``[num_pages, HK, page_size, D]``, is read through strides."""
    with ab.use("torch_native"):
        server = serve(page_size=4, build=False)
        plain = server.pool.get_kv_buffer

        def heads_first(layer_id):
            return tuple(x.view(-1, 4, 2, 16).transpose(1, 2) for x in plain(layer_id))

        server.pool.kv_cache_layout = "hnd"
        server.pool.get_kv_buffer = heads_first
        server.backend = type(serve().backend)(server.runner)
        server.step("EXTEND", {"a": 9, "b": 4})
        server.step("DECODE", {"a": 1, "b": 1})
