"""The cascade benchmark: one cache, shared pages read once, and every way gives the same answer."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_backends import AttentionOutput, InvalidInputError
from attn_backends.bench.cascade import CascadeCase, CascadeInputs, cascade_ways, measure_cascade
from attn_backends.bench.runner import EAGER

CPU = torch.device("cpu")
CASE = CascadeCase(
    batch=3, prefix=48, suffix=21, num_heads=4, num_kv_heads=2, head_dim=16, dtype="fp32"
)


def test_the_default_is_64_requests_over_a_shared_prefix_of_32k() -> None:
    case = CascadeCase()
    assert (case.batch, case.prefix) == (64, 32768)
    assert case.num_heads // case.num_kv_heads == 4


def test_rows_of_the_table_share_the_prefix_and_nothing_else() -> None:
    x = CascadeInputs(CASE, CPU)
    table = x.batch.host_page_table
    assert table is not None and table.shape == (3, 5)
    assert all(torch.equal(row[:3], table[0, :3]) for row in table)
    own = table[:, 3:].flatten().tolist()
    assert len(set(own) | set(table[0, :3].tolist())) == len(own) + 3
    assert [level.num_seqs for level in x.levels] == [1, 3]
    assert x.levels[0].kv_lens == (48,) and x.levels[1].kv_lens == (21, 21, 21)


def test_shared_keys_count_once_in_traffic_and_for_each_request_in_work() -> None:
    point = CascadeInputs(CASE, CPU).point()
    keys = 2 * (48 + 3 * 21) * 2 * 16 * 4
    assert point.bytes == keys + 3 * 4 * (2 * 16 * 4 + 4)
    assert point.flops == 4 * 3 * 4 * 16 * 69
    assert point.case["kv_len"] == 69 and point.case["q_len"] == 1


def test_cascade_and_plain_decode_give_the_same_answer() -> None:
    x = CascadeInputs(CASE, CPU)
    ways, against = cascade_ways(x, ["torch_native", "torch_sdpa", "torch_varlen"], [])
    assert list(ways)[:2] == ["cascade-torch_native", "cascade-torch_sdpa"]
    assert set(against) == {"torch_varlen"}
    found = measure_cascade(x, ways, modes=(EAGER,), rounds=1)
    assert {row["backend"] for row in found.rows} == set(ways) and len(ways) == 4
    assert all(row["right"] and row["median_us"] > 0 for row in found.rows)
    assert found.refused == []


class _Wrapper:
    """Answers from the lists it was planned with, by a softmax over the keys they name."""

    def __init__(self, levels: int, workspace: torch.Tensor, layout: str) -> None:
        assert levels == 2 and layout == "NHD" and workspace.dtype == torch.uint8

    def plan(self, q: Any, indptr: Any, indices: Any, last: Any, *sizes: int, **more: Any) -> None:
        assert sizes == (4, 2, 16, 16)
        assert more["q_data_type"] == more["kv_data_type"] == torch.float32
        self.lists = [
            [t.tolist() for t in (a, b, c, d)] for a, b, c, d in zip(q, indptr, indices, last)
        ]

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows = []
        for i in range(q.shape[0]):
            keys, values = [], []
            for starts, indptr, indices, last in self.lists:
                group = next(g for g in range(len(last)) if starts[g] <= i < starts[g + 1])
                pages = indices[indptr[group] : indptr[group + 1]]
                size = (len(pages) - 1) * 16 + last[group]
                for kept, source in ((keys, cache[0]), (values, cache[1])):
                    kept.append(source[pages].flatten(0, 1)[:size])
            k, v = (torch.cat(x).repeat_interleave(2, 1) for x in (keys, values))
            scores = torch.einsum("hd,khd->hk", q[i], k) * 16**-0.5
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
        return torch.stack(rows)


def test_flashinfer_is_given_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("flashinfer")
    fake.MultiLevelCascadeAttentionWrapper = _Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    x = CascadeInputs(CASE, CPU)
    ways, _ = cascade_ways(x, ["torch_native"], ["flashinfer-cascade"])
    found = measure_cascade(x, ways, modes=(EAGER,), rounds=1)
    row = next(r for r in found.rows if r["backend"] == "flashinfer-cascade")
    assert row["right"], row


def test_a_peer_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    x = CascadeInputs(CASE, CPU)
    ways, _ = cascade_ways(x, ["torch_native"], ["flashinfer-cascade"])
    found = measure_cascade(x, ways, modes=(EAGER,), rounds=1)
    [item] = found.refused
    assert item["backend"] == "flashinfer-cascade" and "flashinfer" in item["reason"]


def test_a_wrong_cascade_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends.bench import cascade

    def lost(states: Any, **more: Any) -> AttentionOutput:
        return states[-1]  # the shared keys are forgotten

    monkeypatch.setattr("attn_backends.cascade.merge_states", lost)
    x = CascadeInputs(CASE, CPU)
    ways, _ = cascade.cascade_ways(x, ["torch_native"], [])
    rows = {r["backend"]: r for r in measure_cascade(x, ways, modes=(EAGER,), rounds=1).rows}
    assert rows["plain-torch_native"]["right"]
    assert not rows["cascade-torch_native"]["right"]
    assert "median_us" not in rows["cascade-torch_native"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"prefix": 40}, "prefix=40"), ({"prefix": 0}, "prefix=0"), ({"batch": 0}, "batch=0"),
     ({"suffix": 0}, "suffix=0")],
)  # fmt: skip
def test_cases_that_are_none_are_refused(fields: dict, word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        CascadeCase(**fields)
    with pytest.raises(InvalidInputError, match="without options"):
        cascade_ways(CascadeInputs(CASE, CPU), ["triton:hopper=false"], [])
