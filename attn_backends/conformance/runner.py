"""Trying checks on cases: passed, refused, failed; and what refusing takes."""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..backend import BackendOptions
from ..capacity import Capacity
from ..errors import InvalidInputError, Reason, UnsupportedCallError
from ..spec import AttentionSpec
from .cases import Case, describe
from .checks import CHECKS, LEVELS, REQUIREMENTS, Check
from .report import Report, Row, environment
from .target import ConformanceError, Target, require

GRAMMAR = re.compile(r"[^=\s][^=]*=.+ \(supported: .+\)(; .+)?", re.DOTALL)


def select_checks(requirements: Iterable[str] | None, device: torch.device) -> list[Check]:
    """The checks of these requirements (None: all) that can be tried on the device.

    Raises:
        InvalidInputError: A requirement does not exist.
    """
    wanted = set(REQUIREMENTS if requirements is None else requirements)
    unknown = sorted(wanted - set(REQUIREMENTS))
    if unknown:
        raise InvalidInputError.of("requirements", ", ".join(unknown), ", ".join(REQUIREMENTS))
    return [
        c
        for c in CHECKS
        if c.requirement in wanted and (c.devices is None or device.type in c.devices)
    ]


def examine(check: Check, target: Target, case: Case) -> Row:
    """Try one check on one case."""
    start = time.perf_counter()
    spec = case.spec(target.base)
    try:
        status, detail = _try(check, target, case, spec)
    except ConformanceError as error:
        status, detail = "failed", str(error)
    except Exception as error:
        status, detail = "failed", f"raised {type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return Row(check.requirement, case.name, describe(spec), status, detail, seconds)


def _try(check: Check, target: Target, case: Case, spec: AttentionSpec) -> tuple[str, str]:
    if check.refusable:
        reasons = target.reasons(spec, case.phase)
        if reasons:
            require_refusal(target, case, spec, reasons)
            return "refused", "; ".join(map(str, reasons))
        feature = check.feature
        if feature is not None and feature not in target.make(spec).capabilities.features:
            return "refused", _require_feature_refusal(target, case, spec, feature)
    try:
        check.function(target, case)
    except UnsupportedCallError as error:
        if not check.refusable or not _about_the_batch(error.reasons):
            raise ConformanceError(
                f"unsupported_reasons has nothing against the call, yet it is refused: {error}"
            ) from error
        return "refused", "; ".join(map(str, error.reasons))
    return "passed", ""


def require_refusal(target: Target, case: Case, spec: AttentionSpec, reasons: list[Reason]) -> None:
    """Require that a call with reasons against it, when made all the same, is refused with them."""
    for reason in reasons:
        require(isinstance(reason, Reason), f"a reason is a {type(reason).__name__}: {reason!r}")
        fits = GRAMMAR.fullmatch(str(reason)) is not None
        require(fits, f"not of the form <argument>=<got> (supported: <want>)[; <fix>]: {reason}")
    always = target.reasons(spec)
    try:
        backend = target.make(spec)
        inputs = target.inputs(case, spec)  # only a phase is against it: then the call must refuse
        backend.run(inputs.q, inputs.k, inputs.v, backend.plan(inputs.batch), **inputs.kwargs)
    except UnsupportedCallError as error:
        require(bool(error.reasons), f"the refusal carries no reasons: {error}")
        missing = [r for r in always if str(r) not in str(error)]
        require(not missing, f"the refusal leaves out: {'; '.join(map(str, missing))}")
        return
    except Exception as error:
        raise ConformanceError(
            f"claims not to support the call ({_join(reasons)}), yet raised "
            f"{type(error).__name__} instead of UnsupportedCallError: {error}"
        ) from error
    raise ConformanceError(f"claims not to support the call ({_join(reasons)}), yet runs it")


