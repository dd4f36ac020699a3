"""PyTorch's FlexAttention: every rule of the contract as a mask or a change of the score.

Scores are scaled, changed by ``score_mod`` and then masked, which is the contract's order. The LSE
is natural, float32, ``[B, H, L]``; a row without keys has ``-inf`` and a zero output.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any, Literal

import torch

from ..backend import BackendOptions, RunExtras
from ..batch import Batch
from ..capabilities import Capabilities, IntSet
from ..capacity import Capacity
from ..errors import Reason
from ..output import AttentionOutput
from ..packages import Probe, probe
from ..plan import Plan
from ..spec import FP8_DTYPES, AttentionSpec
from .adapter import AdapterBackend, AdapterPlan
from .arrange import arrange, no_keys, restore, take_rows, with_host_lengths
from .padded import Padded, mask_starts
from .straight import Found, Kernel, straight

Mod = Callable[..., torch.Tensor]

#: How many variants of a function the compiler may keep.
_VARIANTS = 1 << 16
#: Pairs of query and key above which finding the visible blocks is compiled too.
_MANY_PAIRS = 1 << 26


class TorchFlexOptions(BackendOptions):
    """Options of ``torch_flex``."""

    compile: Literal["auto", "always", "never"] = "auto"
    """Whether to compile the kernel, on the first run: ``auto`` compiles on CUDA only. Without it
    the scores of all queries and keys are held in memory."""


def probe_flex() -> Probe:
    """PyTorch's FlexAttention, with the request for an LSE that came with 2.9."""
    return probe("torch.nn.attention.flex_attention", attribute="AuxRequest", distribution="torch")


def flex_module() -> Any:
    """The loaded module."""
    module = probe_flex().module
    assert module is not None
    return module


@cache
def compiled(name: str) -> Callable[..., Any]:
    """A function of the module, compiled when it is first called.

    Each kind of score and mask is a variant of its own. When variants run out, the compiler would
    go on uncompiled, which rounds scores to the queries' dtype; so they may not run out.
    """
    function = torch.compile(getattr(flex_module(), name), dynamic=True, fullgraph=True)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(
            recompile_limit=_VARIANTS, accumulated_recompile_limit=_VARIANTS
        ):
            return function(*args, **kwargs)

    return call


def flex_attention(fast: bool, *tensors: torch.Tensor, **options: Any) -> Any:
    """The library's function of that name, compiled or as it is."""
    if fast:
        return compiled("flex_attention")(*tensors, **options)
    with nullcontext() if torch.compiler.is_compiling() else without_advice():
        return flex_module().flex_attention(*tensors, **options)


_ADVICE = "flex_attention called without torch.compile"
_advised = threading.Event()


@contextmanager
def without_advice() -> Iterator[None]:
    """Keep PyTorch, which warns once a process, from advising to compile what is not by choice."""
    if _advised.is_set():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ADVICE)
        yield
    _advised.set()


class TorchFlexPlan(AdapterPlan):
    """A batch laid out side by side."""

    def __init__(self, backend: TorchFlexBackend, batch: Batch) -> None:
        super().__init__(backend, batch)
        self.work = arrange(with_host_lengths(batch), self.spec)
        inner = self.work.batch
        members = range(inner.num_seqs)
        left, page_size = self.spec.bounds[0], self.spec.page_size
        self.padded = None
        if members:
            self.padded = Padded(inner, members, page_size, left, dense=self.work.dense)
        self.starts = mask_starts(inner, members) if self.spec.has_mask else None
        self.block_mask: Any = None


