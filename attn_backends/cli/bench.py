"""``attn-backends bench``: measure backends and other libraries against each other."""

from __future__ import annotations

import typer

from . import bench_compare
from .bench_attention import ABOUT, attention_command, host
from .bench_merge import cascade, merge
from .bench_options import BenchCommand

NAME = "bench"
_ABOUT = "Measure backends and other libraries against each other, or compare two measurements."


def group() -> typer.Typer:
    """The commands of ``bench``."""
    app = typer.Typer(help=_ABOUT, no_args_is_help=True)
    for name in ABOUT:
        app.command(name, cls=BenchCommand)(attention_command(name))
    for command in (merge, cascade, host):
        app.command(command.__name__, cls=BenchCommand)(command)
    app.command(bench_compare.NAME)(bench_compare.command)
    return app


__all__ = ["NAME", "group"]
