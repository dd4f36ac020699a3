"""The checks: plain functions ``check_*(target, case)``, each with a requirement and a rule.

A check raises if the backend breaks its rule on a case. None of them knows pytest; ``CHECKS`` lists
them all, and ``run_conformance`` and ``BackendConformance`` are two doors to that list.
"""

from __future__ import annotations

# The order of imports is the order of requirements in reports.
# isort: off
from .base import CHECKS, LEVELS, Check, check
from .values import check_allocates, check_core, check_lse, check_values
from .probing import (
    check_empty_rows,
    check_grouped_heads,
    check_lengths,
    check_padding_rows,
    check_page_sizes,
    check_windows,
)
from .refusals import check_claims, check_mistakes, check_options
from .numbers import check_extreme_logits, check_softcap_range
from .memory import (
    check_inputs_unchanged,
    check_offsets,
    check_out,
    check_page_order,
    check_poison,
    check_strides,
    check_visible_nan,
)
from .algebra import check_self_merge, check_split
from .promises import (
    check_batch_invariance,
    check_capacity,
    check_no_sync,
    check_plan_reuse,
    check_streams,
)

# isort: on

REQUIREMENTS = tuple(dict.fromkeys(c.requirement for c in CHECKS))

__all__ = [
    "CHECKS",
    "LEVELS",
    "REQUIREMENTS",
    "Check",
    "check",
    "check_allocates",
    "check_batch_invariance",
    "check_capacity",
    "check_claims",
    "check_core",
    "check_empty_rows",
    "check_extreme_logits",
    "check_grouped_heads",
    "check_inputs_unchanged",
    "check_lengths",
    "check_lse",
    "check_mistakes",
    "check_no_sync",
    "check_offsets",
    "check_options",
    "check_out",
    "check_padding_rows",
    "check_page_order",
    "check_page_sizes",
    "check_plan_reuse",
    "check_poison",
    "check_self_merge",
    "check_softcap_range",
    "check_split",
    "check_strides",
    "check_streams",
    "check_values",
    "check_visible_nan",
    "check_windows",
]
