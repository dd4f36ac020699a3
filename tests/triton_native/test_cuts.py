"""How keys are cut: the device decides as the host does, and both as the measurements say."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from attn_backends.triton_native.cuts import (  # noqa: E402
    CUT_LOSS,
    MERGE,
    MERGE_PART,
    MERGE_ROWS,
    NEXT,
    START,
    WAVES,
    choose_chunk,
    choose_chunk_on_device,
    cut,
    prefers_many,
    wave_keys,
)

MEASURED = Path(__file__).parents[2] / "docs/results/h200/decode-cuts.json"
H200 = {"processors": 132, "min_chunk": 64}


@triton.jit
def _choose_kernel(
    out_ptr, work, programs, span_max, processors, rate, min_chunk, HK: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, OCCUPANCY: tl.constexpr,
):  # fmt: skip
    chunk = choose_chunk_on_device(
        work * 1.0, programs * 1.0, span_max, processors, rate, min_chunk, HK, GROUP, BLOCK_N,
        OCCUPANCY,
    )  # fmt: skip
    tl.store(out_ptr, chunk)


def _lengths():
    draw = random.Random(11)
    yield from ([1], [64], [65], [131072], [4096] * 64, [2048] * 256, [7, 0, 9], [8192, 1])
    for n, longest in itertools.product((2, 9, 64), (300, 8192)):
        yield [draw.randint(1, longest) for _ in range(n)]
        yield [longest + draw.randint(-longest // 20, 0) for _ in range(n)]


@pytest.mark.parametrize("heads", [(1, 16), (8, 4)], ids=str)
def test_the_device_chooses_the_cut_that_the_host_chooses(heads):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kv_heads, group = heads
    for lens in _lengths():
        facts = {"work": sum(lens), "programs": len(lens), "span_max": max(lens)}
        want = choose_chunk(
            **facts, **H200, occupancy=3, rate=50.0, num_kv_heads=kv_heads, group=group, block_n=64
        )
        out = torch.zeros(1, dtype=torch.int32, device=device)
        _choose_kernel[(1,)](
            out, *facts.values(), 132, 50.0, 64, HK=kv_heads, GROUP=group, BLOCK_N=64, OCCUPANCY=3
        )
        assert int(out) == want, lens


def test_no_cut_makes_more_parts_than_a_work_list_has_room_for():
    for lens in _lengths():
        for kv_heads, occupancy in ((1, 2), (8, 3), (8, 7)):
            chunk = choose_chunk(
                sum(lens), len(lens), max(lens), **H200, occupancy=occupancy, rate=50.0,
                num_kv_heads=kv_heads, group=4, block_n=64,
            )  # fmt: skip
            parts = sum(-(-n // chunk) for n in lens)
            assert parts <= WAVES * -(-132 * occupancy // kv_heads) + 2 * len(lens)


def test_a_wave_lasts_as_long_as_its_tightest_bound():
    assert wave_keys(1, 100, 132) == wave_keys(132, 100, 132) == 100  # the program's own speed
    assert wave_keys(133, 100, 132) == 125  # two on one multiprocessor
    assert wave_keys(396, 100, 132) == pytest.approx(300 / 1.24)  # the memory


def test_many_small_programs_are_preferred_where_larger_ones_leave_an_idle_tail():
    assert prefers_many(512, 132, 3, 7)  # 396 at once, then 116
    assert not prefers_many(256, 132, 3, 7)  # they fit at once
    assert not prefers_many(640, 132, 3, 7)  # the rest still fills the memory
    assert not prefers_many(2048, 132, 3, 7)  # the small ones do not fit at once either


@pytest.mark.parametrize("kind", ["d128", "g8", "p1", "d64", "d256", "mla16"])
def test_the_model_chooses_cuts_that_were_measured_to_be_fast(kind):
    data = json.loads(MEASURED.read_text())
    rows = [r for r in data["rows"] if r["set"] == kind and "splits" in r and r["default"]]
    points = sorted({r["point"] for r in rows})
    assert points
    for point in points:
        here = [r for r in rows if r["point"] == point]
        case = here[0]
        chunk = choose_chunk(
            case["batch"] * case["kv_len"], case["batch"], case["kv_len"], **H200,
            occupancy=case["occupancy"], rate=case["rate"], num_kv_heads=case["num_kv_heads"],
            group=case["group"], block_n=case["block_n"],
        )  # fmt: skip
        parts = -(-case["kv_len"] // chunk)
        nearest = min(here, key=lambda r: abs(r["splits"] - parts))
        best = min(r["median_us"] for r in here)
        assert nearest["median_us"] <= 1.06 * best, (point, parts, nearest["splits"])


def test_the_model_predicts_the_times_that_it_was_fitted_to():
    data = json.loads(MEASURED.read_text())
    rows = [r for r in data["rows"] if r["set"] == "d128" and "splits" in r and r["default"]]
    assert len(rows) == 35
    errors = [_predicted_us(r) / r["median_us"] - 1 for r in rows]
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) < 0.08
    assert max(map(abs, errors)) < 0.25  # 512 programs of four tiles each start twice


def _predicted_us(row):
    """What ``choose_chunk`` weighs against other cuts, for one measured cut."""
    processors = H200["processors"]
    parts, size = cut(row["kv_len"], 0, row["splits"], row["block_n"])
    base, slots = row["batch"] * row["num_kv_heads"], processors * row["occupancy"]
    full, rest = divmod(base * parts - 1, slots)
    rest += 1
    keys = full * wave_keys(slots, size, processors) + wave_keys(rest, size, processors)
    us = keys / row["rate"]
    if parts > 1:
        rows = max(base * row["group"] / (processors * MERGE_ROWS), 1.0)
        us = CUT_LOSS * us + MERGE + MERGE_PART * parts * rows
    return us + START + (-(-rest // processors) - 1) * NEXT


@pytest.mark.parametrize(
    ("batch", "keys", "block_n", "parts"),
    [(1, 1024, 128, 8), (1, 4096, 64, 16), (1, 8192, 32, 32), (1, 131072, 64, None),
     (8, 8192, 64, None), (16, 1024, 64, None)],
)  # fmt: skip
def test_few_keys_take_the_tiles_that_were_measured_for_them(batch, keys, block_n, parts):
    """The points of docs/results/h200/forms.json and decode-forms.json; others keep the default."""
    from dataclasses import replace

    from attn_backends.batch import Batch
    from attn_backends.spec import AttentionSpec
    from attn_backends.triton_native.backend import TritonBackend
    from attn_backends.triton_native.offline import _recording

    spec = AttentionSpec(32, 8, 128, dtype=torch.bfloat16, page_size=16)
    table = torch.zeros(batch, keys // 16, dtype=torch.int32)
    with _recording(90, 132):
        backend = TritonBackend(spec)
        backend.capabilities = replace(backend.capabilities, devices=("cuda", "cpu"))
        plan = backend.plan(Batch.from_lengths([1] * batch, [keys] * batch, page_table=table))
    assert plan.split.block_n == block_n
    assert plan.few_keys is (parts is not None)
    if parts is not None:
        assert plan.bounds.items == parts
