"""What the adapters share: outputs, lengths, and reasons that a missing engine gives."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

import attn_backends as ab
from attn_backends.plan import Plan

from . import sources


class Stranger(ab.AttentionBackend):
    """A backend over the kernels of an engine that is installed, or unpacked."""

    modules: tuple[str, ...] = ()

    @classmethod
    def dependency_reasons(cls, options: Any = None) -> list[ab.Reason]:
        """The engine's kernels cannot be imported."""
        found = [sources.load(name) for name in cls.modules]
        want = f"an importable module, or {sources.VARIABLE} with its file"
        return [
            ab.Reason(name, why, want)
            for name, why in zip(cls.modules, found)
            if not isinstance(why, ModuleType)
        ]

    @classmethod
    def versions(cls) -> dict[str, str]:
        """The engine's version, for reports."""
        cls.dependency_reasons()
        engine = cls.modules[0].partition(".")[0]
        return {engine: sources.version(engine)}

    @classmethod
    def extra_reasons(
        cls,
        spec: ab.AttentionSpec,
        phase: str | None,
        device: torch.device | None,
        options: Any,
    ) -> list[ab.Reason]:
        """Triton's interpreter, which is what runs on a CPU, computes bfloat16 wrongly."""
        low = spec.dtype == torch.bfloat16 or spec.kv != spec.dtype
        if device is None or device.type != "cpu" or not low:
            return []
        got = str(spec.dtype if spec.kv == spec.dtype else spec.kv).removeprefix("torch.")
        return [ab.Reason("dtype", f"{got} on a CPU", "float16, float32 in Triton's interpreter")]

    def kernels(self, name: str) -> Any:
        """A module of ``modules``."""
        return sources.load(name)

    def scales(self, extras: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``k_scale`` and ``v_scale`` of a whole cache, ``[1]`` float32; None is 1."""
        found = []
        for name in ("k_scale", "v_scale"):
            given = getattr(extras, name)
            value = torch.as_tensor(1.0 if given is None else given, dtype=torch.float32)
            if value.numel() != 1:
                raise self.refuse(name, f"one for each of {value.numel()} heads", "one number")
            found.append(value.to(device).reshape(1))
        return found[0], found[1]

    def refuse(self, argument: str, got: object, want: str) -> ab.UnsupportedCallError:
        """The error for a batch or tensor that the kernels have no argument for."""
        reason = ab.Reason(argument, str(got), want)
        return ab.UnsupportedCallError(
            f"{self.name}: {reason}", backend=self.name, reasons=[reason]
        )


class LengthsPlan(Plan):
    """A plan that knows exact lengths on the host; a batch without them is read back once."""

    def __init__(self, backend: Any, batch: ab.Batch, capacity: Any = None) -> None:
        super().__init__(backend, batch, capacity)
        q_lens, kv_lens = batch.q_lens, batch.kv_lens
        self.q_lens = batch.cu_seqlens_q.diff().tolist() if q_lens is None else list(q_lens)
        self.kv_lens = batch.seqlens_k.tolist() if kv_lens is None else list(kv_lens)

    @property
    def one_each(self) -> bool:
        """Whether every sequence has exactly one query."""
        return bool(self.q_lens) and all(n == 1 for n in self.q_lens)


def outputs(spec: ab.AttentionSpec, q: torch.Tensor, out: Any) -> ab.AttentionOutput:
    """The caller's outputs or new ones, as rows of no sequence are to be: 0 and -inf."""
    if out is None:
        o = q.new_empty(q.shape[0], spec.num_heads, spec.dv, dtype=spec.out_dtype)
        out = ab.AttentionOutput(o, q.new_empty(q.shape[0], spec.num_heads, dtype=torch.float32))
    out.o.zero_()
    out.lse.fill_(float("-inf"))
    return out


__all__ = ["LengthsPlan", "Stranger", "outputs"]
