"""Registers: pin values, declare values uniform, and move bytes within a thread, or words between a row's threads.

`words_beside` turns a thread's float32 numbers a, b, c, d ($2..$5) into words $0 and $1 of two bfloat16 numbers each:

    { .reg .pred p; .reg .b32 l, a, b, x, y;
      cvt.rn.bf16x2.f32 a, $3, $2; cvt.rn.bf16x2.f32 b, $5, $4;
      mov.u32 l, %laneid; and.b32 l, l, 1; setp.ne.u32 p, l, 0; selp.b32 x, a, b, p;
      shfl.sync.bfly.b32 y, x, 1, 31, 0xffffffff; selp.b32 $0, y, a, p; selp.b32 $1, b, y, p; }
"""

from ..shim import gl, gluon
from .instructions import TWO_WORDS

_FOUR_WORDS = gl.constexpr((gl.int32,) * 4)


@gluon.jit
def pin(x):
    """Return x, values of 16 or 32 bits; LLVM assumes that x is read and written here.

    So LLVM does not move the computation of x behind this place.  If x is an operand that the tensor cores read until
    here, LLVM does not overwrite the registers of x earlier.
    """
    PACK: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=PACK)


_SAME = gl.constexpr("redux.sync.or.b32 $0, $1, 0xffffffff;")


@gluon.jit
def same(x):
    """Return x, int32, which is equal in all lanes of a warp, as a value that ptxas knows to be equal."""
    return gl.inline_asm_elementwise(_SAME, "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def anew(x):
    """Return x, int32, which is equal in all lanes of a warp, as a value that the compiler cannot move out of a loop.

    Otherwise the compiler computes loop-invariant addresses of operands before the loop, and these addresses take
    registers throughout the loop, or spill.
    """
    return gl.inline_asm_elementwise(_SAME, "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1)


_TRANSPOSE = gl.constexpr(
    "{ .reg .b32 a, b, c, d;"
    " prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;"
    " prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }"
)


@gluon.jit
def transpose_bytes(a, b, c, d):
    """Transpose four int32 words of four bytes: return words of first bytes, of second bytes, ...; 8 instructions."""
    return gl.inline_asm_elementwise(
        _TRANSPOSE, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=_FOUR_WORDS, is_pure=True, pack=1
    )


def _beside(pair: str) -> str:
    """PTX: round $2..$5 to two words of 16-bit pairs, and exchange words between neighbouring lanes.

    An even lane gets the first words of both lanes, an odd lane the second words; the even lane's word comes first.
    """
    return (
        "{ .reg .pred p; .reg .b32 l, a, b, x, y; "
        f"cvt.rn.{pair}.f32 a, $3, $2; cvt.rn.{pair}.f32 b, $5, $4; "
        "mov.u32 l, %laneid; and.b32 l, l, 1; setp.ne.u32 p, l, 0; selp.b32 x, a, b, p; "
        "shfl.sync.bfly.b32 y, x, 1, 31, 0xffffffff; selp.b32 $0, y, a, p; selp.b32 $1, b, y, p; }"
    )


_BESIDE_BF16 = gl.constexpr(_beside("bf16x2"))
_BESIDE_F16 = gl.constexpr(_beside("f16x2"))


@gluon.jit
def words_beside(a, b, c, d, DTYPE: gl.constexpr):
    """Return two neighbouring words of a row, of 16-bit pairs, from float32 pairs (a, b) and (c, d).

    Each of the row's four lanes has a pair of a group of four pairs, and a pair of the next group of four.  Afterwards
    even lanes have two words of the first group, and odd lanes have two words of the second group.
    """
    ASM: gl.constexpr = _BESIDE_BF16 if gl.bfloat16 == DTYPE else _BESIDE_F16
    return gl.inline_asm_elementwise(ASM, "=r,=r,f,f,f,f", [a, b, c, d], dtype=TWO_WORDS, is_pure=False, pack=1)