class TorchFlexBackend(AdapterBackend):
    """FlexAttention, with windows, softcap, ALiBi, masks and fp8 scales as modifications.

    Sequences are laid out side by side, so keys are copied, and a paged cache is gathered. Lengths
    are needed on the host: a batch without them costs a copy per plan.
    """

    name = "torch_flex"
    Options = TorchFlexOptions
    packages = ("torch",)
    variants = ({"compile": "never"}, {"compile": "always"})
    options: TorchFlexOptions
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
        fp8_kv_dtypes=FP8_DTYPES,
        head_dims=IntSet(),
        head_dims_v=IntSet(),
        min_compute_capability=(8, 0),
        features=frozenset(
            ("ragged", "paged", "causal", "bidirectional", "window", "softcap", "alibi", "mask")
        ),
        host_lengths=True,
    )

    @classmethod
    def dependency_reasons(cls, options: BackendOptions | None = None) -> list[Reason]:
        """A PyTorch without it."""
        reason = probe_flex().reason("pip install --upgrade torch; 2.9 or newer")
        return [] if reason is None else [reason]

    @classmethod
    def extra_reasons(
        cls,
        spec: AttentionSpec,
        phase: str | None,
        device: torch.device | None,
        options: BackendOptions | None,
    ) -> list[Reason]:
        """What the compiled kernel does not take."""
        chosen = options if isinstance(options, TorchFlexOptions) else cls.Options()
        reasons: list[Reason] = []
        if not _compiles(chosen, device):
            return reasons
        if device is not None and device.type == "cpu":
            fix = "compiled for CPUs it has no LSE"
            reasons.append(Reason("compile", "always", "auto, never on CPUs", fix))
        if spec.dtype == torch.float64:
            fix = "set compile='never'"
            reasons.append(Reason("dtype", "float64", "narrower dtypes when compiled", fix))
        return reasons

    def _plan(self, batch: Batch, capacity: Capacity | None) -> TorchFlexPlan:
        return TorchFlexPlan(self, batch)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        assert isinstance(plan, TorchFlexPlan)
        spec, padded = self.spec, plan.padded
        if padded is None:
            return no_keys(q, spec, out)
        values = k[..., : spec.dv] if v is None else v
        fast, rows = _compiles(self.options, q.device), take_rows(q, plan.work)
        tensors = (padded.queries(rows), padded.keys(k), padded.keys(values))
        visible = None
        if extras.mask is not None and plan.starts is not None:
            visible = padded.mask(extras.mask, plan.starts)
        with torch.no_grad():
            if plan.block_mask is None or visible is not None:
                plan.block_mask = _block_mask(spec, padded, visible, fast)
            arguments = self._arguments(plan, padded, extras)
            found = attend(partial(flex_attention, fast), tensors, self._width(q), arguments)
            o, lse = padded.rows(found[0]), padded.rows(found[1])
            if extras.v_scale is not None:
                o = o.float() * per_head(extras.v_scale, spec, q.device)[:, None]
            result = restore(o.to(spec.out_dtype), lse.float(), plan.work, q.shape[0], out)
        if rows is q and v is not None and all(x is None for x in extras):
            kernel = self._kernel(fast, q, arguments)
            outputs = found[0].to(spec.out_dtype), found[1].float()
            learned = straight(padded, Found(kernel, tensors, *outputs))
            if learned is not None:
                plan.learn(q, k, v, extras, out, lambda extras: learned)
        return result

    def _width(self, q: torch.Tensor) -> torch.dtype:
        """What scores are computed in."""
        width = self.spec.out_dtype
        if not _compiles(self.options, q.device) and width != torch.float64:
            return torch.float32  # uncompiled, scores are rounded to the dtype of the queries
        return width

    def _arguments(self, plan: TorchFlexPlan, padded: Padded, extras: RunExtras) -> dict[str, Any]:
        spec = self.spec
        return dict(
            score_mod=score_mod(spec, padded, extras),
            block_mask=plan.block_mask,
            scale=spec.scale,
            enable_gqa=spec.group_size > 1,
            return_aux=flex_module().AuxRequest(lse=True),
        )

    def _kernel(self, fast: bool, q: torch.Tensor, arguments: dict[str, Any]) -> Kernel:
        """The same for later layers, for which nothing is compiled any more."""
        dtype, width = self.spec.out_dtype, self._width(q)
        # Without gradients, as the first layer: a kernel is compiled for one or the other.
        if fast and self.spec.kv == width:
            function = compiled("flex_attention").__wrapped__  # type: ignore[attr-defined]

            @torch.no_grad()
            def kernel(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                o, aux = function(*tensors, **arguments)
                return o, aux.lse

        else:

            @torch.no_grad()
            def kernel(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                o, lse = attend(partial(flex_attention, fast), tensors, width, arguments)
                return o.to(dtype), lse.float()

        return Kernel(kernel)


def attend(
    function: Callable[..., Any],
    tensors: tuple[torch.Tensor, ...],
    width: torch.dtype,
    arguments: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(o [n, H, L, DV], lse [n, H, L])`` of tensors side by side."""
    o, aux = function(*(x.to(width) for x in tensors), **arguments)
    return o, aux.lse


def score_mod(spec: AttentionSpec, padded: Padded, extras: RunExtras) -> Mod | None:
    """What happens to a scaled score before it is masked: fp8 scale, softcap, ALiBi."""
    if spec.softcap is None and extras.alibi_slopes is None and extras.k_scale is None:
        return None
    slopes, cap, k_scale = extras.alibi_slopes, None, None
    wide = torch.float64 if spec.dtype == torch.float64 else torch.float32
    if slopes is not None:
        slopes = slopes.to(wide)  # also what slopes are multiplied by: distances of many keys
    if spec.softcap is not None:
        # A tensor: the compiler makes one of a captured float, on the wrong device, and fails.
        cap = torch.full((spec.num_heads,), spec.softcap, dtype=wide, device=padded.q_lens.device)
    if extras.k_scale is not None:
        k_scale = per_head(extras.k_scale, spec, padded.q_lens.device)
    diagonal = padded.kv_lens - padded.q_lens

    def mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        if k_scale is not None:
            score = score * k_scale[h]
        if cap is not None:
            score = cap[h] * torch.tanh(score / cap[h])
        if slopes is not None:
            score = score - slopes[h] * (i + diagonal[b] - j).abs()
        return score

    return mod


def mask_mod(spec: AttentionSpec, padded: Padded, visible: torch.Tensor | None) -> Mod:
    """Which keys a query sees: those of its sequence, within bounds, and by the mask."""
    q_lens, kv_lens = padded.q_lens, padded.kv_lens
    left, right = spec.bounds

    def mod(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        here = i + kv_lens[b] - q_lens[b]
        seen = (i < q_lens[b]) & (j < kv_lens[b])
        if left is not None:
            seen = seen & (j >= here - left)
        if right is not None:
            seen = seen & (j <= here + right)
        if visible is not None:
            seen = seen & visible[b, i, j]
        return seen

    return mod


def _block_mask(
    spec: AttentionSpec, padded: Padded, visible: torch.Tensor | None, fast: bool
) -> Any:
    count = padded.q_lens.shape[0]
    fast = fast and count * padded.max_q * padded.max_k > _MANY_PAIRS
    create = compiled("create_block_mask") if fast else flex_module().create_block_mask
    return create(
        mask_mod(spec, padded, visible),
        B=count,
        H=None,
        Q_LEN=padded.max_q,
        KV_LEN=padded.max_k,
        device=padded.q_lens.device,
    )


def per_head(
    scale: float | torch.Tensor, spec: AttentionSpec, device: torch.device
) -> torch.Tensor:
    """A KV scale as ``[H]`` float32."""
    if not isinstance(scale, torch.Tensor):
        return torch.full((spec.num_heads,), scale, device=device)
    return scale.expand(spec.num_kv_heads).repeat_interleave(spec.group_size)


def _compiles(options: TorchFlexOptions, device: torch.device | None) -> bool:
    if options.compile != "auto":
        return options.compile == "always"
    return device is not None and device.type == "cuda"


__all__ = ["TorchFlexBackend", "TorchFlexOptions", "mask_mod", "score_mod"]
