"""FlashAttention 3: ``flash_attn_interface`` (upstream and its builds), and the one inside vLLM.

What its kernels promise, and what is done about it here:

- Builds differ in what was compiled in; upstream's say so in ``flash_attn_config``, without CUDA.
- Nothing is padded in Python: ragged tensors are padded here, a paged cache is not.
- Whole tiles of keys are loaded where a page holds whole tiles, so a NaN in an unused slot reaches
  the output as 0 * NaN. A left padding of zero selects the loads that skip unused slots.
- Rows without keys get ``-inf`` from the kernel and ``+inf`` where no key exists at all; both are
  settled from lengths.
- Tile shapes follow the longest query of the batch, so batch invariance needs a fixed bound on it.
- fp8 inputs give a bfloat16 output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..backend import RunExtras
from ..capabilities import Capabilities, IntSet
from ..errors import Reason, UnsupportedCallError
from ..packages import Probe, probe
from ..spec import FP8_DTYPES, AttentionSpec
from .adapter import Attend
from .arrange import Arrangement
from .fa2 import vllm_operator, vllm_reasons, vllm_release
from .flash_build import (
    FlashBuild,
    FlashCall,
    by_token,
    by_token_cached,
    kernel_scale,
    padded_dims_reasons,
    round_up,
)
from .operators import attend_beneath, operator_values
from .tensors import DenseKeysOfPlan, Tensors, aligned, widen

_CAPABILITIES = Capabilities(
    devices=("cuda",),
    dtypes=(torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    head_dims=IntSet((*range(1, 257), 576)),
    head_dims_v=IntSet(low=1, high=512),
    min_compute_capability=(9, 0),
    max_compute_capability=(9, 0),
    features=frozenset(
        (
            "ragged",
            "paged",
            "causal",
            "bidirectional",
            "window",
            "softcap",
            "batch_invariant",
            "cuda_graph",
        )
    ),
)

#: Makes what attends of all arguments but q, k and v; and those that a plan fixes.
Entry = tuple[Callable[..., Attend], dict[str, Any]]

#: Keys per tile that a head dim may get, for 16-bit and for fp8 inputs, by compiled width.
_TILES = {64: (128, 160, 192), 96: (128, 144), 128: (128, 176), 192: (96, 112, 128), 256: (64, 80)}
_FP8_TILES = {64: (128, 160), 96: (128,), 128: (96, 160, 192, 224), 192: (128, 160), 256: (64, 128)}
_WIDE_VALUE_TILES = {256: (112,), 512: (64,)}  # head dim up to 64 with wider values

#: What the operator calls arguments of the entry points, and what it does not take.
_OPERATOR_NAMES = {
    "causal": "is_causal",
    "cache_seqlens": "seqused_k",
    "cache_leftpad": "leftpad_k",
    "block_table": "page_table",
}
_NOT_BENEATH = ("return_attn_probs", "return_softmax_lse", "fa_version")
#: What some builds take besides, without defaults.
_NOT_EVERYWHERE = {
    "is_rotary_interleaved": True,
    "attention_chunk": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}

#: A bound on queries per sequence under which no tile shape depends on the batch.
_FIXED_MAX_Q = 512


def is_mla(spec: AttentionSpec) -> bool:
    """Whether this is absorbed MLA, whose values are the first lanes of its keys."""
    return (spec.head_dim, spec.dv) == (576, 512)


class FlashAttention3(FlashBuild):
    """The module ``flash_attn_interface``: upstream's ``hopper`` build and third-party wheels."""

    version = 3
    #: What the latent part of MLA's queries is called.
    latent_name = "qv"
    package = "flash_attn_interface"
    install = "pip install tokenspeed-fa3, or build the hopper folder of flash-attention"
    capabilities = _CAPABILITIES

    def probe(self) -> Probe:
        """Upstream's module, under either of its two names."""
        attribute = "flash_attn_with_kvcache"
        first = probe("flash_attn_interface", attribute=attribute, distribution="tokenspeed-fa3")
        if first.installed:
            return first
        second = probe(
            "flash_attn_3.flash_attn_interface", attribute=attribute, distribution="flash-attn-3"
        )
        return second if second.installed else first

    def flags(self) -> Mapping[str, bool]:
        """What the build left out, by the names that FlashAttention 3 uses; empty if unknown."""
        config = probe("flash_attn_config").module
        flags: Mapping[str, bool] = getattr(config, "CONFIG", {}).get("build_flags", {})
        return flags

    def compiled(self, feature: str) -> bool:
        """Whether the build has a feature, for example ``SOFTCAP`` or ``HDIM96``."""
        names = (f"FLASHATTENTION_DISABLE_{feature}", f"FLASH_ATTENTION_DISABLE_{feature}")
        flags = self.flags()
        return not any(flags.get(name, False) for name in names)

    def native_dims(self, d: int, dv: int) -> bool:
        """Whether a kernel exists for this pair of widths without padding one to the other."""
        if d == dv:
            return True
        if 128 < d <= 192 and 96 < dv <= 128:
            return self.compiled("HDIMDIFF192")
        return d <= 64 and 64 < dv <= 512 and self.compiled("HDIMDIFF64")

    def widths(self, spec: AttentionSpec) -> tuple[int, int]:
        """The widths handed over: D and DV, padded where no kernel takes them as they are."""
        unit = 16 if spec.dtype in FP8_DTYPES else 8
        d, dv = round_up(spec.head_dim, unit), round_up(spec.dv, unit)
        if self.native_dims(d, dv):
            return d, dv
        return max(d, dv), max(d, dv)

    def compiled_width(self, d: int) -> int | None:
        """The width of the kernel that serves a head dim, or None."""
        for width in (64, 96, 128, 192, 256):
            if d <= width and self.compiled(f"HDIM{width}"):
                return width
        return None

    def extra_reasons(self, spec: AttentionSpec, options: Any) -> list[Reason]:
        """What this build left out, and combinations that no build has."""
        fp8 = spec.dtype in FP8_DTYPES
        reasons: list[Reason] = []
        if spec.softcap is not None and not self.compiled("SOFTCAP"):
            reasons.append(Reason("softcap", str(spec.softcap), "None in this build"))
        if spec.window is not None and not self.compiled("LOCAL"):
            reasons.append(Reason("window", str(spec.window), "None in this build"))
        if spec.page_size is not None and not self.compiled("PAGEDKV"):
            reasons.append(Reason("page_size", str(spec.page_size), "None in this build"))
        if fp8 and not self.compiled("FP8"):
            reasons.append(Reason("dtype", "float8_e4m3fn", "float16, bfloat16 in this build"))
        if spec.dtype == torch.float16 and not self.compiled("FP16"):
            reasons.append(Reason("dtype", "float16", "bfloat16 in this build"))
        if spec.batch_invariant and spec.window is not None:
            fix = "tile shapes depend on whether the window covers the longest sequence"
            reasons.append(Reason("batch_invariant", "True with window", "False", fix))
        return reasons + self._width_reasons(spec, fp8)

    def _width_reasons(self, spec: AttentionSpec, fp8: bool) -> list[Reason]:
        if is_mla(spec):
            if fp8:
                return [Reason("dtype", "float8_e4m3fn", "float16, bfloat16 with head_dim=576")]
            if spec.num_kv_heads != 1:
                return [Reason("num_kv_heads", str(spec.num_kv_heads), "1 with head_dim=576")]
            if not self.compiled("HDIMDIFF64"):
                return [Reason("head_dim", "576", "a build with HDIMDIFF64")]
            return []
        if spec.head_dim > 256:
            return [Reason("head_dim_v", str(spec.dv), "512 with head_dim=576")]
        d, dv = self.widths(spec)
        if d > 256 or self.compiled_width(d) is None:
            built = [w for w in (64, 96, 128, 192, 256) if self.compiled(f"HDIM{w}")]
            most = f"up to {max(built, default=0)} in this build"
            return [Reason("head_dim, head_dim_v", f"{spec.head_dim}, {spec.dv}", most)]
        if fp8 and dv > 256:
            return [Reason("head_dim_v", str(spec.dv), "1..256 with dtype=float8_e4m3fn")]
        unit = 16 if fp8 else 8
        native = self.native_dims(round_up(spec.head_dim, unit), round_up(spec.dv, unit))
        return padded_dims_reasons(spec, unit, equal=not native, high=256)

    def whole_tiles(self, spec: AttentionSpec) -> bool:
        """Whether a page may hold whole tiles, which are loaded with their unused slots."""
        if spec.page_size is None:
            return False
        if is_mla(spec):
            tiles: tuple[int, ...] = _WIDE_VALUE_TILES[512]
        else:
            d, dv = self.widths(spec)
            width = self.compiled_width(d) or 256
            if d <= 64 < dv:
                tiles = _WIDE_VALUE_TILES[256 if dv <= 256 else 512]
            else:
                tiles = (_FP8_TILES if spec.dtype in FP8_DTYPES else _TILES)[width]
        return any(spec.page_size % tile == 0 for tile in tiles)

    def prepare(self, work: Arrangement, spec: AttentionSpec, options: Any) -> FlashCall:
        """Ragged keys through varlen, paged ones through the cache entry point."""
        batch = work.batch
        d, dv = (64, 512) if is_mla(spec) else self.widths(spec)
        max_q = max(batch.max_seqlen_q, _FIXED_MAX_Q if spec.batch_invariant else 1)
        splits = 1 if spec.batch_invariant else options.num_splits
        left, right = spec.bounds
        common: dict[str, Any] = dict(
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=max_q,
            softmax_scale=kernel_scale(spec),
            causal=spec.causal,
            window_size=(-1 if left is None else left, -1 if right is None else right),
            softcap=spec.softcap or 0.0,
            num_splits=splits,
        )
        paged = not self.takes_dense_keys(spec, options)
        if paged and self.whole_tiles(spec) and not options.finite_cache:
            common.update(self._skip_unused_slots(work))
        mla, fp8 = is_mla(spec), spec.dtype in FP8_DTYPES
        scales = FixedScales(batch.num_seqs, spec.num_kv_heads, batch.device)
        dense = DenseKeysOfPlan(work, spec)

        entry, fixed = self._paged(work, common) if paged else self._ragged(work, common)

        def tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
            latent: Tensors = ()
            if mla:
                q, k, v, query = split_latent(q, k, v)
                latent = (query,)
            if not paged:
                keys = dense.of(k)
                q, k, v = widen(q, d), widen(keys.take(k), d), widen(keys.take(v), dv)
            return (aligned(q), aligned(k), aligned(v), *latent)

        def all_of(extras: RunExtras, *latent: torch.Tensor) -> dict[str, Any]:
            given = dict(fixed)
            if mla:
                given[self.latent_name] = latent[0]
            if fp8:
                given["k_descale"] = scales.of("k", extras.k_scale)
                given["v_descale"] = scales.of("v", extras.v_scale)
            if not paged:
                given["cu_seqlens_k"] = dense.starts
            return given

        def library(extras: RunExtras, *latent: torch.Tensor) -> Attend:
            return entry(**all_of(extras, *latent))

        def beneath(extras: RunExtras) -> Attend | None:
            values = operator_values(all_of(extras), _OPERATOR_NAMES, _NOT_BENEATH)
            return attend_beneath(self.operator(), values, _NOT_EVERYWHERE)

        return FlashCall(tensors, library, spec.dv, None if mla else beneath)

    def operator(self) -> Any:
        """The operator that both entry points lead to; None if the module has it elsewhere."""
        names = ("flash_attn_3_gpu", "flash_attn_3_cuda")
        found = (getattr(self.module, name, None) for name in names)
        operators = next((x for x in found if x is not None), None)
        return getattr(getattr(operators, "fwd", None), "default", None)

    def _skip_unused_slots(self, work: Arrangement) -> dict[str, torch.Tensor]:
        return {"cache_leftpad": torch.zeros_like(work.batch.seqlens_k)}

    def _ragged(self, work: Arrangement, common: dict[str, Any]) -> Entry:
        """The entry point for keys back to back, with everything that a plan fixes."""
        fixed = dict(common, max_seqlen_k=max(work.batch.max_seqlen_k, 1), return_attn_probs=True)
        return partial(by_token, self.module.flash_attn_varlen_func), fixed

    def _paged(self, work: Arrangement, common: dict[str, Any]) -> Entry:
        """The entry point for pages, with everything that a plan fixes."""
        fixed = dict(
            common,
            cache_seqlens=work.batch.seqlens_k,
            page_table=work.batch.page_table,
            return_softmax_lse=True,
        )
        return partial(by_token_cached, self.module.flash_attn_with_kvcache), fixed


