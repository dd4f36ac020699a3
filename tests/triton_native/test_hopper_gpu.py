"""The Hopper prefill against float64 on a GPU; each group in a process, since deadlocks hang."""

from __future__ import annotations

import pytest
import torch

from attn_backends.bench.hopper_check import groups
from attn_backends.bench.hopper_processes import run_checks
from attn_backends.triton_native import hopper_compat

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0")
@pytest.mark.skipif(hopper_compat.REASON is not None, reason=str(hopper_compat.REASON))
@pytest.mark.parametrize("group", list(groups()))
def test_every_case_of_the_group_is_right(group):
    rows = run_checks([group], limit=240.0, jobs=1)
    assert rows and not [row for row in rows if row["status"] != "passed"]
