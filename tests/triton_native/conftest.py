"""Shared helpers: random paged or ragged problems, and the float64 definition as the answer."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attn_backends as ab
from attn_backends.batch import Batch
from attn_backends.spec import AttentionSpec
from attn_backends.torch_native.backend import TorchNativeBackend, TorchNativeOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Problem:
    """Inputs of one call, in the layout that the spec asks for, with poison in every unused slot.

    Ragged keys get room beyond their length; pages are shuffled, and pages of no sequence exist.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        q_lens: list[int],
        kv_lens: list[int],
        *,
        seed: int = 0,
        poison: float = float("nan"),
        share_kv: bool = False,
        fp8_scales: Any = (None, None),
        device: str = DEVICE,
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.spec, self.q_lens, self.kv_lens = spec, q_lens, kv_lens
        self.device = device
        randn = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
        self.q = randn(sum(q_lens), spec.num_heads, spec.head_dim).to(spec.dtype)
        size = spec.page_size
        heads = spec.num_kv_heads
        if size is None:
            starts = [0, *itertools.accumulate(n + 3 for n in kv_lens)]
            self.page_table = None
            rows = starts[-1] + 1
            place = [torch.arange(n) + starts[b] for b, n in enumerate(kv_lens)]
            shape: tuple[int, ...] = (rows,)
        else:
            width = max([-(-n // size) for n in kv_lens], default=0) + 1
            pages = torch.randperm(len(kv_lens) * width + 3, generator=gen)
            self.page_table = pages[: len(kv_lens) * width].view(-1, width).int()
            starts = None
            place = [
                self.page_table[b, torch.arange(n) // size].long() * size + torch.arange(n) % size
                for b, n in enumerate(kv_lens)
            ]
            for b, n in enumerate(kv_lens):
                self.page_table[b, -(-n // size) :] = 2**31 - 1
            shape = (pages.numel(), size)
        used = torch.cat(place) if place else torch.zeros(0, dtype=torch.long)

        def cache(width: int) -> torch.Tensor:
            flat = torch.full((int(torch.tensor(shape).prod()), heads, width), poison)
            flat[used] = randn(len(used), heads, width)
            if spec.kv.itemsize == 1 and poison != poison:
                return flat.nan_to_num(nan=448.0).to(spec.kv).view(*shape, heads, width)
            return flat.to(spec.kv).view(*shape, heads, width)

        self.k = cache(spec.head_dim)
        self.v = None if share_kv else cache(spec.dv)
        self.batch = Batch.from_lengths(
            q_lens, kv_lens, page_table=self.page_table, cu_seqlens_k=starts, device=device
        )
        self.extras: dict[str, Any] = {}
        if spec.has_alibi:
            slopes = torch.rand(spec.num_heads, generator=gen)
            self.extras["alibi_slopes"] = slopes.to(device)
        if spec.has_mask:
            total = sum(q * kv for q, kv in zip(q_lens, kv_lens))
            mask = torch.rand(total, generator=gen) < 0.6
            self.extras["mask"] = mask.to(device)
        for name, scale in zip(("k_scale", "v_scale"), fp8_scales):
            if scale is not None:
                on = scale.to(device) if isinstance(scale, torch.Tensor) else scale
                self.extras[name] = on
        self.q, self.k = self.q.to(device), self.k.to(device)
        self.v = None if self.v is None else self.v.to(device)

    def with_sinks(self, seed: int = 1) -> Problem:
        """Add sink logits."""
        gen = torch.Generator().manual_seed(seed)
        sinks = torch.randn(self.spec.num_heads, generator=gen)
        self.extras["sinks"] = sinks.to(self.device)
        return self

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The definition in float64, of the stored numbers."""
        spec = dataclasses.replace(
            self.spec, dtype=torch.float64, kv_dtype=None, batch_invariant=False
        )
        backend = TorchNativeBackend(spec, options=TorchNativeOptions(implementation="naive"))
        extras = dict(self.extras)

        def real(x: torch.Tensor, scale: Any) -> torch.Tensor:
            x = x.double()
            if isinstance(scale, torch.Tensor):
                return x * (scale.double()[:, None] if scale.numel() > 1 else scale.double())
            return x if scale is None else x * scale

        k_scale, v_scale = extras.pop("k_scale", None), extras.pop("v_scale", None)
        k = real(self.k, k_scale)
        v = real(self.k[..., : self.spec.dv] if self.v is None else self.v, v_scale)
        out = backend.run(self.q.double(), k, v, backend.plan(self.batch), **extras)
        return out.o, out.lse

    def check(self, out: ab.AttentionOutput, factor: float = 4.0) -> None:
        """Assert o and lse; tolerances follow from the rounding of inputs to the products."""
        o, lse = self.expected()
        dtype = out.o.dtype
        seen = torch.isfinite(lse)
        assert torch.equal(out.lse == float("-inf"), lse == float("-inf"))
        scale = max(float(o.abs().max()), 1e-3) if o.numel() else 1.0
        half = torch.float16 if self.spec.dtype.itemsize == 1 else dtype
        tol = factor * EPS[half] * scale + (2e-6 if dtype == torch.float32 else 0)
        error = (out.o.double() - o).abs().max() if o.numel() else 0.0
        assert error <= tol, f"o: {float(error)} > {tol}"
        worst = (out.lse.double() - lse.double())[seen].abs().max() if seen.any() else 0.0
        limit = 2e-5 if half == torch.float32 else 2e-3
        assert worst <= limit * max(1.0, float(lse[seen].abs().max()) if seen.any() else 1.0)
        if "sinks" not in self.extras:
            assert (out.o[~seen] == 0).all()


def problem(*args: Any, **kwargs: Any) -> Problem:
    """Build a ``Problem``; spec fields may be given in a dict as the first argument."""
    return Problem(*args, **kwargs)


@pytest.fixture
def lab() -> SimpleNamespace:
    """What the tests of this folder share."""
    from attn_backends.triton_native.backend import TritonBackend, TritonOptions

    def run(p: Problem, **options: Any) -> ab.AttentionOutput:
        backend = TritonBackend(p.spec, device=p.device, options=TritonOptions(**options))
        return backend.run(p.q, p.k, p.v, backend.plan(p.batch), **p.extras)

    return SimpleNamespace(
        Problem=Problem, run=run, device=DEVICE, Backend=TritonBackend, Options=TritonOptions
    )
