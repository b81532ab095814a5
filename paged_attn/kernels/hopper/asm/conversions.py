"""Conversions of words of fp8, int8 or int4 numbers to float16, and of float32 numbers (queries, weights) to e4m3.

`exp2_words` makes the word $0 of four weights, and their sum $1, of scores $2..$5, with the unit $6 and the shift $7:

    { .reg .b16 lower, upper; .reg .f32 a, b, c, d;
      fma.rn.f32 a, $2, $6, $7; fma.rn.f32 b, $3, $6, $7; fma.rn.f32 c, $4, $6, $7; fma.rn.f32 d, $5, $6, $7;
      ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; cvt.rn.satfinite.e4m3x2.f32 lower, b, a; add.f32 a, a, b;
      ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d; cvt.rn.satfinite.e4m3x2.f32 upper, d, c; add.f32 c, c, d;
      mov.b32 $0, {lower, upper}; add.f32 $1, a, c; }

`widen_bytes_apart` makes the float16 numbers $0..$3 of a word $4 of four e4m3 numbers:

    { .reg .b16 lower, upper; .reg .b32 a, b; mov.b32 {lower, upper}, $4;
      cvt.rn.f16x2.e4m3x2 a, lower; cvt.rn.f16x2.e4m3x2 b, upper; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }

An e5m2 number is the upper byte of its float16: `prmt` puts the number above a byte of zeros.

An int8 number n with its sign bit flipped is the byte n + 128.  With 0x64 as the upper byte, this byte makes the
float16 1152 + n, from which 1152 is subtracted.
"""

from ..shim import gl, gluon
from .instructions import TWO_WORDS, WORD_AND_SUM, literal


