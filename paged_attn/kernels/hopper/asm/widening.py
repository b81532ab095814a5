"""Widening of fp8 to float16, into words of two or into single numbers.

`widen_bytes_apart` makes the float16 numbers $0..$3 of a word $4 of four e4m3 numbers:

    { .reg .b16 lower, upper; .reg .b32 a, b; mov.b32 {lower, upper}, $4;
      cvt.rn.f16x2.e4m3x2 a, lower; cvt.rn.f16x2.e4m3x2 b, upper; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }

An e5m2 number is the upper byte of its float16: `prmt` puts it above a byte of zeros.
"""

from ..shim import gl, gluon
from .instructions import TWO_WORDS

_E4M3 = gl.constexpr(
    "{ .reg .b16 lower, upper; mov.b32 {lower, upper}, $2;"
    " cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }"
)
_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")  # float16's upper bytes


@gluon.jit
def widen_bytes(x, FP8: gl.constexpr):
    """Widen words of four fp8 numbers to (words of the lower two, words of the upper two) in float16.

    Element by element, the compiler would convert to float32 first.
    """
    ASM: gl.constexpr = _E4M3 if FP8 == 3 else _E5M2
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=TWO_WORDS, is_pure=True, pack=1)


_E4M3_APART = gl.constexpr(
    "{ .reg .b16 lower, upper; .reg .b32 a, b; mov.b32 {lower, upper}, $4;"
    " cvt.rn.f16x2.e4m3x2 a, lower; cvt.rn.f16x2.e4m3x2 b, upper; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
)
_E5M2_APART = gl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $4, 0, 0x1404; prmt.b32 b, $4, 0, 0x3424;"
    " mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
)
_HALVES_4 = gl.constexpr((gl.float16,) * 4)
_HALVES_8 = gl.constexpr((gl.float16,) * 8)


def _pairs_apart(words: str) -> str:
    """PTX: widen words $8 and $9 of two keys, by `words`, to words a..d of two float16 each, and split them."""
    halves = " ".join(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {word};" for i, word in enumerate("abcd"))
    return f"{{ .reg .b32 a, b, c, d, x, y; .reg .b16 l, u; {words} {halves} }}"


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


@gluon.jit
def widen_bytes_apart(x, FP8: gl.constexpr):
    """Widen words of four fp8 numbers to four float16 tensors, lowest byte first."""
    ASM: gl.constexpr = _E4M3_APART if FP8 == 3 else _E5M2_APART
    return gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r", [x], dtype=_HALVES_4, is_pure=True, pack=1)


_E4M3_PAIR = gl.constexpr("{ .reg .b32 w; cvt.rn.f16x2.e4m3x2 w, $2; mov.b32 {$0, $1}, w; }")
_E5M2_PAIR = gl.constexpr("and.b16 $1, $2, 0xFF00; shl.b16 $0, $2, 8;")
_HALVES_2 = gl.constexpr((gl.float16, gl.float16))


@gluon.jit
def widen_pair_apart(x, FP8: gl.constexpr):
    """Widen the two fp8 numbers of 16-bit words to two float16 tensors, lowest byte first."""
    ASM: gl.constexpr = _E4M3_PAIR if FP8 == 3 else _E5M2_PAIR
    return gl.inline_asm_elementwise(ASM, "=&h,=&h,h", [x], dtype=_HALVES_2, is_pure=True, pack=1)


@gluon.jit
def widen_pairs_apart(even, odd, FP8: gl.constexpr):
    """Widen words of two keys to eight float16 tensors: the first number of even and odd, the second of both, ..."""
    ASM: gl.constexpr = _E4M3_PAIRS_APART if FP8 == 3 else _E5M2_PAIRS_APART
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


@gluon.jit
def widen_halves_apart(even, odd, FP8: gl.constexpr):
    """Widen 16-bit words of two keys to four float16 tensors: the first number of even and odd, the second of both."""
    ASM: gl.constexpr = _E4M3_HALVES_APART if FP8 == 3 else _E5M2_HALVES_APART
    return gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,h,h", [even, odd], dtype=_HALVES_4, is_pure=True, pack=1)
