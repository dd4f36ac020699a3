"""The backend under test, bound to a device, and the one place where it is called."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from pydantic import ValidationError

from ..backend import AttentionBackend, BackendOptions
from ..errors import BackendUnavailableError, InvalidInputError, Reason
from ..output import AttentionOutput
from ..plan import Plan
from ..spec import AttentionSpec
from .cases import Base, Case, describe
from .inputs import Inputs, build
from .oracle import Extras, Sequence
from .tolerance import Expected, expect


class ConformanceError(AssertionError):
    """A backend broke a rule; the message says where and by how much."""


def resolve(backend: Any) -> type[AttentionBackend]:
    """The backend class behind a class, a ``"module:Class"`` string or a registered name.

    Raises:
        TypeError: It is neither a class of backends nor text.
        UnknownBackendError: No backend has the name.
        BackendUnavailableError: The module does not import, with its own message.
        InvalidInputError: What stands there is no class of backends.
    """
    if isinstance(backend, type) and issubclass(backend, AttentionBackend):
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend={backend!r} (allowed: a backend class, module:Class, or a name)")
    if ":" in backend:
        module, _, attribute = backend.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a stranger's module may raise anything
            text = f"backend={backend!r} does not load: {type(error).__name__}: {error}"
            raise BackendUnavailableError(text) from error
    else:
        from .. import registry

        found = registry.ATTENTION_BACKENDS[backend].load()
    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        allowed = "an AttentionBackend class"
        raise InvalidInputError.of("backend", repr(backend), allowed, f"it is {found!r}")
    return found


def read_options(backend: type[AttentionBackend], settings: Iterable[str]) -> BackendOptions | None:
    """The options that ``name=value`` settings choose, or None without any.

    Values are read as the option's own type: ``hopper=true``, ``num_splits=3``, ``version=2``.

    Raises:
        InvalidInputError: A setting has another form, or the options refuse it.
    """
    from ..registry.target import invalid_fields, option_from_text

    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals):
            raise InvalidInputError.of("option", repr(setting), "NAME=VALUE")
        values[name] = option_from_text(backend.Options, name, value)
    if not values:
        return None
    try:
        return backend.Options.model_validate(values, strict=True)
    except ValidationError as error:
        raise invalid_fields(error, "option", backend.Options) from None


class Target:
    """A backend class on a device.

    Args:
        backend: A class, ``"module:Class"``, or a registered name.
        device: Where calls run.
        options: The backend's options; None takes its defaults.
    """

    def __init__(
        self,
        backend: Any,
        device: torch.device | str = "cpu",
        options: BackendOptions | None = None,
    ) -> None:
        self.backend = resolve(backend)
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.options = options
        self.base = Base.of(self)
        self.results: dict[Case, AttentionOutput] = {}

    def reasons(self, spec: AttentionSpec, phase: str | None = None) -> list[Reason]:
        """The backend's own reasons against a call."""
        return self.backend.unsupported_reasons(spec, phase, self.device, self.options)

    def make(self, spec: AttentionSpec) -> AttentionBackend:
        """The backend bound to a spec."""
        return self.backend(spec, device=self.device, options=self.options)

    def inputs(self, case: Case, spec: AttentionSpec | None = None) -> Inputs:
        """The case's tensors, made anew."""
        return build(case, spec or case.spec(self.base), self.device)

    def call(
        self,
        inputs: Inputs,
        *,
        backend: AttentionBackend | None = None,
        plan: Plan | None = None,
        poisoned: bool = True,
    ) -> AttentionOutput:
        """One run; its outputs are NaN beforehand unless the backend is to allocate them."""
        backend = backend or self.make(inputs.spec)
        plan = plan or backend.plan(inputs.batch)
        out = nan_out(inputs) if poisoned else None
        return backend.run(inputs.q, inputs.k, inputs.v, plan, **inputs.kwargs, out=out)

    def result(self, case: Case) -> AttentionOutput:
        """The case's result, run once for all checks that look at it."""
        if case not in self.results:
            self.results[case] = self.call(self.inputs(case))
        return self.results[case]

    def expected(self, case: Case, spec: AttentionSpec | None = None) -> Expected:
        """The exact answer of a case, shared by all backends of the process."""
        spec = spec or case.spec(self.base)
        return _expected(case, spec, self.device, self._rounds_row_sum(spec))

    def expected_of(
        self, spec: AttentionSpec, sequences: list[Sequence], extras: Extras
    ) -> Expected:
        """The exact answer of data that no case describes."""
        return expect(spec, sequences, extras, rounds_row_sum=self._rounds_row_sum(spec))

    def _rounds_row_sum(self, spec: AttentionSpec) -> bool:
        if self.reasons(spec):
            return self.backend.capabilities.rounds_row_sum
        return self.make(spec).capabilities.rounds_row_sum


