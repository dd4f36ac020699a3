"""Attention backends that all answer the same question in the same form: ``(O, LSE)``.

Names are loaded when they are first used, so importing the package touches neither CUDA nor
triton nor any optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api import attention
    from .backend import AttentionBackend, BackendOptions
    from .batch import Batch
    from .capabilities import Capabilities, IntSet
    from .capacity import Capacity
    from .cascade import cascade_attention, plan_cascade
    from .chunked import chunked_attention, plan_chunked
    from .config import AttentionConfig, configure
    from .counters import Stats, stats
    from .distributed import plan_ring, plan_sharded_decode, zigzag_shards
    from .errors import (
        AttnBackendsError,
        BackendUnavailableError,
        InvalidInputError,
        Reason,
        UnknownBackendError,
        UnsupportedCallError,
    )
    from .kv_cache import write_kv
    from .merge import apply_sinks, choose_merge_path, merge_state, merge_state_, merge_states
    from .mla import MLAProjection
    from .observation import observe, observed
    from .output import AttentionOutput
    from .plan import Plan
    from .registry import (
        ATTENTION_BACKENDS,
        BackendInfo,
        Explanation,
        Selection,
        explain,
        list_backends,
        register_attention_backend,
        select,
        use,
    )
    from .settings import AttentionSettings
    from .spec import AttentionSpec

_MODULES = {
    "api": ("attention",),
    "backend": ("AttentionBackend", "BackendOptions"),
    "batch": ("Batch",),
    "capabilities": ("Capabilities", "IntSet"),
    "capacity": ("Capacity",),
    "cascade": ("cascade_attention", "plan_cascade"),
    "chunked": ("chunked_attention", "plan_chunked"),
    "config": ("AttentionConfig", "configure"),
    "counters": ("Stats", "stats"),
    "distributed": ("plan_ring", "plan_sharded_decode", "zigzag_shards"),
    "errors": (
        "AttnBackendsError",
        "BackendUnavailableError",
        "InvalidInputError",
        "Reason",
        "UnknownBackendError",
        "UnsupportedCallError",
    ),
    "kv_cache": ("write_kv",),
    "merge": ("apply_sinks", "choose_merge_path", "merge_state", "merge_state_", "merge_states"),
    "mla": ("MLAProjection",),
    "observation": ("observe", "observed"),
    "output": ("AttentionOutput",),
    "plan": ("Plan",),
    "registry": (
        "ATTENTION_BACKENDS",
        "BackendInfo",
        "Explanation",
        "Selection",
        "explain",
        "list_backends",
        "register_attention_backend",
        "select",
        "use",
    ),
    "settings": ("AttentionSettings",),
    "spec": ("AttentionSpec",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value  # the next use is an ordinary lookup
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "AttentionConfig",
    "AttentionOutput",
    "AttentionSettings",
    "AttentionSpec",
    "AttnBackendsError",
    "BackendInfo",
    "BackendOptions",
    "BackendUnavailableError",
    "Batch",
    "Capabilities",
    "Capacity",
    "Explanation",
    "IntSet",
    "InvalidInputError",
    "MLAProjection",
    "Plan",
    "Reason",
    "Selection",
    "Stats",
    "UnknownBackendError",
    "UnsupportedCallError",
    "__version__",
    "apply_sinks",
    "attention",
    "cascade_attention",
    "choose_merge_path",
    "chunked_attention",
    "configure",
    "explain",
    "list_backends",
    "merge_state",
    "merge_state_",
    "merge_states",
    "observe",
    "observed",
    "plan_cascade",
    "plan_chunked",
    "plan_ring",
    "plan_sharded_decode",
    "register_attention_backend",
    "select",
    "stats",
    "use",
    "write_kv",
    "zigzag_shards",
]
