"""Arithmetic of the Hopper prefill for which Triton has no words.

``exp2_mixed`` takes part of the exponentials off the unit that computes them (16 a cycle and
multiprocessor) and evaluates a polynomial instead; ``rescale`` skips a product with ones.
"""

from __future__ import annotations

import struct

from .hopper_compat import gl, gluon

#: 2^r for r in [-1/2, 1/2], by powers of r; relative error 2.9e-6, and exact at 0.
_COEFFICIENTS = (1.0, 0.6931241750717163, 0.24024099111557007, 0.055906426161527634,
                 0.009582852944731712)  # fmt: skip
#: 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits.
_ROUNDER = 12582912.0
#: 2 to this power comes out as 0, without a case of its own.
_LOWEST = -127.0


def _bits(x: float) -> str:
    """A float32 as PTX writes it."""
    return "0f{:08X}".format(struct.unpack("<I", struct.pack("<f", x))[0])


def polynomial_text(result: str, x: str) -> str:
    """PTX of 2^x for x <= 0 or so: exponent by rounding, the rest by a polynomial."""
    c0, c1, c2, c3, c4 = map(_bits, _COEFFICIENTS)
    return (
        "{ .reg .f32 x, t, u; .reg .b32 e, b; "
        f"max.NaN.ftz.f32 x, {x}, {_bits(_LOWEST)}; "
        f"add.rn.ftz.f32 t, x, {_bits(_ROUNDER)}; "
        f"sub.rn.ftz.f32 u, t, {_bits(_ROUNDER)}; "
        "sub.rn.ftz.f32 x, x, u; "
        f"fma.rn.ftz.f32 u, x, {c4}, {c3}; "
        f"fma.rn.ftz.f32 u, u, x, {c2}; "
        f"fma.rn.ftz.f32 u, u, x, {c1}; "
        f"fma.rn.ftz.f32 u, u, x, {c0}; "
        "mov.b32 e, t; shl.b32 e, e, 23; mov.b32 b, u; add.s32 b, b, e; "
        f"mov.b32 {result}, b; }}"
    )


def _exp2_text(share: int) -> tuple[str, str]:
    """PTX of 8 exponentials, ``share`` of them, spread evenly, by the polynomial; constraints."""
    lines = []
    for i in range(8):
        if (i + 1) * share // 8 > i * share // 8:
            lines.append(polynomial_text(f"${i}", f"${i + 8}"))
        else:
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${i + 8};")
    return " ".join(lines), ",".join(["=f"] * 8 + ["f"] * 8)


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
_EXP2 = gl.constexpr({share: _exp2_text(share)[0] for share in range(1, 5)})
_EXP2_CONSTRAINTS = gl.constexpr(_exp2_text(1)[1])
_COUNTS = (32, 64, 128)
_RESCALE = gl.constexpr({count: _rescale_text(count)[0] for count in _COUNTS})
_RESCALE_CONSTRAINTS = gl.constexpr({count: _rescale_text(count)[1] for count in _COUNTS})


@gluon.jit
def exp2_mixed(x, SHARE: gl.constexpr):
    """2^x for x <= 8 or so, ``SHARE`` of 8 by a polynomial."""
    if SHARE == 0:
        y = gl.exp2(x)
    else:
        asm: gl.constexpr = _EXP2[SHARE]
        y = gl.inline_asm_elementwise(
            asm, _EXP2_CONSTRAINTS, [x], dtype=gl.float32, is_pure=True, pack=8
        )
    return y


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


__all__ = ["exp2_mixed", "polynomial_text", "rescale"]
