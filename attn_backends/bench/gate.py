"""The gate before every figure: an answer is compared with the reference, or has no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..output import AttentionOutput
from ..torch_native.backend import TorchNativeBackend

#: Relative error of rounding a tensor core's inputs once. Float32 counts as TF32, which other
#: libraries use for it.
ROUNDING = {
    torch.float64: 2.0**-40, torch.float32: 2.0**-10, torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7, torch.float8_e4m3fn: 2.0**-4,
}  # fmt: skip
#: Largest error of an LSE relative to the largest one: wrong bases and scales are far beyond it.
LSE_ROUNDING = 2.0**-9


@dataclass(frozen=True)
class Checked:
    """How far an answer is from the reference.

    Attributes:
        error: Largest difference of an output.
        limit: Largest that counts as right.
        right: Whether it is within the limit, and its LSE too if it has one in our form.
    """

    error: float
    limit: float
    right: bool


def reference(inputs: Any) -> AttentionOutput:
    """The state of copy 0, computed in float32 by ``torch_native``."""
    backend = TorchNativeBackend(inputs.spec)
    out = backend.run(inputs.q[0], inputs.k[0], inputs.v[0], backend.plan(inputs.batch))
    return AttentionOutput(out.o.float(), out.lse)


def limit_of(want: torch.Tensor, *dtypes: torch.dtype) -> float:
    """Largest error that counts as right: four roundings of the narrowest dtype."""
    return 4 * max(ROUNDING[dtype] for dtype in dtypes) * float(want.abs().max())


def check(call: Callable[[int], Any], want: AttentionOutput, limit: float) -> Checked:
    """Compare what a call gives for copy 0.

    Args:
        call: Returns ``o``, or a tuple that begins with it. The LSE of an ``AttentionOutput`` is
            compared too; other libraries' have other forms.
        want: The reference.
        limit: Largest error of an output.
    """
    got = call(0)
    o = got[0] if isinstance(got, tuple) else got
    error = float((o.float().reshape(want.o.shape) - want.o).abs().max())
    right = error <= limit  # false for NaN
    if right and isinstance(got, AttentionOutput):
        most = max(1.0, float(want.lse.nan_to_num(neginf=0.0).abs().max()))
        empty = want.lse == float("-inf")
        off = torch.where(empty, 0.0, (got.lse - want.lse).abs())
        right = bool((off <= LSE_ROUNDING * most).all())
        right = right and bool((got.lse[empty] == float("-inf")).all())
    return Checked(error, limit, right)


__all__ = ["LSE_ROUNDING", "ROUNDING", "Checked", "check", "limit_of", "reference"]
