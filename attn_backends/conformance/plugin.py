r"""An opt-in pytest plugin: ``pytest -p attn_backends.conformance.plugin --attn-backend NAME``.

It adds options for the backend, level and device, a file of expected failures whose stale entries
fail the run, a header with versions and variables, and JSON and Markdown reports. With
``--attn-backend`` alone, and no test of your own, point pytest at
``attn_backends.conformance.suite``::

    pytest -p attn_backends.conformance.plugin --pyargs attn_backends.conformance.suite \
        --attn-backend torch_native
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ..version import __version__
from .checks import LEVELS
from .report import SUITE_VERSION, Report, Row, environment
from .runner import ExpectedFailure, read_expected_failures
from .target import Target

NAME = "attn_backends_conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The suite's options."""
    group = parser.getgroup("attn_backends conformance")
    group.addoption("--attn-backend", help="backend under test: a name, or module:Class")
    group.addoption("--attn-level", choices=LEVELS, default=None, help="smoke (default) or full")
    group.addoption("--attn-device", default=None, help="cpu or cuda; default: cuda if it is there")
    group.addoption("--attn-xfail", metavar="FILE", help="lines: backend requirement/case # reason")
    group.addoption("--attn-json", metavar="FOLDER", help="write conformance-<backend>.json here")
    group.addoption("--attn-markdown", metavar="FILE", help="write the report as Markdown here")


def pytest_configure(config: pytest.Config) -> None:
    """Start collecting results."""
    config.pluginmanager.register(Collector(config), NAME)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Versions and variables that results depend on."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    facts = environment(device)
    shown = [f"{k} {facts[k]}" for k in ("gpu", "driver", "torch", "triton", "commit") if facts[k]]
    names = sorted(n for n in os.environ if n.startswith(("ATTN_BACKENDS_", "TRITON_INTERPRET")))
    values = ", ".join(f"{n}={os.environ[n]}" for n in names) or "none set"
    return [
        f"attn_backends {__version__}, conformance suite {SUITE_VERSION}, {', '.join(shown)}",
        f"attn_backends variables: {values}",
    ]


class Collector:
    """Gathers rows by backend, and closes the run with reports and stale entries."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: dict[str, list[Row]] = {}
        self.targets: dict[str, Target] = {}
        self.failing: set[tuple[str, ExpectedFailure]] = set()
        self.known: dict[str, list[ExpectedFailure]] = {}
        self.stale: list[str] = []

    def expected_failures(self, backend: str) -> list[ExpectedFailure]:
        """Entries of ``--attn-xfail`` for a backend."""
        path = self.config.getoption("--attn-xfail")
        if backend not in self.known:
            self.known[backend] = read_expected_failures(path, backend) if path else []
        return self.known[backend]

    def record(self, target: Target, row: Row, entry: ExpectedFailure | None) -> None:
        """Take in one result."""
        name = target.backend.name
        self.targets[name] = target
        self.rows.setdefault(name, []).append(row)
        if entry is not None and row.status == "xfailed":
            self.failing.add((name, entry))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write reports; fail the run on stale entries, or if a backend was asked for in vain."""
        whole = not (self.config.option.keyword or self.config.option.markexpr)
        if whole:  # a selection of tests says nothing about the others' entries
            self.stale = [
                f"{name} {entry.pattern}"
                for name, entries in self.known.items()
                for entry in entries
                if (name, entry) not in self.failing
            ]
        reports = [self._report(name) for name in self.rows]
        if (folder := self.config.getoption("--attn-json")) is not None:
            for report in reports:
                report.write(folder)
        if (path := self.config.getoption("--attn-markdown")) is not None:
            Path(path).write_text("\n".join(r.to_markdown() for r in reports))
        nothing = self.config.getoption("--attn-backend") is not None and not self.rows
        if (self.stale or (nothing and whole)) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Counts by backend, and what is stale."""
        for name in self.rows:
            report = self._report(name)
            counts = json.dumps(report.counts())
            terminalreporter.write_line(f"conformance of {name}: {counts}")
        for entry in self.stale:
            terminalreporter.write_line(f"stale expected failure: {entry}", red=True)

    def _report(self, name: str) -> Report:
        target = self.targets[name]
        stale = [s.partition(" ")[2] for s in self.stale if s.startswith(f"{name} ")]
        level = self.config.getoption("--attn-level") or "smoke"
        return Report(
            backend=name,
            level=level,
            device=str(target.device),
            rows=tuple(self.rows[name]),
            stale=tuple(stale),
            meta=environment(target.device, target.backend),
            seconds=sum(r.seconds for r in self.rows[name]),
        )
