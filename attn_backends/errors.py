"""The errors of the library, and the grammar in which refusals are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One reason against a call, in a fixed grammar.

    ``str(reason)`` reads ``<argument>=<got> (supported: <want>)[; <fix>]``, for example
    ``page_size=16 (supported: multiples of 256)``.

    Attributes:
        argument: Name of the argument, spec field or package that is at fault.
        got: What was given.
        want: What is accepted instead.
        fix: Optionally, what the user can do about it.
    """

    argument: str
    got: str
    want: str
    fix: str | None = None

    def __str__(self) -> str:
        text = f"{self.argument}={self.got} (supported: {self.want})"
        return f"{text}; {self.fix}" if self.fix else text


class AttnBackendsError(Exception):
    """Base class of every error that this library raises on purpose."""


class UnknownBackendError(AttnBackendsError, LookupError):
    """A backend name that no registration answers to."""


class BackendUnavailableError(AttnBackendsError, RuntimeError):
    """A known backend whose package, plugin or device is missing or broken here."""


class UnsupportedCallError(AttnBackendsError, NotImplementedError):
    """A call that a backend cannot do.

    Attributes:
        backend: Name of the backend that refuses.
        reasons: Every reason against the call.
    """

    def __init__(self, message: str, *, backend: str = "", reasons: Sequence[Reason] = ()) -> None:
        super().__init__(message)
        self.backend = backend
        self.reasons = tuple(reasons)


class InvalidInputError(AttnBackendsError, ValueError):
    """An input no backend accepts; the message names field, value and allowed range."""

    @classmethod
    def of(
        cls, field: str, value: object, allowed: str, fix: str | None = None
    ) -> InvalidInputError:
        """Write the error in the grammar ``<field>=<value> (allowed: <allowed>)[; <fix>]``.

        Args:
            field: Name of the argument, field or setting.
            value: What it was.
            allowed: What it may be.
            fix: What the caller can do about it, if that does not follow.

        Returns:
            The error, to be raised.
        """
        text = f"{field}={value} (allowed: {allowed})"
        return cls(f"{text}; {fix}" if fix else text)


__all__ = [
    "AttnBackendsError",
    "BackendUnavailableError",
    "InvalidInputError",
    "Reason",
    "UnknownBackendError",
    "UnsupportedCallError",
]