def _in_two() -> str:
    """PTX: four floats rounded to e4m3, in a word, and their rounding errors in e4m3, in another word.

    Each float times 0 is added to its error, so that the error of infinity is NaN.  All conversions are in one text,
    because ptxas 12.8 fuses two conversions whose results are stored side by side.  Other uses of the lower result
    would then read an unwritten register.
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
    """(words, words of errors): four float32 rounded to e4m3, a in the lowest byte, and rounding errors in e4m3."""
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
    """(e4m3 words, float32 sums before rounding) of exp2(x * unit + shift) for four x, a in the lowest byte."""
    return gl.inline_asm_elementwise(
        _EXP2_WORDS, "=r,=f,f,f,f,f,f,f", [a, b, c, d, unit, shift], dtype=WORD_AND_SUM, is_pure=True, pack=1
    )


# Straight lines approximate octaves of 2^x: at a power of two, the bits of a float16 are 2^10 times (exponent + 15).
# Between two powers, 2^x is below the line by up to 6%, and 4% on average, so the line is lowered by 4%.
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
    """Words of `exp2_words` without exponentials (Schraudolph 1999): up to 4% off, 2.5 instructions a weight, no sums.

    Exponents below -15 and NaN become weights of 0.  Exponents must stay below 16; FP8_SLACK keeps them far below.
    """
    unit, shift = unit * _LINE_UNIT, (shift + _LINE_SHIFT) * _LINE_UNIT + 1.0
    return gl.inline_asm_elementwise(
        _LINE_WORDS, "=r,f,f,f,f,f,f", [a, b, c, d, unit, shift], dtype=gl.int32, is_pure=True, pack=1
    )


# ---- fp8 to float16 ------------------------------------------------------------------------------


_E4M3 = gl.constexpr(
    "{ .reg .b16 lower, upper; mov.b32 {lower, upper}, $2;"
    " cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }"
)
_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")  # float16's upper bytes


def _from_int8(words: str, *pairs: str) -> str:
    """PTX: flip the sign bits of `words`, put 0x64 above each byte, and subtract 1152: float16 words `pairs`."""
    flipped = "".join(f" xor.b32 {word}, {word}, 0x80808080;" for word in words)
    lowered = "".join(f" sub.f16x2 {pair}, {pair}, less;" for pair in pairs)
    numbers = "".join(
        f" prmt.b32 {pair}, {words[i // 2]}, above, {('0x4140', '0x4342')[i % 2]};" for i, pair in enumerate(pairs)
    )
    return f" mov.b32 above, 0x64646464; mov.b32 less, 0x64806480;{flipped}{numbers}{lowered}"


_INT8 = gl.constexpr("{ .reg .b32 x, above, less; mov.b32 x, $2;" + _from_int8("x", "$0", "$1") + " }")


@gluon.jit
def widen_bytes(x, FP8: gl.constexpr):
    """Widen int32 words of four one-byte numbers to (words of the lower two, words of the upper two) in float16.

    FP8: mantissa bits of the format, or 7 for int8.

    Without this PTX, the compiler would convert each element to float32 first.
    """
    ASM: gl.constexpr = _E4M3 if FP8 == 3 else _E5M2 if FP8 == 2 else _INT8
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=TWO_WORDS, is_pure=True, pack=1)


_E4M3_APART = gl.constexpr(
    "{ .reg .b16 lower, upper; .reg .b32 a, b; mov.b32 {lower, upper}, $4;"
    " cvt.rn.f16x2.e4m3x2 a, lower; cvt.rn.f16x2.e4m3x2 b, upper; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
)
_E5M2_APART = gl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $4, 0, 0x1404; prmt.b32 b, $4, 0, 0x3424;"
    " mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
)
_INT8_APART = gl.constexpr(
    "{ .reg .b32 x, a, b, above, less; mov.b32 x, $4;"
    + _from_int8("x", "a", "b")
    + " mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
)


def _pairs_apart(words: str) -> str:
    """PTX: widen words $8 and $9 of two keys, by the PTX `words`, to words a..d of two float16, and split a..d."""
    halves = " ".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {word};" for i, word in enumerate("abcd"))
    return f"{{ .reg .b32 a, b, c, d, x, y, above, less; .reg .b16 l, u; {words} {halves} }}"


_E4M3_PAIRS_APART = gl.constexpr(
    _pairs_apart(
        "prmt.b32 x, $8, $9, 0x5140; prmt.b32 y, $8, $9, 0x7362;"
        " mov.b32 {l, u}, x; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, u;"
        " mov.b32 {l, u}, y; cvt.rn.f16x2.e4m3x2 c, l; cvt.rn.f16x2.e4m3x2 d, u;"
    )
)
_E5M2_PAIRS_APART = gl.constexpr(
    _pairs_apart(
        "prmt.b32 x, $8, $9, 0x5140; prmt.b32 y, $8, $9, 0x7362;"
        " prmt.b32 a, x, 0, 0x1404; prmt.b32 b, x, 0, 0x3424; prmt.b32 c, y, 0, 0x1404; prmt.b32 d, y, 0, 0x3424;"
    )
)
_INT8_PAIRS_APART = gl.constexpr(
    _pairs_apart("prmt.b32 x, $8, $9, 0x5140; prmt.b32 y, $8, $9, 0x7362;" + _from_int8("xy", "a", "b", "c", "d"))
)


_HALVES_2 = gl.constexpr((gl.float16,) * 2)
_HALVES_4 = gl.constexpr((gl.float16,) * 4)
_HALVES_8 = gl.constexpr((gl.float16,) * 8)


# ---- int4 to float16 -----------------------------------------------------------------------------
#
# Bits 0 to 3 of a float16 alone are a subnormal number: n * 2^-24.  Bits 4 to 7 alone are n * 2^-20.  A half of a word
# has four int4.  So one AND makes a number of each half, and a shift by 8 brings each half's upper two to these bits.

INT4_UNIT = gl.constexpr(2.0**-24)  # what 1 in an even dim becomes; 1 in an odd dim becomes 16 * INT4_UNIT


def _int4_pairs(word: str, pairs: str) -> str:
    """PTX: split `word`, two halves of four int4, into float16 `pairs`: first numbers of both halves, second, ..."""
    numbers = "".join(
        f" and.b32 {pair}, {(word, 'high')[i // 2]}, {('0x000f000f', '0x00f000f0')[i % 2]};"
        for i, pair in enumerate(pairs.split())
    )
    return f" shr.u32 high, {word}, 8;{numbers}"


_INT4_KEYS = gl.constexpr(
    "{ .reg .b32 x, high, a, b, c, d; mov.b32 x, $8;"
    + _int4_pairs("x", "a b c d")
    + " mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; mov.b32 {$4, $5}, c; mov.b32 {$6, $7}, d; }"
)
_INT4_VALUES = gl.constexpr("{ .reg .b32 x, high; mov.b32 x, $4;" + _int4_pairs("x", "$0 $1 $2 $3") + " }")
_INT4_BYTES = gl.constexpr("{ .reg .b32 x; mov.b32 x, $2; and.b32 $0, x, 0x000f000f; and.b32 $1, x, 0x00f000f0; }")


@gluon.jit
def widen_int4_apart(x):
    """Widen words of eight int4 to eight float16 tensors of stored numbers: number 0, 4, 1, 5, 2, 6, 3, 7.

    Numbers 0, 2, 4, 6 are multiplied by INT4_UNIT, the other numbers by 16 * INT4_UNIT.
    """
    return gl.inline_asm_elementwise(
        _INT4_KEYS, "=h,=h,=h,=h,=h,=h,=h,=h,r", [x], dtype=_HALVES_8, is_pure=True, pack=1
    )


@gluon.jit
def widen_int4_halves(x):
    """Widen 16-bit words of four int4 to four float16 tensors, lowest bits first; a thread's words go in pairs.

    Units are those of `widen_int4_apart`.
    """
    return gl.inline_asm_elementwise(_INT4_VALUES, "=r,=r,=r,=r,r", [x], dtype=_HALVES_4, is_pure=True, pack=2)


@gluon.jit
def widen_int4_bytes(x):
    """Do `widen_int4_halves` for the lower bytes of 16-bit words: two float16 tensors."""
    return gl.inline_asm_elementwise(_INT4_BYTES, "=r,=r,r", [x], dtype=_HALVES_2, is_pure=True, pack=2)


# ---- bytes apart ---------------------------------------------------------------------------------


@gluon.jit
def widen_bytes_apart(x, FP8: gl.constexpr):
    """Widen words of four one-byte numbers to four float16 tensors, lowest byte first."""
    ASM: gl.constexpr = _E4M3_APART if FP8 == 3 else _E5M2_APART if FP8 == 2 else _INT8_APART
    return gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r", [x], dtype=_HALVES_4, is_pure=True, pack=1)


_E4M3_PAIR = gl.constexpr("{ .reg .b32 w; cvt.rn.f16x2.e4m3x2 w, $2; mov.b32 {$0, $1}, w; }")
_E5M2_PAIR = gl.constexpr("and.b16 $1, $2, 0xFF00; shl.b16 $0, $2, 8;")
_INT8_PAIR = gl.constexpr(
    "{ .reg .b32 x, a, above, less; cvt.u32.u16 x, $2;" + _from_int8("x", "a") + " mov.b32 {$0, $1}, a; }"
)


@gluon.jit
def widen_pair_apart(x, FP8: gl.constexpr):
    """Widen the two numbers of 16-bit words to two float16 tensors, lowest byte first."""
    ASM: gl.constexpr = _E4M3_PAIR if FP8 == 3 else _E5M2_PAIR if FP8 == 2 else _INT8_PAIR
    return gl.inline_asm_elementwise(ASM, "=&h,=&h,h", [x], dtype=_HALVES_2, is_pure=True, pack=1)


@gluon.jit
def widen_pairs_apart(even, odd, FP8: gl.constexpr):
    """Widen words of two keys to eight float16 tensors: first number of even, first of odd, second of even, ..."""
    ASM: gl.constexpr = _E4M3_PAIRS_APART if FP8 == 3 else _E5M2_PAIRS_APART if FP8 == 2 else _INT8_PAIRS_APART
    return gl.inline_asm_elementwise(
        ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd], dtype=_HALVES_8, is_pure=True, pack=1
    )


_E4M3_HALVES_APART = gl.constexpr(
    "{ .reg .b32 e, o, x; .reg .b16 l, u; cvt.u32.u16 e, $4; cvt.u32.u16 o, $5; prmt.b32 x, e, o, 0x5140;"
    " mov.b32 {l, u}, x; cvt.rn.f16x2.e4m3x2 e, l; cvt.rn.f16x2.e4m3x2 o, u;"
    " mov.b32 {$0, $1}, e; mov.b32 {$2, $3}, o; }"
)
_E5M2_HALVES_APART = gl.constexpr(
    "{ .reg .b32 e, o; cvt.u32.u16 e, $4; cvt.u32.u16 o, $5; prmt.b32 e, e, o, 0x5140;"
    " prmt.b32 o, e, 0, 0x3424; prmt.b32 e, e, 0, 0x1404; mov.b32 {$0, $1}, e; mov.b32 {$2, $3}, o; }"
)
_INT8_HALVES_APART = gl.constexpr(
    "{ .reg .b32 e, o, x, above, less; cvt.u32.u16 e, $4; cvt.u32.u16 o, $5; prmt.b32 x, e, o, 0x5140;"
    + _from_int8("x", "e", "o")
    + " mov.b32 {$0, $1}, e; mov.b32 {$2, $3}, o; }"
)


@gluon.jit
def widen_halves_apart(even, odd, FP8: gl.constexpr):
    """Widen 16-bit words of two keys to four float16 tensors: first number of even, of odd, second of even, of odd."""
    ASM: gl.constexpr = _E4M3_HALVES_APART if FP8 == 3 else _E5M2_HALVES_APART if FP8 == 2 else _INT8_HALVES_APART
    return gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,h,h", [even, odd], dtype=_HALVES_4, is_pure=True, pack=1)
