"""Inputs of a measured point of the Hopper prefill, and the kernel as a call on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .graph_timer import COLD_BYTES
from .hopper_points import Point


def starts_of(lengths: list[int]) -> torch.Tensor:
    """Cumulative lengths, int32, on the GPU."""
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


class PointInputs:
    """Random inputs of a point, in as many copies as keep L2 cold, and the host facts of it."""

    def __init__(self, point: Point, copies: int | None = None) -> None:
        torch.manual_seed(0)
        self.point = point
        self.q_lens, self.kv_lens = point.lengths()
        heads, kv_heads = point.heads
        dim, dv, dtype = point.head_dim, point.dv, torch.bfloat16
        tokens, keys = sum(self.q_lens), sum(self.kv_lens)
        size = point.page_size
        self.table = None
        shape: tuple[int, ...] = (keys,)
        if size is not None:
            width = max(-(-n // size) for n in self.kv_lens)
            pages = point.batch * width
            self.table = torch.randperm(pages, device="cuda").int().view(point.batch, width)
            shape = (pages, size)
        one = 2 * (tokens * heads * dim + keys * kv_heads * (dim + dv))
        self.copies = copies or max(1, -(-COLD_BYTES // one))

        def rand(*dims: int) -> list[torch.Tensor]:
            return [torch.randn(dims, device="cuda", dtype=dtype) for _ in range(self.copies)]

        self.q = rand(tokens, heads, dim)
        self.k = rand(*shape, kv_heads, dim)
        self.v = rand(*shape, kv_heads, dv)
        self.starts_q = starts_of(self.q_lens)
        self.starts_k = starts_of(self.kv_lens)
        self.lens_k = torch.tensor(self.kv_lens, dtype=torch.int32, device="cuda")
        self.o = torch.empty(tokens, heads, dv, device="cuda", dtype=dtype)
        self.lse = torch.empty(tokens, heads, device="cuda")
        self.scale = dim**-0.5

    @property
    def flops(self) -> int:
        """Operations over the visible pairs, counted exactly."""
        pairs = 0
        for q, kv in zip(self.q_lens, self.kv_lens):
            pairs += q * kv - (q * (q - 1) // 2 if self.point.causal else 0)
        return 2 * pairs * self.point.heads[0] * (self.point.head_dim + self.point.dv)

    def call(self, variant: Any, listed: bool = True) -> Callable[[int], None]:
        """The Hopper kernel on copy i; with ``listed`` the work list is made beforehand."""
        from ..triton_native.hopper_prefill import hopper_prefill, hopper_work

        paged = self.table is not None
        common = {
            "cu_seqlens_q": self.starts_q, "seqlens_k": self.lens_k,
            "cu_seqlens_k": None if paged else self.starts_k, "causal": self.point.causal,
        }  # fmt: skip
        work = hopper_work(variant, total_q=len(self.o), **common) if listed else None

        def run(i: int) -> None:
            hopper_prefill(
                self.q[i], self.k[i], self.v[i], page_table=self.table,
                max_seqlen_q=max(self.q_lens), scale=self.scale, o=self.o, lse=self.lse,
                variant=variant, work=work, **common,
            )  # fmt: skip

        return run

    def plain(self) -> Callable[[int], Any]:
        """The plain Triton kernel through the backend: the oracle of every variant."""
        from ..batch import Batch
        from ..spec import AttentionSpec
        from ..triton_native.backend import TritonBackend, TritonOptions

        point = self.point
        spec = AttentionSpec(
            *point.heads, point.head_dim, head_dim_v=point.dv, dtype=torch.bfloat16,
            page_size=point.page_size, causal=point.causal, sm_scale=self.scale,
        )  # fmt: skip
        backend = TritonBackend(spec, options=TritonOptions(hopper=False))
        batch = Batch.from_lengths(
            self.q_lens, self.kv_lens, page_table=self.table, device=self.o.device
        )
        plan = backend.plan(batch)
        return lambda i: backend.run(self.q[i], self.k[i], self.v[i], plan)


__all__ = ["PointInputs", "starts_of"]
