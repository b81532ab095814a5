"""Inline assembly, and what it is for."""

from .shim import gl, gluon


@gluon.jit
def pin(x):
    """The 16-bit values x, in use here as far as LLVM can tell.

    So it may not sink their conversion, nor use the registers of an operand that the tensor cores still read.
    """
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


def _scale_unless_one(registers: int) -> str:
    """acc *= factor for so many registers, skipped by a warp in which every factor is 1."""
    first = 2 * registers
    vote = (
        f"{{ .reg .pred any, all; setp.neu.f32 any, ${first}, 0f3F800000;"
        f" setp.neu.or.f32 any, ${first + 2}, 0f3F800000, any;"
        " vote.sync.any.pred all, any, 0xffffffff; @!all bra KEEP; "
    )
    products = " ".join(f"mul.f32 ${i}, ${i}, ${first + i};" for i in range(registers))
    return vote + products + " KEEP: mov.pred any, all; }"


def _constraints(registers: int) -> str:
    return ",".join(["=f"] * registers + [str(i) for i in range(registers)] + ["f"] * registers)


_ASM_32, _IN_32 = gl.constexpr(_scale_unless_one(32)), gl.constexpr(_constraints(32))
_ASM_64, _IN_64 = gl.constexpr(_scale_unless_one(64)), gl.constexpr(_constraints(64))


@gluon.jit
def rescale(acc, factor, DIM: gl.constexpr):
    """acc [64, DIM] * factor [64]: without the vote every tile pays for it, though the maximum rarely moves."""
    if DIM == 64:
        return gl.inline_asm_elementwise(
            _ASM_32, _IN_32, [acc, gl.expand_dims(factor, 1)], dtype=gl.float32, is_pure=False, pack=32
        )
    elif DIM == 128:
        return gl.inline_asm_elementwise(
            _ASM_64, _IN_64, [acc, gl.expand_dims(factor, 1)], dtype=gl.float32, is_pure=False, pack=64
        )
    else:
        return acc * gl.expand_dims(factor, 1)


_E4M3 = gl.constexpr(
    "{ .reg .b16 lower, upper; mov.b32 {lower, upper}, $2;"
    " cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }"
)
_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")  # float16's upper bytes
_TRANSPOSE = gl.constexpr(
    "{ .reg .b32 a, b, c, d;"
    " prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;"
    " prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }"
)
_TWO = gl.constexpr((gl.int32, gl.int32))
_FOUR = gl.constexpr((gl.int32, gl.int32, gl.int32, gl.int32))


@gluon.jit
def widen_bytes(x, FP8: gl.constexpr):
    """Words of four fp8 numbers as (words of the lower two, of the upper two) in float16.

    Element by element the compiler would convert to float32 first.
    """
    ASM: gl.constexpr = _E4M3 if FP8 == 3 else _E5M2
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=_TWO, is_pure=True, pack=1)


@gluon.jit
def transpose_bytes(a, b, c, d):
    """Four words of four bytes as the words of their first bytes, second bytes, ...: 8 instructions for 16 bytes."""
    return gl.inline_asm_elementwise(_TRANSPOSE, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=_FOUR, is_pure=True, pack=1)
