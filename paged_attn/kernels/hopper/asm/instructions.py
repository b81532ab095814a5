"""Single instructions that Triton does not offer: special functions of float32, and prefetches into the L2.

`logistic(power)`, thread by thread, is

    { .reg .f32 a; ex2.approx.ftz.f32 a, $1; add.f32 a, a, 0f3F800000; rcp.approx.ftz.f32 $0, a; }

where $0 is the result, $1 the power, and 0f3F800000 the literal of 1.

`bring_near`, which fetches $2 bytes at $1 in each thread whose $3 is not 0, is

    { .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $3; }

Inline assembly must have a result, here $0, which is never read.  `bring_line` fetches the line of memory that holds
address $1:

    { .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, $2; }

A prefetch never faults, and no thread waits for a prefetch.  A load that begins before the bytes have come waits for
memory, as without a prefetch.
"""

import struct

from ..shim import gl, gluon

# Result types of assembly with two results: two words, or a word and a float32 sum.
TWO_WORDS = gl.constexpr((gl.int32,) * 2)
WORD_AND_SUM = gl.constexpr((gl.int32, gl.float32))


def literal(x: float) -> str:
    """Return the PTX literal of a float32."""
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
    """Return 1 / (1 + 2^power)."""
    return gl.inline_asm_elementwise(_LOGISTIC, "=f,f", [power], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def times_logistic(x, power):
    """Return x / (1 + 2^power), by approximate ex2 and rcp; x where x is 0."""
    return gl.inline_asm_elementwise(_TIMES_LOGISTIC, "=f,f,f", [x, power], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh(x):
    """Return tanh(x) by tanh.approx, with a relative error of at most 2^-11."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """Return 2^x by ex2.approx; results below the normal numbers are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    """Return log2(x) by lg2.approx; Triton's function takes 15 instructions.

    The error is at most 2^-22 for x from 1/2 to 2, and at most 2^-22 of the result for other x.
    """
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def inverse(x):
    """Return 1 / x by rcp.approx, off by at most one unit in the last place; a division takes 8 instructions."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


# ---- prefetches ----------------------------------------------------------------------------------


_BRING = gl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $3; }"
)


@gluon.jit
def bring_near(address, size, wanted):
    """Let the L2 fetch `size` bytes from `address` on, both multiples of 16, for each thread where `wanted`."""
    operands = [address, size, wanted.to(gl.int32)]
    gl.inline_asm_elementwise(_BRING, "=r,l,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


_BRING_LINE = gl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, $2; }")


@gluon.jit
def bring_line(address, wanted):
    """Let the L2 fetch the line of memory that holds `address`, for each thread where `wanted`."""
    operands = [address, wanted.to(gl.int32)]
    gl.inline_asm_elementwise(_BRING_LINE, "=r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)
