"""Public names have docstrings that tell everything, and stand in the reference."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from doc_strings import gaps

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "\n".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md"))
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)\n((?:   .*\n)*)", re.MULTILINE)


def packages() -> list[str]:
    import attn_backends.engines

    engines = [m.name for m in pkgutil.iter_modules(attn_backends.engines.__path__) if m.ispkg]
    names = ["", ".merge", ".registry", ".conformance", ".conformance.checks"]
    return ["attn_backends" + name for name in (*names, *(f".engines.{e}" for e in engines))]


def public() -> dict[str, Any]:
    """Every public name, by the shortest path to it."""
    found: dict[str, Any] = {}
    known: list[Any] = []
    for package in packages():
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not any(value is other for other in known):
                known.append(value)
                found[f"{package}.{name}"] = value
    return found


def documented() -> dict[str, Any]:
    """Every object that the reference describes, by the path it is described under."""
    found: dict[str, Any] = {}
    for kind, path, options in DIRECTIVE.findall(REFERENCE):
        if kind == "module":
            module = importlib.import_module(path)
            names = module.__all__ if re.search("^ +:members:", options, re.MULTILINE) else ()
            found |= {f"{path}.{name}": getattr(module, name) for name in names}
            continue
        owner, _, name = path.rpartition(".")
        found[path] = getattr(importlib.import_module(owner), name)
    return found


PUBLIC = public()
#: The suite's own machinery: pytest calls these, and checks share one signature by design.
UNIFORM = ("attn_backends.conformance.checks.", "attn_backends.conformance.BackendConformance")


def test_every_public_name_is_in_the_reference() -> None:
    described = list(documented().values())
    missing = [n for n, v in PUBLIC.items() if not any(v is d for d in described)]
    suite = "attn_backends.conformance.checks"
    hidden = {"attn_backends.__version__", f"{suite}.LEVELS", f"{suite}.Check", f"{suite}.check"}
    assert set(missing) <= hidden, "add them to docs/reference"


def test_every_backend_is_in_the_reference_with_its_options() -> None:
    from attn_backends.backend import BackendOptions
    from attn_backends.registry.builtin import builtin_entries

    described = list(documented().values())
    for name, entry in builtin_entries().items():
        target = entry.load()
        assert f"\n## {name}\n" in REFERENCE
        assert target.__doc__ and target.Options.__doc__  # methods are those of the contract
        assert target.Options is BackendOptions or gaps(name, target.Options) == []
        for value in (target, target.Options):
            assert value is BackendOptions or any(value is d for d in described), value


def described_names() -> list[str]:
    extra = [n for n in documented() if ".adapters." not in n and "_native." not in n]
    return [n for n in dict.fromkeys((*PUBLIC, *extra)) if not n.startswith(UNIFORM)]


@pytest.mark.parametrize("name", described_names())
def test_docstring_tells_of_parameters_results_shapes_and_errors(name: str) -> None:
    assert gaps(name, {**PUBLIC, **documented()}[name]) == []


@pytest.mark.parametrize("name", [n for n in PUBLIC if n.startswith(UNIFORM) and ".check_" in n])
def test_every_check_states_its_rule(name: str) -> None:
    assert len((PUBLIC[name].__doc__ or "").strip()) > 20


def test_a_gap_is_found() -> None:
    import attn_backends as ab

    class Half:
        """A class whose members tell little."""

        def of(self, x: ab.AttentionOutput, lse: "torch.Tensor") -> int:  # noqa: F821
            """Do something.

            Args:
                lse: Log of mass.
            """
            raise ab.InvalidInputError.of("x", x, "nothing")

    found = gaps("Half", Half)
    assert found == [
        "Half.of: Args does not tell of x", "Half.of: no shape for lse", "Half.of: no Returns",
        "Half.of: Raises does not tell of InvalidInputError",
    ]  # fmt: skip


def test_the_page_shows_the_shipped_order_and_which_of_it_was_measured() -> None:
    from attn_backends.registry.ranking import SHIPPED, source_of

    page = (ROOT / "docs/reference/choosing.md").read_text()
    shown = page.split("<!-- rankings: registry.ranking.SHIPPED -->")[1]
    rows = shown.split("<!-- end of rankings -->")[0].strip().splitlines()[2:]
    want = [
        f"| {device} | {phase} | {', '.join(f'`{name}`' for name in order)} | {source_of(device)} |"
        for device, phases in SHIPPED.items()
        for phase, order in phases.items()
    ]
    assert rows == want, "\n".join(["the table should be:", *want])