class VllmFlashAttention3(FlashAttention3):
    """The FlashAttention 3 inside vLLM: every width and feature but appending and gradients."""

    latent_name = "q_v"
    package = "vllm"
    install = "pip install vllm"

    def probe(self) -> Probe:
        """The attention module of vLLM, which loads without the rest of it."""
        return probe("vllm.vllm_flash_attn", attribute="flash_attn_varlen_func")

    @property
    def release(self) -> str | None:
        """The version of vLLM, which its attention module does not repeat."""
        return vllm_release()

    def dependency_reasons(self) -> list[Reason]:
        """A missing vLLM, or one whose extension for this version does not load."""
        reasons = super().dependency_reasons()
        return reasons or vllm_reasons(self.version)

    def flags(self) -> Mapping[str, bool]:
        """Nothing that matters here is left out."""
        return {}

    def extra_reasons(self, spec: AttentionSpec, options: Any) -> list[Reason]:
        """The same, and pages of whole tiles, whose unused slots cannot be skipped here."""
        reasons = super().extra_reasons(spec, options)
        paged = not self.takes_dense_keys(spec, options)
        if not reasons and paged and self.whole_tiles(spec) and not options.finite_cache:
            fix = "set finite_cache=True if unused slots hold finite values"
            want = "sizes that no tile of keys divides"
            reasons.append(Reason("page_size", str(spec.page_size), want, fix))
        return reasons

    def operator(self) -> Any:
        """The operator of vLLM's extension."""
        return vllm_operator(3, "fwd")

    def _skip_unused_slots(self, work: Arrangement) -> dict[str, torch.Tensor]:
        raise AssertionError("refused by extra_reasons")

    def _ragged(self, work: Arrangement, common: dict[str, Any]) -> Entry:
        longest = max(work.batch.max_seqlen_k, 1)
        fixed = dict(common, max_seqlen_k=longest, return_softmax_lse=True, fa_version=3)
        return partial(by_token, self.module.flash_attn_varlen_func), fixed

    def _paged(self, work: Arrangement, common: dict[str, Any]) -> Entry:
        lengths = dict(seqused_k=work.batch.seqlens_k, block_table=work.batch.page_table)
        return self._ragged(work, {**common, **lengths})


