"""The ``triton`` backend: online softmax in plain Triton, with every feature of the contract."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import torch
from pydantic import Field, ValidationInfo, field_validator

from .. import driver
from ..backend import AttentionBackend, BackendOptions, RunExtras
from ..batch import Batch
from ..capabilities import FEATURES, Capabilities, IntSet
from ..capacity import Capacity
from ..errors import InvalidInputError, Reason
from ..output import AttentionOutput
from ..plan import Plan
from ..spec import AttentionSpec
from .configs import PrefillConfig, SplitConfig

#: Least of each size in a configuration, and those that are powers of two.
LEAST = {"block_m": 16, "block_n": 16, "warps": 1, "stages": 1, "occupancy": 1, "min_chunk": 1}
POWERS = ("block_m", "block_n", "warps")
#: Widest head the kernels keep in registers and shared memory.
MAX_HEAD_DIM = 576


def interpreted() -> bool:
    """Whether Triton was asked to interpret kernels on the host."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "off")


class TritonOptions(BackendOptions):
    """Options of the ``triton`` backend; the defaults are the measured choices."""

    num_splits: int | None = Field(default=None, ge=1, le=1024)
    """Parts that the keys of a short query are cut into; None lets the model of waves decide."""

    split_keys: int | None = Field(default=None, ge=16, le=2**30)
    """Keys per part instead; a multiple of the key tile is taken."""

    split_config: tuple[int | bool, ...] | None = Field(default=None, min_length=6, max_length=9)
    """For tuning: the fields of ``SplitConfig``, in order; the last three may be left out."""

    prefill_config: tuple[int | bool, ...] | None = Field(default=None, min_length=6, max_length=10)
    """For tuning: the fields of ``PrefillConfig``, in order; the last four may be left out."""

    short_rows: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """For tuning: queries of at most this many tokens times group take the split kernel; None
    lets the shape decide, and is 0 with ``hopper=True``."""

    hopper: bool | None = None
    """Compute queries longer than ``short_rows`` by the warp-specialised prefill of Hopper: None
    where it can, True always (all queries; calls that it cannot do are refused), False never."""

    pdl: bool = True
    """Let the merge kernel start early on Hopper and newer (programmatic dependent launch)."""

    @field_validator("split_config", "prefill_config")
    @classmethod
    def _has_tiles(
        cls, value: tuple[int | bool, ...] | None, info: ValidationInfo
    ) -> tuple[int | bool, ...] | None:
        """Sizes that a kernel can have; whether a device has room for them, only it can tell."""
        config = SplitConfig if info.field_name == "split_config" else PrefillConfig
        for field, n in zip(fields(config), value or ()):
            least = LEAST.get(field.name)
            if least is not None and (n < least or (field.name in POWERS and n & (n - 1))):
                allowed = f"{'powers of two' if field.name in POWERS else 'any'} from {least} on"
                raise InvalidInputError.of(f"{info.field_name}.{field.name}", n, allowed)
        return value


class TritonBackend(AttentionBackend):
    """Attention in plain Triton: prefill, extend, split-KV decode and MLA, ragged or paged.

    The rows of each sequence are computed by one of two kernels: the split kernel if they are few,
    the prefill kernel otherwise. With ``batch_invariant`` one kernel serves all rows and cuts keys
    at fixed absolute positions, so that the bits of a row depend only on its query, its keys and
    its position: not on batch mates, padding, bounds, or how the prompt was chunked.

    A plan owns the workspace of its runs: use it on one stream at a time.
    """

    name = "triton"
    Options = TritonOptions
    capabilities = Capabilities(
        devices=("cuda", "cpu") if interpreted() else ("cuda",),
        dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn),
        fp8_kv_dtypes=(torch.float8_e4m3fn,),
        head_dims=IntSet(low=1, high=MAX_HEAD_DIM),
        head_dims_v=IntSet(low=1, high=MAX_HEAD_DIM),
        page_sizes=IntSet(low=1),
        group_sizes=IntSet(low=1),
        min_compute_capability=(8, 0),
        features=frozenset(FEATURES),
        fused_sinks=True,
    )
    options: TritonOptions

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Launchers by what their constants depend on, so that a step need not name them all.
        self.launchers: dict[Any, Any] = {}
        #: How numbers reach the tensor cores, by device.
        self.formats: dict[Any, Any] = {}

    @classmethod
    def dependency_reasons(cls, options: BackendOptions | None = None) -> list[Reason]:
        """Whether Triton and the kernels load; the message of what went wrong is kept."""
        try:
            from . import plan  # noqa: F401
        except Exception as error:  # a broken install may raise anything
            text = f"{type(error).__name__}: {error}"
            return [Reason("triton", text, ">=3.5", "pip install triton")]
        return []

    @classmethod
    def extra_reasons(
        cls,
        spec: AttentionSpec,
        phase: str | None,
        device: torch.device | None,
        options: BackendOptions | None,
    ) -> list[Reason]:
        """What stands against cuts or a kernel that the options insist on."""
        if not isinstance(options, TritonOptions):
            return []
        reasons = []
        if spec.batch_invariant:  # keys are cut at fixed positions, by one kernel for all rows
            for name in ("num_splits", "split_keys", "short_rows"):
                if (value := getattr(options, name)) is not None:
                    reasons.append(Reason(name, str(value), "None with batch_invariant=True"))
        if not options.hopper:
            return reasons
        from .hopper_prefill import hopper_reasons

        reasons += hopper_reasons(spec, device)
        # These take other kernels for every row, so that the option would say nothing.
        if spec.batch_invariant:
            reasons.append(Reason("batch_invariant", "True", "False with hopper=True"))
        if options.prefill_config is not None:
            got = str(options.prefill_config)
            reasons.append(Reason("prefill_config", got, "None with hopper=True"))
        return reasons

    @classmethod
    def kernels(
        cls,
        spec: AttentionSpec,
        phase: str,
        device: torch.device,
        options: BackendOptions | None = None,
    ) -> list[str]:
        """The split kernel for short queries; for longer ones that of Hopper or the plain one."""
        from .hopper_prefill import hopper_reasons
        from .plan import SHORT_ROWS

        chosen = options if isinstance(options, TritonOptions) else TritonOptions()
        if spec.batch_invariant:
            return ["split-KV, keys cut at fixed positions (batch_invariant=True)"]
        if chosen.hopper and not chosen.short_rows:
            return ["warp-specialised prefill of Hopper (hopper=True)"]
        if phase == "decode" or spec.dv > 256:
            return ["split-KV, the heads of a group packed into the rows"]
        reasons = hopper_reasons(spec, device)
        if chosen.hopper is False:
            reasons.insert(0, Reason("hopper", "False", "None, True"))
        lines = [f"split-KV for queries of up to {SHORT_ROWS} rows (tokens times group)"]
        if reasons:
            return [*lines, f"plain prefill for longer ones; not Hopper's: {_join(reasons)}"]
        return [*lines, "warp-specialised prefill of Hopper for longer ones"]

    def _plan(self, batch: Batch, capacity: Capacity | None) -> Plan:
        from .plan import TritonPlan

        device = batch.device
        if device.type == "cuda" and driver.current_device() != device.index:
            with torch.cuda.device(device):
                return TritonPlan(self, batch, capacity)
        return TritonPlan(self, batch, capacity)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Any,
        extras: RunExtras,
        out: AttentionOutput | None,
    ) -> AttentionOutput:
        return plan.run(q, k, v, extras, out)


def _join(reasons: list[Reason]) -> str:
    return "; ".join(map(str, reasons))


__all__ = ["MAX_HEAD_DIM", "TritonBackend", "TritonOptions"]
