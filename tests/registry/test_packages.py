"""Optional packages that are absent, broken, too old or incomplete."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_backends as ab
from attn_backends.packages import is_broken, probe, version_tuple
from attn_backends.registry import TuningFile, TuningRow, shape_bucket
from attn_backends.torch_native.backend import TorchNativeBackend

MANGLED = "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs"
FAILURES = {
    "ImportError": f"raise ImportError('/lib/x.so: {MANGLED}')",
    "OSError": "raise OSError('libcudart.so.11.0: cannot open shared object file')",
    "RuntimeError": "raise RuntimeError('version mismatch of the kernel cache')",
    "AttributeError": "import math; math.no_such_function()",
    "ModuleNotFoundError": "import a_dependency_that_is_absent",
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Put a fake package and its metadata on the path, in front of a real one."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, code: str, version: str | None = "2.8.3") -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code + "\n")
        if version is not None:
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            monkeypatch.delitem(sys.modules, loaded)

    yield install
    for name in ("flash_attn", "flashinfer"):
        sys.modules.pop(name, None)


@pytest.fixture
def adapter() -> Callable[[str], None]:
    """Register a backend that needs a package, as the shipped adapters do."""

    def register(package: str) -> None:
        class Needs(TorchNativeBackend):
            name = f"needs_{package}"
            packages = (package,)

            @classmethod
            def dependency_reasons(cls, options: Any = None) -> list[ab.Reason]:
                found = probe(package, attribute="attend", min_version="2.6")
                reason = found.reason(f"pip install {package}")
                return [] if reason is None else [reason]

        ab.register_attention_backend(Needs.name, Needs)

    return register


# F27
@pytest.mark.parametrize("package", ["flash_attn", "flashinfer"])
@pytest.mark.parametrize("kind", FAILURES)
def test_a_package_that_does_not_load_is_listed_refused_and_passed_over(
    package: str,
    kind: str,
    fake: Callable[..., None],
    adapter: Callable[[str], None],
    spec: ab.AttentionSpec,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    fake(package, FAILURES[kind])
    adapter(package)
    name = f"needs_{package}"
    original = {
        "ImportError": MANGLED,
        "OSError": "libcudart.so.11.0: cannot open",
        "RuntimeError": "version mismatch of the kernel cache",
        "AttributeError": "module 'math' has no attribute 'no_such_function'",
        "ModuleNotFoundError": "No module named 'a_dependency_that_is_absent'",
    }[kind]

    info = {i.name: i for i in ab.list_backends()}[name]
    assert not info.available and info.versions == {package: "2.8.3"}
    listed = str(info.reasons[0])
    for part in (kind, original, "2.8.3", f"torch {torch.__version__}", f"pip install {package}"):
        assert part in listed
    assert is_broken(package)

    with pytest.raises(ab.BackendUnavailableError) as caught:
        ab.select(spec, backend=name, device="cpu")
    for part in (kind, original, "2.8.3", torch.__version__):
        assert part in str(caught.value)

    # Measured as the fastest, so that auto tries it first.
    bucket = shape_bucket(spec)
    rows = [TuningRow(device="cpu", phase="prefill", bucket=bucket, median_us={name: 1.0})]
    path = tmp_path / "tuning.json"
    path.write_text(TuningFile(rows=rows).model_dump_json())
    caplog.clear()
    for window in (None, (3, 0), (4, 0)):
        config = ab.AttentionConfig(tuning_file=str(path))
        chosen = ab.select(replace(spec, window=window), device="cpu", config=config)
        assert chosen.name == "torch_native"
        assert original in str(chosen.considered[name][0])
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1 and original in warned[0]


@pytest.mark.parametrize(
    ("code", "version", "parts"),
    [
        ("x = 1", "2.8.3", ["2.8.3, incomplete", "a version with flash_attn.attend"]),
        ("attend = 1", "2.5.9", ["2.5.9, too old", ">=2.6"]),
        ("__version__ = '2.5'\nattend = 1", None, ["2.5, too old", ">=2.6"]),
        ("attend = 1", None, ["unknown version, whose version cannot be told", ">=2.6"]),
        (
            "def __getattr__(name):\n    raise OSError('no ' + name)",
            "2.8.3",
            ["2.8.3, an attribute raised OSError: no attend"],
        ),
    ],
)
def test_a_package_that_loads_but_will_not_do_is_unavailable(
    fake: Callable[..., None],
    adapter: Callable[[str], None],
    spec: ab.AttentionSpec,
    code: str,
    version: str | None,
    parts: list[str],
) -> None:
    fake("flash_attn", code, version)
    adapter("flash_attn")
    with pytest.raises(ab.BackendUnavailableError) as caught:
        ab.select(spec, backend="needs_flash_attn")
    for part in parts:
        assert part in str(caught.value)


def test_a_package_that_is_right_is_used(
    fake: Callable[..., None], adapter: Callable[[str], None], spec: ab.AttentionSpec
) -> None:
    fake("flash_attn", "attend = 1", "2.6.0.post1")
    adapter("flash_attn")
    assert ab.select(spec, backend="needs_flash_attn").name == "needs_flash_attn"
    found = probe("flash_attn", attribute="attend", min_version="2.6")
    assert found.ok and not found.broken and found.reason() is None
    assert found.version == "2.6.0.post1" and found.module is sys.modules["flash_attn"]
    assert probe("flash_attn", attribute="attend", min_version="2.6") is found


def test_an_absent_package_is_not_called_broken() -> None:
    found = probe("a_package_nobody_has", min_version="1")
    assert not found.installed and not found.broken and not is_broken("a_package_nobody_has")
    assert str(found.reason("get it")) == (
        "a_package_nobody_has=not installed (supported: >=1); get it"
    )


def test_a_blocked_module_is_not_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    found = probe("pytest")
    assert not found.ok and found.installed and found.module is None


@pytest.mark.parametrize(
    ("text", "release"),
    [("2.8.3", (2, 8, 3)), ("4.0.0b36", (4, 0, 0)), ("v1.2+cu130", (1, 2)), ("dev", ())],
)
def test_versions_compare_by_release_numbers(text: str, release: tuple[int, ...]) -> None:
    assert version_tuple(text) == release
