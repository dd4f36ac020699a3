"""Merges under torch.compile: registered operators, honest fakes, no recompile per length."""

from __future__ import annotations

import pytest
import torch

from attn_backends.errors import InvalidInputError
from attn_backends.merge import apply_sinks, merge_state, merge_state_, merge_states, ops

assert ops is not None  # importing it registers the operators
OPS = torch.ops.attn_backends


def samples(device: torch.device, make_state):
    a, b = make_state(5, 3, 16), make_state(5, 3, 16, seed=1)
    out = torch.empty_like(a[0]), torch.empty_like(a[1])
    stacked = torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]])
    counts = torch.tensor([0, 1, 2, 2, 1], device=device)
    scale = torch.tensor(0.5, device=device)
    head_major = a[1].mT.contiguous().mT
    return {
        "merge_pair": [
            (*a, *b, None, None, None, None),
            (a[0], head_major, *b, 3, None, None, "torch"),
            (*a, None, b[1], None, 0.5, None, None),
            (*a, *b, None, None, scale, None),
        ],
        "merge_pair_out": [(*a, *b, None, None, None, None, *out)],
        "merge_pair_": [(*a, *b, 2, None, None, None)],
        "merge_stacked": [(*stacked, None, None), (*stacked, counts, None)],
        "merge_stacked_out": [(*stacked, counts, None, *out)],
        "merge_separate": [([a[0], b[0], a[0]], [a[1], b[1], b[1]], None)],
        "merge_separate_out": [([a[0], b[0]], [a[1], b[1]], None, *out)],
    }


@pytest.mark.parametrize("name", list(ops._IMPLEMENTATIONS))
def test_operators_pass_opcheck(name, device, make_state):
    for args in samples(device, make_state)[name]:
        torch.library.opcheck(getattr(OPS, name).default, args)


def compiled(function):
    """``function`` compiled in one graph for any length, and a list that counts its graphs."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(module, inputs):
        graphs.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend), graphs


def assert_equal(got, want) -> None:
    assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)
    assert got.o.dtype == want.o.dtype and got.o.stride() == want.o.stride()
    assert got.lse.dtype == torch.float32 and got.lse.stride() == want.lse.stride()


@pytest.mark.parametrize("layout", ["plain", "padded", "head_major"])
def test_one_graph_serves_every_length(make_state, arrange, layout):
    function, graphs = compiled(lambda a, x, b, y: merge_state(a, x, b, y))
    for tokens in (7, 64, 1, 33):
        a = arrange(*make_state(tokens, 5, 16), layout)
        b = make_state(tokens, 5, 16, seed=1)
        assert_equal(function(*a, *b), merge_state(*a, *b))
    # Size 1 is special to torch.compile; all other lengths share a graph.
    assert len(graphs) <= 2


def test_every_form_compiles(make_state, device):
    def run(o_a, lse_a, o_b, lse_b, sinks, counts, out_o, out_lse):
        merged = merge_state(o_a, lse_a, o_b, lse_b, num_tokens_with_prefix=1)
        small = merge_state(o_a, lse_a, o_b, lse_b, output_scale=0.5)
        merge_state(o_a, lse_a, o_b, lse_b, out=(out_o, out_lse))
        three = merge_states([merged, (o_b, lse_b), (out_o, out_lse)])
        pile = torch.stack([o_a, o_b]), torch.stack([lse_a, lse_b])
        counted = merge_states(pile, counts=counts)
        merge_state_(o_a, lse_a, *three)
        apply_sinks((o_a, lse_a), sinks, out=(o_a, lse_a))
        return merged, small, three, counted

    function, _ = compiled(run)
    for tokens in (5, 9):
        counts = torch.arange(tokens, device=device) % 3
        sinks = torch.linspace(-1, 1, 4, device=device)
        sets = []
        for _ in range(2):
            a, b = make_state(tokens, 4, 16), make_state(tokens, 4, 16, seed=1)
            sets.append((*a, *b, sinks, counts, torch.empty_like(a[0]), torch.empty_like(a[1])))
        for got, want in zip(function(*sets[0]), run(*sets[1])):
            assert torch.equal(got.o.float(), want.o.float()) and torch.equal(got.lse, want.lse)
        for got, want in zip(sets[0], sets[1]):  # mutations too
            assert torch.equal(got, want)


def test_inductor_agrees_with_eager(make_state):
    torch._dynamo.reset()
    function = torch.compile(lambda a, x, b, y: merge_state(a * 2, x + 1, b, y), fullgraph=True)
    a, b = make_state(7, 4, 16), make_state(7, 4, 16, seed=1)
    assert_equal(function(*a, *b), merge_state(a[0] * 2, a[1] + 1, *b))


def test_a_wrong_call_fails_while_tracing(make_state):
    function, _ = compiled(lambda a, x, b, y: merge_state(a, x, b, y))
    a, b = make_state(5, 4, 16), make_state(5, 4, 16)
    with pytest.raises(Exception, match=r"lse_b.dtype=torch.float16 \(allowed: float32\)"):
        function(*a, b[0], b[1].half())


def test_fake_tensors_pass_through(make_state):
    with torch._subclasses.FakeTensorMode() as mode:
        o, lse = mode.from_tensor(torch.ones(3, 2, 16)), mode.from_tensor(torch.ones(3, 2))
        for merged in (merge_state(o, lse, o, lse), merge_states([(o, lse)] * 3)):
            assert merged.o.shape == o.shape and merged.lse.dtype == torch.float32
        with pytest.raises(InvalidInputError, match=r"lse_b.shape"):
            merge_state(o, lse, o, lse[:2])


def test_parameters_are_tensors(make_state):
    a, b = make_state(3, 2, 16), make_state(3, 2, 16, seed=1)
    held = torch.nn.Parameter(a[0], requires_grad=False)
    assert torch.equal(merge_state(held, a[1], *b).o, merge_state(*a, *b).o)
    assert torch.equal(merge_states([(held, a[1]), b, a]).o, merge_states([a, b, a]).o)