def _require_feature_refusal(target: Target, case: Case, spec: AttentionSpec, feature: str) -> str:
    """CUDA graphs are no part of a spec: without the feature, a capacity must be refused."""
    assert feature == "cuda_graph", feature
    inputs = target.inputs(case)
    longest = max(case.kv_lens, default=0)
    pages = 0 if spec.page_size is None else -(-longest // spec.page_size)
    capacity = Capacity(
        num_seqs=max(1, len(case.q_lens)),
        total_q=max(1, sum(case.q_lens)),
        max_seqlen_q=max(1, *case.q_lens),
        max_seqlen_k=longest,
        max_pages=pages,
    )
    try:
        target.make(spec).plan(inputs.batch, capacity)
    except UnsupportedCallError as error:
        require(bool(error.reasons), f"the refusal carries no reasons: {error}")
        return _join(error.reasons)
    raise ConformanceError(f"does not declare {feature}, yet plans with a capacity")


def _about_the_batch(reasons: Iterable[Reason]) -> bool:
    """Whether reasons given by ``plan`` are about the batch, which a spec cannot tell.

    What is about the spec must be said by ``unsupported_reasons``.
    """
    reasons = tuple(reasons)
    fields = set(AttentionSpec.__match_args__)
    return bool(reasons) and all(not fields & set(r.argument.split("/")) for r in reasons)


def _join(reasons: Iterable[Reason]) -> str:
    return "; ".join(map(str, reasons))


@dataclass(frozen=True)
class ExpectedFailure:
    """A failure that is known, with its reason.

    Attributes:
        pattern: ``requirement/case``, with ``*`` and ``?``.
        reason: Why it fails.
    """

    pattern: str
    reason: str

    def covers(self, row: Row) -> bool:
        """Whether this is about the row.

        Args:
            row: A check on a case.

        Returns:
            Whether the pattern matches its requirement and case.
        """
        return fnmatch.fnmatchcase(f"{row.requirement}/{row.case}", self.pattern)


def read_expected_failures(path: str | Path, backend: str) -> list[ExpectedFailure]:
    """Read a file of lines ``<backend> <requirement>/<case>  # <reason>``.

    Args:
        path: The file; empty lines and lines that start with # are skipped.
        backend: Only lines for this backend's name are returned.

    Returns:
        The failures, in the order of the file.

    Raises:
        InvalidInputError: A line has another form, or no reason.
    """
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        text, _, reason = line.partition("#")
        if not text.strip():
            continue
        words = text.split()
        if len(words) != 2 or "/" not in words[1] or not reason.strip():
            form = "<backend> <requirement>/<case>  # <reason>"
            raise InvalidInputError.of(f"{path}:{number}", repr(line), form)
        if words[0] == backend:
            found.append(ExpectedFailure(words[1], reason.strip()))
    return found


def settle(row: Row, expected: Iterable[ExpectedFailure]) -> tuple[Row, ExpectedFailure | None]:
    """The row in the light of expected failures, and the one that is about it.

    A failure that was expected counts as ``xfailed``. The core cannot be excused.
    """
    entry = next((e for e in expected if e.covers(row)), None)
    if entry is None or row.status != "failed" or row.requirement == "core":
        return row, entry
    return replace(row, status="xfailed", detail=f"{entry.reason} [{row.detail}]"), entry


#: Cases that a process of a parallel run takes at a time.
CHUNK = 4


def _work(
    level: str, device: torch.device, requirements: frozenset[str] | None
) -> list[tuple[Check, Case]]:
    checks = select_checks(requirements, device)
    return [(check, case) for check in checks for case in check.cases(level)]


@lru_cache(maxsize=1)
def _here(
    backend: Any, level: str, device: str, options: str | None,
    requirements: frozenset[str] | None,
) -> tuple[Target, list[tuple[Check, Case]]]:  # fmt: skip
    """What a process of a parallel run builds once."""
    target = Target(backend, device)
    if options is not None:
        chosen = target.backend.Options.model_validate_json(options)
        target = Target(backend, device, chosen)
    return target, _work(level, target.device, requirements)


def _examine_some(arguments: tuple[Any, ...], indices: range) -> list[tuple[int, Row]]:
    target, work = _here(*arguments)
    return [(n, examine(work[n][0], target, work[n][1])) for n in indices]


def _examine_parallel(
    arguments: tuple[Any, ...], count: int, jobs: int
) -> Iterator[tuple[int, Row]]:
    """Rows as they are done. Processes are spawned: a forked one could not use CUDA.

    They share the processor: what is expected is computed there, and with all threads in each
    process they would mostly wait for one another.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool:
        chunks = [range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
        for future in as_completed([pool.submit(_examine_some, arguments, c) for c in chunks]):
            yield from future.result()


def run_conformance(
    backend: Any,
    level: str = "smoke",
    *,
    device: torch.device | str = "cpu",
    options: BackendOptions | None = None,
    requirements: Iterable[str] | None = None,
    expected_failures: Iterable[ExpectedFailure] = (),
    progress: Callable[[int, int, Row], None] | None = None,
    jobs: int = 1,
) -> Report:
    """Try every rule of the contract on a backend.

    Args:
        backend: A class, ``"module:Class"``, or a registered name.
        level: ``"smoke"`` (about a minute in an interpreter) or ``"full"`` (the whole grid).
        device: Where calls run.
        options: The backend's options; None takes its defaults.
        requirements: Names from ``REQUIREMENTS``; None is all. The core is always tried.
        expected_failures: Known failures; one that no longer fails makes the report fail.
        progress: Called after each case with (number done, number of all, its row).
        jobs: Processes, which share the device. Beyond 1 the backend must be importable by its
            name in a new process, and a script must guard its entry by ``__name__``.

    Returns:
        The report; ``report.ok`` is the verdict.

    Raises:
        InvalidInputError: The level, a requirement or the number of jobs does not exist.
    """
    if jobs < 1:
        raise InvalidInputError.of("jobs", jobs, "1 or more")
    if level not in LEVELS:
        raise InvalidInputError.of("level", repr(level), ", ".join(LEVELS))
    target = Target(backend, device, options)
    wanted = None if requirements is None else {"core", *requirements}
    names = None if wanted is None else frozenset(wanted)
    work = _work(level, target.device, names)
    expected = list(expected_failures)
    rows: list[Row | None] = [None] * len(work)
    failing: set[ExpectedFailure] = set()
    start = time.perf_counter()
    found: Iterable[tuple[int, Row]]
    if jobs > 1:
        plain = None if options is None else options.model_dump_json()
        arguments = (backend, level, str(target.device), plain, names)
        found = _examine_parallel(arguments, len(work), jobs)
    else:
        found = ((n, examine(check, target, case)) for n, (check, case) in enumerate(work))
    for done, (n, row) in enumerate(found, start=1):
        row, entry = settle(row, expected)
        rows[n] = row
        if entry is not None and row.status == "xfailed":
            failing.add(entry)
        if progress is not None:
            progress(done, len(work), row)
    seconds = time.perf_counter() - start
    stale = tuple(e.pattern for e in expected if e not in failing)
    return Report(
        backend=target.backend.name,
        level=level,
        device=str(target.device),
        rows=tuple(row for row in rows if row is not None),
        stale=stale,
        meta=environment(target.device, target.backend, options),
        seconds=seconds,
        options={} if options is None else options.model_dump(mode="json", exclude_unset=True),
    )


def check_backend(backend: Any, **kwargs: Any) -> Report:
    """``run_conformance``, raising an error unless the backend conforms.

    Args:
        backend: A class, ``"module:Class"``, or a registered name.
        **kwargs: As ``run_conformance``.

    Returns:
        The report of a backend that conforms.

    Raises:
        ConformanceError: It does not; the message is the report's summary.
    """
    report = run_conformance(backend, **kwargs)
    if not report.ok:
        raise ConformanceError(report.summary())
    return report


__all__ = [
    "ExpectedFailure",
    "check_backend",
    "examine",
    "read_expected_failures",
    "require_refusal",
    "run_conformance",
    "select_checks",
    "settle",
]
