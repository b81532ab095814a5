"""Numbers in PTX: literals, and functions of a number that are an instruction or a few.

`logistic(power)`, thread by thread, is

    { .reg .f32 a; ex2.approx.ftz.f32 a, $1; add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 $0, a; }

where $0 is the result, $1 the power and 0f3F800000 is 1 as `literal` writes it.
"""

import struct

from ..shim import gl, gluon

# What assembly returns where that is more than one thing.
TWO_WORDS = gl.constexpr((gl.int32,) * 2)
WORD_AND_SUM = gl.constexpr((gl.int32, gl.float32))


def literal(x: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{struct.pack('>f', x).hex()}"


_LOGISTIC = gl.constexpr(
    "{ .reg .f32 a; ex2.approx.ftz.f32 a, $1; add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 $0, a; }"
)


_TIMES_LOGISTIC = gl.constexpr(
    "{ .reg .f32 a; .reg .pred zero; ex2.approx.ftz.f32 a, $2; add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 a, a; "
    "mul.f32 a, a, $1; setp.eq.f32 zero, $1, 0f00000000; selp.f32 $0, $1, a, zero; }"
)


@gluon.jit
def logistic(power):
    """1 / (1 + 2^power)."""
    return gl.inline_asm_elementwise(_LOGISTIC, "=f,f", [power], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def times_logistic(x, power):
    """x / (1 + 2^power), by two approximations of an instruction each; x where that is 0."""
    return gl.inline_asm_elementwise(_TIMES_LOGISTIC, "=f,f,f", [x, power], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh(x):
    """By one instruction, off by 2^-11 of itself at most."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """2^x by one instruction; what is too small for a normal number is 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
