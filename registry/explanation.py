"""``explain``: what ``select`` would choose, who decided, and what stands against the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..capabilities import PHASES
from ..config import AttentionConfig
from ..errors import AttnBackendsError, InvalidInputError, Reason
from ..spec import AttentionSpec
from .layers import Settings, resolve
from .ranking import ranking
from .registry import AUTO, known_names, lookup
from .selection import check_call, choose, demanded, policy_reasons
from .target import RaisedReason, judge, parse_options
from .tuning import TuningRow


@dataclass(frozen=True)
class PhaseChoice:
    """The choice for one phase.

    Attributes:
        phase: ``"prefill"`` or ``"decode"``.
        name: The backend that would be used; None if the call would be refused.
        layer: Who decides: argument, context, config, environment, or auto.
        setting: The deciding setting, as the user would write it; empty if there is none.
        ranking: Under ``auto``, the order followed: a measured row or the shipped ranking.
        error: Why the call would be refused; None if it would not.
        rejected: Every backend that is not chosen, with all its reasons.
        measured: Under ``auto``, the row of the tuning file that is followed, with its batches;
            None without one.
        kernels: Which of its kernels the chosen backend would use, in its own words.
    """

    phase: str
    name: str | None
    layer: str
    setting: str
    ranking: str | None
    error: str | None
    rejected: Mapping[str, tuple[Reason, ...]]
    measured: TuningRow | None = None
    kernels: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "phase": self.phase,
            "name": self.name,
            "kernels": list(self.kernels),
            "layer": self.layer,
            "setting": self.setting,
            "ranking": self.ranking,
            "error": self.error,
            "rejected": {name: [str(r) for r in rs] for name, rs in self.rejected.items()},
            "measured": None if self.measured is None else self.measured.model_dump(),
        }

    def __str__(self) -> str:
        lines = [f"{self.phase}: {self.name or 'refused'} (chosen by {self.layer}"]
        lines[0] += f": {self.setting})" if self.setting else ")"
        lines += [f"  by: {kernel}" for kernel in self.kernels]
        if self.ranking is not None:
            lines.append(f"  order: {self.ranking}")
        for point in () if self.measured is None else self.measured.points:
            times = ", ".join(f"{n} {t:g} us" for n, t in point.median_us.items())
            lines.append(f"    {point.batch} x {point.q_len} over {point.kv_len}: {times}")
        if self.error is not None:
            lines += [f"  error: {self.error}"]
        for name, reasons in self.rejected.items():
            lines.append(f"  not {name}:")
            lines += [f"    {reason}" for reason in reasons]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The choice for each phase that was asked about.

    Attributes:
        spec: The spec.
        device: The device.
        choices: One for each phase.
    """

    spec: AttentionSpec
    device: torch.device
    choices: tuple[PhaseChoice, ...]

    def __getitem__(self, phase: str) -> PhaseChoice:
        for choice in self.choices:
            if choice.phase == phase:
                return choice
        raise InvalidInputError.of("phase", repr(phase), ", ".join(c.phase for c in self.choices))

    @property
    def _only(self) -> PhaseChoice:
        if len(self.choices) > 1:
            fix = "ask explain() about one phase, or index the explanation by phase"
            raise InvalidInputError.of("phase", "both", "prefill, decode", fix)
        return self.choices[0]

    @property
    def name(self) -> str | None:
        """The backend chosen, if one phase was asked about."""
        return self._only.name

    @property
    def layer(self) -> str:
        """Who decided, if one phase was asked about."""
        return self._only.layer

    @property
    def rejected(self) -> Mapping[str, tuple[Reason, ...]]:
        """The backends not chosen with their reasons, if one phase was asked about."""
        return self._only.rejected

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "spec": str(self.spec),
            "device": str(self.device),
            "phases": {choice.phase: choice.to_dict() for choice in self.choices},
        }

    def __str__(self) -> str:
        return "\n".join([f"{self.spec} on {self.device}", *map(str, self.choices)])


def explain(
    spec: AttentionSpec,
    *,
    phase: str | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    config: AttentionConfig | None = None,
) -> Explanation:
    """Say what ``select`` would do with the same arguments, and ask every backend why not.

    Unlike ``select`` it loads every backend, so optional packages are imported.

    Args:
        spec: What the layer fixes.
        phase: ``"prefill"``, ``"decode"``, or None for both.
        device: As ``select``.
        backend: As ``select``.
        config: As ``select``.

    Returns:
        For each phase the choice, who made it, and every reason against the other backends;
        ``print`` shows all of it, ``to_dict`` gives it to programs.

    Raises:
        UnknownBackendError: A setting names a backend that does not exist.
        InvalidInputError: An argument, option or setting is malformed.
    """
    phases = PHASES if phase is None else (phase,)
    where = check_call(spec, phases[0], device)
    choices = tuple(_explain(spec, p, where, resolve(p, backend, config)) for p in phases)
    return Explanation(spec, where, choices)


def _explain(
    spec: AttentionSpec, phase: str, device: torch.device, settings: Settings
) -> PhaseChoice:
    name = error = None
    try:
        name = choose(spec, phase, device, settings).name
    except InvalidInputError:
        raise
    except AttnBackendsError as refusal:
        error = str(refusal)
    order = None
    if settings.name == AUTO:
        order = ranking(demanded(spec, settings), phase, device, settings.tuning_file)
    rejected: dict[str, tuple[Reason, ...]] = {}
    for other in known_names() if order is None else order:
        if other == name:
            continue
        entry = lookup(other)
        reasons = policy_reasons(other, settings)
        if settings.deny is None or other not in settings.deny[0]:  # the denied are not loaded
            options = settings.options.get(other)
            reasons += judge(entry, demanded(spec, settings), phase, device, options).reasons
        if not reasons and order is None:  # able, but another was asked for by name
            fix = f"chosen by {settings.setting}"
            reasons = (Reason("backend", other, settings.name, fix),)
        elif not reasons and order is not None and name is not None:
            reasons = (order.not_first(other, name),)
        rejected[other] = reasons
    kernels: list[str] = []
    if name is not None:
        options = settings.options.get(name)
        able = getattr(lookup(name).load(), "kernels", None)  # factories have none
        kernels = _kernels(able, demanded(spec, settings), phase, device, _parsed(name, options))
    return PhaseChoice(
        phase=phase,
        name=name,
        layer=settings.layer,
        setting=settings.setting,
        ranking=None if order is None else order.source,
        error=error,
        rejected=rejected,
        measured=None if order is None else order.row,
        kernels=tuple(kernels),
    )


def _kernels(
    able: Any, spec: AttentionSpec, phase: str, device: torch.device, options: Any
) -> list[str]:
    if able is None:
        return []
    try:
        return list(able(spec, phase, device, options))
    except Exception as error:  # words of a stranger's backend; the choice stands without them
        return [str(RaisedReason.of(error, "kernels"))]


def _parsed(name: str, values: Mapping[str, Any] | None) -> Any:
    return parse_options(lookup(name), values) if values else None


__all__ = ["Explanation", "PhaseChoice", "explain"]
