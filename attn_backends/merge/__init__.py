"""Merging attention states: the commutative monoid that split keys are put together with.

A state ``(o, lse)`` is attention over some keys; ``exp(lse)`` is their softmax mass. States over
disjoint keys merge into the state over their union, in any order and any grouping up to rounding,
with ``(0, -inf)`` as identity. Split decode, shared prefixes, chunked prefill and context
parallelism are all this one operation.

``choose_merge_path`` tells which implementation (``cuda``, ``triton``, ``torch``) a call takes.
"""

from .api import apply_sinks, choose_merge_path, merge_state, merge_state_, merge_states
from .dispatch import PATHS, MergePath, default_path

__all__ = [
    "PATHS",
    "MergePath",
    "apply_sinks",
    "choose_merge_path",
    "default_path",
    "merge_state",
    "merge_state_",
    "merge_states",
]
