"""Chunks, latents and sharded decode on a GPU, against the reference in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import attn_backends as ab
from attn_backends.distributed import Interleaved, shard_batch
from attn_backends.torch_native.backend import TorchNativeBackend

pytestmark = pytest.mark.gpu


def random(*shape: int, seed: int) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").bfloat16()


def near(got: ab.AttentionOutput, want: ab.AttentionOutput) -> None:
    """Within a few roundings of bfloat16, row by row at the row's own size."""
    empty = torch.isinf(want.lse)
    assert torch.equal(torch.isinf(got.lse), empty) and not got.o[empty].any()
    size = want.o.float().abs().amax(-1).clamp_min(0.02)
    error = (got.o.float() - want.o.float()).abs().amax(-1)
    assert bool((error <= 4 * torch.finfo(torch.bfloat16).eps * size).all()), float(error.max())
    assert float(torch.where(empty, 0.0, got.lse - want.lse).abs().max()) < 2e-3


@pytest.mark.parametrize("gather", [None, True])
@pytest.mark.parametrize("chunk_size", [1000, 2048, 100_000])
def test_chunks_of_the_triton_backend_equal_the_reference(chunk_size: int, gather) -> None:
    spec = ab.AttentionSpec(32, 8, 128, page_size=16)
    q_lens, kv_lens = [700, 1, 300, 0, 64], [7000, 2500, 300, 40, 0]
    table = torch.randperm(5 * 438).view(5, 438)
    batch = ab.Batch.from_lengths(q_lens, kv_lens, page_table=table, device="cuda")
    q = random(sum(q_lens), 32, 128, seed=1)
    caches = [random(5 * 438, 16, 8, 128, seed=s) for s in (2, 3)]
    reference = TorchNativeBackend(spec)
    want = reference.run(q, *caches, reference.plan(batch))
    plan = ab.plan_chunked(spec, batch, chunk_size=chunk_size, backend="triton", gather=gather)
    near(plan.run(q, *caches), want)


@pytest.mark.parametrize("heads", [16, 128])
def test_latents_of_a_deepseek_layer_in_both_forms(heads: int) -> None:
    g = torch.Generator(device="cuda").manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=g, device="cuda") / 512**0.5  # noqa: E731
    mla = ab.MLAProjection(
        make(heads, 128, 512).bfloat16(), make(heads, 512, 128).bfloat16(), rope_dim=64
    )
    q_lens, kv_lens = [5, 1, 40], [3000, 900, 40]
    table = torch.randperm(3 * 47).view(3, 47)
    batch = ab.Batch.from_lengths(q_lens, kv_lens, page_table=table, device="cuda")
    q, cache = random(46, heads, 192, seed=1), random(3 * 47, 64, 1, 576, seed=2)
    exact = ab.MLAProjection(mla.w_uk.float(), mla.w_uv.float(), rope_dim=64)
    spec = exact.absorbed_spec(page_size=64)
    reference = TorchNativeBackend(spec)
    latent = reference.run(exact.absorb(q.float()), cache.float(), None, reference.plan(batch))
    want = exact.project(latent)

    absorbed = ab.select(mla.absorbed_spec(page_size=64), device="cuda", backend="triton").backend
    one = mla.project(absorbed.run(mla.absorb(q), cache, None, absorbed.plan(batch)))
    expanded = mla.expanded_spec(page_size=64)
    plan = ab.plan_chunked(expanded, batch, chunk_size=1024, backend="triton", gather=True)
    two = plan.run(q, cache, None, expand=mla.expand)
    scale = float(want.o.abs().max())
    for got in (one, two):
        # Projections round on the way as well, over sums of 512.
        assert float((got.o.float() - want.o).abs().max()) <= 8 * 2**-8 * scale
        assert float((got.lse - want.lse).abs().max()) < 5e-2


def test_sharded_decode_replays_a_graph_with_other_lengths() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cuda", (1,))
        spec = ab.AttentionSpec(32, 8, 128, page_size=16)
        table = torch.randperm(4 * 64).view(4, 64)
        caches = [random(4 * 64, 16, 8, 128, seed=s) for s in (2, 3)]
        q = random(4, 32, 128, seed=1)

        def batch(kv_lens: list[int]) -> ab.Batch:
            return shard_batch(
                [1] * 4, kv_lens, Interleaved(16), 0, 1, page_table=table, device="cuda"
            )

        capacity = ab.Capacity(4, 4, 1, 1024, max_pages=64)
        first, second = [1024, 1, 0, 77], [3, 1000, 640, 0]
        plan = ab.plan_sharded_decode(spec, batch(first), mesh, backend="triton", capacity=capacity)
        plan.run(q, *caches)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = plan.run(q, *caches)
        reference = TorchNativeBackend(replace(spec, causal=False))
        for kv_lens in (first, second):
            plan.update(batch(kv_lens))
            graph.replay()
            torch.cuda.synchronize()
            near(got, reference.run(q, *caches, reference.plan(batch(kv_lens))))
    finally:
        dist.destroy_process_group()
