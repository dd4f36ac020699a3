"""The Triton merge and KV write hold up in the suite, in the interpreter or on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_backends.batch import Batch
from attn_backends.conformance import run_conformance
from attn_backends.kv_cache import write_kv
from attn_backends.merge import default_path, merge_state
from attn_backends.spec import AttentionSpec
from attn_backends.torch_native.backend import TorchNativeBackend

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class WithoutBfloat16(TorchNativeBackend):
    """The reference in the dtypes that Triton's interpreter gets right."""

    name = "without_bfloat16"
    capabilities = dataclasses.replace(
        TorchNativeBackend.capabilities, dtypes=(torch.float16, torch.float32)
    )


def test_states_merged_by_triton_pass_every_rule_of_merging() -> None:
    token = default_path.set("triton")
    try:
        report = run_conformance(
            WithoutBfloat16, "smoke", device=DEVICE, requirements=("core", "split", "self_merge")
        )
    finally:
        default_path.reset(token)
    assert report.ok, report.summary()
    counts = [report.counts(r)["passed"] for r in ("split", "self_merge")]
    assert all(counts), counts


def test_the_path_of_merges_is_really_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends.merge import triton_merge

    o, lse = torch.zeros(3, 2, 16, device=DEVICE), torch.zeros(3, 2, device=DEVICE)
    calls = []
    real = triton_merge.prepare_pair
    monkeypatch.setattr(
        triton_merge, "prepare_pair", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    merge_state(o[:, :, :8], lse, o[:, :, 8:], lse, path="triton")
    assert calls


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_cache_written_by_triton_answers_as_ragged_keys_do(
    page_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(page_size)
    q_lens, kv_lens = [2, 0, 1], [13, 4, 7]
    randn = lambda *shape: torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)  # noqa: E731
    q, k, v = randn(sum(q_lens), 4, 16), randn(sum(kv_lens), 2, 16), randn(sum(kv_lens), 2, 24)
    widths = [-(-n // page_size) for n in kv_lens]
    pages = torch.randperm(sum(widths) + 2, generator=generator)
    table = torch.full((3, max(widths)), -1)
    slots, used = [], 0
    for b, (n, width) in enumerate(zip(kv_lens, widths)):
        table[b, :width] = pages[used : used + width]
        used += width
        at = torch.arange(n)
        slots.append(table[b, at // page_size] * page_size + at % page_size)
    shape = (len(pages), page_size, 2)
    k_cache = torch.full((*shape, 16), float("nan"), dtype=dtype, device=DEVICE)
    v_cache = torch.full((*shape, 24), float("nan"), dtype=dtype, device=DEVICE)
    write_kv(k, v, k_cache, v_cache, torch.cat(slots).to(DEVICE), path="triton")

    spec = AttentionSpec(4, 2, 16, head_dim_v=24, dtype=dtype)
    ragged = TorchNativeBackend(spec)
    want = ragged.run(q, k, v, ragged.plan(Batch.from_lengths(q_lens, kv_lens, device=DEVICE)))
    paged = TorchNativeBackend(dataclasses.replace(spec, page_size=page_size))
    batch = Batch.from_lengths(q_lens, kv_lens, page_table=table, device=DEVICE)
    got = paged.run(q, k_cache, v_cache, paged.plan(batch))
    assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)
