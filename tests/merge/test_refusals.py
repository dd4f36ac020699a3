"""Malformed inputs: each error names the field, its value and what is allowed."""

from __future__ import annotations

import pytest
import torch

from attn_backends.errors import InvalidInputError
from attn_backends.merge import apply_sinks, merge_state, merge_state_, merge_states


def good() -> dict[str, torch.Tensor]:
    return {
        "o_a": torch.ones(4, 2, 16),
        "lse_a": torch.zeros(4, 2),
        "o_b": torch.ones(4, 2, 16),
        "lse_b": torch.zeros(4, 2),
    }


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("o_a", None, r"o_a=NoneType \(allowed: a torch.Tensor\)"),
        ("o_a", torch.ones(4, 2), r"o_a.shape=\[4, 2\] \(allowed: \[T, H, DV\]\)"),
        ("o_a", torch.ones(4, 2, 16).int(), r"o_a.dtype=torch.int32 \(allowed: float32"),
        ("o_b", [1.0], r"o_b=list"),
        ("o_b", torch.ones(4, 2, 8), r"o_b.shape=\[4, 2, 8\] \(allowed: \[4, 2, 16\], as o_a\)"),
        ("o_b", torch.ones(4, 2, 16).half(), r"o_b.dtype=torch.float16 \(allowed: torch.float32"),
        ("o_b", torch.ones(4, 2, 32)[..., ::2], r"o_b.stride\(-1\)=2 \(allowed: 1\)"),
        ("lse_a", None, "lse_a=NoneType"),
        ("lse_a", torch.zeros(2, 4), r"lse_a.shape=\[2, 4\] .*head-major .*lse_a.mT"),
        ("lse_b", torch.zeros(4, 2, 1), r"lse_b.shape=\[4, 2, 1\]"),
        ("lse_b", torch.zeros(4, 2).half(), r"lse_b.dtype=torch.float16 \(allowed: float32\)"),
        ("o_b", torch.ones(4, 2, 16, device="meta"), r"o_b.device=meta \(allowed: cpu, where o_a"),
        ("lse_a", torch.zeros(4, 2, device="meta"), r"lse_a.device=meta \(allowed: cpu"),
    ],
)
def test_a_malformed_state_is_named(field, value, message):
    with pytest.raises(InvalidInputError, match=message):
        merge_state(**{**good(), field: value})


@pytest.mark.parametrize("field", ["o_a", "lse_a", "o_b", "lse_b"])
def test_gradients_are_refused(field):
    inputs = good()
    merge_state(**inputs)  # a known layout must not hide it
    inputs[field].requires_grad_(True)
    with pytest.raises(InvalidInputError, match=rf"{field}.requires_grad=True .*detach"):
        merge_state(**inputs)
    with torch.no_grad():
        merge_state(**inputs)
    states = [(inputs["o_a"], inputs["lse_a"]), (inputs["o_b"], inputs["lse_b"])] * 2
    with pytest.raises(InvalidInputError, match="requires_grad=True"):
        merge_states(states)


@pytest.mark.parametrize(
    "out, message",
    [
        (torch.ones(2), "out=Tensor"),
        ((torch.ones(4, 2, 16),), r"out=tuple \(allowed: \(o, lse\)"),
        ((torch.ones(4, 2, 8), torch.ones(4, 2)), r"out.o.shape=\[4, 2, 8\]"),
        ((torch.ones(4, 2, 16).double(), torch.ones(4, 2)), r"out.o.dtype=torch.float64"),
        ((torch.ones(4, 2, 16), torch.ones(4, 2).half()), r"out.lse.dtype=torch.float16"),
        ((torch.ones(4, 2, 16), None), "out.lse=NoneType"),
        (
            (torch.ones(4, 1, 16).expand(4, 2, 16), torch.ones(4, 2)),
            r"out.o.stride\(\)=\(16, 0, 1\)",
        ),
        ((torch.ones(4, 2, 16), torch.ones(1, 2).expand(4, 2)), r"out.lse.stride\(\)=\(0, 1\)"),
        ((torch.ones(4, 2, 32)[..., ::2], torch.ones(4, 2)), r"out.o.stride\(-1\)=2"),
        (
            (torch.ones(4, 2, 16).to(torch.float8_e4m3fn), torch.ones(4, 2)),
            "out.o.dtype=torch.float8_e4m3fn .*pass output_scale",
        ),
        (
            (torch.ones(100).as_strided((4, 2, 16), (8, 16, 1)), torch.ones(4, 2)),
            r"out.o.stride\(\)=\(8, 16, 1\) .*no two elements share memory",
        ),
    ],
)
def test_an_output_that_cannot_be_written_is_named(out, message):
    with pytest.raises(InvalidInputError, match=message):
        merge_state(**good(), out=out)
    inputs = good()
    state = inputs["o_a"], inputs["lse_a"]
    with pytest.raises(InvalidInputError, match=message.replace(".*pass output_scale", "")):
        merge_states([state] * 3, out=out)


def test_an_output_may_be_an_input_but_not_overlap_one():
    buffer, lses = torch.ones(5, 2, 16), torch.zeros(5, 2)
    o_b, lse_b = torch.ones(4, 2, 16), torch.zeros(4, 2)
    a = buffer[:4], lses[:4]
    for out, message in (
        ((buffer[1:], torch.zeros(4, 2)), "out.o=a view that overlaps o_a"),
        ((torch.ones(4, 2, 16), lses[1:]), "out.lse=a view that overlaps lse_a"),
    ):
        for _ in range(2):  # the second time from the cache of layouts
            with pytest.raises(InvalidInputError, match=message):
                merge_state(*a, o_b, lse_b, out=out)
        with pytest.raises(
            InvalidInputError, match=r"out.(o|lse)=a view that overlaps (o|lse)\[0\]"
        ):
            merge_states([a, (o_b, lse_b), a], out=out)
    merge_state(*a, o_b, lse_b, out=a)
    shared = torch.ones(200)
    out = shared[:128].view(4, 2, 16), shared[120:128].view(4, 2)
    with pytest.raises(InvalidInputError, match=r"out.o=a view that overlaps out.lse"):
        merge_state(*a, o_b, lse_b, out=out)


