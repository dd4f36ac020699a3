"""The model of cost: what it says follows from its pieces, and the page holds what it says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import attn_backends as ab
from attn_backends.bench.distributed_cost import (
    NETWORK,
    decode_pieces,
    measured_table,
    model_table,
    rewrite,
    ring_pieces,
)
from attn_backends.distributed.cost import Link, Pieces, decode_cost, ring_cost

PAGE = Path(__file__).resolve().parents[2] / "docs" / "context-parallelism.md"
FAST, SLOW = Link(5.0, 400.0), Link(10.0, 50.0)


def pieces(size: float = 4e6, **compute: float) -> Pieces:
    given = {int(name[1:]): us for name, us in compute.items()}
    return Pieces(given, size, FAST, SLOW)


def test_exchange_hidden_behind_compute_costs_nothing() -> None:
    cost = ring_cost(pieces(n1=8000.0, n4=2000.0), 4)
    # A hop of 1 MB takes 5 + 2.5 us, a step 500 us.
    assert cost.time_us == 2000.0 and cost.exposed_us == 0.0 and cost.efficiency == 1.0


def test_exchange_longer_than_a_step_is_exposed_at_every_hop() -> None:
    cost = ring_cost(pieces(n1=16.0, n4=4.0), 4)
    assert math.isclose(cost.time_us, 3 * 7.5 + 1.0)
    assert math.isclose(cost.exposed_us, 3 * 6.5)
    assert math.isclose(cost.efficiency, 16 / (4 * cost.time_us))


def test_a_ring_over_nodes_is_as_slow_as_the_network() -> None:
    inside, across = ring_cost(pieces(n1=1.0, n8=0.0), 8), ring_cost(pieces(n1=1.0, n16=0.0), 16)
    assert math.isclose(inside.time_us, 7 * FAST.time_us(5e5))
    assert math.isclose(across.time_us, 15 * SLOW.time_us(2.5e5))


def test_a_slow_start_within_a_node_slows_a_ring_over_nodes_too() -> None:
    late = Pieces({1: 1.0, 16: 0.0}, 4e6, Link(200.0, 400.0), SLOW)
    assert late.link(16) == Link(200.0, 50.0) and late.link(8) == Link(200.0, 400.0)


def test_states_that_travel_at_once_wait_for_one_latency_in_a_node_and_two_beyond() -> None:
    inside = decode_cost(pieces(size=4e3, n1=800.0, n8=100.0), 8, "at once")
    assert math.isclose(inside.exposed_us, 5 + 7 * 0.01)
    across = decode_cost(pieces(size=4e3, n1=800.0, n32=30.0), 32, "at once")
    # Four nodes of eight: 3 states over the network, then 28 within each node.
    assert math.isclose(across.exposed_us, 10 + 3 * 0.08 + 5 + 28 * 0.01)
    assert math.isclose(across.time_us, 30 + across.exposed_us)
    for gpus in (2, 4, 8):
        given = pieces(size=4e3, n1=800.0, **{f"n{gpus}": 100.0})
        at_once, ring = (decode_cost(given, gpus, how) for how in ("at once", "ring"))
        assert at_once.time_us <= ring.time_us


def test_decode_hides_nothing() -> None:
    cost = decode_cost(pieces(size=4e3, n1=800.0, n8=100.0), 8)
    assert math.isclose(cost.time_us, 100 + 7 * (5 + 0.01))
    assert math.isclose(cost.exposed_us, 7 * 5.01)
    assert decode_cost(pieces(n1=800.0), 1).time_us == 800.0


def test_a_link_is_found_again_from_two_of_its_exchanges() -> None:
    link = Link(7.0, 123.0)
    found = Link.fit((1e3, link.time_us(1e3)), (1e8, link.time_us(1e8)))
    assert math.isclose(found.latency_us, 7.0) and math.isclose(found.gbps, 123.0)


def test_what_cannot_be_modelled_is_refused() -> None:
    with pytest.raises(ab.InvalidInputError, match=r"gpus=3 .*1, 4"):
        ring_cost(pieces(n1=1.0, n4=1.0), 3)
    with pytest.raises(ab.InvalidInputError, match="large="):
        Link.fit((10, 5.0), (20, 4.0))
    with pytest.raises(ab.InvalidInputError, match="link="):
        Link(1.0, 0.0)
    with pytest.raises(ab.InvalidInputError, match=r"gpus=12 .*multiple of 8"):
        decode_cost(pieces(n1=1.0, n12=1.0), 12, "at once")
    with pytest.raises(ab.InvalidInputError, match="exchange='tree'"):
        decode_cost(pieces(n1=1.0, n8=1.0), 8, "tree")


def rows() -> list[dict]:
    """Results of a made-up benchmark whose pieces are round numbers."""
    case = {"batch": 1, "q_len": 64, "kv_len": 64, "num_heads": 8, "num_kv_heads": 2,
            "head_dim": 16, "page_size": None, "dtype": "bf16"}  # fmt: skip
    found: list[dict] = []
    for gpus in (1, 2, 8):
        for mode, us in (("eager", 900.0), ("graph", 800.0)):
            for bench in ("ring-piece", "cp-decode-piece"):
                found.append({"bench": bench, "case": case, "backend": "x", "mode": mode,
                              "median_us": us / gpus, "gpus": gpus})  # fmt: skip
    for size, us in ((1000, 10.0 + 0.01), (10**6, 10.0 + 10.0)):
        found.append({"bench": "ring-hop", "case": case, "backend": "exchange of a shard",
                      "mode": "eager", "median_us": us, "bytes": size, "hops": 1})  # fmt: skip
        found.append({"bench": "cp-exchange", "case": case, "backend": "exchange all_gather",
                      "mode": "graph", "median_us": us, "bytes": size, "hops": 1})  # fmt: skip
    parts = {"triton 1 GPU": 800.0, "triton 2 GPUs": 410.0, "triton compute alone": 400.0,
             "exchange alone": 20.0}  # fmt: skip
    for name, us in parts.items():
        row = {"bench": "ring-prefill", "case": case, "backend": name, "mode": "eager",
               "median_us": us, "gpus": 2, "right": True}  # fmt: skip
        if name.endswith("GPUs"):
            row |= {"speedup": 1.951, "efficiency": 0.976, "exposed_share": 0.0244}
        found.append(row)
    return found


def test_pieces_are_read_from_results_and_graphs_go_before_eager_calls() -> None:
    ring, decode = ring_pieces(rows()), decode_pieces(rows())
    assert ring is not None and ring_pieces(rows(), "graph") is None
    assert ring.compute_us == decode.compute_us == {1: 800.0, 2: 400.0, 8: 100.0}
    assert ring.exchange_bytes == 64 * 2 * 16 * 2 * 2 and decode.exchange_bytes == 1000
    for link in (ring.node, decode.node):
        assert math.isclose(link.latency_us, 10.0) and math.isclose(link.gbps, 100.0)
    assert ring.network == NETWORK


def test_tables_hold_what_was_measured_and_what_follows() -> None:
    text = "\n".join(measured_table(rows()))
    assert "| 0.800 | 0.410 | 1.95 | 97.6% | 0.400 | 0.020 | 2.4% |" in text
    *_, last, _, held = model_table(rows())
    assert held == (
        "Held against the table above: prefill on 2 GPUs: 0.4 ms by the model, 0.4 ms measured."
    )
    assert last.startswith("| 8 | 0.1 | 0.1 | 100% | ")
    assert last.endswith("| 170.1 to 110.1 | 100.0 | 59% to 91% |")
    wrong = [{**r, "right": False} for r in rows()]
    assert "0.410" not in "\n".join(measured_table(wrong))


def test_the_page_is_what_the_results_say() -> None:
    assert rewrite(PAGE) == PAGE.read_text(), (
        "run python -m attn_backends.bench.distributed_cost docs/context-parallelism.md"
    )
