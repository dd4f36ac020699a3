"""The benchmark of the Hopper prefill: its aims, how it judges them, and what its pages show."""

from __future__ import annotations

import pytest

from attn_backends.bench import hopper_counters, hopper_gates, hopper_tables
from attn_backends.bench.hopper_points import ALL_SETS, PROCESSES, Point, points, variants

POINTS = [point for name in ALL_SETS for point in points(name)]


def _named(name: str) -> Point:
    return next(point for point in POINTS if point.name == name)


@pytest.mark.parametrize(
    "name, asked",
    [
        ("causal 16x1024", {"fa3": 1.05, "fa3 varlen": 1.0}),
        ("full 1x16384", {"fa3": 0.97, "fa3 varlen": 1.0}),
        ("mix 20", {"fa3 varlen": 1.0}),
        ("mix 20 p16", {"fa3 paged": 1.1, "flashinfer": 1.2}),
        ("p64 causal 2x8192", {"fa3 paged": 1.1, "flashinfer": 1.2}),
        ("p16 32x128 over 4096", {"fa3 paged": 1.1, "flashinfer": 1.2}),
        ("p16 64x64 over 4096", {"fa3 paged": 0.95}),
        ("d64 causal 4x4096", {"fa3": 0.95}),
        ("d256 full 4x4096", {"fa3": 0.95}),
        ("d192/128 causal 2x8192", {}),
        ("p1 4x4096 over 0", {}),
    ],
)
def test_each_point_has_the_aims_that_were_set_for_it(name, asked):
    assert hopper_gates.aims(_named(name)) == asked


def test_ratios_are_taken_round_by_round():
    # The machine slows down by half in the last rounds, for both alike.
    found = hopper_gates.ratio([10, 10, 10, 20, 20], [11, 12, 11, 22, 22])
    assert found == {"ratio": 1.1, "p25": 1.1, "p75": 1.1, "rounds": 5}


def test_an_aim_is_met_missed_or_not_measured():
    point = _named("p16 32x128 over 4096")
    times = {"chosen": [10.0] * 4, "fa3 paged": [10.9] * 4, "flashinfer-fa2": [15.0] * 4,
             "flashinfer-fa3": [12.5] * 4}  # fmt: skip
    paged, other = hopper_gates.judge(point, times, ())
    assert (paged["met"], paged["ratio"]) == (False, 1.09)
    assert (other["met"], other["measured"], other["ratio"]) == (True, "flashinfer-fa3", 1.25)
    paged, other = hopper_gates.judge(point, times, {"fa3 paged", "flashinfer-fa3"})
    assert paged["met"] is None and other["measured"] == "flashinfer-fa2"
    assert all(g["met"] is False for g in hopper_gates.judge(point, times, {"chosen"}))
    assert all(g["met"] is False for g in hopper_gates.judge(point, {}, ()))


def test_every_set_is_measured_by_one_process():
    assert sorted(name for group in PROCESSES for name in group) == sorted(ALL_SETS)


@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.name)
def test_the_variant_that_ships_is_measured_first_and_none_twice(point):
    found = variants(point)
    assert next(iter(found)) == "chosen"
    others = [v for name, v in found.items() if name != "chosen"]
    assert len(set(others)) == len(others)


def test_pages_show_aims_rates_and_host_times():
    case = {"name": "causal 1x2"}
    rows = [
        {"case": case, "mode": "graph_cold", "backend": "chosen", "tflops": 500.0},
        {"case": case, "mode": "graph_cold", "backend": "lazy", "tflops": 510.4},
        {"case": case, "mode": "graph_cold", "backend": "fa3", "tflops": 505.0},
        {"case": case, "mode": "graph_cold", "backend": "cudnn", "max_err": 9.0},
        {"case": case, "backend": "flashinfer-fa2", "refused": "absent"},
        {"case": {"name": "host p0"}, "mode": "host", "backend": "run", "median_us": 11.26},
    ]
    gates = [
        {"point": "causal 1x2", "peer": "fa3", "asked": 0.97, "measured": "fa3", "ratio": 0.99,
         "p25": 0.98, "p75": 1.0, "rounds": 4, "met": True},
        {"point": "causal 1x2", "peer": "fa3 varlen", "asked": 1.0, "met": None, "why": "absent"},
    ]  # fmt: skip
    aims, rates, own, host = hopper_tables.parts({"rows": rows, "gates": gates})
    assert aims[0]["times as fast"] == "0.990 (0.980 to 1.000)" and aims[0]["met"] == "yes"
    assert aims[1]["times as fast"] == "not measured: absent" and aims[1]["met"] == ""
    assert rates == [
        {"point": "causal 1x2", "ours": "500", "fastest variant": "510 (lazy)", "fa3": "505"}
    ]
    assert own == [
        {"variant": "chosen", "causal 1x2": "500"}, {"variant": "lazy", "causal 1x2": "510"}
    ]  # fmt: skip
    assert host == [{"batch": "host p0", "call": "run", "host, us": "11.3"}]


def test_counters_are_read_in_the_units_that_their_names_say():
    heads = ["ID", "Kernel Name", *hopper_counters.COUNTERS.values()]
    units = ["", "", "ns", "", "%", "%", "inst", "%", "%", "", ""]
    values = ["0", "k", "3,087,072", "5,071,336", "81.64", "34.5", "916,686,604", "89.2", "7.8",
              "2.24", "3.23"]  # fmt: skip
    lines = ["==PROF== Connected", "launch:|causal 1x2|chosen"]
    lines += [",".join(f'"{x}"' for x in row) for row in (heads, units, values)]
    (row,) = hopper_counters.read("\n".join(lines))
    found = row["counters"]
    assert found["us"] == 3087.072 and found["million cycles"] == 5.071
    assert found["million instructions"] == 916.687 and found["tensor cores busy, %"] == 81.64
    (shown,) = hopper_tables.parts({"rows": [row]})
    assert shown[0]["point"] == "causal 1x2" and shown[0]["million cycles"] == "5.071"
    with pytest.raises(AssertionError, match="0 launches"):
        hopper_counters.read("\n".join(lines[2:]))
