"""The option ``hopper=True`` is honoured or refused, never passed over."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from attn_backends.spec import AttentionSpec
from attn_backends.triton_native.backend import TritonBackend, TritonOptions

SPEC = AttentionSpec(8, 2, 128, dtype=torch.bfloat16)


def reasons(spec: AttentionSpec, phase: str | None = "prefill", **options) -> set[str]:
    found = TritonBackend.unsupported_reasons(spec, phase, None, TritonOptions(**options))
    return {r.argument for r in found} - {"triton", "dtype"}


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"head_dim": 96}, "head_dim"),
        ({"head_dim_v": 64}, "head_dim_v"),
        ({"has_alibi": True}, "has_alibi"),
        ({"has_mask": True}, "has_mask"),
        ({"batch_invariant": True}, "batch_invariant"),
    ],
)
def test_insisting_names_what_the_kernel_cannot_do(changes, argument) -> None:
    spec = dataclasses.replace(SPEC, **changes)
    assert argument in reasons(spec, hopper=True)
    assert argument not in reasons(spec) and argument not in reasons(spec, hopper=False)


def test_insisting_on_another_tile_at_the_same_time_is_refused() -> None:
    tile = (128, 64, 8, 3, True, True)
    assert "prefill_config" in reasons(SPEC, hopper=True, prefill_config=tile)
    assert "prefill_config" not in reasons(SPEC, prefill_config=tile)


@pytest.mark.parametrize("phase", ["prefill", "decode", None])
def test_insisting_is_judged_alike_in_every_phase(phase) -> None:
    # One bound backend serves both phases, and its constructor knows of none.
    assert "head_dim" in reasons(dataclasses.replace(SPEC, head_dim=96), phase, hopper=True)


def test_insisting_leaves_no_query_to_another_kernel() -> None:
    kernels = TritonBackend.kernels(
        SPEC, "decode", torch.device("cuda"), TritonOptions(hopper=True)
    )
    assert kernels == ["warp-specialised prefill of Hopper (hopper=True)"]
    short = TritonOptions(hopper=True, short_rows=64)
    assert "split-KV" in TritonBackend.kernels(SPEC, "decode", torch.device("cuda"), short)[0]
