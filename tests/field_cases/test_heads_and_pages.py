"""Head maps, head dims, pages and poison, on every backend here."""

from __future__ import annotations

import math

import pytest
import torch

from attn_backends.batch import Batch
from attn_backends.conformance.oracle import Extras, Sequence
from attn_backends.conformance.tolerance import expect
from attn_backends.errors import InvalidInputError

from .conftest import DEVICE, Field, check, counting, ln, paged

RATIOS = [
    (3, 1), (5, 1), (6, 1), (7, 1), (12, 1), (12, 2), (24, 4), (24, 8), (28, 4), (40, 8), (48, 1),
    (64, 4), (64, 1),
]  # fmt: skip
HEAD_DIMS = [
    8, 16, 40, 64, 72, 80, 88, 96, 100, 112, 120, 128, 160, 192, 224, 256, 288, 512, 576,
]  # fmt: skip
PAIRS = [(192, 128), (576, 512), (128, 64), (64, 128), (96, 80)]


def random_rows(n, heads, dim, dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, heads, dim, generator=gen).to(dtype)


def close_to_oracle(out, backend, q, k, v):
    """Within twice the suite's bounds, which rest on more rows than there are here."""
    spec, rounds = backend.spec, backend.capabilities.rounds_row_sum
    want = expect(spec, [Sequence(q, k, v)], Extras(), rounds_row_sum=rounds)
    error = (out.o.cpu().double() - want.o).abs()
    assert bool((error <= 2 * want.o_tol[..., None]).all()), float(
        (error / want.o_tol[..., None]).max()
    )
    longest = [float(x.double().norm(dim=-1).max()) for x in (q, k)]
    sums = 2**-23 * longest[0] * longest[1] * spec.scale  # of products, in whatever order
    lse_error = (out.lse.cpu().double() - want.lse).abs()
    assert bool((lse_error <= 2 * want.lse_tol + sums).all()), float(
        (lse_error / want.lse_tol).max()
    )


DIMS = [16, 64, 128]
# Without a GPU each ratio meets one head dim; kernels are slow there.
RATIO_DIMS = [
    (heads, dim)
    for n, heads in enumerate(RATIOS)
    for dim in (DIMS if DEVICE.type == "cuda" else [DIMS[n % 3]])
]


