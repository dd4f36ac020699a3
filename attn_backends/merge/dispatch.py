"""Which implementation merges a call, and why: ``cuda``, ``triton`` or ``torch``.

The choice is a value. ``cuda`` needs 16-byte vectors: a float32, float16 or bfloat16 input whose
head dim, strides and pointers are whole vectors. ``triton`` takes any of them on a GPU. ``torch``
takes everything, anywhere. The first without a reason against it is chosen, unless ``measured``
knows that Triton is the faster for a merge of that kind and size on this device; a path asked for
by name is taken or refused, never replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch

from ..config import current_merge_path
from ..errors import InvalidInputError, Reason, UnsupportedCallError

PATHS = ("cuda", "triton", "torch")
VECTOR_BYTES = 16
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_ROWS = 2**31 - 2**16  # kernels count rows in 32 bits, and round up
MANY_STATES = 16  # most that measurements of a few states speak for
MARGIN = 0.02  # a path must be faster by this share to be taken against the rule
FP8_CAPABILITY = (8, 9)  # first with float8_e4m3fn conversions

#: Path of calls in this context that name none; None leaves it to the settings of the process.
default_path: ContextVar[str | None] = ContextVar("attn_backends_merge_path", default=None)


def asked_path() -> str | None:
    """Path for calls that name none: that of the context, of the configuration, or None."""
    path = default_path.get()
    return current_merge_path() if path is None else path


class MergePath(NamedTuple):
    """The path that a merge takes, with the reason for it.

    Attributes:
        path: ``"cuda"``, ``"triton"`` or ``"torch"``.
        reason: Why this one, and why none before it.
    """

    path: str
    reason: str


class MergeFacts(NamedTuple):
    """What the choice depends on.

    Attributes:
        device: Where the tensors are.
        dtype: Of the inputs' ``o``.
        out_dtype: Of the result's ``o``.
        num_rows: T * H.
        head_dim: DV.
        vector_fault: Why 16-byte access is impossible, or None.
        states: How many are merged.
        contiguous: Whether all outputs and LSEs are, the LSEs as ``[T, H]``.
    """

    device: torch.device
    dtype: torch.dtype
    out_dtype: torch.dtype
    num_rows: int
    head_dim: int
    vector_fault: Reason | None
    states: int = 2
    contiguous: bool = True


def vector_elements(dtype: torch.dtype) -> int:
    """Elements in 16 bytes."""
    return VECTOR_BYTES // dtype.itemsize


def vector_fault(named: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Reason | None:
    """The first stride or pointer that rules out whole vectors of ``dtype``, or None.

    Args:
        named: Outputs ``[..., H, DV]`` with their argument names; those of another dtype than
            ``dtype`` (a narrower result) hold the same number of elements per vector.
        dtype: Of the inputs.
    """
    width = vector_elements(dtype)
    for name, o in named:
        for dim in range(o.dim() - 1):
            if o.shape[dim] > 1 and o.stride(dim) % width:
                want = f"multiples of {width} for {_short(dtype)}"
                return Reason(f"{name}.stride({dim})", str(o.stride(dim)), want)
        size = width * o.dtype.itemsize
        if o.numel() and o.data_ptr() % size:
            got = f"{o.data_ptr() % size} bytes past a vector"
            return Reason(f"{name}.data_ptr()", got, f"multiples of {size} bytes")
    return None


def choose(facts: MergeFacts, path: str | None) -> MergePath:
    """Choose the path for ``facts``, or check the one asked for.

    Raises:
        InvalidInputError: ``path`` is no path's name.
        UnsupportedCallError: The path asked for cannot do this merge.
    """
    if path is None:
        path = asked_path()
    if path is None:
        return _first_without_reason(facts)
    if path not in PATHS:
        raise InvalidInputError.of("path", repr(path), "None, " + ", ".join(map(repr, PATHS)))
    reasons = _REASONS[path](facts)
    if reasons:
        text = "; ".join(map(str, reasons))
        message = f"merge path {path!r} cannot do this call: {text}"
        raise UnsupportedCallError(message, backend=f"merge:{path}", reasons=reasons)
    return MergePath(path, "asked for")


def _first_without_reason(facts: MergeFacts) -> MergePath:
    passed: list[str] = []
    if facts.device.type != "cuda":  # the interpreter is for tests: taken only when asked for
        return MergePath("torch", f"device={facts.device.type}; cuda and triton need a GPU")
    for path in PATHS:
        reasons = _REASONS[path](facts)
        if not reasons:
            why = f"{_short(facts.dtype)} head_dim={facts.head_dim} on {facts.device.type}"
            if path == "cuda" and (times := _measured_slower(facts)) is not None:
                passed.append(f"not cuda: {times}")
                continue
            return MergePath(path, "; ".join([why, *passed]))
        passed.append(f"not {path}: {reasons[0]}")
    raise AssertionError("the torch path takes every call")


def steady_path(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """A path that does not follow the number of rows or where they lie, for batch invariance.

    What is chosen for speed does, and paths may differ in the last place.

    Args:
        device: Where the states are.
        dtype: Of their outputs.
        head_dim: DV.

    Returns:
        The path that was asked for, else Triton on a GPU if it can do such merges, else torch.
    """
    asked = asked_path()
    if asked is not None:
        return asked
    if device.type != "cuda":
        return "torch"
    reasons = _triton_reasons(MergeFacts(device, dtype, dtype, 1, head_dim, None))
    return "torch" if reasons else "triton"


def kind_of(states: int, head_dim: int) -> str | None:
    """Merges that measurements take to be alike but for their size; None for those of no kind.

    Args:
        states: How many are merged.
        head_dim: DV; Triton fills rows up to a power of two.
    """
    if states > MANY_STATES:
        return None
    name = "pair" if states == 2 else "few"
    return name if head_dim & (head_dim - 1) == 0 else f"{name}-padded"


def is_faster(us: float, than_us: float) -> bool:
    """Whether a time is shorter by more than a measurement's noise."""
    return us < than_us * (1 - MARGIN)