class FixedScales:
    """fp8 scales in the form ``[B, HK]``; a float becomes a tensor once."""

    def __init__(self, num_seqs: int, kv_heads: int, device: torch.device) -> None:
        self.shape = (num_seqs, kv_heads)
        self.device = device
        self.floats: dict[tuple[str, float], torch.Tensor] = {}

    def of(self, name: str, scale: float | torch.Tensor | None) -> torch.Tensor | None:
        """The scale for a library, or None."""
        if scale is None:
            return None
        if isinstance(scale, torch.Tensor):
            return scale.expand(self.shape)
        if (name, scale) not in self.floats:
            self.floats[name, scale] = torch.full(self.shape, scale, device=self.device)
        return self.floats[name, scale]


def split_latent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Absorbed MLA in two parts: the rope lanes, and the latent lanes that are also the values.

    Returns:
        ``(q_rope [T, H, 64], k_rope [..., 1, 64], latent [..., 1, 512], q_latent [T, H, 512])``.

    Raises:
        UnsupportedCallError: ``v`` is not the first 512 lanes of ``k``.
    """
    if v.data_ptr() != k.data_ptr() or v.stride() != k.stride():
        reason = Reason("v", "a tensor of its own", "None, or the first 512 lanes of k")
        raise UnsupportedCallError(
            f"flash_attention: {reason}", backend="flash_attention", reasons=[reason]
        )
    return q[..., 512:], k[..., 512:], v, aligned(q[..., :512])


__all__ = ["FlashAttention3", "VllmFlashAttention3", "is_mla", "split_latent"]
