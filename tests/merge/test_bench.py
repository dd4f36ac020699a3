"""The merge benchmark: its account of bytes, and on a GPU a short run of each part."""

from __future__ import annotations

import json

import pytest

from attn_backends.bench.merge import MAX_COPIES, Case, main
from attn_backends.bench.merge_aims import aims
from attn_backends.bench.merge_aims import main as show


def test_traffic_is_what_must_move_at_least():
    assert Case(1, 1).bytes == 2 * 256 + 2 * 4 + 256 + 4  # 776 bytes and the merged LSE
    assert Case(10, 4, 64, "fp32").bytes == 40 * (3 * 256 + 12)
    assert Case(1, 1, states=8).bytes == 8 * (256 + 4) + 256 + 4
    assert Case(4, 2, empty=1.0).bytes == 8 * (256 + 8 + 256 + 4)


def test_inputs_rotate_far_enough_to_be_cold():
    for tokens in (16, 1024, 65536):
        case = Case(tokens)
        assert case.copies == MAX_COPIES or case.copies * case.bytes >= 5 * 60 * 2**20
    assert Case(1).copies == MAX_COPIES


def row(backend, us, mode="graph_cold", spread=0.0, right=True, **case):
    case = {**Case(256).row(), **case}
    times = {"median_us": us, "p25_us": us - spread, "p75_us": us + spread} if right else {}
    return {"case": case, "backend": backend, "mode": mode, "right": right, **times}


def test_aims_compare_our_better_path_with_what_was_measured_beside_it():
    rows = [row("cuda", 4.0), row("triton", 3.0), row("flashinfer", 3.1, spread=0.2)]
    rows += [row("cuda", 9.0, tokens=65536), row("copy", 8.8, tokens=65536)]
    rows += [row("cuda", 5.0, states=8), row("pairwise", 9.0, states=8)]
    rows += [row("cuda", 9.9, "host", tokens=64), row("triton", 13.0, "eager", tokens=64)]
    rows += [row("cuda", 10.0, "eager", tokens=64), row("vllm-triton", 15.5, "eager", tokens=64)]
    rows += [row("triton", None, right=False, tokens=512), row("flashinfer", 1.0, tokens=512)]
    found = {(x["aim"], x["case"].split()[0]): x for x in aims(rows)}
    against = found["our better path against FlashInfer", "T=256"]
    assert against["got"] == 1.033 and against["met"] and not against["clear"]
    assert not found["the same, beyond", "T=256"]["met"]
    assert found["Triton against CUDA", "T=256"]["got"] == 1.333
    assert found["share of the copy's bandwidth", "T=65536"]["met"]  # 0.978
    assert not found["eight states against seven merges", "T=256"]["met"]
    assert found["host time of cuda, us", "T=64"]["met"]
    assert found["eager against vllm-triton", "T=64"]["got"] == 1.55
    assert len(found) == 7  # a wrong answer is compared with nothing


def test_aims_are_shown_of_a_results_file(tmp_path, capsys):
    file = tmp_path / "merge.json"
    rows = [row("cuda", 2.0), row("flashinfer", 3.0)]
    rows[0]["associativity_err"] = 0.25
    file.write_text(json.dumps({"rows": rows}))
    assert show([str(file)]) == 0
    text = capsys.readouterr().out
    assert text.count("met ") == 2 and "MISSED" not in text and "2.50e-01" in text


@pytest.mark.gpu
def test_each_part_writes_checked_rows(tmp_path):
    file = tmp_path / "rows.json"
    common = ["--tokens", "1024", "--no-peers", "--rounds", "4", "--json", str(file)]
    assert main(["pairs", *common]) == 0
    found = json.loads(file.read_text())
    rows = found["rows"]
    ours = {"cuda", "triton", "torch", "copy", "cuda-alone", "triton-alone"}
    assert {r["backend"] for r in rows} == ours
    assert all(r["right"] and r["median_us"] > 0 for r in rows)
    assert {x["aim"] for x in found["aims"]} <= {"Triton against CUDA"}
    assert set(found["meta"]) >= {"command", "date", "gpu", "driver", "torch", "triton", "commit"}
