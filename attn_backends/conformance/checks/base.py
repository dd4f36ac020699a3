"""What a check is: a rule, a plain function that tries it, and the cases it is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cases import Case
from ..target import Target

LEVELS = ("smoke", "full")
CheckFunction = Callable[[Target, Case], None]


@dataclass(frozen=True)
class Check:
    """One rule of the contract, and how it is tried.

    Attributes:
        requirement: Short name of the rule; results are counted by it.
        function: Raises if the backend breaks the rule on a case.
        cases: The cases of a level.
        devices: Device types on which the rule can be tried; None is any.
        feature: Declared feature the rule is about, if the spec does not say so itself.
        refusable: Whether a backend may refuse the cases.
    """

    requirement: str
    function: CheckFunction
    cases: Callable[[str], list[Case]]
    devices: tuple[str, ...] | None = None
    feature: str | None = None
    refusable: bool = True

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.__name__

    @property
    def rule(self) -> str:
        """The rule in words."""
        return " ".join((self.function.__doc__ or "").split())


CHECKS: list[Check] = []


def check(
    requirement: str,
    cases: Callable[[str], list[Case]],
    *,
    devices: tuple[str, ...] | None = None,
    feature: str | None = None,
    refusable: bool = True,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as the check of a requirement; the function stays as it is."""

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS.append(Check(requirement, function, cases, devices, feature, refusable))
        return function

    return register


__all__ = ["CHECKS", "LEVELS", "Check", "check"]
