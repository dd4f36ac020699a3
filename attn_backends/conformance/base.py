"""The pytest door: derive a class, give it a backend, and every rule becomes tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..backend import BackendOptions
from .checks import CHECKS
from .runner import ExpectedFailure, examine, settle
from .target import Target

DEFAULT_LEVEL = "smoke"
_targets: dict[tuple[Any, ...], Target] = {}


class BackendConformance:
    """Every rule of the contract, as tests of one backend.

    Derive a class whose name starts with Test and override the fixture ``backend``::

        class TestMyBackend(BackendConformance):
            @pytest.fixture
            def backend(self):
                return MyBackend

    Each test is a requirement on a case. It skips only if the backend refuses the case by its own
    ``unsupported_reasons`` and the call, made all the same, is refused; the reasons are the skip's
    message. The requirement ``core`` cannot be skipped.

    Attributes:
        level: ``smoke`` or ``full``; None takes ``--attn-level``, or ``smoke`` without the plugin.
        requirements: Restrict the class to these requirements; None is all.
    """

    level: str | None = None
    requirements: tuple[str, ...] | None = None

    @pytest.fixture
    def backend(self) -> Any:
        """The backend under test: a class, ``"module:Class"`` or a registered name."""
        raise NotImplementedError("override the fixture `backend` and return your backend class")

    @pytest.fixture
    def device(self, request: pytest.FixtureRequest) -> torch.device | str:
        """Where calls run: ``--attn-device``, else CUDA if the backend and the machine have it."""
        return request.config.getoption("--attn-device", None) or "auto"

    @pytest.fixture
    def options(self) -> BackendOptions | None:
        """Options of the backend; None takes its defaults."""
        return None

    @pytest.fixture
    def expected_failures(self) -> list[ExpectedFailure]:
        """Failures that are known; one that passes fails its test."""
        return []

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per requirement and case of the level."""
        if "conformance_case" not in metafunc.fixturenames:
            return
        level = self.level or metafunc.config.getoption("--attn-level", None) or DEFAULT_LEVEL
        pairs = [
            (check, case)
            for check in CHECKS
            if check.requirement in ("core", *(self.requirements or (check.requirement,)))
            for case in check.cases(level)
        ]
        ids = [f"{check.requirement}-{case.name}" for check, case in pairs]
        metafunc.parametrize("conformance_case", pairs, ids=ids)

    def test_conformance(
        self,
        conformance_case: Any,
        backend: Any,
        device: Any,
        options: BackendOptions | None,
        expected_failures: list[ExpectedFailure],
        request: pytest.FixtureRequest,
    ) -> None:
        """The backend keeps a requirement on a case."""
        check, case = conformance_case
        target = target_of(backend, device, options)
        if check.devices is not None and target.device.type not in check.devices:
            pytest.skip(f"the rule concerns {', '.join(check.devices)} only")
        plugin = request.config.pluginmanager.get_plugin("attn_backends_conformance")
        known = [*expected_failures]
        if plugin is not None:
            known += plugin.expected_failures(target.backend.name)
        row, entry = settle(examine(check, target, case), known)
        if plugin is not None:
            plugin.record(target, row, entry)
        if row.status == "refused":
            pytest.skip(row.detail)
        if row.status == "xfailed":
            pytest.xfail(row.detail)
        if row.status == "failed":
            pytest.fail(f"{check.rule}\n{row.spec}: {row.detail}", pytrace=False)
        if entry is not None and "*" not in entry.pattern and "?" not in entry.pattern:
            pytest.fail(f"expected to fail, but passes: {entry.pattern}", pytrace=False)


def target_of(backend: Any, device: Any, options: BackendOptions | None) -> Target:
    """The target of a backend, made once per device and options."""
    key = (backend, str(device), options)
    if key not in _targets:
        where = device
        if str(device) == "auto":
            probe = Target(backend, "cpu", options)
            cuda = torch.cuda.is_available() and "cuda" in probe.backend.capabilities.devices
            where = "cuda" if cuda else "cpu"
        _targets[key] = Target(backend, where, options)
    return _targets[key]


__all__ = ["BackendConformance"]
