"""The kernels behind PyTorch's ``scaled_dot_product_attention``, called for their LSE.

- ``flash`` on CPU anchors causality at the top left, gives a row without keys an LSE of 0, and ends
  the process where there are no keys at all. Causality goes in as a mask wherever corners differ,
  and rows without keys never go in.
- ``efficient`` pads its LSE to a multiple of 32; ``cudnn`` adds a dimension of one from 2.9.
- ``flash`` and ``cudnn`` on CUDA take no mask here. Where they are asked for by name, and causality
  is not square, the keys that every query sees are attended to first, and both parts merged.
- All three want batches of equal lengths: sequences are grouped by their lengths.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ..backend import BackendOptions, RunExtras
from ..batch import Batch
from ..capabilities import Capabilities, IntSet
from ..capacity import Capacity
from ..errors import Reason
from ..merge import merge_state
from ..output import AttentionOutput
from ..plan import Plan
from ..spec import AttentionSpec
from .adapter import AdapterBackend
from .arrange import arrange, no_keys, restore, take_rows, with_host_lengths
from .flash_build import kernel_query, kernel_scale, round_up
from .padded import Padded, kept_keys, mask_starts
from .tensors import widen

#: The operators, which are private, by kernel.
OPERATORS = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
}


class TorchSdpaOptions(BackendOptions):
    """Options of ``torch_sdpa``."""

    kernel: Literal["auto", "flash", "efficient", "cudnn"] = "auto"
    """``auto`` takes ``flash`` where it can do the call, else ``efficient``; the CPU has ``flash``
    alone."""


class Group(NamedTuple):
    """Sequences of equal lengths.

    Attributes:
        padded: Where they lie; nothing is padded, since their lengths are equal.
        starts: ``[n]`` where each one's part of the mask starts, or None.
        bounds: ``[q_len, kv_len]`` bool that causality and window leave, or None if they hide
            nothing.
        causal: ``is_causal`` of the kernel says what ``bounds`` would.
        bias: What is added to scores, if ``bounds`` alone decides.
        early: Keys in front that every query sees, and that are attended to by themselves: what is
            left is square, where a kernel without a bias can be causal.
    """

    padded: Padded
    starts: torch.Tensor | None
    bounds: torch.Tensor | None
    causal: bool
    bias: torch.Tensor | None = None
    early: int = 0


class TorchSdpaPlan(Plan):
    """A batch in groups of equal lengths."""

    backend: TorchSdpaBackend

    def __init__(self, backend: TorchSdpaBackend, batch: Batch) -> None:
        super().__init__(backend, batch)
        self.work = arrange(with_host_lengths(batch), self.spec)
        inner = self.work.batch
        assert inner.q_lens is not None and inner.kv_lens is not None
        members: dict[tuple[int, int], list[int]] = {}
        left = self.spec.bounds[0]
        for b, (q_len, kv_len) in enumerate(zip(inner.q_lens, inner.kv_lens)):
            members.setdefault((q_len, kept_keys(q_len, kv_len, left)), []).append(b)
        self.groups = [self._group(inner, seqs, *lengths) for lengths, seqs in members.items()]

    def _group(self, batch: Batch, seqs: list[int], q_len: int, kv_len: int) -> Group:
        spec = self.spec
        padded = Padded(batch, seqs, spec.page_size, spec.bounds[0], dense=self.work.dense)
        starts = mask_starts(batch, seqs) if spec.has_mask else None
        left, right = spec.bounds
        diagonal = kv_len - q_len
        hides_left = left is not None and kv_len - 1 - left > 0
        hides_right = right is not None and diagonal + right < kv_len - 1
        if not hides_left and not hides_right:
            return Group(padded, starts, None, False)
        plain = spec.causal and left is None and not spec.has_alibi and not spec.has_mask
        if plain and (q_len == kv_len or _without_bias(self.backend.options, batch.device)):
            return Group(padded, starts, None, True, early=kv_len - q_len)
        i = torch.arange(q_len, device=batch.device)[:, None] + diagonal
        j = torch.arange(kv_len, device=batch.device)[None, :]
        bounds = torch.ones(q_len, kv_len, dtype=torch.bool, device=batch.device)
        if left is not None:
            bounds &= j >= i - left
        if right is not None:
            bounds &= j <= i + right
        bias = None
        if not spec.has_mask and not spec.has_alibi:
            bias = _bias(spec, padded, bounds, None)
        return Group(padded, starts, bounds, False, bias)


class TorchSdpaBackend(AdapterBackend):
    """The flash, memory-efficient and cuDNN kernels of PyTorch, and its flash kernel for CPUs.

    Keys are gathered by groups of equal lengths, so a paged cache is copied. Lengths are needed on
    the host: a batch without them costs a copy per plan.
    """

    name = "torch_sdpa"
    Options = TorchSdpaOptions
    packages = ("torch",)
    variants = ({}, {"kernel": "flash"}, {"kernel": "efficient"}, {"kernel": "cudnn"})
    options: TorchSdpaOptions
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        head_dims=IntSet(low=1, high=256),
        head_dims_v=IntSet(low=1, high=256),
        min_compute_capability=(8, 0),
        features=frozenset(
            ("ragged", "paged", "causal", "bidirectional", "window", "alibi", "mask")
        ),
        host_lengths=True,
    )

    @classmethod
    def dependency_reasons(cls, options: BackendOptions | None = None) -> list[Reason]:
        """A PyTorch without one of the operators, which are private."""
        missing = [name for name in OPERATORS.values() if not hasattr(torch.ops.aten, name)]
        return [Reason("torch", torch.__version__, f"a version with aten::{n}") for n in missing]

    @classmethod
    def extra_reasons(
        cls,
        spec: AttentionSpec,
        phase: str | None,
        device: torch.device | None,
        options: BackendOptions | None,
    ) -> list[Reason]:
        """What the kernel that was asked for lacks."""
        kernel = options.kernel if isinstance(options, TorchSdpaOptions) else "auto"
        reasons = []
        if device is not None and device.type == "cpu" and kernel in ("efficient", "cudnn"):
            reasons.append(Reason("kernel", kernel, "auto, flash on CPUs"))
        if _without_bias(options, device):
            if spec.dtype == torch.float32:
                reasons.append(Reason("dtype", "float32", f"float16, bfloat16 with {kernel}"))
            for name, wanted in (
                ("window", spec.window is not None),
                ("has_alibi", spec.has_alibi),
                ("has_mask", spec.has_mask),
            ):
                if wanted:
                    fix = "kernel='efficient' takes a bias"
                    reasons.append(Reason(name, str(getattr(spec, name)), "none", fix))
        return reasons

    def _plan(self, batch: Batch, capacity: Capacity | None) -> TorchSdpaPlan:
        return TorchSdpaPlan(self, batch)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        assert isinstance(plan, TorchSdpaPlan)
        spec, work = self.spec, plan.work
        if not plan.groups:
            return no_keys(q, spec, out)
        v = k[..., : spec.dv] if v is None else v
        rows = take_rows(q, work)
        with torch.no_grad():
            if plan.groups[0].padded.whole:
                o, lse = attend(self, plan.groups[0], rows, k, v, extras)
                return restore(o, lse, work, q.shape[0], out)
            o = torch.empty(*rows.shape[:2], spec.dv, dtype=q.dtype, device=q.device)
            lse = torch.empty(rows.shape[:2], dtype=torch.float32, device=q.device)
            for group in plan.groups:
                part_o, part_lse = attend(self, group, rows, k, v, extras)
                o.index_copy_(0, group.padded.targets, part_o)
                lse.index_copy_(0, group.padded.targets, part_lse)
        return restore(o, lse, work, q.shape[0], out)


def attend(
    backend: TorchSdpaBackend,
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: RunExtras,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(o [rows, H, DV], lse [rows, H])`` of one group."""
    spec, padded = backend.spec, group.padded
    query, key, value = padded.queries(q), padded.keys(k), padded.keys(v)
    visible = group.bounds
    if extras.mask is not None and group.starts is not None:
        mine = padded.mask(extras.mask, group.starts)[:, None]  # [n, 1, q_len, kv_len]
        visible = mine if visible is None else mine & visible
    bias = group.bias
    if bias is None:
        bias = _bias(spec, padded, visible, extras.alibi_slopes)
    kernel = _kernel(backend.options.kernel, query, spec, bias is not None)
    narrow = kernel == "efficient" and extras.alibi_slopes is not None
    if narrow or kernel == "cpu":
        # ``efficient`` takes a bias in the query dtype, and half types cannot tell far keys apart;
        # the kernel for CPUs sums half-precision probabilities in half precision.
        query, key, value = query.float(), key.float(), value.float()
    query, scale = kernel_query(query, spec), kernel_scale(spec)
    if group.early:
        n = group.early
        before = _call(kernel, query, key[:, :, :n], value[:, :, :n], None, False, scale)
        after = _call(kernel, query, key[:, :, n:], value[:, :, n:], None, True, scale)
        return merge_state(*(padded.rows(x) for x in (*before, *after)))
    o, lse = _call(kernel, query, key, value, bias, group.causal, scale)
    o = o.to(q.dtype)
    if extras.mask is not None and visible is not None:
        empty = ~visible.any(dim=-1)  # [n, 1, q_len]
        o = o.masked_fill(empty[..., None], 0)
        lse = lse.masked_fill(empty, float("-inf"))
    return padded.rows(o), padded.rows(lse)


