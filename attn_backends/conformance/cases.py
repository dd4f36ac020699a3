"""A case: one call, described by how it differs from the base that a backend declares.

Cases name no backend. ``Base`` fills in what a case leaves open (dtype, head counts, page size)
from the backend's declaration, so the same list of cases, with the same ids, serves every backend,
and results can be laid side by side.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidInputError
from ..spec import AttentionSpec

if TYPE_CHECKING:
    from .target import Target

#: Where a tensor's elements lie. ``plain`` is contiguous; see ``inputs`` for the others.
LAYOUTS = ("plain", "heads_first", "packed", "wide", "odd", "gaps")
KEYS = ("any", "ragged", "paged")
KV_SCALES = ("none", "float", "scalar", "head")
DATA = ("normal", "probe")

HALF_DTYPES = (torch.bfloat16, torch.float16)
DTYPES = (*HALF_DTYPES, torch.float32, torch.float64, torch.float8_e4m3fn)
DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


@dataclass(frozen=True)
class Base:
    """The plainest call a backend accepts; cases change it.

    Attributes:
        dtype: Query dtype, a half type if there is one.
        head_dim: 64 or 128 if accepted.
        heads: ``(H, HK)``, grouped if accepted.
        page_size: For cases that ask for pages.
        causal: Whether plain causal calls are accepted; else bidirectional.
        ragged: Whether cases that do not care use ragged keys.
        accepted: Whether the backend accepts this base at all.
    """

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    heads: tuple[int, int] = (4, 2)
    page_size: int = 16
    causal: bool = True
    ragged: bool = True
    accepted: bool = False

    @classmethod
    def of(cls, target: Target) -> Base:
        """The first combination that the target does not refuse, in order of preference."""
        capabilities = target.backend.capabilities
        dtypes = [d for d in DTYPES if d in capabilities.dtypes]
        dims = [64, 128, 32, 16, 256, 96, 192, 8, *capabilities.head_dims.values]
        pages = [16, 64, 256, 1, *capabilities.page_sizes.values]
        groups = [(4, 2), (4, 4), (4, 1), *((g, 1) for g in capabilities.group_sizes.values)]
        for dtype in dtypes:
            for dim in dims:
                for heads in groups:
                    for causal in (True, False):
                        base = cls(dtype, dim, heads, causal=causal)
                        found = base._with_keys(target, pages)
                        if found is not None:
                            return found
        return cls(dtype=dtypes[0] if dtypes else torch.bfloat16)

    def _with_keys(self, target: Target, pages: list[int]) -> Base | None:
        ragged = not target.reasons(self.spec(None))
        size = next((p for p in pages if not target.reasons(self.spec(p))), None)
        if not ragged and size is None:
            return None
        return replace(self, ragged=ragged, page_size=size or 16, accepted=True)

    def spec(self, page_size: int | None) -> AttentionSpec:
        """The base's spec over ragged keys (None) or pages."""
        heads, kv_heads = self.heads
        return AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            page_size=page_size,
            causal=self.causal,
        )


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: What is special about it; unique within a check.
        q_lens: Query tokens of each sequence.
        kv_lens: Keys of each sequence.
        change: Spec fields that differ from the base, as sorted pairs.
        keys: ``ragged``, ``paged``, or ``any``: whichever the backend prefers.
        layout: Of ``LAYOUTS``, for q, k and v alike.
        sinks: Whether the call passes sinks.
        kv_scale: Form of ``k_scale`` and ``v_scale``.
        v_from_k: ``v=None``: values are the first lanes of the keys.
        int64: Index tensors are int64.
        spare: Unused table columns and, for ragged keys, unused rows after each sequence.
        data: ``normal`` values, or the ``probe`` with q = 0 and v[j] = j.
        amplitude: Standard deviation of q.
        seed: Changes the data and the order of pages, nothing else.
        tags: What a check needs to know besides, as sorted pairs.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    change: tuple[tuple[str, Any], ...] = ()
    keys: str = "any"
    layout: str = "plain"
    sinks: bool = False
    kv_scale: str = "none"
    v_from_k: bool = False
    int64: bool = False
    spare: int = 0
    data: str = "normal"
    amplitude: float = 2.0
    seed: int = 0
    tags: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        allowed = {"keys": KEYS, "layout": LAYOUTS, "kv_scale": KV_SCALES, "data": DATA}
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise InvalidInputError.of(field, getattr(self, field), ", ".join(values))

    @property
    def phase(self) -> str:
        """``decode`` when no sequence has more than one query, else ``prefill``."""
        return "decode" if max(self.q_lens, default=0) <= 1 else "prefill"

    def tag(self, name: str, default: Any = None) -> Any:
        """A tag's value."""
        return dict(self.tags).get(name, default)

    def spec(self, base: Base) -> AttentionSpec:
        """The spec of this case for a backend with this base."""
        paged = self.keys == "paged" or (self.keys == "any" and not base.ragged)
        spec = base.spec(base.page_size if paged else None)
        return replace(spec, **dict(self.change))

    def stable_seed(self, salt: str = "") -> int:
        """A seed from the content: the same in every process and for every backend."""
        text = f"{self.name}|{self.q_lens}|{self.kv_lens}|{self.seed}|{salt}"
        return zlib.crc32(text.encode())


def case(name: str, q_lens: Any, kv_lens: Any, **fields: Any) -> Case:
    """A case; keywords that are not fields of ``Case`` change the spec."""
    own = {key: fields.pop(key) for key in list(fields) if key in Case.__match_args__}
    if "tags" in own:
        own["tags"] = tuple(sorted(own["tags"].items()))
    change = tuple(sorted(fields.items()))
    return Case(name, tuple(q_lens), tuple(kv_lens), change=change, **own)


def describe(spec: AttentionSpec) -> str:
    """A spec in a few letters: ``bf16-H32-HK8-D128-P16-causal``."""
    parts = [
        DTYPE_NAMES.get(spec.dtype, str(spec.dtype)),
        f"H{spec.num_heads}",
        f"HK{spec.num_kv_heads}",
        f"D{spec.head_dim}",
    ]
    if spec.dv != spec.head_dim:
        parts.append(f"DV{spec.dv}")
    if spec.kv != spec.dtype:
        parts.append(f"kv_{DTYPE_NAMES.get(spec.kv, str(spec.kv))}")
    if spec.page_size is not None:
        parts.append(f"P{spec.page_size}")
    parts.append("causal" if spec.causal else "full")
    for name in ("window", "softcap", "sm_scale"):
        if getattr(spec, name) is not None:
            parts.append(f"{name}={getattr(spec, name)}".replace(" ", ""))
    parts += [n for n in ("has_alibi", "has_mask", "batch_invariant") if getattr(spec, n)]
    return "-".join(parts)


__all__ = ["DTYPES", "DTYPE_NAMES", "LAYOUTS", "Base", "Case", "case", "describe"]
