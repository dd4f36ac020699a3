"""Plans and runs: what is checked before any kernel starts, and what a plan promises."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_backends.backend import AttentionBackend
from attn_backends.batch import Batch
from attn_backends.capabilities import FEATURES, Capabilities, IntSet
from attn_backends.capacity import Capacity
from attn_backends.errors import (
    AttnBackendsError,
    InvalidInputError,
    Reason,
    UnsupportedCallError,
)
from attn_backends.output import AttentionOutput
from attn_backends.spec import AttentionSpec
from attn_backends.torch_native.backend import TorchNativeBackend

H, HK, D, DV = 4, 2, 8, 6
RAGGED = AttentionSpec(H, HK, D, DV, dtype=torch.float32)
PAGED = replace(RAGGED, page_size=4)
FP8 = replace(RAGGED, kv_dtype=torch.float8_e4m3fn)


class Recorder(AttentionBackend):
    """Writes zeros and remembers what it was given."""

    name = "recorder"
    capabilities = Capabilities(
        devices=("cpu",),
        dtypes=(torch.float32, torch.float16),
        fp8_kv_dtypes=(torch.float8_e4m3fn,),
        head_dims=IntSet(high=64),
        head_dims_v=IntSet(),
        features=frozenset(FEATURES),
    )

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def _run(self, q, k, v, plan, extras, out):
        self.calls.append((q, k, v, plan, extras, out))
        if out is None:
            out = AttentionOutput(torch.zeros(q.shape[0], H, self.spec.dv), torch.zeros(len(q), H))
        return out


def call(spec=RAGGED, **change):
    """One run with everything in order but for ``change``."""
    backend = Recorder(spec)
    table = [[1, 0], [2, 3]] if spec.page_size else None
    plan = change.pop("plan", None) or backend.plan(
        Batch.from_lengths([2, 1], [3, 5], page_table=table)
    )
    lead = (8,) if spec.page_size is None else (4, 4)
    tensors = {
        "q": torch.randn(3, H, D),
        "k": torch.randn(*lead, HK, D).to(spec.kv),
        "v": torch.randn(*lead, HK, DV).to(spec.kv),
    }
    tensors |= {n: change.pop(n) for n in list(change) if n in tensors}
    return backend.run(*tensors.values(), plan, **change), backend


def strided(*shape):
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]


slopes, flat = torch.ones(H), torch.ones(2 * 3 + 5, dtype=torch.bool)
BATCH = Batch.from_lengths([2], [3])
STATE = AttentionOutput(torch.zeros(1, H, DV), torch.zeros(1, H))
BAD = [
    (RAGGED, {"q": [1]}, "q=list"),
    (RAGGED, {"q": torch.randn(3, H + 1, D)}, "q.shape=[3, 5, 8]"),
    (RAGGED, {"q": torch.randn(3, H, D + 1)}, "q.shape=[3, 4, 9]"),
    (RAGGED, {"q": torch.randn(2, H, D)}, "q.shape[0]=2"),
    (RAGGED, {"q": torch.randn(4, H, D)}, "q.shape[0]=4"),
    (RAGGED, {"q": torch.randn(3, H, D).half()}, "q.dtype=torch.float16"),
    (RAGGED, {"q": torch.randn(3, H, D).to("meta")}, "q.device=meta"),
    (RAGGED, {"q": strided(3, H, D)}, "q.stride(-1)=2"),
    (RAGGED, {"q": torch.randn(3, H, D, requires_grad=True)}, "q.requires_grad=True"),
    (RAGGED, {"k": torch.randn(8, HK, D).bfloat16()}, "k.dtype=torch.bfloat16"),
    (RAGGED, {"k": torch.randn(7, HK, D), "v": torch.randn(7, HK, DV)}, "k.shape[0]=7"),
    (RAGGED, {"k": torch.randn(8, HK + 1, D)}, "k.shape=[8, 3, 8]"),
    (RAGGED, {"k": torch.randn(8, HK, D, requires_grad=True)}, "k.requires_grad=True"),
    (RAGGED, {"k": strided(8, HK, D)}, "k.stride(-1)=2"),
    (RAGGED, {"v": torch.randn(8, HK, D)}, "v.shape=[8, 2, 8]"),
    (RAGGED, {"v": torch.randn(9, HK, DV)}, "v.shape=[9, 2, 6]"),
    (PAGED, {"k": torch.randn(4, 3, HK, D)}, "k_cache.shape=[4, 3, 2, 8]"),
    (PAGED, {"v": torch.randn(5, 4, HK, DV)}, "v_cache.shape=[5, 4, 2, 6]"),
    (PAGED, {"k": torch.randn(3, 4, HK, D), "v": torch.randn(3, 4, HK, DV)}, "page_table=3"),
    (RAGGED, {"sinks": torch.ones(H - 1)}, "sinks.shape=[3]"),
    (RAGGED, {"sinks": torch.ones(2 * H)[::2]}, "sinks.stride(-1)=2"),
    (RAGGED, {"sinks": torch.ones(H).half()}, "sinks.dtype=torch.float16 (allowed: torch.float32)"),
    (RAGGED, {"sinks": torch.ones(H).to("meta")}, "sinks.device=meta"),
    (RAGGED, {"alibi_slopes": slopes}, "alibi_slopes=given"),
    (replace(RAGGED, has_alibi=True), {}, "alibi_slopes=None"),
    (replace(RAGGED, has_alibi=True), {"alibi_slopes": torch.ones(1)}, "alibi_slopes.shape=[1]"),
    (RAGGED, {"mask": flat}, "mask=given"),
    (replace(RAGGED, has_mask=True), {}, "mask=None"),
    (replace(RAGGED, has_mask=True), {"mask": flat[1:]}, "mask.shape=[10]"),
    (
        replace(RAGGED, has_mask=True),
        {"mask": flat.int()},
        "mask.dtype=torch.int32 (allowed: torch.bool)",
    ),
    (RAGGED, {"k_scale": 0.5}, "k_scale=0.5"),
    (FP8, {"k_scale": 0.0}, "k_scale=0.0"),
    (FP8, {"v_scale": float("nan")}, "v_scale=nan"),
    (FP8, {"v_scale": "1"}, "v_scale='1'"),
    (FP8, {"k_scale": torch.ones(3)}, "k_scale.shape=[3]"),
    (FP8, {"k_scale": torch.ones(2).double()}, "k_scale=torch.float64"),
    (RAGGED, {"out": (torch.empty(3, H, D), torch.empty(3, H))}, "out.o.shape=[3, 4, 8]"),
    (RAGGED, {"out": (torch.empty(3, H, DV).half(), torch.empty(3, H))}, "out.o.dtype="),
    (RAGGED, {"out": (torch.empty(3, H, DV), torch.empty(H, 3))}, "out.lse.shape=[4, 3]"),
    (RAGGED, {"out": (torch.empty(3, H, DV), torch.empty(3, H).half())}, "out.lse=torch.float16"),
    (RAGGED, {"out": (torch.empty(1, H, DV).expand(3, H, DV), torch.empty(3, H))}, "out.o.stride"),
    (
        RAGGED,
        {"out": (torch.empty(99).as_strided((3, H, DV), (DV, DV, 1)), torch.empty(3, H))},
        "out.o.stride()=(6, 6, 1) (allowed: strides under which no two elements share memory)",
    ),
    (
        RAGGED,
        {"out": (torch.empty(3, H, DV), torch.empty(9).as_strided((3, H), (1, 1)))},
        "out.lse.stride()=(1, 1)",
    ),
    (RAGGED, {"out": (strided(3, H, DV), torch.empty(3, H))}, "out.o.stride(-1)=2"),
    (RAGGED, {"out": torch.empty(3, H, DV)}, "out=Tensor (allowed: (o, lse), both tensors)"),
    (RAGGED, {"out": torch.empty(2, 3, H, DV)}, "out=Tensor"),
    (RAGGED, {"out": (torch.empty(3, H, DV), torch.empty(3, H), None)}, "out=tuple"),
    (RAGGED, {"out": (torch.empty(3, H, DV), None)}, "out.lse=NoneType"),
    (
        replace(RAGGED, has_mask=True),
        {"mask": torch.ones(3, 5).bool()},
        "mask.shape=[3, 5] (allowed: flat [sum of q_len * kv_len], row-major by sequence)",
    ),
    (RAGGED, {"plan": "plan"}, "plan=str"),
]


@pytest.mark.parametrize(("spec", "change", "start"), BAD, ids=[f"{b[2]}-{n}" for n, b in
                                                                enumerate(BAD)])  # fmt: skip
def test_a_bad_input_is_named_before_the_kernel_runs(spec, change, start):
    with pytest.raises(InvalidInputError, match="^" + re.escape(start)) as error:
        call(spec, **change)
    assert " (allowed: " in str(error.value)


BAD_ARGUMENTS = [
    (lambda: Recorder({"num_heads": 4}), "spec=dict"),
    (lambda: Recorder(RAGGED, device="gpu"), "device='gpu'"),
    (lambda: Recorder(RAGGED, options={"a": 1}), "options=dict (allowed: None, or Recorder.Opt"),
    (lambda: Recorder(RAGGED).plan([3]), "batch=list (allowed: a Batch)"),
    (lambda: Recorder(RAGGED).plan(BATCH, {"num_seqs": 1}), "capacity=dict (allowed: a Capacity"),
    (lambda: Recorder(RAGGED).plan(BATCH, CAPACITY).update(None), "batch=NoneType"),
    (lambda: STATE.merge(tuple(STATE)), "other=tuple (allowed: an AttentionOutput)"),
]


@pytest.mark.parametrize(
    ("make", "start"), BAD_ARGUMENTS, ids=[start for _, start in BAD_ARGUMENTS]
)
def test_an_argument_of_another_kind_is_named(make, start):
    with pytest.raises(InvalidInputError, match="^" + re.escape(start)):
        make()


def test_the_advice_for_a_strided_output_is_not_to_copy_it():
    with pytest.raises(InvalidInputError) as error:
        call(out=(strided(3, H, DV), torch.empty(3, H)))
    assert "contiguous()" not in str(error.value)


def test_good_calls_reach_the_kernel_once_with_all_extras():
    spec = replace(FP8, has_alibi=True, has_mask=True)
    scale = torch.ones(HK)
    _, backend = call(spec, alibi_slopes=slopes, mask=flat, k_scale=scale, v_scale=0.5)
    ((_, _, _, _, extras, _),) = backend.calls
    assert extras.alibi_slopes is slopes and extras.mask is flat
    assert extras.k_scale is scale and extras.v_scale == 0.5 and extras.sinks is None


def test_gradients_are_refused_only_where_they_would_be_recorded():
    q = torch.randn(3, H, D, requires_grad=True)
    with torch.no_grad():
        call(q=q)
    call(q=q.detach())
    with pytest.raises(InvalidInputError, match=r"forward only\); pass q\.detach\(\)"):
        call(q=q)


def test_values_may_be_left_out_if_keys_are_wide_enough():
    _, backend = call(v=None)
    assert backend.calls[0][2] is None
    wide = replace(RAGGED, head_dim_v=D + 1)
    with pytest.raises(InvalidInputError, match="v=None"):
        call(wide, v=None)


def test_sinks_of_a_backend_without_fused_sinks_are_merged_after_the_run():
    (o, lse), backend = call(sinks=torch.zeros(H))
    assert backend.calls[0][4].sinks is None
    assert torch.allclose(lse, torch.full_like(lse, 0.693147)) and bool((o == 0).all())


def test_no_query_and_no_key_need_no_kernel():
    backend = Recorder(RAGGED)
    empty = torch.zeros(0, HK, D), torch.zeros(0, HK, DV)
    for q_lens, kv_lens in (([0, 0], [0, 0]), ([], []), ([2, 1], [0, 0])):
        q = torch.randn(sum(q_lens), H, D)
        out = backend.run(q, *empty, backend.plan(Batch.from_lengths(q_lens, kv_lens)))
        assert out.o.shape == (len(q), H, DV) and bool((out.o == 0).all())
        assert out.lse.shape == (len(q), H) and bool(out.lse.isneginf().all())
    assert not backend.calls


def test_a_plan_serves_equal_specs_and_no_other():
    first, second = Recorder(RAGGED), Recorder(replace(RAGGED))
    plan = first.plan(Batch.from_lengths([1], [1]))
    q, k, v = torch.randn(1, H, D), torch.randn(1, HK, D), torch.randn(1, HK, DV)
    second.run(q, k, v, plan)
    assert second.calls[0][3] is plan
    with pytest.raises(InvalidInputError, match=r"plan\.spec="):
        Recorder(replace(RAGGED, softcap=1.0)).run(q, k, v, plan)
    with pytest.raises(InvalidInputError, match=r"plan\.backend=recorder"):
        TorchNativeBackend(RAGGED).run(q, k, v, plan)


def test_page_ids_are_checked_without_host_facts_only_under_the_debug_switch(monkeypatch):
    index = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    batch = Batch(
        index(0, 3), index(5), page_table=torch.tensor([[0, 4]]), total_q=3, max_seqlen_q=3,
        max_seqlen_k=5,
    )  # fmt: skip
    backend = Recorder(PAGED)
    call(PAGED, plan=backend.plan(batch))
    monkeypatch.setenv("ATTN_BACKENDS_VALIDATE", "1")
    with pytest.raises(InvalidInputError, match=r"page_table=4 \(allowed: 0\.\.3"):
        call(PAGED, plan=backend.plan(batch))


# Capacity

BOUNDS = {"num_seqs": 3, "total_q": 8, "max_seqlen_q": 4, "max_seqlen_k": 12}
CAPACITY = Capacity(**BOUNDS, max_pages=3)


@pytest.mark.parametrize("name", [*BOUNDS, "max_pages"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "3"], ids=str)
def test_a_bad_capacity_is_named(name, value):
    with pytest.raises(InvalidInputError, match=rf"capacity\.{name}="):
        Capacity(**{**BOUNDS, name: value})


def test_a_backend_without_graphs_refuses_a_capacity():
    with pytest.raises(UnsupportedCallError, match=r"capacity=given \(supported: None\)") as error:
        TorchNativeBackend(RAGGED).plan(Batch.from_lengths([1], [1]), CAPACITY)
    assert error.value.backend == "torch_native" and len(error.value.reasons) == 1


within = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=3)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(within, min_size=1, max_size=4), st.booleans())
def test_fixed_buffers_hold_each_batch_in_turn(steps, is_paged):
    spec = PAGED if is_paged else RAGGED
    plan, addresses = None, None
    for pairs in steps:
        q, kv = [a for a, _ in pairs], [b for _, b in pairs]
        table = torch.arange(3 * len(q)).view(-1, 3) if is_paged else None
        batch = Batch.from_lengths(q, kv, page_table=table)
        if plan is None:
            plan = Recorder(spec).plan(batch, CAPACITY)
        else:
            plan.update(batch)
        held, num = plan.batch, len(q)
        assert held.seqlens_k.tolist() == kv + [0] * (3 - num)
        assert held.cu_seqlens_q.tolist()[: num + 1] == batch.cu_seqlens_q.tolist()
        assert set(held.cu_seqlens_q.tolist()[num:]) == {sum(q)}
        assert held.kv_lens is None and held.q_lens is None
        assert (held.total_q, held.max_seqlen_k) == (8, 12)
        if is_paged:
            assert torch.equal(held.page_table[:num], table.int())
        tensors = (held.cu_seqlens_q, held.seqlens_k, held.page_table, held.cu_seqlens_k)
        now = [x.data_ptr() for x in tensors if x is not None]
        assert addresses in (None, now), "a graph reads the buffers where they were"
        addresses = now


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "name"),
    [
        ([1] * 4, [1] * 4, "num_seqs=4"),
        ([4, 4, 1], [4, 4, 1], "total_q=9"),
        ([5], [5], "max_seqlen_q=5"),
        ([1], [13], "max_seqlen_k=13"),
    ],
)
def test_a_batch_beyond_the_capacity_is_refused_and_changes_nothing(q_lens, kv_lens, name):
    big = Batch.from_lengths(q_lens, kv_lens)
    with pytest.raises(InvalidInputError, match=rf"batch\.{name} "):
        Recorder(RAGGED).plan(big, CAPACITY)
    plan = Recorder(RAGGED).plan(Batch.from_lengths([2], [7]), CAPACITY)
    with pytest.raises(InvalidInputError, match=rf"batch\.{name} .*plan again"):
        plan.update(big)
    assert plan.batch.seqlens_k.tolist() == [7, 0, 0]


def test_update_needs_a_capacity_and_a_batch_of_the_same_kind():
    one = Batch.from_lengths([1], [1])
    with pytest.raises(InvalidInputError, match="capacity=None"):
        Recorder(RAGGED).plan(one).update(one)
    plan = Recorder(RAGGED).plan(one, CAPACITY)
    with pytest.raises(InvalidInputError, match="batch=paged"):
        plan.update(Batch.from_lengths([1], [1], page_table=[[0]]))


def test_a_capacity_has_pages_for_all_the_keys_it_promises():
    batch = Batch.from_lengths([1], [1], page_table=[[0]])
    tight = replace(CAPACITY, max_seqlen_k=12, max_pages=2)
    with pytest.raises(InvalidInputError, match=r"capacity.max_pages=2 \(allowed: >= 3"):
        Recorder(PAGED).plan(batch, tight)
    Recorder(RAGGED).plan(Batch.from_lengths([1], [1]), replace(tight, max_pages=0))


def test_given_mask_starts_are_refused_where_they_would_be_dropped():
    lengths = Batch.from_lengths([1], [3])
    batch = replace(lengths, mask_indptr=torch.tensor([0, 3]))
    with pytest.raises(InvalidInputError, match=r"batch\.mask_indptr=given"):
        Recorder(RAGGED).plan(batch, CAPACITY)


def test_mask_starts_are_checked_and_kept_in_64_bits():
    lengths = Batch.from_lengths([1], [3])
    kept = replace(lengths, mask_indptr=torch.tensor([0, 3], dtype=torch.int32))
    assert kept.mask_indptr.dtype == torch.int64
    with pytest.raises(InvalidInputError, match=r"mask_indptr=torch\.float32"):
        replace(lengths, mask_indptr=torch.tensor([0.0, 3.0]))
    with pytest.raises(InvalidInputError, match=r"mask_indptr.shape=\[3\]"):
        replace(lengths, mask_indptr=torch.tensor([0, 3, 4]))


@pytest.mark.parametrize("text", ["flase", "2", ""])
def test_a_debug_switch_that_is_neither_on_nor_off_is_refused(text, monkeypatch):
    monkeypatch.setenv("ATTN_BACKENDS_VALIDATE", text)
    with pytest.raises(InvalidInputError, match="ATTN_BACKENDS_VALIDATE"):
        Recorder(RAGGED).plan(Batch.from_lengths([1], [1]))


# Reasons and capabilities

words = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=9)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(words, words, words, st.none() | words)
def test_reasons_are_written_in_one_grammar(argument, got, want, fix):
    text = str(Reason(argument, got, want, fix))
    assert text == f"{argument}={got} (supported: {want})" + (f"; {fix}" if fix else "")


def test_a_plan_refuses_a_batch_on_a_device_that_the_backend_does_not_serve():
    class Elsewhere(Recorder):
        name = "elsewhere"
        capabilities = replace(Recorder.capabilities, devices=("cuda",))

    with pytest.raises(UnsupportedCallError, match=r"batch\.device=cpu \(supported: cuda\)"):
        Elsewhere(RAGGED).plan(Batch.from_lengths([2], [2]))


def test_a_refusal_carries_every_reason_in_order():
    spec = AttentionSpec(
        4, 2, 96, 1, dtype=torch.float64, page_size=3, window=(1, 0), softcap=1.0, has_mask=True
    )

    class Narrow(Recorder):
        name = "narrow"
        capabilities = Capabilities(
            devices=("cuda",),
            dtypes=(torch.float16,),
            head_dims=IntSet((64, 128)),
            page_sizes=IntSet(multiple_of=256),
            group_sizes=IntSet((1,)),
            features=frozenset({"paged"}),
        )

    reasons = Narrow.unsupported_reasons(spec, "prefill", torch.device("cpu"))
    assert list(map(str, reasons)) == [
        "device=cpu (supported: cuda)",
        "dtype=float64 (supported: float16)",
        "head_dim=96 (supported: 64, 128)",
        "head_dim_v=1 (supported: head_dim=96)",
        "page_size=3 (supported: multiples of 256)",
        "num_heads/num_kv_heads=2 (supported: 1)",
        "causal=True (supported: False)",
        "window=(1, 0) (supported: None)",
        "softcap=1.0 (supported: None)",
        "has_mask=True (supported: False)",
    ]
    with pytest.raises(UnsupportedCallError) as error:
        Narrow(spec, device="cpu")
    assert error.value.reasons == tuple(reasons) and error.value.backend == "narrow"
    assert isinstance(error.value, AttnBackendsError)
    assert all(str(r) in str(error.value) for r in reasons)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(1, 40), st.none() | st.integers(1, 40), st.integers(1, 6), st.integers(-3, 50))
def test_int_sets_hold_what_they_say(low, high, step, value):
    members = IntSet(low=low, high=high, multiple_of=step)
    inside = value >= low and (high is None or value <= high) and value % step == 0
    assert (value in members) == inside
    assert "1" not in members and 2.5 not in IntSet()


def test_unknown_features_cannot_be_declared():
    with pytest.raises(ValueError, match="sofcap"):
        Capabilities(devices=("cpu",), dtypes=(), features=frozenset({"sofcap"}))


@pytest.mark.gpu
def test_tensors_of_two_devices_are_named():
    spec = replace(RAGGED, dtype=torch.float16)
    backend = TorchNativeBackend(spec)
    plan = backend.plan(Batch.from_lengths([1], [1], device="cuda"))
    q, k, v = torch.randn(1, H, D), torch.randn(1, HK, D), torch.randn(1, HK, DV)
    with pytest.raises(InvalidInputError, match=r"k\.device=cpu \(allowed: cuda:0"):
        backend.run(q.half().cuda(), k.half(), v.half().cuda(), plan)
