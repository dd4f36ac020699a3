"""The kernels behind PyTorch's ``scaled_dot_product_attention``, called for their LSE.

- ``flash`` on CPU anchors causality at the top left, gives a row without keys an LSE of 0, and ends
  the process where there are no keys at all. Causality goes in as a mask wherever corners differ,
  and rows without keys never go in.
- ``efficient`` pads its LSE to a multiple of 32; ``cudnn`` adds a dimension of one from 2.9.
- ``flash`` on CUDA anchors it at the bottom right, as the contract does. PyTorch's own
  ``scaled_dot_product_attention`` refuses that; the operator does not. A ROCm build is not relied
  on for it.
- ``flash`` and ``cudnn`` on CUDA take no mask here. Where ``cudnn`` is asked for, and causality is
  not square, the keys that every query sees are attended to first, and both parts merged.
- Kernels load 16 bytes at a time: rows that start elsewhere are copied.
- All three want batches of equal lengths: sequences are grouped by their lengths.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

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
from .adapter import AdapterBackend, AdapterPlan
from .arrange import arrange, no_keys, restore, take_rows, with_host_lengths
from .flash_build import kernel_query, kernel_scale, round_up
from .padded import Padded, kept_keys, mask_starts
from .straight import Found, Kernel, straight
from .tensors import aligned, widen

#: The operators, which are private, by kernel.
OPERATORS = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
}
_WITHOUT_BIAS = ("flash", "cudnn")


class TorchSdpaOptions(BackendOptions):
    """Options of ``torch_sdpa``."""

    kernel: Literal["auto", "flash", "efficient", "cudnn"] = "auto"
    """``auto`` takes ``flash`` where it can do the call, else ``efficient``; the CPU has ``flash``
    alone."""


class Group(NamedTuple):
    """Sequences of equal lengths.

    Attributes:
        padded: Where they lie; nothing is padded, since their lengths are equal.
        kernel: What computes them.
        starts: ``[n]`` where each one's part of the mask starts, or None.
        bounds: ``[q_len, kv_len]`` bool that causality and window leave, or None if they hide
            nothing.
        causal: ``is_causal`` of the kernel says what ``bounds`` would.
        bias: What is added to scores, if ``bounds`` alone decides.
        early: Keys in front that every query sees, and that are attended to by themselves: what is
            left is square, where a kernel without a bias can be causal.
    """

    padded: Padded
    kernel: str
    starts: torch.Tensor | None
    bounds: torch.Tensor | None
    causal: bool
    bias: torch.Tensor | None = None
    early: int = 0


class TorchSdpaPlan(AdapterPlan):
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
        spec, asked = self.spec, self.backend.options.kernel
        padded = Padded(batch, seqs, spec.page_size, spec.bounds[0], dense=self.work.dense)
        starts = mask_starts(batch, seqs) if spec.has_mask else None
        left, right = spec.bounds
        diagonal = kv_len - q_len
        hides_left = left is not None and kv_len - 1 - left > 0
        hides_right = right is not None and diagonal + right < kv_len - 1
        biased = spec.has_alibi or spec.has_mask
        if not hides_left and not hides_right:
            kernel = _kernel(asked, batch.device, spec, biased)
            return Group(padded, kernel, starts, None, False)
        if spec.causal and left is None and not biased:
            kernel = _kernel(asked, batch.device, spec, False)
            if not diagonal or _ends_together(kernel):
                return Group(padded, kernel, starts, None, True)
            if kernel in _WITHOUT_BIAS:
                return Group(padded, kernel, starts, None, True, early=diagonal)
        i = torch.arange(q_len, device=batch.device)[:, None] + diagonal
        j = torch.arange(kv_len, device=batch.device)[None, :]
        bounds = torch.ones(q_len, kv_len, dtype=torch.bool, device=batch.device)
        if left is not None:
            bounds &= j >= i - left
        if right is not None:
            bounds &= j <= i + right
        bias = None if biased else _bias(spec, padded, bounds, None)
        kernel = _kernel(asked, batch.device, spec, True)
        return Group(padded, kernel, starts, bounds, False, bias)


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
        missing = [name for name in OPERATORS.values() if not hasattr(torch, name)]
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
        values = k[..., : spec.dv] if v is None else v
        rows = take_rows(q, work)
        with torch.no_grad():
            if plan.groups[0].padded.whole:
                o, lse, found = attend(spec, plan.groups[0], rows, k, values, extras)
                result = restore(o, lse, work, q.shape[0], out)
                if rows is q and v is not None and found is not None:
                    learned = straight(plan.groups[0].padded, found)
                    if learned is not None:
                        plan.learn(q, k, v, extras, out, lambda extras: learned)
                return result
            o = torch.empty(*rows.shape[:2], spec.dv, dtype=q.dtype, device=q.device)
            lse = torch.empty(rows.shape[:2], dtype=torch.float32, device=q.device)
            for group in plan.groups:
                part_o, part_lse, _ = attend(spec, group, rows, k, values, extras)
                o.index_copy_(0, group.padded.targets, part_o)
                lse.index_copy_(0, group.padded.targets, part_lse)
        return restore(o, lse, work, q.shape[0], out)


def attend(
    spec: AttentionSpec,
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: RunExtras,
) -> tuple[torch.Tensor, torch.Tensor, Found | None]:
    """``(o [rows, H, DV], lse [rows, H])`` of one group, and how the kernel gave it.

    The last is None if there was more to do than the kernel does, with these extras or with any.
    """
    padded, kernel = group.padded, group.kernel
    views = padded.queries(q), padded.keys(k), padded.keys(v)
    query, key, value = views
    visible = group.bounds
    if extras.mask is not None and group.starts is not None:
        mine = padded.mask(extras.mask, group.starts)[:, None]  # [n, 1, q_len, kv_len]
        visible = mine if visible is None else mine & visible
    bias = group.bias
    if bias is None:
        bias = _bias(spec, padded, visible, extras.alibi_slopes)
    narrow = kernel == "efficient" and extras.alibi_slopes is not None
    if narrow or kernel == "cpu":
        # ``efficient`` takes a bias in the query dtype, and half types cannot tell far keys apart;
        # the kernel for CPUs sums half-precision probabilities in half precision.
        query, key, value = query.float(), key.float(), value.float()
    width, value_width = widths(kernel, spec)
    query = aligned(widen(kernel_query(query, spec), width))
    key, value = aligned(widen(key, width)), aligned(widen(value, value_width))
    call = prepared(group._replace(bias=bias), spec, query.dtype)
    if group.early:
        n = group.early
        before = prepared(group._replace(causal=False), spec, query.dtype)
        parts = (
            *before(query, aligned(key[:, :, :n]), aligned(value[:, :, :n])),
            *call(query, aligned(key[:, :, n:]), aligned(value[:, :, n:])),
        )
        o, lse = merge_state(*(padded.rows(x) for x in parts))
        return o[..., : spec.dv], lse, None
    wide_o, lse = call(query, key, value)
    o = wide_o[..., : spec.dv].to(q.dtype)
    found = None
    as_given = all(x is view for x, view in zip((query, key, value), views))
    if as_given and extras.alibi_slopes is None:
        found = Found(call, views, o, lse)
    if extras.mask is not None and visible is not None:
        empty = ~visible.any(dim=-1)  # [n, 1, q_len]
        o = o.masked_fill(empty[..., None], 0)
        lse = lse.masked_fill(empty, float("-inf"))
        found = None
    return padded.rows(o), padded.rows(lse), found


def _without_bias(options: BackendOptions | None, device: torch.device | None) -> bool:
    """Whether the kernel that was asked for can hide nothing but what lies above a diagonal."""
    asked = options.kernel if isinstance(options, TorchSdpaOptions) else "auto"
    return asked in _WITHOUT_BIAS and not (device is not None and device.type == "cpu")


def _kernel(asked: str, device: torch.device, spec: AttentionSpec, biased: bool) -> str:
    if device.type == "cpu":
        return "cpu"
    if asked != "auto":
        return asked
    half = spec.dtype in (torch.float16, torch.bfloat16)
    return "flash" if half and not biased and spec.dv == spec.head_dim else "efficient"


def _ends_together(kernel: str) -> bool:
    """Whether a kernel's diagonal ends at the last query and key, and not begins at the first."""
    return kernel == "flash" and torch.version.hip is None


