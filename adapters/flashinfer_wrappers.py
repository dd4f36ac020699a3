"""FlashInfer's wrappers: who owns one, for how long, and the workspace they share.

A wrapper holds the state of its last ``plan``, so every plan of ours owns one until it is dropped;
then the wrapper may serve another plan. Planning fills a pinned host buffer and copies it without
waiting, so a wrapper is taken again only once that copy is done. Wrappers and the workspace for
split keys belong to one device, stream and thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..errors import InvalidInputError

MIB = 1 << 20


class _Idle:
    """A wrapper that no plan owns, and the event after which its buffers are free."""

    def __init__(self, wrapper: Any, done: torch.cuda.Event | None) -> None:
        self.wrapper = wrapper
        self.done = done

    def ready(self) -> bool:
        return self.done is None or self.done.query()


class WrapperPool:
    """Wrappers by place and kind. One pool serves the process; it is safe to use from threads."""

    def __init__(self) -> None:
        # A finalizer may run inside `take`, in the same thread.
        self._lock = threading.RLock()
        self._idle: dict[Hashable, list[_Idle]] = {}
        self._workspaces: dict[Hashable, torch.Tensor] = {}

    def place(self, device: torch.device) -> tuple[Hashable, ...]:
        """Device, stream and thread of the caller."""
        stream = 0
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
        return (str(device), stream, threading.get_ident())

    def workspace(self, device: torch.device, megabytes: int) -> torch.Tensor:
        """The workspace of the caller's device, stream and thread, of exactly this size."""
        key = (*self.place(device), megabytes)
        with self._lock:
            if key not in self._workspaces:
                # Zeros: FlashInfer asks for them on first use.
                self._workspaces[key] = torch.zeros(
                    megabytes * MIB, dtype=torch.uint8, device=device
                )
            return self._workspaces[key]

    def take(self, device: torch.device, kind: Hashable, make: Callable[[], Any]) -> Any:
        """A wrapper that is nobody's: an idle one whose copies are done, or a new one."""
        key = (*self.place(device), kind)
        with self._lock:
            idle = self._idle.get(key, [])
            for i, item in enumerate(idle):
                if item.ready():
                    return idle.pop(i).wrapper
        return make()

    def lend(self, owner: object, device: torch.device, kind: Hashable, wrapper: Any) -> None:
        """Let ``owner`` keep the wrapper as long as it lives; afterwards it is idle."""
        key = (*self.place(device), kind)
        weakref.finalize(owner, self._give_back, key, wrapper, planned(device))

    def _give_back(self, key: Hashable, wrapper: Any, done: torch.cuda.Event | None) -> None:
        with self._lock:
            self._idle.setdefault(key, []).append(_Idle(wrapper, done))


def planned(device: torch.device) -> torch.cuda.Event | None:
    """An event behind the copies of a plan that was just made."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def explain_workspace(error: Exception, megabytes: int) -> Exception:
    """FlashInfer's complaint about a small workspace as one that names the option."""
    if "workspace" not in str(error) and "AlignedAllocator" not in str(error):
        return error
    fix = f"raise the option workspace_mb; FlashInfer says: {error}"
    return InvalidInputError.of("workspace_mb", megabytes, "more MiB for this batch", fix)


POOL = WrapperPool()

__all__ = ["MIB", "POOL", "WrapperPool", "explain_workspace", "planned"]
