"""Options that must have their effect, scales, softcaps, neighbors, shared prefixes."""

from __future__ import annotations

import math

import pytest
import torch

from attn_backends.batch import Batch
from attn_backends.conformance.oracle import Sequence, attend
from attn_backends.errors import InvalidInputError

from .conftest import Field, check, counting, ln, paged

KEYS = pytest.mark.parametrize("page_size", [None, 16], ids=["ragged", "paged"])
E = math.e


def rows(values, heads, dim, dtype):
    """``[n, heads, dim]`` with these numbers in lane 0."""
    x = torch.zeros(len(values), heads, dim)
    x[..., 0] = torch.tensor(values)[:, None]
    return x.to(dtype)


def everywhere(values, heads, dim, dtype):
    """``[n, heads, dim]`` with each number in every lane."""
    return torch.tensor(values)[:, None, None].expand(-1, heads, dim).to(dtype)


def near(x, want, tolerance=2e-3):
    """Whether all numbers are within a half type's rounding of ``want``."""
    assert bool(((x.double() - want).abs() <= tolerance * max(1.0, abs(want))).all()), (x, want)


@KEYS
@pytest.mark.parametrize(("softcap", "o", "lse"), [(20.0, 0.650342, 20.331352), (None, 1.0, 60.0)])
def test_softcap_has_its_effect(field: Field, page_size, softcap, o, lse):  # F15
    spec = field.spec(softcap=softcap, sm_scale=1.0, page_size=page_size)
    backend = field.bind(spec, "decode")
    q, k = rows([1.0], 2, 16, spec.dtype), rows([60.0, 40.0], 2, 16, spec.kv)
    out = field.run(backend, q, [k], [everywhere([1.0, 0.0], 2, 16, spec.kv)], [1])
    near(out.o, o)
    near(out.lse, lse, 1e-6 if spec.dtype == torch.float32 else 1e-3)


@KEYS
@pytest.mark.parametrize(("window", "o"), [((2, 0), 14.0), (None, 7.5)])
def test_a_window_has_its_effect(field: Field, page_size, window, o):  # F15
    spec = field.spec(window=window, page_size=page_size)
    out = field.probe([16], [16], spec)
    near(out.o[-1], o)
    near(out.lse[-1], math.log(3 if window else 16), 1e-6)


@KEYS
def test_sinks_have_their_effect_and_states_leave_them_out(field: Field, page_size):  # F15
    spec = field.spec(page_size=page_size)
    backend = field.bind(spec, "decode")
    q, k = rows([0.0], 2, 16, spec.dtype), rows([0.0, 0.0], 2, 16, spec.kv)
    v = everywhere([1.0, 1.0], 2, 16, spec.kv)
    state = field.run(backend, q, [k], [v], [1])
    check(state, [1], ln(2))
    final = field.run(backend, q, [k], [v], [1], sinks=torch.ones(2))
    near(final.o, 2 / (2 + E))
    near(final.lse, math.log(2 + E), 1e-6)


@KEYS
@pytest.mark.parametrize("slopes", [True, False])
def test_alibi_has_its_effect(field: Field, page_size, slopes):  # F15
    spec = field.spec(has_alibi=slopes, page_size=page_size)
    kwargs = {"alibi_slopes": torch.full((2,), 0.5)} if slopes else {}
    out = field.probe([4], [4], spec, **kwargs)
    near(out.o[-1], 2.084576 if slopes else 1.5)
    near(out.lse[-1], 0.787339 if slopes else math.log(4), 1e-6)


