"""FlashInfer: everything planned, one wrapper per plan, base 2 turned, both releases alike."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest
import torch
from standin_flashinfer import flashinfer
from support import assert_close, make_call, reference, run

from attn_backends.adapters.flashinfer import FlashInferBackend, choose_kernel
from attn_backends.adapters.flashinfer_wrappers import POOL
from attn_backends.batch import Batch
from attn_backends.capacity import Capacity
from attn_backends.cascade import cascade_attention
from attn_backends.errors import InvalidInputError, UnsupportedCallError
from attn_backends.prefixes import split_prefixes
from attn_backends.spec import AttentionSpec

RELEASES = ("0.6.8.post1", "0.7.4")
FP8 = torch.float8_e4m3fn


def bind(spec: AttentionSpec, **options: Any) -> FlashInferBackend:
    chosen = FlashInferBackend.Options.model_validate({"workspace_mb": 1, **options})
    return FlashInferBackend(spec, device="cpu", options=chosen)


def spec(**fields: Any) -> AttentionSpec:
    base = dict(num_heads=6, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    return AttentionSpec(**{**base, **fields})


def test_without_the_package_the_install_command_is_named(install: Any) -> None:
    reasons = FlashInferBackend.unsupported_reasons(spec())
    assert str(reasons[0]).endswith("pip install flashinfer-python")


CASES = {
    "plain": {},
    "full": dict(causal=False),
    "window": dict(window=(3, None)),
    "window-full": dict(causal=False, window=(3, None)),
    "softcap": dict(softcap=2.0),
    "scale": dict(sm_scale=0.3),
    "scale-zero": dict(sm_scale=0.0),
    "group-5": dict(num_heads=5, num_kv_heads=1),
}
LENGTHS = {"mixed": ([5, 3, 0, 1], [2, 17, 4, 0]), "decode": ([1, 1, 1], [5, 0, 33])}


@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_both_releases_equal_the_reference(
    case, lengths, page_size, host, install: Any, on_cpu: None
) -> None:
    call = make_call(spec(page_size=page_size, **CASES[case]), *LENGTHS[lengths], host=host, room=1)
    want = reference(call)
    for release in RELEASES:
        install(**flashinfer(release))
        assert_close(run(bind(call.spec), call), want)
        assert_close(run(bind(call.spec, finite_cache=True), call), want)


@pytest.mark.parametrize("keys", [1, 2, 64, 3072])
def test_the_lse_is_natural(keys: int, install: Any, on_cpu: None) -> None:
    """With queries of zero every score is 0, so the LSE is the logarithm of the count."""  # F09
    install(**flashinfer())
    call = make_call(spec(page_size=16), [1], [keys])
    call.q.zero_()
    assert float(run(bind(call.spec), call).lse[0, 0]) == pytest.approx(math.log(keys), abs=1e-6)


def test_plans_that_live_side_by_side_do_not_share_a_wrapper(install: Any, on_cpu: None) -> None:
    module = flashinfer()
    install(**module)
    backend = bind(spec(page_size=16))
    calls = [make_call(backend.spec, [1, 2], [5, 9], seed=s) for s in range(3)]
    longer = make_call(backend.spec, [4], [50])
    plans = [backend.plan(call.batch) for call in (*calls, longer)]
    for call, plan in zip((*calls, longer), plans):
        assert_close(run(backend, call, plan), reference(call))
    assert len(module["flashinfer"].made) == 4
    del plan, plans
    gc.collect()
    again = [backend.plan(call.batch) for call in calls]
    assert len(module["flashinfer"].made) == 4  # idle wrappers serve again
    for call, one in zip(calls, again):
        assert_close(run(backend, call, one), reference(call))


def test_a_thread_takes_no_wrapper_and_no_workspace_of_another(install: Any, on_cpu: None) -> None:
    module = flashinfer()
    install(**module)
    backend = bind(spec(page_size=16))
    call = make_call(backend.spec, [1, 2], [5, 9])
    run(backend, call)  # its wrapper is idle from here on
    gc.collect()
    workspaces = set()

    def plan() -> None:
        backend.plan(call.batch)
        workspaces.add(POOL.workspace(torch.device("cpu"), 1).data_ptr())

    plan()
    thread = threading.Thread(target=plan)
    thread.start()
    thread.join()
    assert len(module["flashinfer"].made) == 2 and len(workspaces) == 2


@pytest.mark.parametrize("release", RELEASES)
def test_a_cascade_is_merged_by_this_library(release: str, install: Any, on_cpu: None) -> None:
    """Shared pages once, own pages apart: with the LSE in base 2 the merge would be off."""
    install(**flashinfer(release))
    fields = spec(page_size=16)
    table = [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    batch = Batch.from_lengths([1, 2, 1], [40, 47, 33], page_table=table)
    call = make_call(fields, [1, 2, 1], [40, 47, 33])._replace(batch=batch)
    parts = split_prefixes(batch, 16, 2)
    assert len(parts) == 2
    got = cascade_attention(call.q, call.k, call.v, parts, backend="flashinfer")
    assert_close(got, reference(call))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("window", [None, (2, None)])
def test_a_plan_with_a_capacity_follows_its_updates(
    release, page_size, window, install: Any, on_cpu: None
) -> None:
    install(**flashinfer(release))
    fields = spec(page_size=page_size, window=window)
    backend = bind(fields)
    capacity = Capacity(num_seqs=4, total_q=8, max_seqlen_q=5, max_seqlen_k=40, max_pages=4)
    plan = backend.plan(make_call(fields, [1, 1], [5, 40]).batch, capacity)
    shapes = (([1, 1], [5, 40]), ([3, 1, 4], [9, 0, 2]), ([2, 2, 2, 2], [40, 1, 5, 7]))
    for lengths in shapes:
        for host in (True, False):
            call = make_call(fields, *lengths, host=host)
            if host:
                plan.update(call.batch)
            n = len(call.q)
            q = torch.cat([call.q, torch.full((8 - n, 6, 64), 9.0, dtype=call.q.dtype)])
            got = backend.run(q, call.k, call.v, plan)
            assert bool((got.o[n:] == 0).all()) and bool((got.lse[n:] == float("-inf")).all())
            assert_close(type(got)(got.o[:n], got.lse[:n]), reference(call))


@pytest.mark.parametrize("release", RELEASES)
def test_mla_runs_on_the_cache_as_it_is(release: str, install: Any, on_cpu: None) -> None:
    install(**flashinfer(release))
    fields = AttentionSpec(16, 1, 576, 512, page_size=16)
    call = make_call(fields, [1, 3, 1], [20, 33, 0])
    assert_close(run(bind(fields), call), reference(call))
    with pytest.raises(UnsupportedCallError, match="first 512 lanes of k"):
        run(bind(fields), call._replace(v=call.k[..., :512].clone()))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (dict(head_dim=96), "head_dim=96"),
        (dict(head_dim=192, head_dim_v=192), "head_dim_v=192"),
        (dict(head_dim=192, head_dim_v=128, page_size=16), "page_size=16"),
        (dict(causal=False, window=(1, 1)), "window="),
        (dict(kv_dtype=FP8), "kv_dtype="),
        (dict(kv_dtype=FP8, page_size=16, window=(3, None)), "kv_dtype="),
        (dict(has_alibi=True), "has_alibi=True"),
        (dict(has_mask=True), "has_mask=True"),
        (dict(batch_invariant=True), "batch_invariant=True"),
        (dict(num_heads=16, num_kv_heads=1, head_dim=576, head_dim_v=512), "page_size=None"),
    ],
)
def test_what_it_cannot_do_is_refused_with_its_limit(fields, why, install, on_cpu) -> None:
    install(**flashinfer())
    with pytest.raises(UnsupportedCallError, match=why):
        bind(spec(**fields))


@pytest.mark.parametrize("form", ["float", "scalar", "head"])
def test_fp8_scales_reach_scores_and_values(form: str, install: Any, on_cpu: None) -> None:
    install(**flashinfer())
    value = {"float": 0.5, "scalar": torch.tensor(0.5), "head": torch.tensor([0.5, 2.0])}[form]
    fields = spec(kv_dtype=FP8, page_size=16)
    call = make_call(fields, [2, 1], [9, 20], k_scale=value, v_scale=value)
    backend = bind(fields)
    if form == "head":
        with pytest.raises(UnsupportedCallError, match="k_scale=a tensor of 2"):
            run(backend, call)
        call = call._replace(kwargs={"k_scale": 0.5, "v_scale": value})
    assert_close(run(backend, call), reference(call))


def test_a_scale_that_changes_in_place_is_read_again(install: Any, on_cpu: None) -> None:
    install(**flashinfer())
    scale = torch.tensor(0.5)
    call = make_call(spec(kv_dtype=FP8, page_size=16), [1], [9], k_scale=scale)
    backend = bind(call.spec)
    plan = backend.plan(call.batch)
    assert_close(run(backend, call, plan), reference(call))
    scale.mul_(3)
    assert_close(run(backend, call, plan), reference(call))


def test_a_workspace_that_is_too_small_names_the_option(install: Any, on_cpu: None) -> None:
    modules = flashinfer()

    def small(self: Any, **_: Any) -> None:
        raise RuntimeError(
            "Buffer overflow when allocating memory for batch_prefill_tmp_v with size 9 and "
            "alignment 16, but only 4 bytes available in AlignedAllocator. Increase the workspace "
            "buffer size."
        )

    modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper.plan = small
    install(**modules)
    backend = bind(spec(page_size=16))
    with pytest.raises(InvalidInputError, match=r"workspace_mb=1 .*batch_prefill_tmp_v"):
        backend.plan(make_call(backend.spec, [1], [9]).batch)


def test_a_workspace_that_is_too_small_for_mla_is_told_by_a_class_of_its_own(
    install: Any, on_cpu: None
) -> None:
    modules = flashinfer("0.7.4")

    class PlanUnsupported(ValueError):
        pass

    def small(self: Any, **_: Any) -> None:
        raise PlanUnsupported("fa2 MLA needs 17369088 float workspace bytes for partial outputs")

    modules["flashinfer.mla"].BatchMLAPagedAttentionWrapper.plan = small
    install(**modules)
    backend = bind(AttentionSpec(16, 1, 576, 512, page_size=16))
    with pytest.raises(InvalidInputError, match=r"workspace_mb=1 .*17369088 float workspace bytes"):
        backend.plan(make_call(backend.spec, [1], [9]).batch)


def test_another_error_of_the_library_is_passed_on(install: Any, on_cpu: None) -> None:
    modules = flashinfer()

    def broken(self: Any, **_: Any) -> None:
        raise ValueError("something else")

    modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper.plan = broken
    install(**modules)
    backend = bind(spec(page_size=16))
    with pytest.raises(ValueError, match=r"^something else$"):
        backend.plan(make_call(backend.spec, [1], [9]).batch)


def test_the_kernel_is_chosen_here_and_not_by_the_library(install: Any, on_cpu: None) -> None:
    install(**flashinfer())
    cpu, auto = torch.device("cpu"), FlashInferBackend.Options()
    assert choose_kernel(spec(), auto, 4096, cpu, None) == "fa2"  # no Hopper here
    with pytest.raises(UnsupportedCallError, match="kernel=fa3"):
        bind(spec(), kernel="fa3")
    fa3 = FlashInferBackend.Options(kernel="fa3")
    wide = spec(causal=False, window=(3, None))
    reasons = FlashInferBackend.unsupported_reasons(wide, options=fa3)
    assert any(r.argument == "kernel" for r in reasons)