def _measured_slower(facts: MergeFacts) -> str | None:
    """The measured times, where the CUDA path lost to Triton at the size nearest to this one."""
    from . import measured

    kind = kind_of(facts.states, facts.head_dim)
    if kind is None or not measured.TIMES or not facts.contiguous or facts.out_dtype != facts.dtype:
        return None
    capability = torch.cuda.get_device_capability(facts.device)
    points = measured.TIMES.get((capability, kind))
    size = facts.num_rows * facts.head_dim * facts.dtype.itemsize
    if not points or not size or _triton_reasons(facts):
        return None
    at, cuda, triton = min(points, key=lambda point: abs(math.log(point[0] / size)))
    if not is_faster(triton, cuda):
        return None
    return f"{cuda:.4g} us measured (triton: {triton:.4g} us) for a result of {at} bytes"


def _cuda_reasons(facts: MergeFacts) -> list[Reason]:
    from . import nvrtc

    if facts.device.type != "cuda":
        return [Reason("device", facts.device.type, "cuda")]
    reasons = [*nvrtc.missing(), *nvrtc.device_reasons(facts.device)]
    reasons += _kernel_reasons(facts)
    if facts.dtype in KERNEL_DTYPES:
        width = vector_elements(facts.dtype)
        if facts.head_dim % width:
            want = f"multiples of {width} for {_short(facts.dtype)}"
            reasons.append(Reason("head_dim", str(facts.head_dim), want))
        elif facts.vector_fault is not None:
            reasons.append(facts.vector_fault)
    return reasons


def _triton_reasons(facts: MergeFacts) -> list[Reason]:
    from . import triton_merge

    interpreted = triton_merge.interpreted()
    if facts.device.type != "cuda" and not (interpreted and facts.device.type == "cpu"):
        return [Reason("device", facts.device.type, "cuda, or cpu under TRITON_INTERPRET=1")]
    reasons = triton_merge.missing() + _kernel_reasons(facts)
    if interpreted:
        if torch.bfloat16 in (facts.dtype, facts.out_dtype):
            # The interpreter keeps bfloat16 as integers and multiplies bit patterns.
            reasons.append(Reason("dtype", "bfloat16", "float32, float16 in Triton's interpreter"))
        if facts.out_dtype == torch.float8_e4m3fn:
            want = "float32, float16 in Triton's interpreter"
            reasons.append(Reason("out.o.dtype", "float8_e4m3fn", want))
    return reasons


def _torch_reasons(facts: MergeFacts) -> list[Reason]:
    return []


def _kernel_reasons(facts: MergeFacts) -> list[Reason]:
    """Reasons against either kernel path."""
    reasons = []
    if facts.dtype not in KERNEL_DTYPES:
        reasons.append(Reason("dtype", _short(facts.dtype), ", ".join(map(_short, KERNEL_DTYPES))))
    if facts.out_dtype == torch.float8_e4m3fn and facts.device.type == "cuda":
        capability = torch.cuda.get_device_capability(facts.device)
        if capability < FP8_CAPABILITY:
            got = f"{capability[0]}.{capability[1]}"
            reasons.append(Reason("compute_capability", got, ">= 8.9 for float8_e4m3fn"))
    if not facts.head_dim:
        reasons.append(Reason("head_dim", "0", ">= 1"))
    if facts.num_rows > MAX_ROWS:
        reasons.append(Reason("num_tokens * num_heads", str(facts.num_rows), f"<= {MAX_ROWS}"))
    return reasons


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_REASONS: dict[str, Callable[[MergeFacts], list[Reason]]] = {
    "cuda": _cuda_reasons,
    "triton": _triton_reasons,
    "torch": _torch_reasons,
}

__all__ = [
    "KERNEL_DTYPES",
    "PATHS",
    "MergeFacts",
    "MergePath",
    "asked_path",
    "choose",
    "default_path",
    "is_faster",
    "kind_of",
    "steady_path",
    "vector_elements",
    "vector_fault",
]
