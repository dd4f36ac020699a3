"""What a backend declares it can do, as data: one source for reasons, docs, tests and the CLI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .errors import Reason
from .spec import AttentionSpec

#: Features a backend may declare. Sinks are not among them: they are a merge, so all have them.
FEATURES = (
    "ragged",
    "paged",
    "causal",
    "bidirectional",
    "window",
    "softcap",
    "alibi",
    "mask",
    "batch_invariant",
    "cuda_graph",
)
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class IntSet:
    """A set of ints that can say what it holds: listed values, or a range with a step.

    Attributes:
        values: The members, if listed; then the other fields are ignored.
        low: Smallest member.
        high: Largest member; None is unbounded.
        multiple_of: Members are multiples of this.
    """

    values: tuple[int, ...] = ()
    low: int = 1
    high: int | None = None
    multiple_of: int = 1

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        if self.values:
            return value in self.values
        below = self.high is None or value <= self.high
        return self.low <= value and below and value % self.multiple_of == 0

    def __str__(self) -> str:
        if self.values:
            return ", ".join(_runs(self.values))
        if self.multiple_of > 1:
            limit = f" up to {self.high}" if self.high is not None else ""
            return f"multiples of {self.multiple_of}{limit}"
        return f"any >= {self.low}" if self.high is None else f"{self.low}..{self.high}"


def _runs(values: tuple[int, ...]) -> list[str]:
    """Listed values in order, with three or more neighbors as ``low..high``."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    long = 3
    return [
        text
        for run in runs
        for text in ([f"{run[0]}..{run[-1]}"] if len(run) >= long else map(str, run))
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(_name, dtypes)) or "none"


