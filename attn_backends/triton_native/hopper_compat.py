"""Gluon's names for Hopper under Triton 3.6 to 3.9, and why Gluon cannot be used if it cannot.

Kernels import Gluon from here and nowhere else. Importing this file never fails: without a usable
Gluon ``REASON`` says what is missing, and the kernel files must not be imported.
"""

from __future__ import annotations

from typing import Any

from ..errors import Reason

#: Triton releases whose Gluon was compiled for sm_90a with these kernels.
SUPPORTED = "3.6 to 3.9"

REASON: Reason | None = None
gluon: Any = None
gl: Any = None
aggregate: Any = None
barrier: Any = None
mbarrier: Any = None
tma_load: Any = None
copy_rows: Any = None
copies_arrive: Any = None
fence_async_shared: Any = None
warpgroup_mma: Any = None
warpgroup_mma_wait: Any = None
TensorDescriptor: Any = None
GluonASTSource: Any = None


def triton_version() -> tuple[int, int]:
    """Major and minor version of the installed Triton."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def _load() -> Reason | None:
    """Bind the names; return the reason if this Triton does not have them."""
    global \
        gluon, \
        gl, \
        aggregate, \
        barrier, \
        mbarrier, \
        tma_load, \
        copy_rows, \
        copies_arrive, \
        fence_async_shared, \
        warpgroup_mma, \
        warpgroup_mma_wait
    global TensorDescriptor, GluonASTSource
    try:
        import triton

        version = triton_version()
    except Exception as error:
        return Reason("triton", f"{type(error).__name__}: {error}", SUPPORTED, "install triton")
    if not (3, 6) <= version < (3, 10):
        return Reason("triton", triton.__version__, SUPPORTED)
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon._runtime import GluonASTSource
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        aggregate = getattr(triton, "aggregate", None)
        if aggregate is None:  # private before 3.9
            aggregate = triton.language.core._aggregate
        barrier = getattr(gl, "barrier", None)
        if barrier is None:  # called so before 3.7
            barrier = gl.thread_barrier
        mbarrier = hopper.mbarrier
        fence_async_shared = hopper.fence_async_shared
        warpgroup_mma = hopper.warpgroup_mma
        warpgroup_mma_wait = hopper.warpgroup_mma_wait
        # Renamed in 3.9; the old name is still there, but raises.
        new = getattr(hopper.tma, "async_load", None)
        tma_load = hopper.tma.async_copy_global_to_shared if new is None else new
        new = getattr(hopper.async_copy, "async_load", None)
        copy_rows = hopper.async_copy.async_copy_global_to_shared if new is None else new
        copies_arrive = hopper.async_copy.mbarrier_arrive
    except Exception as error:
        got = f"{triton.__version__} without Gluon for Hopper ({type(error).__name__}: {error})"
        return Reason("triton", got, SUPPORTED)
    return None


REASON = _load()

__all__ = [
    "REASON",
    "GluonASTSource",
    "TensorDescriptor",
    "aggregate",
    "barrier",
    "copies_arrive",
    "copy_rows",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma_load",
    "triton_version",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
