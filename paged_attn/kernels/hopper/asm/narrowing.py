"""Narrowing to e4m3: operands in two, and a softmax's weights, with exponentials or without.

`exp2_words` of four scores $2..$5, by the unit $6 and the shift $7, makes the word $0 and the sum $1:

    { .reg .b16 lower, upper; .reg .f32 a, b, c, d;
      fma.rn.f32 a, $2, $6, $7; fma.rn.f32 b, $3, $6, $7; fma.rn.f32 c, $4, $6, $7; fma.rn.f32 d, $5, $6, $7;
      ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; cvt.rn.satfinite.e4m3x2.f32 lower, b, a; add.f32 a, a, b;
      ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d; cvt.rn.satfinite.e4m3x2.f32 upper, d, c; add.f32 c, c, d;
      mov.b32 $0, {lower, upper}; add.f32 $1, a, c; }
"""

from ..shim import gl, gluon
from .numbers import TWO_WORDS, WORD_AND_SUM, literal


def _in_two() -> str:
    """Infinity, which would become the largest number, leaves a rest that is none: its product with 0 is added.

    In one piece, for ptxas 12.8 makes one instruction of two conversions whose results are stored side by side, and
    what else uses the lower one then reads a register that nobody writes.
    """
    text = "{ .reg .b16 p, q, x, y; .reg .b32 h; .reg .f32 a, b, c, d;"
    text += " cvt.rn.satfinite.e4m3x2.f32 p, $3, $2; cvt.rn.satfinite.e4m3x2.f32 q, $5, $4; mov.b32 $0, {p, q};"
    for pair, first, second, lower, upper in (("p", "a", "b", "$2", "$3"), ("q", "c", "d", "$4", "$5")):
        text += f" cvt.rn.f16x2.e4m3x2 h, {pair}; mov.b32 {{x, y}}, h; cvt.f32.f16 {first}, x; cvt.f32.f16 {second}, y;"
        for number, whole in ((first, lower), (second, upper)):
            text += f" sub.f32 {number}, {whole}, {number}; fma.rn.f32 {number}, {whole}, {literal(0.0)}, {number};"
    text += " cvt.rn.satfinite.e4m3x2.f32 p, b, a; cvt.rn.satfinite.e4m3x2.f32 q, d, c; mov.b32 $1, {p, q}; }"
    return text


_IN_TWO = gl.constexpr(_in_two())


@gluon.jit
def e4m3_in_two(a, b, c, d):
    """(words of four numbers in e4m3, a's the lowest, words of what these lack)."""
    return gl.inline_asm_elementwise(_IN_TWO, "=&r,=&r,f,f,f,f", [a, b, c, d], dtype=TWO_WORDS, is_pure=True, pack=1)


_EXP2_WORDS = gl.constexpr(
    "{ .reg .b16 lower, upper; .reg .f32 a, b, c, d;"
    " fma.rn.f32 a, $2, $6, $7; fma.rn.f32 b, $3, $6, $7; fma.rn.f32 c, $4, $6, $7; fma.rn.f32 d, $5, $6, $7;"
    " ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; cvt.rn.satfinite.e4m3x2.f32 lower, b, a; add.f32 a, a, b;"
    " ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d; cvt.rn.satfinite.e4m3x2.f32 upper, d, c; add.f32 c, c, d;"
    " mov.b32 $0, {lower, upper}; add.f32 $1, a, c; }"
)


@gluon.jit
def exp2_words(a, b, c, d, unit, shift):
    """(words of exp2(x * unit + shift) of four x in e4m3, a's the lowest, and their sums, not rounded)."""
    return gl.inline_asm_elementwise(
        _EXP2_WORDS, "=r,=f,f,f,f,f,f,f", [a, b, c, d, unit, shift], dtype=WORD_AND_SUM, is_pure=True, pack=1
    )


# A line through each octave: the bits of a float16 are 2^10 times its power of two plus 15, but for where it lies
# between two of them.  There 2^x is below the line by up to 6%, 4% on average: the line is lowered by that.
OCTAVES, BIAS, LOWERED = 32.0, 15.0, 0.0573


def _line_words() -> str:
    """Four floats in [1/2, 1], times 2^24: 2^24 less 2^8 times the bits of a weight in float16.

    Numbers in that range are 2^-24 apart.  The larger a weight, the smaller they are, for saturation has to make
    zeros of what is far below.
    """
    every = "".join(f" fma.rn.sat.f32 {x}, ${i}, $5, $6;" for i, x in enumerate("abcd", 1))
    return (
        "{ .reg .b16 lower, upper; .reg .b32 p, q; .reg .f32 a, b, c, d;" + every + " prmt.b32 p, a, b, 0x6521;"
        " prmt.b32 q, c, d, 0x6521; sub.u32 p, 0x80008000, p; sub.u32 q, 0x80008000, q;"
        " cvt.rn.satfinite.e4m3x2.f16x2 lower, p; cvt.rn.satfinite.e4m3x2.f16x2 upper, q;"
        " mov.b32 $0, {lower, upper}; }"
    )


_LINE_WORDS = gl.constexpr(_line_words())
# what is added to an exponent, and what the sum is multiplied by, before 1 is added
LINE_SHIFT, LINE_UNIT = BIAS - LOWERED, -0.5 / OCTAVES
_LINE_SHIFT, _LINE_UNIT = gl.constexpr(LINE_SHIFT), gl.constexpr(LINE_UNIT)


@gluon.jit
def line_words(a, b, c, d, unit, shift):
    """`exp2_words` without exponentials (Schraudolph 1999), up to 4% off: 2.5 instructions a weight.

    Exponents below -15 and NaN become 0.  None may be above 16, and none is, that far below what a maximum may lag.
    """
    unit, shift = unit * _LINE_UNIT, (shift + _LINE_SHIFT) * _LINE_UNIT + 1.0
    return gl.inline_asm_elementwise(
        _LINE_WORDS, "=r,f,f,f,f,f,f", [a, b, c, d, unit, shift], dtype=gl.int32, is_pure=True, pack=1
    )
