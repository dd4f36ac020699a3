"""What every command shares: output for people or programs, and errors with exit codes.

Exit codes: 0 is a good answer, 1 a bad one (a check failed, nothing fits), 2 a call that could
not be carried out (bad input, a missing package).
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import AttnBackendsError

EXIT_BAD_ANSWER = 1
EXIT_CANNOT_RUN = 2
#: Tables in a pipe are not folded to the 80 columns that rich would assume.
_PIPE_WIDTH = 200

Function = TypeVar("Function", bound=Callable[..., Any])
#: ``--json`` without a file, where one may be named: results go to standard output.
STDOUT = "-"
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


class MissingPackageError(AttnBackendsError, ImportError):
    """A package that a command needs is not installed."""


def stdout() -> Console:
    """Standard output; plain text unless it is a terminal."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Standard error, for progress and errors."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    terminal = bool(getattr(file, "isatty", lambda: False)())
    width = None if terminal or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(
        file=file, width=width, highlight=False, emoji=False, force_terminal=terminal, markup=False
    )


def print_json(data: Any) -> None:
    """Write ``data`` to standard output; NaN and infinities become null, which JSON has."""
    sys.stdout.write(json.dumps(_plain(data), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        items = sorted(data) if isinstance(data, (set, frozenset)) else data
        return [_plain(item) for item in items]
    if isinstance(data, float):
        return data if data == data and abs(data) != float("inf") else None
    if data is None or isinstance(data, (bool, int, str)):
        return data
    return str(data)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for people; long cells fold rather than vanish."""
    result = Table(title=title, title_justify="left", header_style="bold", title_style="bold")
    for column in columns:
        result.add_column(Text(column), overflow="fold")
    for row in rows:
        result.add_row(*(_cell(cell) for cell in row))
    return result


_STYLES = {"PASS": "green", "FAIL": "bold red", "yes": "green", "no": "yellow"}


def _cell(cell: str) -> Text:
    return Text(cell, style=_STYLES.get(cell, ""))


def guarded(function: Function) -> Function:
    """Turn this library's errors into a message and exit code 2; as JSON if that was asked for.

    A command asks for it by ``as_json``, or by ``results`` that go to standard output.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AttnBackendsError as error:
            fail(error, as_json=bool(kwargs.get("as_json")) or kwargs.get("results") == STDOUT)

    return wrapper  # type: ignore[return-value]


def fail(error: Exception, *, as_json: bool) -> NoReturn:
    """Report an error and leave with exit code 2."""
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": str(error)}})
    else:
        text = Text("error: ", style="bold red").append(str(error), style="not bold")
        stderr().print(text, soft_wrap=True)  # names and paths are not cut in two
    raise typer.Exit(EXIT_CANNOT_RUN)


__all__ = [
    "STDOUT",
    "EXIT_BAD_ANSWER",
    "EXIT_CANNOT_RUN",
    "JsonFlag",
    "MissingPackageError",
    "fail",
    "guarded",
    "print_json",
    "stderr",
    "stdout",
    "table",
]
