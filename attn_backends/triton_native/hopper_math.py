"""Arithmetic of the Hopper prefill for which Triton has no words: a product that warps skip."""

from __future__ import annotations

import struct

from .hopper_compat import gl, gluon


def _bits(x: float) -> str:
    """A float32 as PTX writes it."""
    return "0f{:08X}".format(struct.unpack("<I", struct.pack("<f", x))[0])


def _rescale_text(count: int) -> tuple[str, str]:
    """PTX that multiplies registers, unless the factors of every thread of the warp are 1.

    In a thread's part of an accumulator two rows alternate, two registers at a time.
    """
    factors = 2 * count
    lines = [
        "{ .reg .pred p, q; ",
        f"setp.neu.f32 p, ${factors}, {_bits(1.0)}; ",
        f"setp.neu.or.f32 p, ${factors + 2}, {_bits(1.0)}, p; ",
        "vote.sync.any.pred q, p, 0xffffffff; ",
        "@!q bra.uni unchanged; ",
    ]
    lines += [f"mul.f32 ${i}, ${i}, ${factors + i}; " for i in range(count)]
    # Results lie where the first operand lay.
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * count
    return "".join([*lines, "unchanged: }"]), ",".join(constraints)


# Compile-time functions may not call others, so the texts are made here.
_COUNTS = (32, 64, 128)
_RESCALE = gl.constexpr({count: _rescale_text(count)[0] for count in _COUNTS})
_RESCALE_CONSTRAINTS = gl.constexpr({count: _rescale_text(count)[1] for count in _COUNTS})


@gluon.jit
def rescale(acc, factor, COUNT: gl.constexpr):
    """``acc * factor``, where warps without a factor other than 1 do nothing.

    ``COUNT`` is how many elements a thread holds. The accumulator must be that of a warpgroup.
    """
    asm: gl.constexpr = _RESCALE[COUNT]
    constraints: gl.constexpr = _RESCALE_CONSTRAINTS[COUNT]
    return gl.inline_asm_elementwise(
        asm, constraints, [acc, factor], dtype=gl.float32, is_pure=True, pack=COUNT
    )


__all__ = ["rescale"]
