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