@pytest.mark.parametrize(
    "change",
    [{"softcap": 20.0}, {"window": (2, 0)}, {"sm_scale": 1.0}, {"causal": False}],
    ids=lambda c: next(iter(c)),
)
def test_a_plan_of_another_spec_raises(field: Field, change):  # F15
    spec = field.spec()
    backend, other = field.bind(spec), field.bind(field.spec(**change))
    q = torch.zeros(4, 2, 16, dtype=spec.dtype, device=field.device)
    with pytest.raises(InvalidInputError, match=r"plan\.spec="):
        backend.run(q, q, q, other.plan(field.ragged([4], [4])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("score", "lse"),
    [
        (1.0, 0.999867), (100.0, 48.201379), (1000.0, 50.0), (4400.0, 50.0), (5000.0, 50.0),
        (10000.0, 50.0), (-1.0, -0.999867), (-10000.0, -50.0),
    ],
)  # fmt: skip
def test_softcap_does_not_overflow(field: Field, dtype, score, lse):  # F14
    spec = field.spec(softcap=50.0, sm_scale=1.0, dtype=dtype)
    backend = field.bind(spec, "decode")
    q, k = rows([score], 2, 16, dtype), rows([1.0], 2, 16, dtype)
    v = counting(3, spec)[2:]
    out = field.run(backend, q, [k], [v], [1])
    assert bool((out.o == 2).all())
    # Hardware tanh has 11 bits.
    near(out.lse, lse, 1e-6 if dtype == torch.float32 else 2**-10)


def _fp8_spec(field: Field, **fields):
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    dtype = next((d for d in dtypes if d in field.cls.capabilities.dtypes), torch.float16)
    return field.spec(dim=64, sm_scale=1.0, dtype=dtype, kv_dtype=torch.float8_e4m3fn, **fields)


@KEYS
@pytest.mark.parametrize("form", ["float", "scalar", "head", "none"])
def test_fp8_scales_count_once_each(split_field: Field, page_size, form):  # F25
    field = split_field
    spec = _fp8_spec(field, page_size=page_size)
    backend = field.bind(spec, "decode")
    fp8 = torch.float8_e4m3fn
    q = rows([1.0], 2, 64, spec.dtype)
    k, v = rows([0.0, 4.0], 2, 64, fp8), everywhere([0.0, 2.0], 2, 64, fp8)
    scale = {
        "float": 0.5,
        "scalar": torch.tensor(0.5),
        "head": torch.tensor([0.5, 0.5]),
        "none": None,
    }[form]
    out = field.run(backend, q, [k], [v], [1], poison=448.0, k_scale=scale, v_scale=scale)
    if form == "none":  # no scales means 1
        near(out.o, 2 / (1 + math.exp(-4)))
        near(out.lse, math.log(1 + math.exp(4)), 1e-5)
    else:
        near(out.o, 0.880797)
        near(out.lse, 2.126928, 1e-5)


@pytest.mark.parametrize(
    ("k_scale", "v_scale", "o", "lse"),
    [(None, 0.5, 0.982014, 4.018150), (0.5, None, 1.761594, 2.126928)],
)
def test_fp8_scales_of_one_side_stay_on_their_side(field: Field, k_scale, v_scale, o, lse):  # F25
    spec = _fp8_spec(field)
    backend = field.bind(spec, "decode")
    fp8 = torch.float8_e4m3fn
    q, k = rows([1.0], 2, 64, spec.dtype), rows([0.0, 4.0], 2, 64, fp8)
    v = everywhere([0.0, 2.0], 2, 64, fp8)
    out = field.run(backend, q, [k], [v], [1], k_scale=k_scale, v_scale=v_scale)
    near(out.o, o)
    near(out.lse, lse, 1e-5)


def test_fp8_scales_differ_by_kv_head(field: Field):  # F25
    spec = _fp8_spec(field, heads=(4, 2))
    backend = field.bind(spec, "decode")
    fp8 = torch.float8_e4m3fn
    q, k = rows([1.0], 4, 64, spec.dtype), rows([0.0, 4.0], 2, 64, fp8)
    v = everywhere([0.0, 2.0], 2, 64, fp8)
    scales = {"k_scale": torch.tensor([0.5, 0.25]), "v_scale": torch.tensor([0.5, 2.0])}
    out = field.run(backend, q, [k], [v], [1], **scales)
    near(out.o[:, :2], 0.880797)
    near(out.o[:, 2:], 4 / (1 + math.exp(-1)))
    near(out.lse[:, :2], 2.126928, 1e-5)
    near(out.lse[:, 2:], math.log(1 + E), 1e-5)


def _prefix_and_suffixes(field: Field, count, prefix_len, suffix_lens):
    """One-token queries over a shared prefix and own suffixes, in two states and in one pass."""
    spec = field.spec(heads=(5, 1), dim=128)
    backend = field.bind(spec, "decode")
    gen = torch.Generator().manual_seed(11)
    randn = lambda n, h: torch.randn(n, h, 128, generator=gen).to(spec.dtype)  # noqa: E731
    q, prefix = randn(count, 5), (randn(prefix_len, 1), randn(prefix_len, 1))
    suffixes = [(randn(n, 1), randn(n, 1)) for n in suffix_lens]
    device = field.device
    # The shared prefix: one sequence of `count` queries, which all see all of it.
    shared = Batch.from_lengths([1] * count, [prefix_len] * count, device=device,
                                page_table=[[0]] * count)  # fmt: skip
    pages = field.spec(heads=(5, 1), dim=128, page_size=prefix_len)
    over_prefix = field.bind(pages, "decode")
    k, v = (x[None].to(device) for x in prefix)
    lse = torch.full((5, count), math.nan, device=device).T  # a transposed view
    o = torch.empty(count, 5, 128, dtype=spec.out_dtype, device=device)
    a = over_prefix.run(q.to(device), k, v, over_prefix.plan(shared), out=(o, lse))
    b = field.run(backend, q, [k for k, _ in suffixes], [v for _, v in suffixes], [1] * count)
    merged = a.merge(b)
    whole = [
        attend(spec, Sequence(q[i : i + 1], torch.cat([prefix[0], k]), torch.cat([prefix[1], v])))
        for i, (k, v) in enumerate(suffixes)
    ]
    exact_o, exact_lse = torch.cat([w.o for w in whole]), torch.cat([w.lse for w in whole])
    bound = 1e-5 if spec.dtype == torch.float32 else 8 * torch.finfo(spec.dtype).eps
    assert float((merged.o.cpu().double() - exact_o).abs().max()) < bound
    assert float((merged.lse.cpu().double() - exact_lse).abs().max()) < 1e-5
    plain = over_prefix.run(q.to(device), k, v, over_prefix.plan(shared))
    assert torch.equal(plain.lse, a.lse) and torch.equal(plain.o, a.o), "strides of lse matter"


def test_a_shared_prefix_merged_with_suffixes_is_one_pass(split_field: Field):  # F05
    _prefix_and_suffixes(split_field, 3, 6, [1, 2, 3])


def test_a_long_shared_prefix_merged_with_suffixes_is_one_pass(split_field: Field):  # F05
    if split_field.device.type == "cuda":
        _prefix_and_suffixes(split_field, 128, 3000, [1 + n % 16 for n in range(128)])
    elif split_field.name == "torch_native":
        _prefix_and_suffixes(split_field, 16, 3000, [1 + n for n in range(16)])
    else:  # the full size takes minutes in an interpreter
        _prefix_and_suffixes(split_field, 4, 150, [1, 5, 9, 16])


def test_bits_of_a_row_do_not_depend_on_its_neighbors(field: Field):  # F24
    size = 16
    dtype = torch.bfloat16 if torch.bfloat16 in field.cls.capabilities.dtypes else torch.float16
    spec = field.spec(heads=(8, 2), dim=128, dtype=dtype, page_size=size, batch_invariant=True)
    backend = field.bind(spec)
    long = 200 if field.interpreted else 1000
    gen = torch.Generator().manual_seed(5)
    randn = lambda n, h: torch.randn(n, h, 128, generator=gen).to(dtype)  # noqa: E731
    row = (randn(1, 8), randn(long, 2), randn(long, 2))
    beside = 33 if field.interpreted else 129
    prefill = (randn(beside, 8), randn(beside, 2), randn(beside, 2))
    others = [(randn(1, 8), randn(n, 2), randn(n, 2)) for n in range(3, 34 if long == 1000 else 8)]

    def run(sequences, hint=None):
        q = torch.cat([s[0] for s in sequences])
        q_lens, kv_lens = [len(s[0]) for s in sequences], [len(s[1]) for s in sequences]
        k, v, table = paged([s[1] for s in sequences], [s[2] for s in sequences], spec, math.nan)
        batch = Batch.from_lengths(q_lens, kv_lens, page_table=table, device=field.device)
        if hint is not None:
            object.__setattr__(batch, "max_seqlen_k", hint)
        device = field.device
        return backend.run(q.to(device), k.to(device), v.to(device), backend.plan(batch))

    alone = run([row])
    for name, out in {
        "beside a prefill": run([row, prefill]),
        "in a batch": run([row, *others]),
        "with a loose bound": run([row], 50 * long),
    }.items():
        assert torch.equal(out.o[:1], alone.o), name
        assert torch.equal(out.lse[:1], alone.lse), name
    last = run([prefill, *others, row])
    assert torch.equal(last.o[-1:], alone.o) and torch.equal(last.lse[-1:], alone.lse)
