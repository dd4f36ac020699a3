"""Names of backends, what they can do here, and which one a call gets."""

from __future__ import annotations

if __name__ == "registry":
    # The folder lies at the root of a checkout; a bare import would make a second registry.
    raise ImportError("import attn_backends.registry instead of registry")

from .entry import BackendEntry
from .explanation import Explanation, PhaseChoice, explain
from .layers import use
from .listing import BackendInfo, list_backends
from .ranking import shape_bucket
from .registry import ATTENTION_BACKENDS, register_attention_backend
from .selection import Selection, select
from .tuning import TuningFile, TuningPoint, TuningRow, load_tuning, write_tuning

__all__ = [
    "ATTENTION_BACKENDS",
    "BackendEntry",
    "BackendInfo",
    "Explanation",
    "PhaseChoice",
    "Selection",
    "TuningFile",
    "TuningPoint",
    "TuningRow",
    "explain",
    "list_backends",
    "load_tuning",
    "register_attention_backend",
    "select",
    "shape_bucket",
    "use",
    "write_tuning",
]
