"""Registers: pin values, declare them uniform, and move them between the words of a thread or the threads of a row.

`words_beside` of bfloat16 turns a thread's numbers a, b, c, d ($2..$5) into its words $0 and $1:

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
    """Return x, values of 16 or 32 bits, which LLVM sees as used here.

    LLVM then neither sinks their conversion nor reuses registers of an operand that the tensor cores still read.
    """
    PACK: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=PACK)


_SAME = gl.constexpr("redux.sync.or.b32 $0, $1, 0xffffffff;")


@gluon.jit
def same(x):
    """Return x, equal in all lanes of a warp; ptxas knows that of this result, and not of results of shuffles."""
    return gl.inline_asm_elementwise(_SAME, "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def anew(x):
    """Return x, equal in all lanes of a warp, as a value that cannot be moved out of a loop.

    Otherwise loop-invariant addresses of operands are computed before the loop, and take registers or spill.
    """
    return gl.inline_asm_elementwise(_SAME, "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1)


_TRANSPOSE = gl.constexpr(
    "{ .reg .b32 a, b, c, d;"
    " prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;"
    " prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }"
)


@gluon.jit
def transpose_bytes(a, b, c, d):
    """Transpose four words of four bytes: words of the first bytes, second bytes, ...; 8 instructions for 16 bytes."""
    return gl.inline_asm_elementwise(
        _TRANSPOSE, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=_FOUR_WORDS, is_pure=True, pack=1
    )


def _beside(pair: str) -> str:
    """PTX: two words of 16-bit pairs.

    Even lanes get the first words of a pair of lanes, odd lanes the second words, the even lane's word first.
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
    """Two neighbouring words of a row, from pairs (a, b) and (c, d) that are four words apart in the row.

    Each of four lanes has a word of both groups of four.  Afterwards even lanes have two words of the first group, odd
    lanes two words of the second group.
    """
    ASM: gl.constexpr = _BESIDE_BF16 if gl.bfloat16 == DTYPE else _BESIDE_F16
    return gl.inline_asm_elementwise(ASM, "=r,=r,f,f,f,f", [a, b, c, d], dtype=TWO_WORDS, is_pure=False, pack=1)
