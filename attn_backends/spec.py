"""What a layer fixes: head counts, widths, dtypes, mask shape and scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .errors import InvalidInputError

#: Floating dtypes that the contract knows for queries; a backend declares which of them it takes.
QUERY_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

Window = tuple["int | None", "int | None"]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_int(name: str, value: Any, low: int) -> None:
    if not _is_int(value) or value < low:
        raise InvalidInputError.of(name, repr(value), f"an int >= {low}")


def check_device(device: Any) -> torch.device:
    """Return a device by its name, or raise InvalidInputError."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        allowed = "a torch.device or its name"
        raise InvalidInputError.of("device", repr(device), allowed, str(error)) from None


def check_present(device: torch.device) -> None:
    """Raise InvalidInputError for a CUDA device that this machine does not have."""
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        allowed = f"cpu, or one of {count} visible CUDA devices"
        raise InvalidInputError.of("device", repr(str(device)), allowed)


def check_window(window: Any, *, name: str = "window") -> Window | None:
    """Return ``window`` as ``(left, right)`` or None, or raise InvalidInputError."""
    if window is None:
        return None
    allowed = "None, or (left, right) with each None (unbounded) or an int >= 0"
    fix = "a window of W tokens is left = W - 1; unbounded is None, not -1"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidInputError.of(name, repr(window), allowed, fix)
    left, right = window
    for bound in (left, right):
        if bound is not None and (not _is_int(bound) or bound < 0):
            raise InvalidInputError.of(name, repr(window), allowed, fix)
    return None if left is None and right is None else (left, right)


def check_softcap(softcap: Any, *, name: str = "softcap") -> float | None:
    """Return ``softcap`` as a float or None (off), or raise InvalidInputError."""
    if softcap is None:
        return None
    number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
    if not number or not math.isfinite(softcap) or softcap <= 0:
        raise InvalidInputError.of(name, repr(softcap), "None (off) or a finite number > 0")
    return float(softcap)


def check_scale(sm_scale: Any, *, name: str = "sm_scale") -> float | None:
    """Return ``sm_scale`` as a float or None (the default), or raise InvalidInputError."""
    if sm_scale is None:
        return None
    number = isinstance(sm_scale, (int, float)) and not isinstance(sm_scale, bool)
    if not number or not math.isfinite(sm_scale) or sm_scale < 0:
        allowed = "None (1/sqrt(head_dim)) or a finite number >= 0; 0 weighs all keys equally"
        raise InvalidInputError.of(name, repr(sm_scale), allowed)
    return float(sm_scale)


@dataclass(frozen=True)
class AttentionSpec:
    """The facts of an attention layer that do not change from step to step.

    Backends are chosen and bound by spec; two layers with equal specs share plans.

    Attributes:
        num_heads: H, query heads.
        num_kv_heads: HK, key and value heads; divides ``num_heads``, any ratio.
        head_dim: D, width of queries and keys.
        head_dim_v: DV, width of values and of the output; None means D.
        dtype: Query dtype: float16, bfloat16, float32, float64 or float8_e4m3fn.
        kv_dtype: Dtype of keys and values; None means ``dtype``. An fp8 dtype with a wider
            ``dtype`` is a quantised cache, scaled by ``k_scale`` and ``v_scale`` at run time.
        page_size: Tokens per page of a paged cache; None means ragged keys.
        causal: Bottom-right causal: query i of a sequence sees keys ``j <= i + kv_len - q_len``.
        window: ``(left, right)`` inclusive bounds around ``i + kv_len - q_len``; None is
            unbounded. A window of W tokens is ``left = W - 1``. Causal sets right to 0.
        softcap: c in ``s = c * tanh(s / c)``, applied after the scale and before the mask.
        sm_scale: Factor on ``q . k``; None means ``1 / sqrt(head_dim)``, 0 weighs keys equally.
        has_alibi: Calls pass ``alibi_slopes`` [H].
        has_mask: Calls pass a boolean ``mask``, flattened per sequence.
        batch_invariant: The bits of a sequence's result must not depend on its batch mates.

    Raises:
        InvalidInputError: A field is out of its range; the message names it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    page_size: int | None = None
    causal: bool = True
    window: Window | None = None
    softcap: float | None = None
    sm_scale: float | None = None
    has_alibi: bool = False
    has_mask: bool = False
    batch_invariant: bool = False
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            _require_int(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            allowed = f"a divisor of num_heads={self.num_heads}"
            raise InvalidInputError.of("num_kv_heads", self.num_kv_heads, allowed)
        if self.head_dim_v is not None:
            _require_int("head_dim_v", self.head_dim_v, 1)
        if self.dtype not in QUERY_DTYPES:
            names = ", ".join(map(str, QUERY_DTYPES))
            raise InvalidInputError.of("dtype", repr(self.dtype), names)
        if self.kv not in (self.dtype, *FP8_DTYPES):
            allowed = f"dtype={self.dtype}, or float8_e4m3fn, float8_e5m2"
            raise InvalidInputError.of("kv_dtype", repr(self.kv_dtype), allowed)
        if self.page_size is not None:
            _require_int("page_size", self.page_size, 1)
        for name in ("causal", "has_alibi", "has_mask", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError.of(name, repr(getattr(self, name)), "True or False")
        window = check_window(self.window)
        if self.causal and window is not None:
            # Right is 0 under causality whatever was asked; a bare right bound then says nothing.
            window = None if window[0] is None else (window[0], 0)
        put("window", window)
        put("softcap", check_softcap(self.softcap))
        put("sm_scale", check_scale(self.sm_scale))
        put("_hash", hash(self._key()))

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)

    def __hash__(self) -> int:  # computed once: selection looks specs up on every call
        return self._hash

    @property
    def scale(self) -> float:
        """``sm_scale`` with its default filled in."""
        return 1.0 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale

    @property
    def dv(self) -> int:
        """``head_dim_v`` with its default filled in."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def kv(self) -> torch.dtype:
        """``kv_dtype`` with its default filled in."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of ``o``: the query dtype, bfloat16 for fp8 queries."""
        return torch.bfloat16 if self.dtype in FP8_DTYPES else self.dtype

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """``(left, right)`` that causality and window together leave; None is unbounded."""
        left, right = self.window if self.window is not None else (None, None)
        return left, 0 if self.causal else right


__all__ = [
    "FP8_DTYPES",
    "QUERY_DTYPES",
    "AttentionSpec",
    "Window",
    "check_device",
    "check_present",
    "check_scale",
    "check_softcap",
    "check_window",
]
