"""The kernels compile for every architecture without a GPU, spill nothing, use 16-byte accesses."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_backends.merge import cuda_merge, nvrtc

ARCHS = ("sm_80", "sm_90", "sm_100")
HERE = Path(__file__).parent
TILED = {"STRIDED": 1, "TILE_TOKENS": 8}
STACKED = {"SEPARATE": 0, "COUNT_BYTES": 0}
#: Name: dtype, dtype of the result, head dim, macros of the layout, states, size.
VARIANTS = {
    "pair-bf16-small": (torch.bfloat16, torch.bfloat16, 128, {}, 2, "small"),
    "pair-bf16-large": (torch.bfloat16, torch.bfloat16, 128, {}, 2, "large"),
    "pair-fp32-to-fp16-strided": (torch.float32, torch.float16, 192, {"STRIDED": 1}, 2, "large"),
    "pair-fp16-in-place": (torch.float16, torch.float16, 576, {"IN_PLACE": 1}, 2, "small"),
    "pair-wide-rows": (torch.bfloat16, torch.bfloat16, 8192, {}, 2, "small"),
    "pair-token-major-sinks": (
        torch.bfloat16, torch.bfloat16, 80, {**TILED, "HAS_B": 0}, 2, "small",
    ),
    "many-bf16": (torch.bfloat16, torch.bfloat16, 128, STACKED, 8, "small"),
    "many-bf16-large": (torch.bfloat16, torch.bfloat16, 128, STACKED, 8, "large"),
    "many-fp32-counts": (
        torch.float32, torch.bfloat16, 512, {**STACKED, **TILED, "COUNT_BYTES": 4}, 20, "large",
    ),
    "many-shared": (torch.float32, torch.float32, 128, STACKED, 64, "small"),
    "many-shared-many": (torch.bfloat16, torch.bfloat16, 128, {**STACKED, **TILED}, 999, "small"),
    "many-separate": (
        torch.float16, torch.float16, 72, {"SEPARATE": 1, "COUNT_BYTES": 0}, 8, "small",
    ),
    "many-wide-rows": (
        torch.float32, torch.float32, 4096, {**STACKED, "COUNT_BYTES": 8}, 64, "small",
    ),
}  # fmt: skip


def source_of(name: str) -> Path:
    return cuda_merge.SOURCES["merge_pair" if name.startswith("pair") else "merge_many"]


def defines_of(arch: str, name: str, unroll: int = 1) -> dict[str, int]:
    dtype, out_dtype, dim, more, states, size = VARIANTS[name]
    tile, vectors = more.get("TILE_TOKENS", 0), dim * dtype.itemsize // 16
    tuning, pdl = cuda_merge.TUNING._replace(unroll=unroll), arch != "sm_80"
    num_bytes = 1 if size == "small" else 1 << 30
    defines = cuda_merge.macros(dtype, out_dtype, dim, **more)
    if name.startswith("pair"):
        return defines | cuda_merge.pair_macros(
            vectors, num_bytes, tile, pdl=pdl, resident=1 << 18, tuning=tuning
        )
    return defines | cuda_merge.many_macros(
        vectors, states, num_bytes, tile, counted=more["COUNT_BYTES"] > 0, pdl=pdl,
        resident=1 << 18, tuning=tuning,
    )  # fmt: skip


def compile_log(arch: str, name: str, unroll: int = 1) -> str:
    log = io.StringIO()
    defines = defines_of(arch, name, unroll)
    assert nvrtc.compile_cubin(source_of(name), arch, defines, logs=log).code
    return log.getvalue()


@pytest.mark.skipif(bool(nvrtc.missing()), reason="needs cuda-core and NVRTC: the cuda extra")
@pytest.mark.parametrize("arch", ARCHS)
def test_cuda_kernels_compile_without_spills(arch):
    plain = [name for name in VARIANTS if name.startswith("pair-bf16")]
    for name, unroll in [*((name, 1) for name in VARIANTS), *((name, 2) for name in plain)]:
        log = compile_log(arch, name, unroll)
        kernels = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert kernels == [("0", "0")], f"{name} spills: {log}"
        assert "0 bytes stack frame" in log


@pytest.mark.skipif(bool(nvrtc.missing()), reason="needs cuda-core and NVRTC: the cuda extra")
@pytest.mark.parametrize("pdl", [False, True])
def test_cuda_kernels_move_whole_vectors_and_read_past_coherence_where_they_may(pdl, tmp_path):
    # Where a kernel may start before the one ahead of it has ended, its inputs are not read-only
    # for as long as it lives, as ld.global.nc asks.
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("needs the cuobjdump that Triton brings")
    for name in ("pair-bf16-small", "pair-bf16-large", "many-bf16"):
        defines = {**defines_of("sm_90", name), "PDL": int(pdl), "FETCH": int(pdl)}
        cubin = tmp_path / "merge.cubin"
        cubin.write_bytes(nvrtc.compile_cubin(source_of(name), "sm_90", defines).code)
        command = [str(tool), "-sass", str(cubin)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        loads = set(re.findall(r"LDG\S*", code)) - {"LDG.E.STRONG.GPU"}
        assert loads == (
            {"LDG.E", "LDG.E.128"} if pdl else {"LDG.E.CONSTANT", "LDG.E.128.CONSTANT"}
        )
        assert set(re.findall(r"STG\S*", code)) == {"STG.E", "STG.E.128"}


@pytest.mark.skipif(bool(nvrtc.missing()), reason="needs cuda-core and NVRTC: the cuda extra")
def test_float8_results_compile_where_the_hardware_converts():
    name = "pair-bf16-small"
    defines = {**defines_of("sm_90", name), "OUT_TYPE": 3}
    assert nvrtc.compile_cubin(source_of(name), "sm_90", defines, logs=io.StringIO()).code


def test_the_grid_covers_every_row_exactly_once():
    for tokens, heads, rows, tile in [(7, 5, 16, 0), (7, 5, 16, 8), (9, 3, 4, 8), (1, 1, 64, 8)]:
        blocks = cuda_merge._grid(tokens, heads, rows, tile)
        if not tile:
            assert (blocks - 1) * rows < tokens * heads <= blocks * rows
            continue
        t, h = min(tile, rows), rows // min(tile, rows)
        assert blocks == ((tokens + t - 1) // t) * ((heads + h - 1) // h)
        assert t * h <= rows


def test_blocks_have_whole_rows_and_hardly_an_idle_lane():
    for vectors in (1, 2, 4, 5, 8, 9, 10, 12, 16, 20, 24, 32, 36, 40, 64, 72, 128, 144, 256, 1024):
        for threads, tile in itertools.product((64, 128, 256), (0, 8)):
            rows, size = cuda_merge.block(vectors, threads, tile)
            if vectors > 2 * threads:
                assert (rows, size) == (1, threads)
                continue
            assert size == rows * vectors <= 2 * threads
            assert not tile or rows % tile == 0 or 2 * threads // vectors < tile
            lanes = -(-size // 32) * 32
            least = 0.75 if tile or 4 * vectors > threads else 0.9
            assert size / lanes >= least, (vectors, threads)


def test_triton_kernels_compile_without_spills():
    # In a process of its own: this one may have Triton's interpreter switched on.
    pytest.importorskip("triton")
    script = HERE / "compile_triton.py"
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all compiled" in run.stdout
