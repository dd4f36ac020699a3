"""Orders of backends that were measured: written by ``python -m attn_backends.bench.ship``."""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    """What a tuning file says of an architecture.

    Attributes:
        gpu: Where it was measured.
        date: When.
        commit: Of this library.
        file: The tuning file.
        orders: Backends by phase, best first over all rows.
        rows: Microseconds by backend, for each phase and kind of shape (``shape_bucket``).
    """

    gpu: str
    date: str
    commit: str
    file: str
    orders: dict[str, tuple[str, ...]]
    rows: dict[tuple[str, str], dict[str, float]]


MEASURED: dict[str, Measured] = {
    "sm90": Measured(
        gpu="NVIDIA H200",
        date="2026-11-30",
        commit="d11a717",
        file="docs/results/h200/tuning.json",
        orders={
            "prefill": ("triton", "flashinfer", "flash_attention", "torch_varlen", "torch_sdpa"),
            "decode": ("triton", "flashinfer", "flash_attention", "torch_varlen", "torch_sdpa"),
        },
        rows={
            ("decode", "D128-G4-bfloat16-ragged"): {
                "triton": 17.989,
                "flashinfer": 21.675,
                "flash_attention": 25.59,
                "torch_sdpa": 108.513,
                "torch_varlen": 164.241,
            },
            ("prefill", "D128-G4-bfloat16-ragged"): {
                "triton": 139.782,
                "flashinfer": 144.037,
                "torch_sdpa": 274.234,
                "flash_attention": 289.63,
                "torch_varlen": 289.719,
            },
            ("prefill", "D128-G4-bfloat16-paged"): {
                "triton": 224.874,
                "flashinfer": 321.42,
                "flash_attention": 342.911,
                "torch_sdpa": 2390.619,
            },
            ("decode", "D128-G4-bfloat16-paged"): {
                "triton": 43.275,
                "flashinfer": 52.955,
                "flash_attention": 54.883,
                "torch_sdpa": 630.292,
            },
        },
    ),
}
