"""How SGLang learns of the plug, and how the configuration reaches it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import attn_backends as ab
from attn_backends.engines.sglang import NAME, register
from attn_backends.engines.sglang.registration import create
from attn_backends.errors import BackendUnavailableError

ROOT = Path(__file__).resolve().parents[3]


def homes() -> list:
    """The modules of this SGLang that have the lists of choices, the newest home first."""
    found = []
    for name in ("sglang.srt.arg_groups.choices", "sglang.srt.server_args"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "ATTENTION_BACKEND_CHOICES"):
            found.append(module)
    return found


@pytest.fixture
def tables(sglang):
    """SGLang's registry and its lists of choices, as they were before."""
    from sglang.srt.layers.attention import attention_registry

    choices = homes()[0]
    lists = (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    )
    kept = [list(names) for names in lists]
    table = attention_registry.ATTENTION_BACKENDS
    before = dict(table)
    table.pop(NAME, None)
    yield (table, *lists)
    for names, old in zip(lists, kept):
        names[:] = old
    table.clear()
    table.update(before)


def test_registering_adds_the_factory_and_the_choice(tables) -> None:
    table, names, deterministic = tables
    register()
    assert table[NAME] is create
    assert names.count(NAME) == deterministic.count(NAME) == 1


def test_registering_again_changes_nothing(tables) -> None:
    table, names, deterministic = tables
    register()
    register()
    assert table[NAME] is create
    assert names.count(NAME) == deterministic.count(NAME) == 1


def test_the_name_is_none_of_the_engines_own(tables) -> None:
    table, names, _ = tables
    assert NAME not in table
    assert not [known for known in names if known != NAME and (known in NAME or NAME in known)]


def test_a_name_that_somebody_else_holds_is_left_to_them(tables) -> None:
    table, _, _ = tables
    table[NAME] = other = print
    with pytest.raises(BackendUnavailableError, match="already belongs to"):
        register()
    assert table[NAME] is other


def test_another_registry_is_told_apart(tables, monkeypatch) -> None:
    for module in homes():
        monkeypatch.delattr(module, "add_attention_backend_choices")
    with pytest.raises(BackendUnavailableError, match=r"supported: 0\.5\.17 to 0\.5\.23"):
        register()
    assert NAME not in tables[0]


def test_without_the_engine_the_error_says_so(monkeypatch) -> None:
    for name in [n for n in sys.modules if n == "sglang" or n.startswith("sglang.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(BackendUnavailableError, match="sglang="):
        register()


def test_importing_the_plug_imports_neither_engine_nor_kernels() -> None:
    code = (
        "import sys\n"
        "import attn_backends.engines.sglang\n"
        "heavy = {'sglang', 'triton', 'flashinfer', 'flash_attn', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "import torch; print(torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split("\n")[:2] == ["[]", "False"], done.stderr


def test_the_entry_point_leads_to_register() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (group,) = [part for part in text.split("\n[") if part.startswith("project.entry-points.")
                and "sglang.srt.plugins" in part]  # fmt: skip
    assert 'attn_backends = "attn_backends.engines.sglang:register"' in group


def names_of(server) -> set[str]:
    return {backend.name for backend, _ in server.backend.forward_metadata.plans.values()}


def test_prefill_and_decode_take_their_backends_from_the_environment(serve, monkeypatch) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_PREFILL", "torch_native")
    monkeypatch.setenv("ATTN_BACKENDS_DECODE", "triton")
    server = serve(page_size=16, heads=2, kv_heads=1)
    server.step("EXTEND", {"a": 9})
    assert names_of(server) == {"torch_native"}
    server.step("DECODE", {"a": 1})
    assert names_of(server) == {"triton"}
    server.step("MIXED", {"a": 1, "b": 4})
    assert names_of(server) == {"torch_native"}


def test_a_configuration_file_reaches_the_backend(serve, monkeypatch, tmp_path) -> None:
    file = tmp_path / "attention.yaml"
    text = "decode: triton\nprefill: torch_native\noptions:\n  triton:\n    num_splits: 3\n"
    file.write_text(text)
    monkeypatch.setenv("ATTN_BACKENDS_CONFIG", str(file))
    server = serve(page_size=16, heads=2, kv_heads=1)
    server.step("EXTEND", {"a": 40})
    server.step("DECODE", {"a": 1})
    ((backend, _),) = server.backend.forward_metadata.plans.values()
    assert backend.name == "triton" and backend.options.num_splits == 3


def test_a_context_goes_before_the_environment(serve, monkeypatch) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_BACKEND", "triton")
    with ab.use("torch_native"):
        server = serve()
        server.step("EXTEND", {"a": 3})
        assert names_of(server) == {"torch_native"}
