"""Backends that are wrong on purpose, made from the reference."""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.backend import BackendOptions
from attn_backends.errors import Reason
from attn_backends.output import AttentionOutput
from attn_backends.torch_native.backend import TorchNativeBackend


class Wrong(TorchNativeBackend):
    """Scales its output by one percent too much."""

    name = "toy_wrong"

    def _run(self, *args: Any) -> AttentionOutput:
        out = super()._run(*args)
        return AttentionOutput(out.o * 1.01, out.lse)


class Base2(TorchNativeBackend):
    """Gives its LSE in base 2."""

    name = "toy_base2"

    def _run(self, *args: Any) -> AttentionOutput:
        out = super()._run(*args)
        return AttentionOutput(out.o, out.lse * 1.4426950408889634)


class Raises(TorchNativeBackend):
    """Fails when it is run."""

    name = "toy_raises"

    def _run(self, *args: Any) -> AttentionOutput:
        raise RuntimeError("ptxas fatal: no such architecture")


class Unwritten(TorchNativeBackend):
    """Returns memory that nobody wrote."""

    name = "toy_unwritten"

    def _run(self, *args: Any) -> AttentionOutput:
        out = super()._run(*args)
        return AttentionOutput(torch.full_like(out.o, float("nan")), out.lse)


class Absent(TorchNativeBackend):
    """Needs a package that is not there."""

    name = "toy_absent"

    @classmethod
    def dependency_reasons(cls, options: BackendOptions | None = None) -> list[Reason]:
        return [Reason("toylib", "not installed", ">=3", "pip install toylib")]


class ManyOptions(TorchNativeBackend.Options):  # type: ignore[misc,name-defined]
    """Which library."""

    version: str = "1"


class Many(TorchNativeBackend):
    """Stands for three libraries, of which one is wrong and one is not there."""

    name = "toy_many"
    Options = ManyOptions
    builds = ({"version": "1"}, {"version": "2"}, {"version": "3"})

    @classmethod
    def dependency_reasons(cls, options: BackendOptions | None = None) -> list[Reason]:
        if isinstance(options, ManyOptions) and options.version == "3":
            return [Reason("toylib", "2", ">=3", "pip install toylib")]
        return []

    def _run(self, *args: Any) -> AttentionOutput:
        out = super()._run(*args)
        scale = 1.0 if self.options.version == "1" else 1.01  # type: ignore[attr-defined]
        return AttentionOutput(out.o * scale, out.lse)
