"""Options of the ``triton`` backend are checked where they are made."""

from __future__ import annotations

import pytest

from attn_backends.triton_native.backend import TritonOptions


@pytest.mark.parametrize(
    ("option", "tile", "words"),
    [
        (
            "split_config",
            (48, 64, 4, 3, 3, 64),
            r"split_config\.block_m=48 .*powers of two from 16",
        ),
        ("split_config", (16, 8, 4, 3, 3, 64), r"split_config\.block_n=8 "),
        ("split_config", (16, 64, 4, 3, 0, 64), r"split_config\.occupancy=0 .*any from 1 on"),
        ("split_config", (16, 64, 4, 3, 3, 0), r"split_config\.min_chunk=0 "),
        ("prefill_config", (128, 64, 3, 3, True, True), r"prefill_config\.warps=3 "),
        ("prefill_config", (128, 64, 4, 0, True, True), r"prefill_config\.stages=0 "),
    ],
)
def test_sizes_that_no_kernel_can_have_are_refused(option, tile, words) -> None:
    with pytest.raises(ValueError, match=words):
        TritonOptions(**{option: tile})
