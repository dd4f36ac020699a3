"""Decode under captured graphs: one capture per batch size, any lengths at replay.

On a CPU nothing is captured: a replay runs the layers again over the tensors that a graph would
read, which shows whether they hold what the step needs. ``test_gpu.py`` captures and replays.
"""

from __future__ import annotations

import pytest
import torch

import attn_backends as ab
from attn_backends.errors import UnsupportedCallError


@pytest.fixture
def captured(serve, beside):
    """``captured(sizes, **facts)``: a server with requests a, b, c, and a graph per size."""

    def make(*sizes: int, **facts):
        server = serve(**{"heads": 2, "kv_heads": 1, **facts})
        server.step("EXTEND", {"a": 30, "b": 5, "c": 17})
        server.backend.init_cuda_graph_state(max(sizes), max(sizes))
        return server, {n: beside("server").Graph(server, n) for n in sizes}

    return make


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_replay_with_other_lengths(captured, page_size) -> None:
    with ab.use("torch_native", decode="triton"):
        server, graphs = captured(3, page_size=page_size)
        graphs[3].replay(["c", "a", "b"])
        server.step("EXTEND", {"b": 90})
        graphs[3].replay(["a", "b", "c"])


def test_replay_of_layers_with_plans_of_their_own(captured) -> None:
    layers = ({}, {"logit_cap": 3.0}, {"sliding_window_size": 4})
    with ab.use("torch_native", decode="triton"):
        server, graphs = captured(2, page_size=16, layers=layers)
        assert len(server.backend._graphs.steps[2].plans) == 3
        graphs[2].replay(["b", "a"])


def test_replay_with_fewer_requests_than_captured(captured) -> None:
    with ab.use("torch_native", decode="triton"):
        _, graphs = captured(4, page_size=16)
        graphs[4].replay(["b"])
        graphs[4].replay(["a", "c", "b"])


def test_graphs_of_several_sizes_share_one_table(captured) -> None:
    with ab.use("torch_native", decode="triton"):
        server, graphs = captured(1, 3, page_size=4)
        graphs[3].replay(["a", "b", "c"])
        graphs[1].replay(["c"])
        graphs[3].replay(["c", "b"])
        state = server.backend._graphs
        tables = {
            plan.batch.page_table.data_ptr()
            for step in state.steps.values()
            for _, plan in step.plans.values()
        }
        assert tables == {state.pages.data_ptr()}


def test_eager_steps_between_replays(captured) -> None:
    with ab.use("torch_native", decode="triton"):
        server, graphs = captured(2, page_size=16)
        graphs[2].replay(["a", "b"])
        server.step("DECODE", {"a": 1, "c": 1})
        server.step("MIXED", {"b": 1, "c": 6})
        graphs[2].replay(["c", "b"])


def test_replay_without_lengths_on_the_host(captured) -> None:
    with ab.use("torch_native", decode="triton"):
        _, graphs = captured(2, page_size=4)
        graphs[2].replay(["a", "c"], mirror=False)


@pytest.mark.parametrize("page_size", [1, 16])
def test_replay_with_a_pool_for_sliding_windows(captured, page_size) -> None:
    layers = ({"sliding_window_size": 6}, {})
    with ab.use("torch_native", decode="triton"):
        _, graphs = captured(2, page_size=page_size, layers=layers, windows=(0,))
        graphs[2].replay(["c", "a"])


def test_padding_has_one_key(serve) -> None:
    assert serve().backend.get_cuda_graph_seq_len_fill_value() == 1


def test_a_backend_without_graphs_says_so_at_capture(captured) -> None:
    with ab.use("torch_native"), pytest.raises(UnsupportedCallError, match="torch_native: capac"):
        captured(2)


def test_prefill_graphs_that_capture_attention_are_refused(serve) -> None:
    server = serve()
    server.backend.init_cuda_graph_state(2, 2)
    batch = server.batch("EXTEND", {"a": 3})
    for in_capture in (False, True):
        with pytest.raises(UnsupportedCallError, match="forward_mode in a graph=EXTEND"):
            server.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)


def test_lengths_beyond_the_context_do_not_widen_the_table(serve) -> None:
    """What SGLang pads a table with may exceed it; keys beyond the context do not exist."""
    server = serve(page_size=64)
    tables = server.backend._tables
    assert tables.width(10**6) == tables.width(tables.most_keys) == 4
    pages, windowed = tables.pages(torch.tensor([1, 2]), 4)
    assert pages.shape == (2, 4) and windowed is None