def widths(kernel: str, spec: AttentionSpec) -> tuple[int, int]:
    """The widths of keys and values that a kernel takes, for those of the spec."""
    d, dv = spec.head_dim, spec.dv
    if kernel == "cpu":
        return max(d, dv), max(d, dv)
    d, dv = round_up(d, 8), round_up(dv, 8)
    return (max(d, dv), max(d, dv)) if kernel == "flash" else (d, dv)


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


def prepared(group: Group, spec: AttentionSpec, dtype: torch.dtype) -> Kernel:
    """A kernel on ``[n, H, L, D]`` in ``dtype``; natural LSE ``[n, H, L]``."""
    kernel, causal, bias = group.kernel, group.causal, group.bias
    function, rows = operator(kernel), group.padded.max_q
    shape = (group.padded.q_lens.shape[0], spec.num_heads, -1, -1)
    named: dict[str, Any] = dict(dropout_p=0.0, is_causal=causal, scale=kernel_scale(spec))
    if kernel == "flash":  # which shares heads of keys by itself, as the kernel for CPUs does
        return Kernel(function, dict(named, return_debug_mask=False))
    if kernel == "cpu":
        mask = None if bias is None else bias.float().expand(shape)
        return Kernel(function, dict(named, attn_mask=mask))
    named["compute_log_sumexp"] = True
    if kernel == "efficient":
        bias = None if bias is None else _aligned_bias(bias.to(dtype), shape)
        named["attn_bias"] = bias
        return Kernel(function, named, spec.group_size, lambda lse: lse[..., :rows])
    return Kernel(
        function,
        dict(named, attn_bias=None, return_debug_mask=False),
        spec.group_size,
        lambda lse: lse.squeeze(-1) if lse.dim() == 4 else lse,
    )


def _aligned_bias(bias: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A bias whose rows start at multiples of 16 elements, in a shape that ends in its own."""
    keys = bias.shape[-1]
    return widen(bias, round_up(keys, 16))[..., :keys].expand(shape)


def operator(kernel: str) -> Any:
    """PyTorch's binding of a kernel, which costs less than the way through ``torch.ops``."""
    return getattr(torch, OPERATORS[kernel])


__all__ = ["OPERATORS", "TorchSdpaBackend", "TorchSdpaOptions"]
