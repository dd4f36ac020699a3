"""Compile the Triton merge kernels offline for each architecture and check the machine code.

Run by ``test_offline.py`` in a process without Triton's interpreter.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from attn_backends.merge import triton_kernels, triton_merge

NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
}
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def build(kernel, pointers, constants, arch: int):
    """Compile as the launcher does, without a device."""
    signature, constexprs, attrs = {}, {}, {}
    for i, param in enumerate(kernel.params):
        if param.is_constexpr:
            signature[param.name], constexprs[(i,)] = "constexpr", constants[param.name]
        elif param.name.endswith("_ptr"):
            dtype = pointers[param.name]
            if dtype is None:
                signature[param.name], constexprs[(i,)] = "constexpr", None
                continue
            signature[param.name] = "*" + NAMES[dtype]
            if not param.do_not_specialize_on_alignment:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            assert param.do_not_specialize, param.name
            signature[param.name] = param.annotation_type
    source = ASTSource(kernel, signature, constexprs, attrs)
    options = {"num_warps": triton_merge.TUNING.warps, "enable_fp_fusion": False}
    return compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def dump(path: str, flag: str) -> str:
    """What cuobjdump says about a binary."""
    command = [str(TOOL), flag, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check(compiled, what: str, wide: bool) -> None:
    """No stack, hence no spills; 16-byte loads and stores of outputs where alignment allows."""
    if not TOOL.exists():
        return
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        assert "STACK:0" in dump(file.name, "-res-usage"), f"{what} spills"
        code = dump(file.name, "-sass")
        assert not re.search(r"\b(LDL|STL)\b", code), f"{what} uses local memory"
        if wide:
            assert "LDG.E.128" in code and "STG.E.128" in code, f"{what} has narrow accesses"


def main() -> None:
    fp32, fp16, bf16, fp8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
    pairs = [
        (bf16, bf16, 128, False, False, 0),
        (fp16, fp16, 576, True, True, 0),
        (fp32, bf16, 192, False, False, 0),
        (bf16, fp8, 128, False, False, 2),
    ]
    for arch in (80, 90, 100):
        for dtype, out, dim, strided, in_place, scaled in pairs if arch == 90 else pairs[:2]:
            for aligned in (True, False) if arch == 90 else (True,):
                o = torch.empty(1, 1, dim, dtype=dtype)
                constants = {
                    **triton_merge._shape(o, aligned, triton_merge.TUNING),
                    "STRIDED": strided,
                    "HAS_B": True,
                    "SCALED": scaled,
                    "FETCH": aligned and not strided and arch >= 90,
                    "RESIDENT": 1056,
                    "IN_PLACE": in_place,
                    "PDL": arch >= 90,
                }
                pointers = {"o_a_ptr": dtype, "o_b_ptr": dtype, "o_ptr": out}
                pointers |= {"lse_a_ptr": fp32, "lse_b_ptr": fp32, "lse_ptr": fp32}
                pointers["scale_ptr"] = fp32 if scaled else None
                kernel = triton_kernels.merge_pair_aligned
                if not aligned:
                    kernel = triton_kernels.merge_pair_any
                what = f"pair {dtype} {dim} sm_{arch} aligned={aligned}"
                compiled = build(kernel, pointers, constants, arch)
                check(compiled, what, aligned and out == dtype)
                fetches = "cp.async.bulk.prefetch.L2" in compiled.asm["ptx"]
                assert fetches == constants["FETCH"], f"{what} fetches: {fetches}"
        many = [(8, False, False), (40, True, False), (5, False, True)]
        for states, counts, separate in many if arch == 90 else many[:1]:
            o = torch.empty(1, 1, 128, dtype=bf16)
            constants = {
                **triton_merge._shape(o, True, triton_merge.TUNING),
                "BLOCK_O": min(states, triton_merge.MAX_UNROLL),
                "SHORT": states <= triton_merge.MAX_UNROLL,
                "STRIDED": counts,
                "SEPARATE": separate,
                "HAS_COUNTS": counts,
                "IN_PLACE": counts,
                "PDL": arch >= 90,
            }
            pointers = {"o_0_ptr": bf16, "lse_0_ptr": fp32, "o_ptr": bf16, "lse_ptr": fp32}
            pointers["counts_ptr"] = torch.int32 if counts else fp32
            compiled = build(triton_kernels.merge_many_aligned, pointers, constants, arch)
            check(compiled, f"many n={states} sm_{arch}", True)
    print("all compiled")


if __name__ == "__main__":
    main()
