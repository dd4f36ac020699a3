"""The contract as something that can be run: an oracle, cases, checks, and two ways to run them.

``run_conformance(backend)`` tries every rule on a backend and returns a report. For pytest, derive
a class from ``BackendConformance`` and give it a ``backend``::

    import pytest
    from attn_backends.conformance import BackendConformance

    class TestMyBackend(BackendConformance):
        @pytest.fixture
        def backend(self):
            return MyBackend

Cases are skipped only for reasons that the backend itself gives, and every case skipped is called
all the same and must be refused. The core cannot be skipped. The suite has its own version,
``SUITE_VERSION``; a newer suite may fail a backend that an older one passed.
"""

from __future__ import annotations

from typing import Any

from .checks import CHECKS, REQUIREMENTS
from .report import SUITE_VERSION, Report, matrix
from .runner import ExpectedFailure, check_backend, read_expected_failures, run_conformance
from .target import ConformanceError


def __getattr__(name: str) -> Any:
    if name == "BackendConformance":  # the only name that needs pytest
        from .base import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CHECKS",
    "REQUIREMENTS",
    "SUITE_VERSION",
    "BackendConformance",
    "ConformanceError",
    "ExpectedFailure",
    "Report",
    "check_backend",
    "matrix",
    "read_expected_failures",
    "run_conformance",
]
