"""Calls for adapter tests: a batch in any layout, and the reference's answer to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attn_backends.batch import Batch
from attn_backends.output import AttentionOutput
from attn_backends.spec import AttentionSpec
from attn_backends.torch_native.backend import TorchNativeBackend

NEG_INF = float("-inf")


class Call(NamedTuple):
    """Inputs of one run."""

    spec: AttentionSpec
    batch: Batch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    kwargs: dict[str, Any]


def make_call(
    spec: AttentionSpec,
    q_lens: list[int],
    kv_lens: list[int],
    *,
    room: int = 0,
    host: bool = True,
    seed: int = 0,
    **kwargs: Any,
) -> Call:
    """A call with ``room`` unused rows after each ragged sequence; ``host=False`` hides lengths."""
    rng = torch.Generator().manual_seed(seed)
    table = starts = None
    if spec.page_size is None:
        starts = [0]
        for kv in kv_lens:
            starts.append(starts[-1] + kv + room)
        shape: tuple[int, ...] = (starts[-1],)
    else:
        pages = [-(-kv // spec.page_size) for kv in kv_lens]
        order = torch.randperm(sum(pages) + 2, generator=rng).tolist()
        width = max(pages, default=0) + 1
        table = [[order.pop() for _ in range(n)] + [2**31 - 1] * (width - n) for n in pages]
        shape = (sum(pages) + 2, spec.page_size)

    def values(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=rng).to(dtype)

    q = values(sum(q_lens), spec.num_heads, spec.head_dim, dtype=spec.dtype)
    k = values(*shape, spec.num_kv_heads, spec.head_dim, dtype=spec.kv)
    v = None
    if (spec.head_dim, spec.dv) != (576, 512):
        v = values(*shape, spec.num_kv_heads, spec.dv, dtype=spec.kv)
    batch = Batch.from_lengths(q_lens, kv_lens, page_table=table, cu_seqlens_k=starts)
    if spec.has_alibi:
        kwargs["alibi_slopes"] = torch.rand(spec.num_heads, generator=rng)
    return Call(spec, batch if host else on_device_only(batch), q, k, v, kwargs)


def on_device_only(batch: Batch) -> Batch:
    """The batch as an engine builds it: no exact lengths, generous bounds."""
    return Batch(
        cu_seqlens_q=batch.cu_seqlens_q,
        seqlens_k=batch.seqlens_k,
        cu_seqlens_k=batch.cu_seqlens_k,
        page_table=batch.page_table,
        total_q=batch.total_q + 3,
        max_seqlen_q=batch.max_seqlen_q + 2,
        max_seqlen_k=batch.max_seqlen_k + 5,
    )


def reference(call: Call) -> AttentionOutput:
    """The reference in float64, on the same inputs."""
    options = TorchNativeBackend.Options(implementation="naive")
    backend = TorchNativeBackend(call.spec, options=options)
    return backend.run(call.q, call.k, call.v, backend.plan(call.batch), **call.kwargs)


def run(backend: Any, call: Call, plan: Any = None) -> AttentionOutput:
    """One run of a bound backend."""
    plan = backend.plan(call.batch) if plan is None else plan
    return backend.run(call.q, call.k, call.v, plan, **call.kwargs)


def assert_close(got: AttentionOutput, want: AttentionOutput) -> None:
    """Equal up to one rounding of the output dtype, and float32 sums for the LSE."""
    assert got.o.shape == want.o.shape and got.o.dtype == want.o.dtype
    assert got.lse.shape == want.lse.shape and got.lse.dtype == torch.float32
    step = torch.finfo(want.o.dtype).eps
    size = want.o.float().abs().amax().clamp_min(1.0) if want.o.numel() else 1.0
    assert bool(((got.o.float() - want.o.float()).abs() <= 2 * step * size).all())
    empty = want.lse == NEG_INF
    assert torch.equal(got.lse == NEG_INF, empty)
    assert bool((got.o[empty] == 0).all())
    error = (got.lse - want.lse)[~empty].abs()
    assert bool((error <= 1e-5 * want.lse[~empty].abs().clamp_min(1.0)).all()), error.max()
