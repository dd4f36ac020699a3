"""Compiled kernels on disk are written whole, checked when read, and private."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from attn_backends.merge import cubin_cache, nvrtc

pytest.importorskip("cuda.core", reason="cuda-core is not installed")
CODE = b"\x7fELF" + bytes(range(256))


def open_in(folder: Path) -> Any:
    found = cubin_cache.open_cache(folder)
    if found is None:
        from cuda.core import utils

        assert not hasattr(utils, "FileStreamProgramCache"), "there should be a cache"
        pytest.skip("this cuda-core has no cache of programs")
    return found


def files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def test_what_was_stored_comes_back_in_another_process(tmp_path: Path) -> None:
    open_in(tmp_path / "cuda")["key"] = CODE
    assert open_in(tmp_path / "cuda")["key"] == CODE
    assert open_in(tmp_path / "cuda").get("other") is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_entry_is_removed_and_missed(tmp_path: Path, damage: str) -> None:
    cache = open_in(tmp_path / "cuda")
    cache["key"] = CODE
    (entry,) = files(tmp_path)
    stored = entry.read_bytes()
    bad = {
        "cut": stored[:-5],
        "flipped": bytes([stored[0] ^ 1]) + stored[1:],
        "empty": b"",
        "foreign": CODE,  # as cuda.core's own cache would store it
    }[damage]
    entry.chmod(0o600)
    entry.write_bytes(bad)
    assert open_in(tmp_path / "cuda").get("key") is None
    assert files(tmp_path) == []
    cache["key"] = CODE
    assert cache["key"] == CODE


def test_an_interrupted_write_leaves_the_old_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_in(tmp_path / "cuda")
    cache["key"] = CODE

    def interrupted(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(OSError, match="full"):
        cache["key"] = CODE[::-1]
    monkeypatch.undo()
    assert open_in(tmp_path / "cuda")["key"] == CODE


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="the system has no such permissions")
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    own = tmp_path / "own"
    open_in(own)
    assert not stat.S_IMODE(own.stat().st_mode) & 0o077
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert cubin_cache.open_cache(shared) is None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cubin_cache.open_cache(tmp_path / "file" / "cuda") is None


def test_a_kernel_is_compiled_once_and_again_if_its_entry_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nvrtc.missing():
        pytest.skip(str(nvrtc.missing()[0]))
    source = tmp_path / "kernel.cu"
    source.write_text('extern "C" __global__ void f(float *x) { x[threadIdx.x] *= FACTOR; }')
    cache = open_in(tmp_path / "cuda")
    monkeypatch.setattr(nvrtc, "_disk_cache", lambda: cache)

    def cubin(factor: int = 2) -> bytes:
        return bytes(nvrtc.compile_cubin(source, "sm_90", {"FACTOR": factor}).code)

    first = cubin()
    (entry,) = files(tmp_path / "cuda")
    written = entry.stat().st_mtime_ns
    assert cubin() == first and entry.stat().st_mtime_ns == written
    entry.chmod(0o600)
    entry.write_bytes(entry.read_bytes()[:100])
    assert cubin() == first
    cubin(3)
    assert len(files(tmp_path / "cuda")) == 2
