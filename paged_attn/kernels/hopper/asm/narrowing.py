"""Narrowing to e4m3: operands as sums of two numbers, and weights of a softmax, with exponentials or without.

`exp2_words` makes the word $0 and the sum $1 of four scores $2..$5, with the unit $6 and the shift $7:

    { .reg .b16 lower, upper; .reg .f32 a, b, c, d;
      fma.rn.f32 a, $2, $6, $7; fma.rn.f32 b, $3, $6, $7; fma.rn.f32 c, $4, $6, $7; fma.rn.f32 d, $5, $6, $7;
      ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; cvt.rn.satfinite.e4m3x2.f32 lower, b, a; add.f32 a, a, b;
      ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d; cvt.rn.satfinite.e4m3x2.f32 upper, d, c; add.f32 c, c, d;
      mov.b32 $0, {lower, upper}; add.f32 $1, a, c; }
"""

from ..shim import gl, gluon
from .instructions import TWO_WORDS, WORD_AND_SUM, literal


def _in_two() -> str:
    """PTX: four floats as e4m3 numbers, and the rests.

    Each float times 0 is added to its rest, so infinity leaves NaN.  All conversions are in one text: ptxas 12.8 fuses
    two conversions whose results are stored side by side, and other uses of the lower result then read an unwritten
    register.
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
    """(words, words): four float32 rounded to e4m3, a in the lowest byte, and the rests of that rounding in e4m3."""
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
    """(e4m3 words, float32 sums) of exp2(x * unit + shift) for four x, a in the lowest byte; sums are not rounded."""
    return gl.inline_asm_elementwise(
        _EXP2_WORDS, "=r,=f,f,f,f,f,f,f", [a, b, c, d, unit, shift], dtype=WORD_AND_SUM, is_pure=True, pack=1
    )


# A line through each octave: at a power of two, the bits of a float16 are 2^10 times (exponent + 15).  Between two
# powers, 2^x is below the line by up to 6%, and 4% on average, so the line is lowered by 4%.
OCTAVES, BIAS, LOWERED = 32.0, 15.0, 0.0573


def _line_words() -> str:
    """PTX: four floats in [1/2, 1] that equal 1 - 2^-16 * (bits of a float16 weight), then e4m3 words of the weights.

    Floats in that range are 2^-24 apart.  A larger weight has a smaller float, so that saturation at 1 makes small
    weights 0.
    """
    every = "".join(f" fma.rn.sat.f32 {x}, ${i}, $5, $6;" for i, x in enumerate("abcd", 1))
    return (
        "{ .reg .b16 lower, upper; .reg .b32 p, q; .reg .f32 a, b, c, d;" + every + " prmt.b32 p, a, b, 0x6521;"
        " prmt.b32 q, c, d, 0x6521; sub.u32 p, 0x80008000, p; sub.u32 q, 0x80008000, q;"
        " cvt.rn.satfinite.e4m3x2.f16x2 lower, p; cvt.rn.satfinite.e4m3x2.f16x2 upper, q;"
        " mov.b32 $0, {lower, upper}; }"
    )


_LINE_WORDS = gl.constexpr(_line_words())
# a weight's float is (exponent + LINE_SHIFT) * LINE_UNIT + 1
LINE_SHIFT, LINE_UNIT = BIAS - LOWERED, -0.5 / OCTAVES
_LINE_SHIFT, _LINE_UNIT = gl.constexpr(LINE_SHIFT), gl.constexpr(LINE_UNIT)


@gluon.jit
def line_words(a, b, c, d, unit, shift):
    """`exp2_words` without exponentials (Schraudolph 1999), up to 4% off, with 2.5 instructions a weight; no sums.

    Exponents below -15 and NaN become weights of 0.  Exponents must stay below 16; FP8_SLACK keeps them far below.
    """
    unit, shift = unit * _LINE_UNIT, (shift + _LINE_SHIFT) * _LINE_UNIT + 1.0
    return gl.inline_asm_elementwise(
        _LINE_WORDS, "=r,f,f,f,f,f,f", [a, b, c, d, unit, shift], dtype=gl.int32, is_pure=True, pack=1
    )
