"""The Hopper prefill on a GPU: against float64, each group in a process of its own, since deadlocks
hang; and behind the backend, where it must agree with the plain kernel and repeat bit for bit.
"""

from __future__ import annotations

import pytest
import torch

import attn_backends as ab
from attn_backends.bench.hopper_cases import groups
from attn_backends.bench.hopper_processes import run_checks
from attn_backends.triton_native import hopper_compat

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0"),
    pytest.mark.skipif(hopper_compat.REASON is not None, reason=str(hopper_compat.REASON)),
]


@pytest.mark.slow
@pytest.mark.parametrize("group", list(groups()))
def test_every_case_of_the_group_is_right(group):
    rows = run_checks([group], limit=240.0, jobs=1)
    assert rows and not [row for row in rows if row["status"] != "passed"]


def _setting(page_size: int | None, sinks: bool, q_lens=(700, 300), kv_lens=(900, 300)):
    """A spec, a batch, and a function that makes tensors, with 3 pages of nobody or none."""
    spec = ab.AttentionSpec(8, 2, 128, dtype=torch.bfloat16, page_size=page_size)
    table = None
    if page_size is not None:
        width = -(-max(kv_lens) // page_size)
        pages = len(q_lens) * width + 3
        table = torch.randperm(pages, device="cuda")[: len(q_lens) * width]
        table = table.reshape(len(q_lens), width).int()
    batch = ab.Batch.from_lengths(list(q_lens), list(kv_lens), page_table=table, device="cuda")

    def tensors(more: int = 0):
        shape = (sum(kv_lens),) if page_size is None else (pages + more, page_size)
        q = torch.randn(sum(q_lens), 8, 128, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, *shape, 2, 128, device="cuda", dtype=torch.bfloat16)
        options = {"sinks": torch.randn(8, device="cuda")} if sinks else {}
        return (q, k, v), options

    return spec, batch, tensors


def _backend(spec: ab.AttentionSpec, **options):
    from attn_backends.triton_native.backend import TritonBackend, TritonOptions

    return TritonBackend(spec, options=TritonOptions(**options))


def _assert_near(got, want):
    assert (got.o.float() - want.o.float()).abs().max() < 0.05
    assert (got.lse - want.lse).abs().max() < 2e-3


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("q_lens", [(700, 300), (700, 3)])
def test_layers_repeat_bit_for_bit_and_agree_with_the_plain_kernel(page_size, sinks, q_lens):
    spec, batch, tensors = _setting(page_size, sinks, q_lens)
    backend, plain = _backend(spec), _backend(spec, hopper=False)
    plan = backend.plan(batch)
    for _ in range(2):  # the first compiles
        args, options = tensors()
        backend.run(*args, plan, **options)
    for _ in range(3):
        args, options = tensors()
        repeat, called = plan.repeat, []
        plan.repeat = lambda *a, repeat=repeat, called=called: (
            called.append(repeat(*a)) or called[-1]
        )
        got = backend.run(*args, plan, **options)
        plan.repeat = repeat
        assert called[0] is not None
        want = backend.run(*args, backend.plan(batch), **options)
        assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)
        _assert_near(got, plain.run(*args, plain.plan(batch), **options))


def test_a_cache_that_grew_is_read_to_its_end():
    spec, batch, tensors = _setting(16, False)
    backend, plain = _backend(spec), _backend(spec, hopper=False)
    capacity = ab.Capacity(
        num_seqs=2, total_q=1000, max_seqlen_q=700, max_seqlen_k=900, max_pages=57
    )
    plan = backend.plan(batch, capacity=capacity)
    for more in (0, 0, 50, 50, 50, 0):
        (q, k, v), _ = tensors(more)
        moved = batch.page_table + more
        later = ab.Batch.from_lengths([700, 300], [900, 300], page_table=moved)
        plan.update(later)
        got = backend.run(q, k, v, plan)
        _assert_near(got, plain.run(q, k, v, plain.plan(later)))


def test_every_row_is_computed_by_the_kernel_that_is_insisted_on():
    spec, batch, tensors = _setting(16, True, (1, 0, 5, 64), (700, 3, 5, 0))
    backend, plain = _backend(spec, hopper=True), _backend(spec, hopper=False)
    plan = backend.plan(batch)
    assert plan.prefills and not plan.splits and plan.hopper is not None
    args, options = tensors()
    got, want = (b.run(*args, b.plan(batch), **options) for b in (backend, plain))
    _assert_near(got, want)


def test_addresses_between_vectors_are_refused_if_it_is_insisted_on():
    spec, batch, tensors = _setting(None, False)
    backend = _backend(spec, hopper=True)
    plan = backend.plan(batch)
    (q, k, v), _ = tensors()
    backend.run(q, k, v, plan)
    odd = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape)
    odd.copy_(q)
    with pytest.raises(ab.UnsupportedCallError, match="data_ptr"):
        backend.run(odd, k, v, plan)
    want = _backend(spec).run(q, k, v, _backend(spec).plan(batch))
    _assert_near(_backend(spec).run(odd, k, v, _backend(spec).plan(batch)), want)


def test_plans_with_room_write_all_rows_of_fewer_queries():
    spec, batch, tensors = _setting(16, False)
    capacity = ab.Capacity(
        num_seqs=4, total_q=1500, max_seqlen_q=800, max_seqlen_k=1024, max_pages=64
    )
    backend, plain = _backend(spec, hopper=True), _backend(spec, hopper=False)
    plan = backend.plan(batch, capacity=capacity)
    for rows in (1000, 1200):
        (q, k, v), _ = tensors()
        more = torch.cat([q, q.new_full((rows - 1000, 8, 128), float("nan"))])
        got = backend.run(more, k, v, plan)
        want = plain.run(q, k, v, plain.plan(batch))
        _assert_near(ab.AttentionOutput(got.o[:1000], got.lse[:1000]), want)
        assert (got.o[1000:] == 0).all() and (got.lse[1000:] == float("-inf")).all()


@pytest.mark.parametrize("page_size", [1, 16])
def test_values_may_be_the_first_lanes_of_the_keys(page_size):
    table = torch.randperm(90, device="cuda").int()[: 2 * (-(-640 // 16))]
    if page_size == 1:
        table = torch.randperm(1300, device="cuda").int()[: 2 * 640]
    batch = ab.Batch.from_lengths(
        [400, 200], [640, 200], page_table=table.view(2, -1), device="cuda"
    )
    spec = ab.AttentionSpec(8, 2, 192, head_dim_v=128, dtype=torch.bfloat16, page_size=page_size)
    q = torch.randn(600, 8, 192, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1440 // page_size, page_size, 2, 192, device="cuda", dtype=torch.bfloat16)
    backend, plain = _backend(spec, hopper=True), _backend(spec, hopper=False)
    plan, want = backend.plan(batch), plain.run(q, k, None, plain.plan(batch))
    for _ in range(3):
        _assert_near(backend.run(q, k, None, plan), want)