@pytest.mark.parametrize(("heads", "dim"), RATIO_DIMS, ids=str)
def test_any_ratio_of_heads_maps_to_the_right_kv_head(field: Field, heads, dim):  # F17
    want = [h // (heads[0] // heads[1]) for h in range(heads[0])]
    for page_size, q_lens, kv_lens in ((None, [3], [3]), (16, [1, 1], [9, 20])):
        spec = field.spec(heads=heads, dim=dim, page_size=page_size)
        backend = field.bind(spec)
        q = torch.zeros(sum(q_lens), heads[0], dim).to(spec.dtype)
        number = torch.arange(heads[1], dtype=torch.float32)[None, :, None]
        keys = [torch.zeros(n, heads[1], dim).to(spec.kv) for n in kv_lens]
        values = [number.expand(n, heads[1], dim).to(spec.kv) for n in kv_lens]
        o = field.run(backend, q, keys, values, q_lens).o.double()
        expected = torch.tensor(want, device=o.device)[None, :, None].expand(o.shape)
        assert bool(((o - expected).abs() <= 1e-6 * expected).all())


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_any_head_dim_and_no_lane_beyond_it(field: Field, dim):  # F18
    spec = field.spec(dim=dim)
    backend = field.bind(spec)
    q = random_rows(3, 2, dim, spec.dtype, 1)
    k, v = (random_rows(17, 2, dim, spec.kv, seed) for seed in (2, 3))
    batch = field.ragged([3], [17])
    plan = backend.plan(batch)
    for poison in (1e4, math.nan):
        rows = []
        for x in (k, v):  # rows cut out of wider rows, whose other lanes are poison
            wide = torch.full((17, 2, dim + 24), poison).to(spec.kv)
            wide[..., :dim] = x
            rows.append(wide.to(field.device)[..., :dim])
        out = backend.run(q.to(field.device), *rows, plan)
        close_to_oracle(out, backend, q, k, v)


@pytest.mark.parametrize("kv_heads", [16, 1])
@pytest.mark.parametrize("dims", PAIRS, ids=str)
def test_values_may_be_of_another_width(field: Field, dims, kv_heads):  # F19
    dim, dv = dims
    heads = (2 * max(1, kv_heads // 8), max(1, kv_heads // 8)) if field.interpreted else None
    heads = heads or (16, kv_heads)
    spec = field.spec(heads=heads, dim=dim, head_dim_v=dv)
    backend = field.bind(spec)
    q = random_rows(2, heads[0], dim, spec.dtype, 1)
    k = random_rows(33, heads[1], dim, spec.kv, 2)
    v = random_rows(33, heads[1], dv, spec.kv, 3)
    whole = field.run(backend, q, [k], [v], [2])
    assert whole.o.shape == (2, heads[0], dv)
    close_to_oracle(whole, backend, q, k, v)
    # Two chunks merged. The first is seen by all queries: two one-token sequences share it.
    first = field.run(backend, q, [k[:20], k[:20]], [v[:20], v[:20]], [1, 1])
    last = field.run(backend, q, [k[20:]], [v[20:]], [2])
    close_to_oracle(first.merge(last), backend, q, k, v)


def test_values_may_be_the_first_lanes_of_the_keys(field: Field):  # F19
    spec = field.spec(heads=(4, 1), dim=576, head_dim_v=512, page_size=16)
    backend = field.bind(spec, "decode")
    q, k = random_rows(1, 4, 576, spec.dtype, 1), random_rows(33, 1, 576, spec.kv, 2)
    cache, _, table = paged([k], [k[..., :512]], spec, math.nan)
    batch = Batch.from_lengths([1], [33], page_table=table, device=field.device)
    out = backend.run(q.to(field.device), cache.to(field.device), None, backend.plan(batch))
    assert out.o.shape == (1, 4, 512)
    close_to_oracle(out, backend, q, k, k[..., :512])


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("part", ["k", "v", "kv"])
def test_poison_in_unused_slots_stays_there(split_field: Field, part, poison):  # F21
    field = split_field
    spec = field.spec(page_size=4)
    backend = field.bind(spec, "decode")
    values, keys = counting(13, spec), torch.zeros(13, 2, 16).to(spec.kv)
    clean_k, clean_v, table = paged([keys], [values], spec, 0.0)
    bad_k, bad_v, _ = paged([keys], [values], spec, poison)
    k, v = bad_k if "k" in part else clean_k, bad_v if "v" in part else clean_v
    batch = Batch.from_lengths([1], [13], page_table=table, device=field.device)
    q = torch.zeros(1, 2, 16, dtype=spec.dtype, device=field.device)
    check(backend.run(q, k.to(field.device), v.to(field.device), backend.plan(batch)), [6], ln(13))


def test_poison_that_a_window_left_behind_stays_there(split_field: Field):  # F21
    field = split_field
    spec = field.spec(page_size=4, window=(2, 0))
    backend = field.bind(spec, "decode")
    values, keys = counting(13, spec), torch.zeros(13, 2, 16).to(spec.kv)
    values[:10], keys[:10] = math.nan, math.nan
    out = field.run(backend, torch.zeros(1, 2, 16).to(spec.dtype), [keys], [values], [1])
    check(out, [11], ln(3))


def test_room_beyond_ragged_lengths_is_not_read(field: Field):  # F21
    spec = field.spec()
    backend = field.bind(spec)
    store = torch.full((6, 2, 16), math.nan).to(spec.kv)
    k, v = store.clone(), store.clone()
    k[0], v[0] = 0, 0
    k[3:], v[3:] = 0, counting(3, spec)
    batch = field.ragged([1, 1], [1, 3], cu_seqlens_k=[0, 3, 6])
    q = torch.zeros(2, 2, 16, dtype=spec.dtype, device=field.device)
    check(backend.run(q, k.to(field.device), v.to(field.device), backend.plan(batch)), [0, 1],
          ln(1, 3))  # fmt: skip


@pytest.mark.parametrize("where", ["k", "v"])
def test_a_visible_nan_stays_visible(field: Field, where):  # F21
    spec = field.spec(page_size=4)
    backend = field.bind(spec, "decode")
    values, keys = counting(13, spec), torch.zeros(13, 2, 16).to(spec.kv)
    (values if where == "v" else keys)[12, 0] = math.nan
    out = field.run(backend, torch.zeros(1, 2, 16).to(spec.dtype), [keys], [values], [1])
    assert bool(out.o[:, 0].isnan().all())
    check(type(out)(out.o[:, 1:], out.lse[:, 1:]), [6], ln(13))


@pytest.mark.parametrize("size", [1, 2, 3, 16, 32, 48, 64, 128, 256, 512])
def test_any_page_size_and_junk_beyond_the_length(field: Field, size):  # F22
    spec = field.spec(heads=(2, 1), page_size=size)
    backend = field.bind(spec, "decode")
    lens = sorted({0, 1, size - 1, size, size + 1, 3 * size})
    if field.interpreted:
        lens = [n for n in lens if n < 300]
    values = [counting(n, spec) % 64 for n in lens]
    keys = [torch.zeros(n, 1, 16).to(spec.kv) for n in lens]
    k, v, table = paged(keys, values, spec, math.nan, spare=2)
    for row, n in zip(table, lens):
        row[-(-n // size)] = 0  # one extra page that looks valid
    q = torch.zeros(len(lens), 2, 16, dtype=spec.dtype, device=field.device)
    k, v = k.to(field.device), v.to(field.device)
    for tail in (2**31 - 1, -1):
        table[table == 2**31 - 1] = tail
        batch = Batch.from_lengths([1] * len(lens), lens, page_table=table, device=field.device)
        out = backend.run(q, k, v, backend.plan(batch))
        check(out, [float(x.double().mean()) if len(x) else 0.0 for x in values], ln(*lens))


def test_a_page_id_outside_the_cache_raises(field: Field):  # F22
    spec = field.spec(page_size=16)
    backend = field.bind(spec)
    k = torch.zeros(4, 16, 2, 16, dtype=spec.kv, device=field.device)
    q = torch.zeros(1, 2, 16, dtype=spec.dtype, device=field.device)
    for page, allowed in ((4, r"0\.\.3"), (-1, ">= 0")):
        batch = Batch.from_lengths([1], [20], page_table=[[0, page]], device=field.device)
        with pytest.raises(InvalidInputError, match=f"page_table={page} .*{allowed}"):
            backend.run(q, k, k, backend.plan(batch))


def test_pages_past_two_to_the_31_elements(field: Field):  # F20
    spec = field.spec(heads=(1, 1), dim=64, page_size=256)
    backend = field.bind(spec, "decode")
    stride = 256 * 576  # the page stride of a wide MLA cache
    pages = 14_600
    size = (pages * stride) * spec.kv.itemsize
    storage = torch.UntypedStorage(size, device=field.device)
    flat = torch.empty(0, dtype=spec.kv, device=field.device).set_(storage)
    k = flat.as_strided((pages, 256, 1, 64), (stride, 576, 576, 1))
    v = flat.as_strided((pages, 256, 1, 64), (stride, 576, 576, 1), 64)
    data = [random_rows(200, 1, 64, spec.kv, seed).to(field.device) for seed in (1, 2)]
    q = random_rows(1, 1, 64, spec.dtype, 3).to(field.device)
    results = []
    for page in (0, 14_563, 14_564, 14_599):
        k[page, :200], v[page, :200] = data
        batch = Batch.from_lengths([1], [200], page_table=[[page]], device=field.device)
        results.append(backend.run(q, k, v, backend.plan(batch)))
    assert stride * 14_563 < 2**31 < stride * 14_564
    for out in results[1:]:
        assert torch.equal(out.o, results[0].o) and torch.equal(out.lse, results[0].lse)
