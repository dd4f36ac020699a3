"""A progress bar on standard error; nothing where that is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .console import stderr

Step = Callable[[str | None], None]


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Step]:
    """Show how many of ``total`` steps are done, with elapsed time and an estimate of the rest.

    Args:
        what: Name of the work.
        total: Number of steps.

    Yields:
        ``step(text)``: with a text it says what comes next, with None that a step is done.
    """
    console = stderr()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)

        def step(text: str | None) -> None:
            if text is None:
                bar.advance(task)
            else:
                bar.update(task, description=f"{what} {text}")

        yield step


__all__ = ["Step", "progress_bar"]
