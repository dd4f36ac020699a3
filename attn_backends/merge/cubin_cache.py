"""Compiled kernels on disk, for the next process: written whole, checked when read.

cuda.core stores an entry under a name that depends on source, options and compiler, through a
temporary file and a rename. What it reads it hands out as it is; so entries here end in their own
SHA-256, and one that does not fit is removed and compiled anew. A folder that other users can write
to is not used: what lies there would run on the GPU.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

CACHE_BYTES = 64 << 20
_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """Where compiled kernels lie: below ``XDG_CACHE_HOME``, else ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "attn-backends" / "cuda"


def open_cache(folder: Path | None = None) -> Any:
    """The cache, as ``Program.compile`` takes it; None if there can be none.

    Args:
        folder: Where; default ``cache_folder()``. It is made for its user alone.
    """
    path = cache_folder() if folder is None else folder
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(path):
            return None
        return _class()(path, max_size_bytes=CACHE_BYTES)
    except Exception:  # no home, no permission, no such class: compile in every process
        return None


def is_private(path: Path) -> bool:
    """Whether nobody else can put files into the folder, as far as this system can tell."""
    if not hasattr(os, "getuid"):
        return True
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o002


@cache
def _class() -> Any:
    from cuda.core.utils import FileStreamProgramCache

    class CheckedCache(FileStreamProgramCache):  # type: ignore[misc]
        """Entries that end in the SHA-256 of what comes before."""

        def __getitem__(self, key: Any) -> bytes:
            stored = super().__getitem__(key)
            code, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
            if hashlib.sha256(code).digest() != digest:
                super().__delitem__(key)
                raise KeyError(key)
            return code

        def __setitem__(self, key: Any, value: Any) -> None:
            code = bytes(getattr(value, "code", value))
            super().__setitem__(key, code + hashlib.sha256(code).digest())

    return CheckedCache


__all__ = ["CACHE_BYTES", "cache_folder", "is_private", "open_cache"]
