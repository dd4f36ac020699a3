"""The console script ``attn-backends``; each command is a module with ``NAME`` and ``command``.

A module with ``group`` in place of ``command`` has commands of its own.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from ..version import __version__

if TYPE_CHECKING:
    import typer

#: Modules of this package, in the order of the help text.
COMMANDS = (
    "list_backends",
    "doctor",
    "explain",
    "generate",
    "roofline",
    "conform",
    "bench",
    "tune",
)
_NEEDS = "attn-backends needs typer and rich: pip install 'attn-backends[cli]'"


def build_app() -> typer.Typer:
    """Assemble the commands."""
    import typer

    app = typer.Typer(
        name="attn-backends",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    show = typer.Option(False, "--version", is_eager=True, help="Show the version and exit.")

    def root(version: bool = show) -> None:
        if version:
            typer.echo(__version__)
            raise typer.Exit

    about = "Attention backends: which there are, whether they work, and which one is chosen."
    app.callback(help=about, invoke_without_command=True)(root)
    for name in COMMANDS:
        module: ModuleType = importlib.import_module(f"{__package__}.{name}")
        if hasattr(module, "group"):  # commands of its own
            app.add_typer(_unwrapped_group(module.group()), name=module.NAME)
            continue
        text = _unwrapped(module.command.__doc__)
        app.command(module.NAME, cls=getattr(module, "CLS", None), help=text)(module.command)
    return app


def _unwrapped_group(group: typer.Typer) -> typer.Typer:
    for info in group.registered_commands:
        info.help = _unwrapped(info.callback.__doc__ or "") if info.callback else None
    return group


def _unwrapped(document: str) -> str:
    """A docstring with each paragraph on one line, to be wrapped to the terminal's width."""
    paragraphs = inspect.cleandoc(document).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def main() -> None:
    """Run the command line; says what to install if typer or rich is missing."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except Exception as error:
        print(f"{_NEEDS} ({type(error).__name__}: {error})", file=sys.stderr)
        raise SystemExit(2) from error
    build_app()(prog_name="attn-backends")


__all__ = ["COMMANDS", "build_app", "main"]


if __name__ == "__main__":
    main()
