"""Backends of other distributions, found through entry points."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attn_backends as ab
from attn_backends.registry.registry import TABLE

CODE = '''
from attn_backends import register_attention_backend
from attn_backends.torch_native.backend import TorchNativeBackend

class Good(TorchNativeBackend):
    """Comes from a plugin."""
    name = "toy_plugin"
'''
ENTRY_POINTS = """[attn_backends.backends]
toy_plugin = toy_module:Good
toy_broken = toy_broken_module:Backend
toy_missing = toy_module:NoSuchClass
toy_wrong = toy_module:CODE_IS_NOT_A_CLASS
torch_native = toy_module:Good
Bad-Name = toy_module:Good
"""


def write_distribution(folder: Path, entry_points: str = ENTRY_POINTS) -> None:
    """A distribution as an installer would leave it."""
    (folder / "toy_module.py").write_text(CODE + "\nCODE_IS_NOT_A_CLASS = 3\n")
    (folder / "toy_broken_module.py").write_text("raise OSError('libtoy.so: cannot open')\n")
    info = folder / "toy_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_distribution(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    TABLE.scanned = False
    for name in ("toy_module", "toy_broken_module"):
        sys.modules.pop(name, None)


def test_a_plugin_is_found_on_the_first_miss_and_not_before(
    plugin: None, spec: ab.AttentionSpec
) -> None:
    ab.select(spec, device="cpu")
    assert not TABLE.scanned
    chosen = ab.select(spec, backend="toy_plugin", device="cpu")
    assert TABLE.scanned and type(chosen.backend).__doc__ == "Comes from a plugin."
    assert ab.ATTENTION_BACKENDS["toy_plugin"].origin == "plugin toy-plugin 1.2"


def test_listing_names_finds_plugins_without_running_them(plugin: None) -> None:
    assert "toy_plugin" in list(ab.ATTENTION_BACKENDS)
    assert "toy_module" not in sys.modules and "toy_broken_module" not in sys.modules


def test_broken_plugins_are_listed_with_their_errors_and_kill_nothing(
    plugin: None, spec: ab.AttentionSpec
) -> None:
    infos = {(i.name, i.origin): i for i in ab.list_backends()}
    origin = "plugin toy-plugin 1.2"
    assert infos["toy_plugin", origin].available
    for name, words in {
        "toy_broken": "OSError: libtoy.so: cannot open",
        "toy_missing": "has no attribute 'NoSuchClass'",
        "toy_wrong": "3 is neither an AttentionBackend class nor a factory",
        "torch_native": "the name is taken by builtin",
        "Bad-Name": "[a-z][a-z0-9_]*",
    }.items():
        info = infos[name, origin]
        assert not info.available and words in str(info), name
    assert infos["torch_native", "builtin"].available
    assert ab.select(spec, device="cpu").name == "torch_native"
    with pytest.raises(ab.BackendUnavailableError, match=r"libtoy\.so: cannot open"):
        ab.select(spec, backend="toy_broken")
    choice = ab.explain(spec, device="cpu", phase="prefill")
    assert "libtoy.so" in str(choice.rejected["toy_broken"][0])
    assert "toy_plugin" in choice.rejected


def test_the_allow_list_decides_which_plugins_may_be_loaded(
    plugin: None, spec: ab.AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ab.select(spec, backend="toy_plugin").name == "toy_plugin"
    for value in ("none", "toy_broken", "Toy_Broken, toy_missing"):
        monkeypatch.setenv("ATTN_BACKENDS_PLUGINS", value)
        with pytest.raises(ab.BackendUnavailableError, match="ATTN_BACKENDS_PLUGINS"):
            ab.select(spec, backend="toy_plugin")
        info = {i.name: i for i in ab.list_backends()}["toy_plugin"]
        assert not info.available and "add it to ATTN_BACKENDS_PLUGINS" in str(info)
        assert ab.select(spec, device="cpu").name == "torch_native"
    monkeypatch.setenv("ATTN_BACKENDS_PLUGINS", " TOY_PLUGIN ")
    assert ab.select(spec, backend="toy_plugin").name == "toy_plugin"
    monkeypatch.setenv("ATTN_BACKENDS_PLUGINS", "")
    with pytest.raises(ab.InvalidInputError, match=r"ATTN_BACKENDS_PLUGINS=''.*or none"):
        ab.select(spec, backend="toy_plugin")


def test_a_plugin_that_is_not_allowed_is_never_imported(
    plugin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_PLUGINS", "none")
    ab.list_backends()
    assert "toy_module" not in sys.modules and "toy_broken_module" not in sys.modules


def test_unreadable_metadata_kills_nothing(
    monkeypatch: pytest.MonkeyPatch, spec: ab.AttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**kwargs: Any) -> Any:
        raise ValueError("broken metadata")

    monkeypatch.setattr(importlib.metadata, "entry_points", fail)
    TABLE.scanned = False
    with pytest.raises(ab.UnknownBackendError):
        ab.select(spec, backend="nope")
    assert "broken metadata" in caplog.text


@pytest.fixture(scope="module")
def environment_with_plugin(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A new virtual environment into which only the plugin is installed; torch is lent to it."""
    home = tmp_path_factory.mktemp("venv")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(home)
    [site] = home.glob("lib/python*/site-packages")
    write_distribution(site)
    borrowed = [p for p in sys.path if p.endswith("-packages")]
    root = Path(ab.__file__).resolve().parent.parent
    (site / "borrowed.pth").write_text("\n".join([*borrowed, str(root)]) + "\n")

    def run(code: str) -> Any:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("ATTN_", "PYTHON"))}
        done = subprocess.run(
            [str(home / "bin" / "python"), "-c", code],
            env=clean,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_plugin_installed_into_an_environment_works_there(
    environment_with_plugin: Callable[..., Any],
) -> None:
    result = environment_with_plugin(
        """
import json, torch
import attn_backends as ab
spec = ab.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)
k = torch.zeros(1, 3, 1, 8)
o, lse = ab.attention(torch.zeros(1, 1, 2, 8), k, k, backend="toy_plugin")
print(json.dumps({
    "chosen": ab.select(spec, backend="toy_plugin").name,
    "auto": ab.select(spec, device="cpu").name,
    "lse": lse.flatten().tolist(),
    "listed": {i.name + "@" + i.origin: str(i) for i in ab.list_backends()},
}))
"""
    )
    assert result["chosen"] == "toy_plugin" and result["auto"] == "torch_native"
    assert result["lse"] == pytest.approx([1.098612, 1.098612], abs=1e-6)
    listed = result["listed"]
    assert listed["toy_plugin@plugin toy-plugin 1.2"].endswith("available")
    assert "libtoy.so" in listed["toy_broken@plugin toy-plugin 1.2"]
