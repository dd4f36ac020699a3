"""Attention over several devices: the same states and the same merge, over ``torch.distributed``.

Names are loaded when they are first used, so that a torch without ``torch.distributed`` can
import the package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode import ShardedDecodePlan, plan_sharded_decode
    from .layout import Interleaved, shard_batch
    from .ring import RingPlan, plan_ring
    from .shards import Shards, zigzag_shards

_HOME = {
    "ShardedDecodePlan": "decode",
    "plan_sharded_decode": "decode",
    "Interleaved": "layout",
    "shard_batch": "layout",
    "RingPlan": "ring",
    "plan_ring": "ring",
    "Shards": "shards",
    "zigzag_shards": "shards",
}


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "Interleaved",
    "RingPlan",
    "Shards",
    "ShardedDecodePlan",
    "plan_ring",
    "plan_sharded_decode",
    "shard_batch",
    "zigzag_shards",
]
