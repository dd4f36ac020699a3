"""Commands in the documents run, or at least exist with the options they are shown with."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from doc_pages import PAGES, ROOT, blocks, name_of

#: Cheap here: no download, no GPU.
RUN = {"list", "doctor", "explain", "roofline"}
#: Programs of others, whose options are theirs.
FOREIGN = {"compute-sanitizer", "git", "cd", "export", "nsys", "ncu", "vllm", "uv", "curl"}


def commands(page: Path) -> list[list[str]]:
    """Words of every command line; unlabelled blocks may hold other text."""
    found = []
    for language in ("sh", "bash", "console", ""):
        for body in blocks(page, language):
            for line in body.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]  # variables before a command
                if words and (language or words[0] == "attn-backends"):
                    found.append(words)
    return found


ALL = [(page, words) for page in PAGES for words in commands(page)]
OURS = list(dict.fromkeys(tuple(w[1:]) for _, w in ALL if w[0] == "attn-backends" and w[1:]))
MODULES = list(
    dict.fromkeys(
        tuple(w[2:])
        for _, w in ALL
        if re.match(r"python3?$", w[0]) and w[1] == "-m" and w[2].startswith("attn_backends.")
    )
)


def test_commands_are_found() -> None:
    assert len(OURS) >= 7


def resolve(arguments: tuple[str, ...]):
    """The command that a line names, entered with its options but not run."""
    import typer

    from attn_backends.cli.app import build_app

    command, name, rest = typer.main.get_command(build_app()), "attn-backends", list(arguments)
    context = None
    while True:
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "resolve_command"):
            return command
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        name, command, rest = command.resolve_command(context, rest)


@pytest.mark.parametrize("arguments", OURS, ids=" ".join)
def test_command_line_exists_with_its_options(arguments: tuple[str, ...]) -> None:
    assert resolve(tuple(a.replace("BACKEND", "triton") for a in arguments)) is not None


@pytest.mark.parametrize("arguments", [a for a in OURS if a[0] in RUN], ids=" ".join)
def test_cheap_command_runs(arguments: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    from typer.testing import CliRunner

    from attn_backends.cli.app import build_app

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build_app(), list(arguments))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("arguments", MODULES, ids=" ".join)
def test_module_exists_with_its_options(arguments: tuple[str, ...], monkeypatch) -> None:
    module, *rest = arguments
    assert importlib.util.find_spec(module) is not None
    options = [a.split("=")[0] for a in rest if a.startswith("--") and a != "--"]
    if not options:
        return
    words = [a for a in rest[:1] if not a.startswith("-") and module.endswith(".attention")]
    monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said), pytest.raises(SystemExit):
        runpy.run_module(module, run_name="__main__")
    for option in options:
        assert option in said.getvalue(), f"{module} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_other_line_names_something_that_is_there(page: Path) -> None:
    makefile, project = (ROOT / n for n in ("Makefile", "pyproject.toml"))
    for words in commands(page):
        program, *rest = words
        if program == "make":
            targets = [w for w in rest if "=" not in w]
            for target in targets:
                assert re.search(rf"^{target}:", makefile.read_text(), re.MULTILINE), words
        elif program == "pip" or words[:3] == ["python", "-m", "pip"]:
            for extras in re.findall(r"attn-backends\[([\w,-]+)\]", " ".join(words)):
                for extra in extras.split(","):
                    assert re.search(rf"^{extra} = \[", project.read_text(), re.MULTILINE), words
        elif re.match(r"python3?$", program):
            script = rest[0]
            assert script == "-m" or script == "-c" or (ROOT / script).exists(), words
        elif program != "attn-backends":
            assert program in FOREIGN, f"{page.name}: {' '.join(words)}"