@lru_cache(maxsize=4096)
def _expected(
    case: Case, spec: AttentionSpec, device: torch.device, rounds_row_sum: bool
) -> Expected:
    inputs = build(case, spec, device)
    return expect(spec, inputs.sequences, inputs.extras, rounds_row_sum=rounds_row_sum)


def nan_out(inputs: Inputs) -> AttentionOutput:
    """Contiguous outputs for a call, full of NaN."""
    rows, spec = inputs.q.shape[0], inputs.spec
    o = torch.full((rows, spec.num_heads, spec.dv), float("nan"), dtype=spec.out_dtype)
    lse = torch.full((rows, spec.num_heads), float("nan"))
    return AttentionOutput(o.to(inputs.q.device), lse.to(inputs.q.device))


def require(condition: bool, message: str) -> None:
    """Raise ConformanceError unless the condition holds."""
    if not condition:
        raise ConformanceError(message)


def require_o(o: torch.Tensor, want: Expected, spec: AttentionSpec, *, slack: float = 0.0) -> None:
    """Require ``o`` to be within its bound, plus ``slack`` rounding steps."""
    require(o.dtype == spec.out_dtype, f"o is {o.dtype}, not {spec.out_dtype}")
    require(
        tuple(o.shape) == tuple(want.o.shape), f"o is {list(o.shape)}, not {list(want.o.shape)}"
    )
    bound = (want.o_tol + slack * want.step)[..., None].expand_as(want.o)
    require_close("o", "[token, head, lane]", o, want.o, bound)


def require_lse(lse: torch.Tensor, want: Expected, *, factor: float = 1.0) -> None:
    """Require ``lse`` to be float32, ``[T, H]`` and within ``factor`` times its bound."""
    require(lse.dtype == torch.float32, f"lse is {lse.dtype}, not torch.float32")
    shape = list(want.lse.shape)
    require(list(lse.shape) == shape, f"lse is {list(lse.shape)}, not {shape} = [tokens, heads]")
    require_close("lse", "[token, head]", lse, want.lse, factor * want.lse_tol)


def require_close(
    name: str, axes: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor
) -> None:
    """Require ``|got - want| <= bound`` everywhere; infinities must be equal, NaN is wrong."""
    if not want.numel():
        return
    got = got.to(want.dtype)
    error = torch.where(got == want, 0.0, (got - want).abs())
    bad = ~(error <= bound)  # true for NaN
    if not bool(bad.any()):
        return
    worst = torch.where(bad, (error / bound).nan_to_num(nan=float("inf")), -1.0).argmax()
    at = [int(i) for i in torch.unravel_index(worst, want.shape)]
    here = tuple(at)
    raise ConformanceError(
        f"{name}{axes} at {at}: got {float(got[here]):.6g}, want {float(want[here]):.6g} "
        f"+- {float(bound[here]):.2g}; {int(bad.sum())} of {want.numel()} numbers are off"
    )


def require_same_bits(what: str, got: AttentionOutput, want: AttentionOutput) -> None:
    """Require two results to be equal bit by bit; NaN equals NaN."""
    for name, a, b in (("o", got.o, want.o), ("lse", got.lse, want.lse)):
        require(
            a.shape == b.shape, f"{name} is {list(a.shape)} with {what}, {list(b.shape)} without"
        )
        equal = (a == b) | (a.isnan() & b.isnan())
        if not bool(equal.all()):
            at = [int(i) for i in (~equal).nonzero()[0]]
            here = tuple(at)
            raise ConformanceError(
                f"{name} changes with {what}: at {at} {float(a[here]):.9g} against "
                f"{float(b[here]):.9g}; {int((~equal).sum())} of {a.numel()} numbers differ"
            )


__all__ = [
    "ConformanceError",
    "Target",
    "describe",
    "nan_out",
    "read_options",
    "require",
    "require_close",
    "require_lse",
    "require_o",
    "require_same_bits",
    "resolve",
]
