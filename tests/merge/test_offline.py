"""The kernels compile for every architecture without a GPU, spill nothing, use 16-byte accesses."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_backends.merge import cuda_merge, nvrtc

ARCHS = ("sm_80", "sm_90", "sm_100")
HERE = Path(__file__).parent
VARIANTS = {
    "pair-bf16": (torch.bfloat16, torch.bfloat16, 128, {}),
    "pair-fp32-to-fp16-strided": (torch.float32, torch.float16, 192, {"STRIDED": 1}),
    "pair-fp16-in-place": (torch.float16, torch.float16, 576, {"IN_PLACE": 1}),
    "pair-token-major-sinks": (
        torch.bfloat16,
        torch.bfloat16,
        80,
        {"STRIDED": 1, "TILE_TOKENS": 8, "HAS_B": 0},
    ),
    "many-bf16": (torch.bfloat16, torch.bfloat16, 128, {"SEPARATE": 0, "COUNT_BYTES": 0}),
    "many-fp32-counts": (
        torch.float32,
        torch.bfloat16,
        512,
        {"SEPARATE": 0, "COUNT_BYTES": 4, "STRIDED": 1, "TILE_TOKENS": 8},
    ),
    "many-separate": (torch.float16, torch.float16, 72, {"SEPARATE": 1, "COUNT_BYTES": 0}),
    "many-wide-rows": (torch.float32, torch.float32, 4096, {"SEPARATE": 0, "COUNT_BYTES": 8}),
}


def compile_log(arch: str, name: str) -> str:
    dtype, out_dtype, dim, more = VARIANTS[name]
    defines = cuda_merge.macros(dtype, out_dtype, dim, **more)
    shape = cuda_merge.many_macros if name.startswith("many") else cuda_merge.pair_macros
    defines |= shape(dim * dtype.itemsize // 16, cuda_merge.TUNING)
    log = io.StringIO()
    assert nvrtc.compile_cubin(cuda_merge.SOURCE, arch, defines, logs=log).code
    return log.getvalue()


@pytest.mark.skipif(bool(nvrtc.missing()), reason="needs cuda-core and NVRTC: the cuda extra")
@pytest.mark.parametrize("arch", ARCHS)
def test_cuda_kernels_compile_without_spills(arch):
    for name in VARIANTS:
        log = compile_log(arch, name)
        kernels = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert len(kernels) == 2, f"{name}: {log}"
        assert all(kernel == ("0", "0") for kernel in kernels), f"{name} spills: {log}"
        assert "0 bytes stack frame" in log


@pytest.mark.skipif(bool(nvrtc.missing()), reason="needs cuda-core and NVRTC: the cuda extra")
def test_float8_results_compile_where_the_hardware_converts():
    defines = cuda_merge.macros(torch.bfloat16, torch.float8_e4m3fn, 128)
    defines |= cuda_merge.pair_macros(16, cuda_merge.TUNING)
    assert nvrtc.compile_cubin(cuda_merge.SOURCE, "sm_90", defines, logs=io.StringIO()).code


def test_the_grid_covers_every_row_exactly_once():
    for tokens, heads, rows, tile in [(7, 5, 16, 0), (7, 5, 16, 8), (9, 3, 4, 8), (1, 1, 64, 8)]:
        blocks = cuda_merge._grid(tokens, heads, rows, tile)
        if not tile:
            assert (blocks - 1) * rows < tokens * heads <= blocks * rows
            continue
        t, h = min(tile, rows), rows // min(tile, rows)
        assert blocks == ((tokens + t - 1) // t) * ((heads + h - 1) // h)
        assert t * h <= rows


def test_triton_kernels_compile_without_spills():
    # In a process of its own: this one may have Triton's interpreter switched on.
    pytest.importorskip("triton")
    script = HERE / "compile_triton.py"
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all compiled" in run.stdout
