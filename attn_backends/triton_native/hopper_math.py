"""What the Hopper prefill needs of PTX: a product that warps skip, a place where sums are known."""

from __future__ import annotations

import struct

from .hopper_compat import gl, gluon


def _bits(x: float) -> str:
    """A float32 as PTX writes it."""
    return "0f{:08X}".format(struct.unpack("<I", struct.pack("<f", x))[0])


def _text(count: int, start: list[str], line: str) -> tuple[str, str]:
    """PTX that changes registers, unless the factors of every thread of the warp are 1.

    In a thread's part of an accumulator two rows alternate, two registers at a time.
    """
    factors = 2 * count
    lines = [
        "{ .reg .pred p, q, r0, r1; ",
        f"setp.neu.f32 p, ${factors}, {_bits(1.0)}; ",
        f"setp.neu.or.f32 p, ${factors + 2}, {_bits(1.0)}, p; ",
        "vote.sync.any.pred q, p, 0xffffffff; ",
        "@!q bra.uni unchanged; ",
    ]
    lines += [x.format(factors, factors + 2) for x in start]
    lines += [line.format(i, factors + i, i // 2 % 2) for i in range(count)]
    # Results lie where the first operand lay.
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * count
    return "".join([*lines, "unchanged: }"]), ",".join(constraints)


# Compile-time functions may not call others, so the texts are made here.
_COUNTS = (32, 64, 128)
_MULTIPLY = "mul.f32 ${0}, ${0}, ${1}; "
_CHOICE = [f"setp.neu.f32 r{i}, ${{{i}}}, {_bits(0.0)}; " for i in range(2)]
_CHOOSE = f"selp.f32 ${{0}}, ${{0}}, {_bits(0.0)}, r{{2}}; "
_RESCALE = gl.constexpr({count: _text(count, [], _MULTIPLY)[0] for count in _COUNTS})
_CLEAR = gl.constexpr({count: _text(count, _CHOICE, _CHOOSE)[0] for count in _COUNTS})
_CONSTRAINTS = gl.constexpr({count: _text(count, [], _MULTIPLY)[1] for count in _COUNTS})


@gluon.jit
def rescale(acc, factor, COUNT: gl.constexpr):
    """``acc * factor``, where warps without a factor other than 1 do nothing.

    ``COUNT`` is how many elements a thread holds. The accumulator must be that of a warpgroup.
    """
    asm: gl.constexpr = _RESCALE[COUNT]
    constraints: gl.constexpr = _CONSTRAINTS[COUNT]
    return gl.inline_asm_elementwise(
        asm, constraints, [acc, factor], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def clear(acc, keep, COUNT: gl.constexpr):
    """``acc``, or 0 where ``keep`` is 0 and not 1, whatever stands there; else as ``rescale``."""
    asm: gl.constexpr = _CLEAR[COUNT]
    constraints: gl.constexpr = _CONSTRAINTS[COUNT]
    return gl.inline_asm_elementwise(
        asm, constraints, [acc, keep], dtype=gl.float32, is_pure=True, pack=COUNT
    )


# A performance event that no sum causes; one that a compiler cannot rule out, nor move.
_HOLD = gl.constexpr(
    "{ .reg .pred p; setp.lt.f32 p, $4, 0f00000000; setp.lt.or.f32 p, $5, 0f00000000, p; "
    "setp.lt.or.f32 p, $6, 0f00000000, p; setp.lt.or.f32 p, $7, 0f00000000, p; @p pmevent 7; "
    "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
)
_HOLD_CONSTRAINTS = gl.constexpr("=r,=r,=r,=r,f,f,f,f")


@gluon.jit
def hold(sums):
    """Have sums of what is not negative ready here, four a thread.

    ptxas moves additions behind the next branch, where they cost a tenth of the loop; between
    exponentials, which have a unit of their own, they cost nothing.
    """
    asm: gl.constexpr = _HOLD
    constraints: gl.constexpr = _HOLD_CONSTRAINTS
    gl.inline_asm_elementwise(asm, constraints, [sums], dtype=gl.int32, is_pure=False, pack=4)


__all__ = ["clear", "hold", "rescale"]
