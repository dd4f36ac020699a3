"""MLA end to end: absorbed decode, expanded prefill in chunks, against a float64 model of a layer.

The layer is shaped like DeepSeek's: latents of 512 and 64 lanes, heads of 128 + 64 for scores and
128 for values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import attn_backends as ab
from attn_backends.chunked import plan_chunked
from attn_backends.mla import MLAProjection
from attn_backends.pieces import Call

RANK, ROPE, NOPE, VALUE, PAGE = 512, 64, 128, 128, 16


@dataclass(frozen=True)
class Layer:
    """A layer's projections and one step's tensors, and what attention over them is exactly.

    Attributes:
        mla: The projections.
        q: ``[T, H, 192]``.
        cache: ``[num_pages, PAGE, 1, 576]``, NaN where no token is.
        batch: Lengths and pages.
        o: ``[T, H, 128]`` float64, the answer.
        lse: ``[T, H]`` float64.
    """

    mla: MLAProjection
    q: torch.Tensor
    cache: torch.Tensor
    batch: ab.Batch
    o: torch.Tensor
    lse: torch.Tensor


def layer(q_lens: list[int], kv_lens: list[int], dtype: torch.dtype, heads: int = 4) -> Layer:
    """Make a layer and compute it by its definition: every key and value written out."""
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    w_uk, w_uv = make(heads, NOPE, RANK) / RANK**0.5, make(heads, RANK, VALUE) / RANK**0.5
    q, latents = make(sum(q_lens), heads, NOPE + ROPE), make(sum(kv_lens), 1, RANK + ROPE)
    pages = [-(-n // PAGE) for n in kv_lens]
    order = torch.randperm(sum(pages) + 1, generator=g)
    cache = torch.full((sum(pages) + 1, PAGE, 1, RANK + ROPE), float("nan"), dtype=dtype)
    table = torch.full((len(kv_lens), max(pages)), -1, dtype=torch.int32)
    os, lses = [], []
    row = at = top = 0
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        for i in range(pages[b]):
            count = min(PAGE, kv_len - i * PAGE)
            table[b, i] = order[at]
            cache[order[at], :count] = latents[row + i * PAGE : row + i * PAGE + count]
            at += 1
        own = latents[row : row + kv_len, 0].double()
        c, rope = own[:, :RANK], own[:, RANK:]
        k = torch.einsum("nr,hkr->nhk", c, w_uk.double())
        v = torch.einsum("nr,hrv->nhv", c, w_uv.double())
        k = torch.cat([k, rope[:, None].expand(-1, heads, -1)], dim=-1)
        s = torch.einsum("qhd,khd->hqk", q[top : top + q_len].double(), k) / (NOPE + ROPE) ** 0.5
        i, j = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)[None]
        s = torch.where(j <= i, s, float("-inf"))
        lse = torch.logsumexp(s, -1)
        p = torch.where(lse[..., None] == float("-inf"), 0.0, torch.exp(s - lse[..., None]))
        os.append(torch.einsum("hqk,khv->qhv", p, v))
        lses.append(lse.T)
        row, top = row + kv_len, top + q_len
    batch = ab.Batch.from_lengths(q_lens, kv_lens, page_table=table)
    mla = MLAProjection(w_uk, w_uv, ROPE)
    return Layer(mla, q, cache, batch, torch.cat(os), torch.cat(lses))


def absorbed(x: Layer, backend: str, **spec) -> ab.AttentionOutput:
    own = x.mla.absorbed_spec(page_size=PAGE, **spec)
    assert (own.num_kv_heads, own.head_dim, own.dv) == (1, 576, 512)
    chosen = ab.select(own, phase="decode", backend=backend).backend
    return x.mla.project(chosen.run(x.mla.absorb(x.q), x.cache, None, chosen.plan(x.batch)))


def expanded(x: Layer, backend: str, chunk_size: int) -> ab.AttentionOutput:
    own = x.mla.expanded_spec(page_size=PAGE)
    assert (own.num_kv_heads, own.head_dim, own.dv) == (x.mla.num_heads, 192, 128)
    plan = plan_chunked(own, x.batch, chunk_size=chunk_size, backend=backend, gather=True)
    return plan.run(x.q, x.cache, None, expand=x.mla.expand)


def close(got: ab.AttentionOutput, x: Layer, steps: float) -> None:
    """Within so many roundings of the dtype, each at the size of values and scores."""
    eps = torch.finfo(got.o.dtype).eps
    eps = max(eps, torch.finfo(torch.float32).eps)  # LSEs, and so merges, are float32
    empty = x.lse == float("-inf")
    assert torch.equal(torch.isinf(got.lse), empty) and not got.o[empty].any()
    size = float(x.o.abs().max())
    error = float((got.o.double() - x.o).abs().max())
    assert error <= steps * eps * size, error / (eps * size)
    off = float(torch.where(empty, 0.0, got.lse.double() - x.lse).abs().max())
    reach = max(1.0, float(torch.where(empty, 0.0, x.lse).abs().max()))
    assert off <= steps * eps * reach, off / (eps * reach)


#: A prefix, none, one query, no query, no key.
MIXED = ([3, 4, 1, 0, 2], [37, 4, 20, 5, 0])


def test_absorbed_decode_equals_the_float64_layer() -> None:
    x = layer([1, 1, 1], [37, 1, 20], torch.float64)
    close(absorbed(x, "torch_native"), x, 8)


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 33, 100])
def test_expanded_chunked_prefill_equals_the_float64_layer(chunk_size: int) -> None:
    x = layer(*MIXED, torch.float64)
    close(expanded(x, "torch_native", chunk_size), x, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_agree_within_the_rounding_of_the_dtype(dtype: torch.dtype) -> None:
    x = layer(*MIXED, dtype)
    # Projections round as well: the expanded form rounds keys and values, the absorbed one queries
    # and latent outputs, each over sums of 512.
    steps = 16 if dtype == torch.bfloat16 else 64
    one, two = absorbed(x, "torch_native"), expanded(x, "torch_native", 16)
    close(one, x, steps)
    close(two, x, steps)


def test_the_triton_backend_computes_both_forms() -> None:
    x = layer([1, 2], [19, 2], torch.float32, heads=2)
    close(absorbed(x, "triton"), x, 64)
    close(expanded(x, "triton", 16), x, 64)


def test_states_of_the_two_forms_merge() -> None:
    """A prefix read absorbed and own tokens read expanded: one softmax."""
    x = layer([3], [35], torch.float64)
    table = x.batch.host_page_table
    prefix = ab.Batch.from_lengths([3], [32], page_table=table)
    own = ab.Batch.from_lengths([3], [3], page_table=table[:, 2:])
    spec = replace(x.mla.absorbed_spec(page_size=PAGE), causal=False)
    backend = ab.select(spec, backend="torch_native").backend
    first = x.mla.project(backend.run(x.mla.absorb(x.q), x.cache, None, backend.plan(prefix)))
    second = expanded(replace(x, batch=own), "torch_native", 16)
    close(first.merge(second), x, 8)


def test_the_cache_is_never_expanded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = layer([2, 3], [60, 50], torch.float32)
    held: list[int] = []
    run = Call.run

    def watched(self, q, k, v, **extras):
        held.append(k.shape[0])
        assert k.shape[1:] == (4, 192) and v.shape == (k.shape[0], 4, 128)
        return run(self, q, k, v, **extras)

    monkeypatch.setattr(Call, "run", watched)
    close(expanded(x, "torch_native", 16), x, 64)
    assert held and max(held) <= 16


def test_scale_is_that_of_the_query_before_absorption() -> None:
    x = layer([1], [5], torch.float64)
    assert x.mla.absorbed_spec(page_size=PAGE).scale == 192**-0.5
    assert x.mla.expanded_spec(page_size=PAGE).scale == 192**-0.5
    scaled = x.mla.absorbed_spec(page_size=PAGE, sm_scale=0.2)
    assert scaled.scale == 0.2 and scaled.dtype == torch.float64


def test_absorbed_attention_bits_do_not_depend_on_batch_mates() -> None:
    """Of the attention; the projections before and after are matrix products of torch."""
    x = layer([1, 2], [20, 9], torch.float32)
    q, table = x.mla.absorb(x.q), x.batch.host_page_table
    spec = x.mla.absorbed_spec(page_size=PAGE)
    backend = ab.select(spec, backend="torch_native").backend
    alone = ab.Batch.from_lengths([2], [9], page_table=table[1:])
    one = backend.run(q[1:], x.cache, None, backend.plan(alone))
    both = backend.run(q, x.cache, None, backend.plan(x.batch))
    assert torch.equal(one.o, both.o[1:]) and torch.equal(one.lse, both.lse[1:])


def test_each_form_twice_gives_the_same_bits() -> None:
    x = layer(*MIXED, torch.bfloat16)
    for form in (lambda: absorbed(x, "torch_native"), lambda: expanded(x, "torch_native", 16)):
        one, two = form(), form()
        assert torch.equal(one.o, two.o) and torch.equal(one.lse, two.lse)


def test_malformed_projections_are_refused_by_name() -> None:
    w_uk, w_uv = torch.zeros(2, 8, 16), torch.zeros(2, 16, 4)
    for args, name in (
        ((w_uk[0], w_uv, 4), "w_uk.shape"),
        ((w_uk, w_uv[:1], 4), "w_uv.shape"),
        ((w_uk, w_uv, -1), "rope_dim"),
        ((w_uk, w_uv, 1.0), "rope_dim"),
    ):
        with pytest.raises(ab.InvalidInputError, match=name):
            MLAProjection(*args)
    mla = MLAProjection(w_uk, w_uv, 4)
    for call, name in (
        (lambda: mla.absorb(torch.zeros(1, 2, 13)), "q.shape"),
        (lambda: mla.expand(torch.zeros(1, 1, 19)), "latents.shape"),
        (lambda: mla.expand(torch.zeros(1, 1, 20).half()), "latents.dtype"),
        (lambda: mla.expand(torch.zeros(1, 1, 20), torch.zeros(1, 1, 20)), "v=given"),
    ):
        with pytest.raises(ab.InvalidInputError, match=name):
            call()
