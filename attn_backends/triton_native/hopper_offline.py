"""Compile the Hopper prefill without a GPU, and read from the machine code whether it is sound.

``python -m attn_backends.triton_native.hopper_offline d128 d256-p16`` prints one line of JSON per
configuration. What is read: registers and spills (local memory), and how many exponentials and
additions stand between the wait for the scores and the wait for the output. If ptxas moved that
second wait up, or the additions behind it, the results are the same, and a part of the speed is
gone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import hopper_compat
from .hopper_launch import formats_of
from .hopper_variant import (
    Variant,
    base_variant,
    compile_arguments,
    key_box,
    query_box,
    split_lanes,
)

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ALIGNED = (
    "o_ptr", "lse_ptr", "work_ptr", "table_ptr", "sinks_ptr", "stride_ot", "stride_oh"
)  # fmt: skip
_PARAMETER = re.compile(r"\s*\.param (?:\.align (\d+) )?\.(\w+) .*?(?:\[(\d+)\])?,?\s*$")


@dataclass(frozen=True)
class OfflineCase:
    """What to compile."""

    head_dim: int = 128
    variant: Variant = field(default_factory=Variant)
    dtype: torch.dtype = torch.bfloat16
    page_size: int | None = None
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    head_dim_v: int = 0
    sinks: bool = False


@dataclass(frozen=True)
class OfflineReport:
    """What the machine code shows.

    Attributes:
        registers: Per thread at launch; warps trade them afterwards.
        shared: Bytes of shared memory per program.
        local: Instructions that touch local memory, that is spills.
        hot_local: Those of them inside the loop over keys; None without a disassembler.
        overlap: Per consumer, exponentials between the two waits of the loop; None likewise.
        sums: Per consumer, additions there; None likewise.
        serialized: Whether ptxas warned that it serialized the tensor cores.
        direct: Whether the driver can be handed its arguments, as ``hopper_launch`` does.
    """

    registers: int
    shared: int
    local: int | None
    hot_local: int | None
    overlap: tuple[int, ...] | None
    sums: tuple[int, ...] | None
    serialized: bool
    direct: bool


def _case(head_dim: int, changes: dict[str, Any] | None = None, **more: Any) -> OfflineCase:
    """What ships for a head dim, with changes to the variant and to the call."""
    return OfflineCase(head_dim, replace(base_variant(head_dim), **(changes or {})), **more)


_SINGLE = {"consumers": 1, "block_n": 64, "stages": 2}
CASES = {
    "d64": _case(64),
    "d128": _case(128),
    "d128-turns": _case(128, {"held": 64, "turns": True}),
    "d192": _case(192, head_dim_v=128),
    "d256": _case(256),
    "d128-full": _case(128, causal=False),
    "d128-p16": _case(128, page_size=16),
    "d128-p16-pack4": _case(128, {"pack": 4}, page_size=16),
    "d192-p16": _case(192, page_size=16, head_dim_v=128),
    "d256-p16": _case(256, page_size=16),
    "d64-p1": _case(64, page_size=1),
    "d128-p1": _case(128, page_size=1),
    "d192-p1": _case(192, page_size=1, head_dim_v=128),
    "d256-p1": _case(256, page_size=1),
    "d128-p1-single": _case(128, _SINGLE, page_size=1),
    "d128-p48-pack4": _case(128, {"pack": 4}, page_size=48),
    "d128-window-cap": _case(128, window=(1023, 0), softcap=30.0),
    "d128-sinks": _case(128, sinks=True),
    "d128-pack4-sinks": _case(128, {"pack": 4}, sinks=True),
    "d64-single": _case(64, {"consumers": 1, "stages": 2}),
    "d128-single": _case(128, _SINGLE),
    "d192-single": _case(192, _SINGLE, head_dim_v=128),
}


def compile_case(case: OfflineCase) -> Any:
    """The ``CompiledKernel`` for sm_90a, specialised as an ordinary launch would be."""
    import triton
    from triton.backends.compiler import GPUTarget

    from .hopper_kernel import _hopper_prefill_kernel as kernel

    gl, name = hopper_compat.gl, _TYPES[case.dtype]
    element = gl.bfloat16 if case.dtype == torch.bfloat16 else gl.float16

    def descriptor(box: tuple[int, ...]) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(box), element)
        return f"tensordesc<{name}[{', '.join(map(str, box))}],{layout!r}>"

    variant, dv = case.variant, case.head_dim_v or case.head_dim
    constants = compile_arguments(
        variant, case.head_dim, dv, case.page_size, case.causal, case.window, case.softcap,
        case.sinks,
    )  # fmt: skip
    d, d1 = split_lanes(case.head_dim)
    lanes = {"q": d, "q1": d1, "k": d, "k1": d1, "v": dv}
    gather = variant.gathers(case.page_size)
    aligned = [*_ALIGNED, *(["k", "v"] if gather else [])]
    signature: dict[str, str] = {}
    for argument in kernel.arg_names:
        if argument in lanes and (not lanes[argument] or (gather and argument == "k1")):
            constants = {**constants, argument: None}
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("q", "q1"):
            signature[argument] = descriptor(query_box(variant, lanes[argument]))
        elif argument in lanes and gather:
            signature[argument] = "*" + name
        elif argument in lanes:
            signature[argument] = descriptor(key_box(variant, lanes[argument], case.page_size))
        elif argument.endswith("_ptr"):
            kinds = {"o_ptr": name, "lse_ptr": "fp32", "sinks_ptr": "fp32"}
            signature[argument] = "*" + kinds.get(argument, "i32")
        elif argument.startswith("stride_"):
            signature[argument] = "i64"
        else:
            floats = ("scale", "lse_scale", "softcap_in", "softcap_out")
            signature[argument] = "fp32" if argument in floats else "i32"
    places = {argument: i for i, argument in enumerate(signature)}
    source = hopper_compat.GluonASTSource(
        kernel,
        signature,
        {(places[k],): v for k, v in constants.items()},
        {(places[k],): [["tt.divisibility", 16]] for k in aligned},
    )
    options = {"num_warps": 4, "maxnreg": variant.max_registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _tool(name: str) -> Path | None:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return path if path.exists() else None


def inspect(compiled: Any) -> OfflineReport:
    """Read registers, spills and overlap of a compiled kernel."""
    disassembler = _tool("cuobjdump")
    registers, serialized = 0, False
    seen: SassReport | None = None
    with tempfile.TemporaryDirectory() as folder:
        cubin, source = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        source.write_text(compiled.asm["ptx"])
        for ptxas in filter(None, (_tool("ptxas"), _tool("ptxas-blackwell"))):
            log = subprocess.run(
                [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", Path(folder, "again.cubin")],
                capture_output=True, text=True,
            )  # fmt: skip
            if log.returncode == 0:  # the older of the two may not know the PTX version
                text = log.stdout + log.stderr
                used = re.search(r"Used (\d+) registers", text)
                registers = int(used[1]) if used else 0
                serialized = re.search(r"C75\d\d|serializ", text) is not None
                break
        if disassembler is not None:
            sass = subprocess.run(
                [disassembler, "-sass", cubin], capture_output=True, text=True, check=True
            ).stdout
            seen = read_sass(sass)
    known = ptx_parameters(compiled.asm["ptx"])
    direct = formats_of(compiled.src.signature, known) is not None
    found = (None,) * 4 if seen is None else seen
    return OfflineReport(registers, compiled.metadata.shared, *found, serialized, direct)


def ptx_parameters(ptx: str) -> list[tuple[int, int]]:
    """Offset and size of each parameter of a kernel, as its PTX declares them."""
    found, at = [], 0
    for line in ptx.split(".entry", 1)[1].split(")", 1)[0].splitlines():
        match = _PARAMETER.match(line)
        if match:
            size = int(match[3]) if match[3] else int(match[2][1:]) // 8
            at += -at % int(match[1] or size)
            found.append((at, size))
            at += size
    return found


class SassReport(NamedTuple):
    """Local memory instructions, those in the loops, and what stands between the loops' waits."""

    local: int
    hot_local: int
    overlap: tuple[int, ...]
    sums: tuple[int, ...]


def read_sass(sass: str) -> SassReport:
    """Read the machine code of a kernel."""
    local = hot = exponentials = additions = inside = 0
    overlap: list[int] = []
    sums: list[int] = []
    waiting = False
    for line in sass.splitlines():
        found = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line)
        if not found:
            continue
        name = found[1]
        if name.startswith("WARPGROUP.DEPBAR"):
            if waiting:
                overlap.append(exponentials)
                sums.append(additions)
                hot += inside
            # A wait that leaves one product running is the loop's wait for the scores.
            waiting = "0x1" in found[2]
            exponentials = additions = inside = 0
        exponentials += name.startswith("MUFU.EX2")
        additions += name.startswith("FADD")
        spill = name.startswith(("LDL", "STL"))
        local += spill
        inside += spill
    return SassReport(local, hot, tuple(overlap), tuple(sums))


def main(names: list[str]) -> int:
    """Compile and print the named configurations, or all."""
    for name in names or list(CASES):
        report = inspect(compile_case(CASES[name]))
        print(json.dumps({"name": name, **asdict(report)}), flush=True)
    return 0


__all__ = [
    "CASES",
    "OfflineCase",
    "OfflineReport",
    "SassReport",
    "compile_case",
    "inspect",
    "read_sass",
]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