def test_outputs_may_interleave_with_inputs():
    wide = torch.ones(4, 2, 48)
    wide[..., 32:] = 3
    lse = torch.zeros(4, 2)
    state = merge_state(
        wide[..., :16], lse, wide[..., 32:], lse, out=(wide[..., 16:32], torch.empty(4, 2))
    )
    assert torch.equal(state.o, torch.full_like(state.o, 2.0))
    assert bool((wide[..., :16] == 1).all()) and bool((wide[..., 32:] == 3).all())
    heads = torch.ones(4, 4, 16)
    heads[:, :2] = 5
    state = merge_state(heads[:, :2], lse, heads[:, :2], lse, out=(heads[:, 2:], torch.empty(4, 2)))
    assert bool((heads == 5).all())


@pytest.mark.parametrize(
    "scale, message",
    [
        (0.0, r"output_scale=0.0 \(allowed: None, a finite number > 0"),
        (-1, "output_scale=-1"),
        (float("nan"), "output_scale=nan"),
        (True, "output_scale=True"),
        ("1", "output_scale='1'"),
        (torch.ones(2), r"output_scale.shape=\[2\] \(allowed: \[\] or \[1\]\)"),
        (torch.ones(1).double(), "output_scale.dtype=torch.float64"),
        (torch.ones(1, device="meta"), "output_scale.device=meta"),
    ],
)
def test_a_malformed_scale_is_named(scale, message):
    merge_state(**good(), output_scale=1.0)
    with pytest.raises(InvalidInputError, match=message):
        merge_state(**good(), output_scale=scale)


@pytest.mark.parametrize("n", [-1, 5, 1.5, "1", True])
def test_a_prefix_beyond_the_rows_is_named(n):
    with pytest.raises(InvalidInputError, match=r"num_tokens_with_prefix=.* \(allowed: "):
        merge_state(**good(), num_tokens_with_prefix=n)
    inputs = good()
    with pytest.raises(InvalidInputError, match="num_tokens_with_prefix"):
        merge_state_(*inputs.values(), num_tokens_with_prefix=n)


@pytest.mark.parametrize(
    "states, message",
    [
        ([], "states=0 states"),
        (torch.ones(2), "states=Tensor"),
        ((torch.ones(0, 4, 2, 16), torch.ones(0, 4, 2)), "states=0 states"),
        ((torch.ones(4, 2, 16), torch.ones(4, 2)), r"states\[0\].shape=\[4, 2, 16\]"),
        ([torch.ones(4, 2, 16)], r"states\[0\]=Tensor \(allowed: a pair"),
        ([(torch.ones(4, 2, 16), torch.ones(4, 2)), 3], r"states\[1\]=int"),
        ([(torch.ones(4, 2, 16), torch.ones(4, 2)), (1, 2), (3, 4)], r"o\[1\]=int"),
        (
            [(torch.ones(4, 2, 16), torch.ones(4, 2)), (torch.ones(4, 2, 8), torch.ones(4, 2))] * 2,
            r"o\[1\].shape=\[4, 2, 8\] \(allowed: \[4, 2, 16\], as o\[0\]\)",
        ),
        ((torch.ones(3, 4, 2, 16), torch.ones(3, 4, 3)), r"lse.shape=\[3, 4, 3\]"),
    ],
)
def test_malformed_states_are_named(states, message):
    with pytest.raises(InvalidInputError, match=message):
        merge_states(states)


@pytest.mark.parametrize(
    "counts, message",
    [
        ([1, 2, 3, 4], "counts=list"),
        (torch.ones(3, dtype=torch.int32), r"counts.shape=\[3\] \(allowed: \[T=4\]\)"),
        (torch.ones(4), "counts.dtype=torch.float32"),
        (torch.ones(4, dtype=torch.int32, device="meta"), "counts.device=meta"),
    ],
)
def test_malformed_counts_are_named(counts, message):
    stacked = torch.ones(3, 4, 2, 16), torch.zeros(3, 4, 2)
    with pytest.raises(InvalidInputError, match=message):
        merge_states(stacked, counts=counts)
    separate = list(zip(*stacked))
    with pytest.raises(InvalidInputError, match=r"counts=given .*stack the states"):
        merge_states(separate, counts=torch.ones(4, dtype=torch.int32))


@pytest.mark.parametrize(
    "sinks, message",
    [
        ([1.0, 2.0], "sinks=list"),
        (torch.ones(3), r"sinks=\[3\] \(allowed: a float32 tensor \[H=2\]\)"),
        (torch.ones(2).half(), "sinks.dtype=torch.float16"),
        (torch.ones(2, device="meta"), "sinks.device=meta"),
    ],
)
def test_malformed_sinks_are_named(sinks, message):
    with pytest.raises(InvalidInputError, match=message):
        apply_sinks((torch.ones(4, 2, 16), torch.zeros(4, 2)), sinks)
    with pytest.raises(InvalidInputError, match="state=Tensor"):
        apply_sinks(torch.ones(2), torch.ones(2))
