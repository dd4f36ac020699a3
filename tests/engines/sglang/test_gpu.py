"""The plug on a GPU: real shapes, captured graphs replayed with other lengths, and no waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import attn_backends as ab

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn
BIG = dict(
    device="cuda", dtype=torch.bfloat16, heads=32, kv_heads=8, dim=128, context=4096
)  # as in Llama 3 8B
LAYERS = ({}, {"sliding_window_size": 127}, {"logit_cap": 30.0})
PAGES = pytest.mark.parametrize("page_size", [1, 64])


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@PAGES
def test_prompts_prefixes_and_decode(serve, page_size) -> None:
    with ab.use("auto"):
        server = serve(page_size=page_size, layers=LAYERS, **BIG)
        server.step("EXTEND", {"a": 300, "b": 1, "c": 65}, lse=True)
        server.share("a", "d", 256)
        server.step("EXTEND", {"d": 7, "b": 130})
        server.step("DECODE", {"a": 1, "b": 1, "c": 1, "d": 1}, lse=True)
        server.step("MIXED", {"a": 1, "c": 40})


@PAGES
def test_replayed_graphs(serve, beside, page_size) -> None:
    with ab.use("triton"):
        server = serve(page_size=page_size, layers=LAYERS, **BIG)
        server.step("EXTEND", {"a": 90, "b": 5, "c": 317, "d": 64})
        server.backend.init_cuda_graph_state(8, 8)
        graphs = {n: beside("server").Graph(server, n) for n in (8, 4, 1)}  # largest first
        graphs[4].replay(["d", "a", "b", "c"])
        graphs[8].replay(["b", "c", "a"])
        server.step("EXTEND", {"b": 900})
        graphs[8].replay(["a", "b", "c", "d"])
        graphs[1].replay(["b"])
        server.step("DECODE", {"c": 1})
        graphs[4].replay(["c", "b"], mirror=False)


def test_replayed_graphs_of_a_pool_for_sliding_windows(serve, beside) -> None:
    with ab.use("triton"):
        server = serve(page_size=16, layers=LAYERS[:2], windows=(1,), **BIG)
        server.step("EXTEND", {"a": 400, "b": 5})
        server.backend.init_cuda_graph_state(4, 4)
        graph = beside("server").Graph(server, 4)
        for names in (["a", "b"], ["b"], ["b", "a"]):
            graph.replay(names)


def test_replayed_graphs_of_an_fp8_pool(serve, beside) -> None:
    scale = torch.tensor(0.5, device="cuda")
    with ab.use("triton"):
        layers = ({"scales": (scale, scale)}, {"scales": (0.25, 2.0)}, {})
        server = serve(page_size=16, kv_dtype=E4M3, layers=layers, **BIG)
        server.step("EXTEND", {"a": 200, "b": 5})
        server.backend.init_cuda_graph_state(2, 2)
        graph = beside("server").Graph(server, 2)
        for names in (["a", "b"], ["b"]):
            graph.replay(names)


def test_sinks(serve) -> None:
    sinks = torch.randn(32, device="cuda").to(torch.bfloat16)
    with ab.use("auto"):
        server = serve(page_size=16, layers=LAYERS[:2], **BIG)
        server.step("EXTEND", {"a": 200, "b": 5}, sinks=sinks, lse=True)
        server.step("DECODE", {"a": 1, "b": 1}, sinks=sinks, lse=True)


@pytest.mark.parametrize("windows", [(), (1,)], ids=["one_pool", "two_pools"])
def test_steps_do_not_wait_for_the_device(serve, beside, windows) -> None:
    with ab.use("triton"):
        server = serve(page_size=16, layers=LAYERS[:2], windows=windows, **BIG)
        server.step("EXTEND", {"a": 90, "b": 5})
        server.step("DECODE", {"a": 1, "b": 1})
        server.backend.init_cuda_graph_state(2, 2)
        graph = beside("server").Graph(server, 2)
        graph.replay(["a", "b"])
        for mode, tokens in (("EXTEND", {"a": 3, "b": 9}), ("DECODE", {"b": 1, "a": 1})):
            batch = server.batch(mode, tokens)
            drawn = [server.draw(layer, sum(tokens.values())) for layer in server.layers]
            torch.cuda.synchronize()
            with no_waiting():
                server.backend.init_forward_metadata(batch)
                for layer, (q, k, v) in zip(server.layers, drawn):
                    server.backend.forward(q, k, v, layer, batch)
        graph.host_lens.copy_(batch.seq_lens_cpu)
        graph.lens.copy_(batch.seq_lens)
        torch.cuda.synchronize()
        with no_waiting():
            server.backend.init_forward_metadata_out_graph(graph.batch)
            graph.graph.replay()


def test_a_prefill_under_capture_is_refused(serve) -> None:
    """A plan of one step's lengths must not end up in a graph."""
    with ab.use("triton"):
        server = serve(page_size=16, **BIG)
        layer = server.layers[0]
        batch = server.batch("EXTEND", {"a": 20})
        server.backend.init_forward_metadata(batch)
        q, k, v = server.draw(layer, 20)
        server.backend.forward(q, k, v, layer, batch)
        with (
            pytest.raises(ab.UnsupportedCallError, match="capture=prefill"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            server.backend.forward(q, k, v, layer, batch)
