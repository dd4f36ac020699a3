"""Compile the kernels of a call for a GPU that is not here, and read what ptxas says of them.

For tests (no spills at shipped configurations), for reading assembly, and for filling a Triton
cache before a measured run. It plans and "runs" on the CPU with launches recorded instead of made.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..batch import Batch
from ..spec import AttentionSpec
from . import kernels
from . import plan as planning
from .backend import TritonBackend, TritonOptions
from .device import Device

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass
class Launch:
    """A launch that was recorded instead of made."""

    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]
    grid: tuple[int, int, int]

    def compile(self, arch: int) -> Any:
        """The ``CompiledKernel`` for a compute capability, specialised as a launch would be."""
        signature: dict[str, str] = {}
        constants = dict(self.constants)
        attributes: dict[tuple[int], list[Any]] = {}
        names = self.kernel.arg_names
        for i, (name, value) in enumerate(zip(names, (*self.tensors, *self.numbers))):
            fixed = name in self.kernel.do_not_specialize
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                attributes[(i,)] = [["tt.divisibility", 16]]
            elif value is None:
                signature[name] = "constexpr"
                constants[name] = None
            elif hasattr(value, "block_shape"):
                dtype, box = TYPES[value.base.dtype], ", ".join(map(str, value.block_shape))
                signature[name] = f"tensordesc<{dtype}[{box}]>"
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value == 1 and not fixed:
                signature[name] = "constexpr"
                constants[name] = 1
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not fixed:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        for name in self.constants:
            signature[name] = "constexpr"
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=self.options)


@contextmanager
def _recording(arch: int, processors: int) -> Iterator[list[Launch]]:
    launches: list[Launch] = []

    class Recorder:
        def __init__(
            self, kernel: Any, constants: dict, *, warps=4, stages=2, pdl=False, registers=0
        ) -> None:  # fmt: skip
            self.kernel, self.constants = kernel, constants
            self.options = {"num_warps": warps, "num_stages": stages}
            if pdl:
                self.options["launch_pdl"] = True
            if registers:
                self.options["maxnreg"] = registers

        def again(self, *given: Any) -> bool:
            return False

        def form(self, signature: Any) -> None:
            return None

        def first(self, grid: Any, tensors: Any, numbers: Any, signature: Any = None) -> None:
            launches.append(
                Launch(self.kernel, self.constants, self.options, tensors, numbers, grid)
            )

    saved = kernels.Launcher, planning.device_of
    kernels.launcher_of.cache_clear()
    kernels.Launcher = Recorder
    planning.device_of = lambda kind, index: Device(arch, processors, False)
    try:
        yield launches
    finally:
        kernels.Launcher, planning.device_of = saved
        kernels.launcher_of.cache_clear()


def record(
    spec: AttentionSpec, q_lens: list[int], kv_lens: list[int], *, arch: int = 90,
    processors: int = 132, sinks: bool = False, share_kv: bool = False,
    options: TritonOptions | None = None,
) -> list[Launch]:  # fmt: skip
    """The launches that a call would make on a GPU of compute capability ``arch``."""
    heads = spec.num_kv_heads
    if spec.page_size is None:
        table, shape = None, (max(sum(kv_lens), 1),)
    else:
        width = max(-(-n // spec.page_size) for n in kv_lens)
        table = torch.zeros(len(kv_lens), width, dtype=torch.int32)
        shape = (1, spec.page_size)
    q = torch.empty(sum(q_lens), spec.num_heads, spec.head_dim, dtype=spec.dtype)
    k = torch.empty(*shape, heads, spec.head_dim, dtype=spec.kv)
    v = None if share_kv else torch.empty(*shape, heads, spec.dv, dtype=spec.kv)
    extras: dict[str, Any] = {}
    if sinks:
        extras["sinks"] = torch.empty(spec.num_heads)
    if spec.has_alibi:
        extras["alibi_slopes"] = torch.empty(spec.num_heads)
    if spec.has_mask:
        total = sum(a * b for a, b in zip(q_lens, kv_lens))
        extras["mask"] = torch.empty(total, dtype=torch.bool)
    with _recording(arch, processors) as launches:
        backend = TritonBackend(spec, options=options)
        # The tensors stand in for those of a GPU; nothing reads or writes them.
        backend.capabilities = replace(backend.capabilities, devices=("cuda", "cpu"))
        batch = Batch.from_lengths(q_lens, kv_lens, page_table=table)
        backend.run(q, k, v, backend.plan(batch), **extras)
    return launches


@dataclass(frozen=True)
class Report:
    """What ptxas says of a kernel.

    Attributes:
        name: The kernel.
        registers: Per thread.
        spills: Bytes of spill stores and loads per thread.
        shared: Bytes of shared memory per program.
        wgmma: Count of ``wgmma.mma_async`` in the PTX.
        mma: Count of ``mma.sync`` in the PTX.
        cp_async: Count of ``cp.async`` copies in the PTX.
        serialized: Whether warpgroup products wait for each other, for lack of registers.
    """

    name: str
    registers: int
    spills: int
    shared: int
    wgmma: int
    mma: int
    cp_async: int
    serialized: bool


def report(compiled: Any) -> Report:
    """Assemble the PTX once more with ``ptxas -v`` and read registers and spills."""
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        log = subprocess.run(
            [str(_ptxas(int(re.sub(r"\D", "", target[1])))), "-v", f"--gpu-name={target[1]}",
             str(source), "-o", str(Path(folder, "kernel.cubin"))],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None, log
    return Report(
        compiled.metadata.name, int(registers[1]), sum(spills), compiled.metadata.shared,
        ptx.count("wgmma.mma_async"), len(re.findall(r"\bmma\.sync", ptx)),
        ptx.count("cp.async.cg") + ptx.count("cp.async.ca"), "instructions are serialized" in log,
    )  # fmt: skip


def _ptxas(arch: int) -> Path:
    """The assembler that this Triton takes for a target."""
    from triton.backends.nvidia.compiler import get_ptxas

    return Path(get_ptxas(arch).path)


__all__ = ["Launch", "Report", "record", "report"]
