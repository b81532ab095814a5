"""Numbers in PTX: literals, and functions of one float32 that take few instructions.

`logistic(power)`, thread by thread, is

    { .reg .f32 a; ex2.approx.ftz.f32 a, $1; add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 $0, a; }

where $0 is the result, $1 the power, and 0f3F800000 the literal of 1.
"""

import struct

from ..shim import gl, gluon

# Result types of assembly with two results.
TWO_WORDS = gl.constexpr((gl.int32,) * 2)
WORD_AND_SUM = gl.constexpr((gl.int32, gl.float32))


def literal(x: float) -> str:
    """PTX literal of a float32."""
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
    """x / (1 + 2^power), by approximate ex2 and rcp; x where x is 0."""
    return gl.inline_asm_elementwise(_TIMES_LOGISTIC, "=f,f,f", [x, power], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh(x):
    """tanh(x) by tanh.approx, with a relative error of at most 2^-11."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """2^x by ex2.approx; results below the normal numbers are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