def _without_bias(options: BackendOptions | None, device: torch.device | None) -> bool:
    """Whether the kernel that was asked for can hide nothing but what lies above a diagonal."""
    asked = options.kernel if isinstance(options, TorchSdpaOptions) else "auto"
    return asked in ("flash", "cudnn") and not (device is not None and device.type == "cpu")


def _kernel(asked: str, query: torch.Tensor, spec: AttentionSpec, biased: bool) -> str:
    if query.device.type == "cpu":
        return "cpu"
    if asked != "auto":
        return asked
    half = query.dtype in (torch.float16, torch.bfloat16)
    return "flash" if half and not biased and spec.dv == spec.head_dim else "efficient"


def _bias(
    spec: AttentionSpec,
    padded: Padded,
    visible: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor | None:
    """What is added to the scores, broadcast to ``[n, H, q_len, kv_len]``, or None."""
    if visible is None and slopes is None:
        return None
    device = padded.q_lens.device
    bias = torch.zeros(1, 1, padded.max_q, padded.max_k, device=device)
    if slopes is not None:
        i = torch.arange(padded.max_q, device=device)[:, None] + (padded.max_k - padded.max_q)
        j = torch.arange(padded.max_k, device=device)[None, :]
        bias = -slopes[:, None, None] * (i - j).abs()  # [H, q_len, kv_len]
        bias = bias[None]
    if visible is not None:
        bias = bias.masked_fill(~visible, float("-inf"))
    return bias


def _call(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel on ``[n, H, L, D]``, natural LSE ``[n, H, L]``."""
    op = getattr(torch.ops.aten, OPERATORS[kernel])
    dv = v.shape[-1]
    if kernel == "cpu":
        width = max(q.shape[-1], dv)
        q, k, v = widen(q, width), widen(k, width), widen(v, width)
        if bias is not None:
            bias = bias.to(torch.float32).expand(q.shape[0], q.shape[1], -1, -1)
        o, lse = op(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return o[..., :dv], lse
    group = q.shape[1] // k.shape[1]
    if group > 1 and kernel != "flash":  # which shares heads of keys by itself
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    width = round_up(q.shape[-1], 8)
    value_width = round_up(dv, 8) if kernel != "flash" else round_up(max(width, dv), 8)
    if kernel == "flash":
        width = value_width
    q, k, v = widen(q, width), widen(k, width), widen(v, value_width)
    rows = q.shape[2]
    if kernel == "flash":
        o, lse = op(q, k, v, 0.0, causal, False, scale=scale)[:2]
    elif kernel == "efficient":
        o, lse = op(q, k, v, _aligned_bias(bias, q, k), True, 0.0, causal, scale=scale)[:2]
    else:
        o, lse = op(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        lse = lse.squeeze(-1) if lse.dim() == 4 else lse
    return o[..., :dv], lse[..., :rows]


def _aligned_bias(
    bias: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor | None:
    """A bias in the query dtype whose rows start at multiples of 16 elements."""
    if bias is None:
        return None
    keys = k.shape[2]
    wide = widen(bias.to(q.dtype), round_up(keys, 16))
    return wide[..., :keys].expand(q.shape[0], q.shape[1], -1, -1)


__all__ = ["OPERATORS", "TorchSdpaBackend", "TorchSdpaOptions"]