@dataclass(frozen=True)
class Capabilities:
    """Declared limits of a backend. What is not declared here is refused.

    Attributes:
        devices: Device types, for example ``("cpu", "cuda")``.
        dtypes: Query dtypes.
        fp8_kv_dtypes: Dtypes of a quantised cache below wider queries.
        head_dims: Accepted D.
        head_dims_v: Accepted DV when it differs from D; None means DV must equal D.
        head_dim_pairs: If given, the only (D, DV) with DV != D that are accepted.
        page_sizes: Accepted page sizes, if paged.
        group_sizes: Accepted H / HK.
        min_compute_capability: Oldest CUDA architecture, for example ``(8, 0)``.
        max_compute_capability: Newest CUDA architecture; None is unbounded.
        phases: Of ``"prefill"`` and ``"decode"``.
        features: Of ``FEATURES``.
        fused_sinks: The kernel folds sinks in itself; else they are merged after the run.
        host_lengths: ``plan`` works from lengths on the host; where a batch lacks them, it copies
            them from the device and waits. Without this, ``plan`` and ``run`` never wait.
        rounds_row_sum: The row sum, and so the LSE, is taken over probabilities rounded to the
            query dtype: off by up to that dtype's unit roundoff (bf16: 0.002, fp16: 0.0005).
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    fp8_kv_dtypes: tuple[torch.dtype, ...] = ()
    head_dims: IntSet = IntSet()
    head_dims_v: IntSet | None = None
    head_dim_pairs: tuple[tuple[int, int], ...] | None = None
    page_sizes: IntSet = IntSet()
    group_sizes: IntSet = IntSet()
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    phases: tuple[str, ...] = PHASES
    features: frozenset[str] = frozenset()
    fused_sinks: bool = False
    host_lengths: bool = False
    rounds_row_sum: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(self.features - set(FEATURES))
        if unknown:
            raise ValueError(f"features={unknown} (allowed: {', '.join(FEATURES)})")

    def device_reasons(self, device: torch.device | None) -> Iterator[Reason]:
        """Reasons against a device. Asks for an architecture only if a limit is declared.

        Args:
            device: Where a call would run; None leaves the device out of it.

        Yields:
            At most one reason: the device's type, that there is none, or its compute capability.
        """
        if device is None:
            return
        if device.type not in self.devices:
            yield Reason("device", device.type, ", ".join(self.devices))
            return
        if device.type != "cuda":
            return
        if not torch.cuda.is_available():
            yield Reason("device", "cuda", "a visible CUDA device", "check the driver")
            return
        low, high = self.min_compute_capability, self.max_compute_capability
        if low is None and high is None:
            return
        got = torch.cuda.get_device_capability(device)
        if (low is not None and got < low) or (high is not None and got > high):
            want = ">= {}.{}".format(*low) if low is not None else ""
            if high is not None:
                want += " and " * bool(want) + "<= {}.{}".format(*high)
            yield Reason("compute_capability", "{}.{}".format(*got), want)

    def spec_reasons(self, spec: AttentionSpec, phase: str | None) -> Iterator[Reason]:
        """Reasons against a spec: dtype first, then shape, then features.

        Args:
            spec: What the layer fixes.
            phase: ``"prefill"``, ``"decode"``, or None for either.

        Yields:
            Every reason that follows from the declared data.
        """
        if spec.dtype not in self.dtypes:
            yield Reason("dtype", _name(spec.dtype), _names(self.dtypes))
        if spec.kv != spec.dtype and spec.kv not in self.fp8_kv_dtypes:
            want = _names((spec.dtype, *self.fp8_kv_dtypes))
            yield Reason("kv_dtype", _name(spec.kv), want)
        if spec.head_dim not in self.head_dims:
            yield Reason("head_dim", str(spec.head_dim), str(self.head_dims))
        yield from self._value_dim_reasons(spec)
        if spec.page_size is not None and "paged" in self.features:
            if spec.page_size not in self.page_sizes:
                yield Reason("page_size", str(spec.page_size), str(self.page_sizes))
        if spec.group_size not in self.group_sizes:
            yield Reason("num_heads/num_kv_heads", str(spec.group_size), str(self.group_sizes))
        if phase is not None and phase not in self.phases:
            yield Reason("phase", phase, ", ".join(self.phases))
        yield from self._feature_reasons(spec)

    def _value_dim_reasons(self, spec: AttentionSpec) -> Iterator[Reason]:
        if spec.dv == spec.head_dim:
            return
        if self.head_dims_v is None:
            yield Reason("head_dim_v", str(spec.dv), f"head_dim={spec.head_dim}")
        elif self.head_dim_pairs is not None:
            if (spec.head_dim, spec.dv) not in self.head_dim_pairs:
                pairs = ", ".join(f"{d}/{dv}" for d, dv in self.head_dim_pairs)
                yield Reason("head_dim/head_dim_v", f"{spec.head_dim}/{spec.dv}", pairs)
        elif spec.dv not in self.head_dims_v:
            yield Reason("head_dim_v", str(spec.dv), str(self.head_dims_v))

    def _feature_reasons(self, spec: AttentionSpec) -> Iterator[Reason]:
        asked = {
            "ragged": (spec.page_size is None, "page_size", "None", "a page size"),
            "paged": (
                spec.page_size is not None,
                "page_size",
                spec.page_size,
                "None (ragged keys)",
            ),
            "causal": (spec.causal, "causal", True, "False"),
            "bidirectional": (not spec.causal, "causal", False, "True"),
            "window": (spec.window is not None, "window", spec.window, "None"),
            "softcap": (spec.softcap is not None, "softcap", spec.softcap, "None"),
            "alibi": (spec.has_alibi, "has_alibi", True, "False"),
            "mask": (spec.has_mask, "has_mask", True, "False"),
            "batch_invariant": (spec.batch_invariant, "batch_invariant", True, "False"),
        }
        for feature, (wanted, argument, got, want) in asked.items():
            if wanted and feature not in self.features:
                yield Reason(argument, str(got), want)


__all__ = ["FEATURES", "PHASES", "Capabilities", "IntSet"]
