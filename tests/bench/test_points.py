"""Presets and points: the shapes of known models, and grids as they are asked for."""

from __future__ import annotations

import pytest
import torch

from attn_backends import InvalidInputError
from attn_backends.bench.attention_cases import Inputs, cases, points, shape_of
from attn_backends.bench.attention_peers import PEER_NAMES, peers
from attn_backends.bench.merge import standard_cases
from attn_backends.bench.presets import SHORT, preset
from attn_backends.bench.report import command_line
from attn_backends.bench.roofline import MODELS

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LLAMA = shape_of("decode", preset("llama3-8b"))


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "dim"),
    [
        ("llama3-8b", 32, 8, 128),
        ("llama3-70b", 64, 8, 128),
        ("qwen", 28, 4, 128),
        ("gemma", 16, 8, 256),
        ("deepseek", 128, 1, 576),
    ],
)
def test_a_preset_fixes_heads_and_widths(name: str, heads: int, kv_heads: int, dim: int) -> None:
    shape = shape_of("decode", preset(name))
    assert (shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]) == (heads, kv_heads, dim)
    assert name in SHORT


def test_mla_expands_its_keys_in_prefill_only() -> None:
    deepseek = preset("deepseek")
    assert shape_of("mla", deepseek)["head_dim_v"] == 512
    assert shape_of("prefill", deepseek) == {
        "num_heads": 128, "num_kv_heads": 128, "head_dim": 192, "head_dim_v": 128,
        "page_size": None,
    }  # fmt: skip
    with pytest.raises(InvalidInputError, match="deepseek, for mla"):
        shape_of("mla", preset("llama3-8b"))


def test_every_model_of_the_roofline_is_a_preset() -> None:
    for name in MODELS:
        assert preset(name).model is MODELS[name]
    with pytest.raises(InvalidInputError, match="preset='gpt-9'"):
        preset("gpt-9")


def test_standard_points_are_those_of_the_modules() -> None:
    assert points("decode", LLAMA, GPU) == cases("decode")
    mla = points("mla", shape_of("mla", preset("deepseek")), GPU)
    assert {c.num_heads for c in mla} == {128}
    assert len(set(mla)) == len(mla) == len(cases("mla")) // 2


@pytest.mark.parametrize("bench", ["decode", "prefill", "extend", "mla"])
def test_a_cpu_has_few_and_small_points(bench: str) -> None:
    model = "deepseek" if bench == "mla" else "llama3-8b"
    found = points(bench, shape_of(bench, preset(model)), CPU)
    assert 1 < len(found) <= 4
    assert all(c.batch * c.kv_len <= 1024 and c.q_len <= c.kv_len for c in found)


def test_a_grid_has_every_batch_with_every_length() -> None:
    found = points("decode", LLAMA, CPU, (1, 3), (64, 100))
    pairs = [(c.batch, c.q_len, c.kv_len) for c in found]
    assert pairs == [(1, 1, 64), (1, 1, 100), (3, 1, 64), (3, 1, 100)]
    prefill = points("prefill", shape_of("prefill", preset("qwen")), CPU, lengths=(48,))
    assert [(c.q_len, c.kv_len, c.num_heads) for c in prefill] == [(48, 48, 28)]
    extend = points("extend", LLAMA, CPU, lengths=(48, 64), q_len=7)
    assert [(c.q_len, c.kv_len, c.phase) for c in extend] == [
        (7, 48, "prefill"),
        (7, 64, "prefill"),
    ]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"batches": (0,)}, "batch=0"),
        ({"lengths": (5, -1)}, "length=-1"),
        ({"lengths": (5,), "q_len": 6}, "q_len=6"),
        ({"q_len": 0}, "q_len=0"),
    ],
)
def test_points_that_are_none_are_refused(arguments: dict, word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        points("extend", LLAMA, CPU, **arguments)
    with pytest.raises(InvalidInputError, match="q_len"):
        points("decode", LLAMA, CPU, q_len=2)


def test_merge_points_of_a_cpu_have_both_kinds() -> None:
    parts = standard_cases(device="cpu", num_heads=4, head_dim=8, dtype="fp32")
    assert all(c.device == "cpu" and c.copies == 1 for part in parts.values() for c in part)
    assert {c.states for c in parts["many"]} == {8} and parts["pairs"][0].num_heads == 4
    assert [c.tokens for c in standard_cases((3, 5), device="cpu")["pairs"]] == [3, 5]


def test_peers_are_named_for_every_benchmark() -> None:
    assert set(PEER_NAMES) == {"prefill", "extend", "decode", "mla"}
    for bench in PEER_NAMES:
        model = preset("deepseek" if bench == "mla" else "llama3-8b")
        case = points(bench, shape_of(bench, model), CPU)[0]
        assert tuple(peers(Inputs(case, device=CPU))) == PEER_NAMES[bench]
    mla = points("decode", shape_of("decode", preset("deepseek")), CPU)[0]
    assert tuple(peers(Inputs(mla, device=CPU))) == PEER_NAMES["mla"]


def test_commands_name_no_absolute_folder() -> None:
    said = command_line(
        "attn-backends bench", ["--json", "/a/b/out.json", "--plot=/c/p.png", "d/e"]
    )
    assert said == "attn-backends bench --json out.json --plot=p.png d/e"
    assert command_line("x", ["--batch", "1", "a b"]) == "x --batch 1 'a b'"
