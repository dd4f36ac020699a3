"""Compiling CUDA sources at run time.

NVRTC compiles (no toolkit needed), cuda.core loads. A kernel is compiled on first use (about
0.15 s), kept per device, and kept on disk for the next process.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .. import driver as launching
from ..errors import Reason
from .cubin_cache import open_cache

MIN_CAPABILITY = (8, 0)


@lru_cache(maxsize=1)
def _core() -> Any:
    """``(cuda.core, None)``, or ``(None, why it does not load)``; the module's home has moved."""
    try:
        import cuda.core as core

        if not hasattr(core, "Program"):
            import cuda.core.experimental as core
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # fails if the library is not installed
        return core, None
    except Exception as error:  # a broken install may raise anything
        return None, f"{type(error).__name__}: {error}"


@lru_cache(maxsize=1)
def missing() -> list[Reason]:
    """Reasons for which this path cannot run in this process."""
    if torch.version.hip is not None:
        return [Reason("torch", "ROCm build", "CUDA build")]
    if _core()[0] is None:
        return [
            Reason("cuda.core", str(_core()[1]), "installed", "pip install attn-backends[cuda]")
        ]
    return []


@lru_cache(maxsize=64)
def device_reasons(device: torch.device) -> tuple[Reason, ...]:
    """Reasons against the device or its driver, where the packages are present."""
    if missing():
        return ()
    from cuda.bindings import driver, nvrtc

    reasons = []
    if not launching.available():
        reasons.append(Reason("driver", "no cuLaunchKernelEx", "CUDA >= 11.8", "update the driver"))
    capability = torch.cuda.get_device_capability(device)
    name = "{}.{}".format(*capability)
    if capability < MIN_CAPABILITY:
        reasons.append(Reason("compute_capability", name, ">= 8.0"))
    archs = nvrtc.nvrtcGetSupportedArchs()[-1]
    if capability[0] * 10 + capability[1] not in archs:
        fix = "install a newer nvidia-cuda-nvrtc"
        reasons.append(Reason("compute_capability", name, "what NVRTC compiles for", fix))
    major = nvrtc.nvrtcVersion()[-2]
    driver_major = driver.cuDriverGetVersion()[-1] // 1000
    if driver_major < major:
        fix = f"install nvidia-cuda-nvrtc of CUDA {driver_major}"
        reasons.append(Reason("driver CUDA", str(driver_major), f">= {major}, as NVRTC's", fix))
    return tuple(reasons)


def text_of(source: Path) -> str:
    """A CUDA source with the files of its folder that it includes: the cache goes by the text."""
    return re.sub(
        r'^#include "(.+)"$',
        lambda found: source.with_name(found[1]).read_text(),
        source.read_text(),
        flags=re.MULTILINE,
    )


def compile_cubin(source: Path, arch: str, defines: dict[str, int], logs: Any = None) -> Any:
    """Compile a CUDA source for ``arch`` (as ``"sm_90"``); needs no GPU.

    Args:
        source: The file.
        arch: Target.
        defines: Macros.
        logs: Receives what ptxas says about registers and spills; then nothing is cached.

    Returns:
        cuda.core's ``ObjectCode``, not yet loaded.
    """
    core = _core()[0]
    options = core.ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in sorted(defines.items())],
        ptxas_options=None if logs is None else ["-v"],
    )
    program = core.Program(text_of(source), "c++", options)
    if logs is not None:
        return program.compile("cubin", logs=logs)
    cache = _disk_cache()
    if cache is not None:
        try:
            return program.compile("cubin", cache=cache)
        except (OSError, TypeError, ValueError):  # unwritable, or a release without the argument
            pass
    return program.compile("cubin")


@lru_cache(maxsize=1)
def _disk_cache() -> Any:
    return open_cache()


_LOCK = threading.Lock()
_KERNELS: dict[Any, Any] = {}


def load_kernel(source: Path, device: int, name: str, defines: dict[str, int]) -> tuple[int, Any]:
    """A kernel of one specialisation of a source, compiled and loaded on a device.

    Returns:
        Its handle for the driver, and the object that keeps it loaded.
    """
    key = (source, device, name, tuple(sorted(defines.items())))
    with _LOCK:
        found = _KERNELS.get(key)
        if found is None:
            major, minor = torch.cuda.get_device_capability(device)
            code = compile_cubin(source, f"sm_{major}{minor}", defines)
            with torch.cuda.device(device), _relaxed_capture():
                kernel = code.get_kernel(name)
                # Load it now: the driver is lazy, and a first launch may come during capture.
                found = _KERNELS[key] = (_function(kernel), kernel)
    return found


def _function(kernel: Any) -> int:
    """The kernel's handle in the current context."""
    from cuda.bindings import driver

    code, function = driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle)))
    if int(code):
        raise RuntimeError(f"the CUDA driver did not load a kernel: {code}")
    return int(function)


class _relaxed_capture:
    """Let this thread load a module while a graph is captured, as torch does for allocations."""

    def __enter__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _, self.mode = driver.cuThreadExchangeStreamCaptureMode(mode)

    def __exit__(self, *_: object) -> None:
        self.driver.cuThreadExchangeStreamCaptureMode(self.mode)


__all__ = ["compile_cubin", "device_reasons", "load_kernel", "missing"]
