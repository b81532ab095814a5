"""Prefetches into the L2.

`bring_near` of $2 bytes at $1, for each thread whose $3 is not 0, is

    { .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $3; }

Inline assembly must have a result; nobody reads $0.  `bring_near` needs multiples of 16 bytes.  `bring_line` fetches
the line of memory that holds any address:

    { .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, $2; }

A prefetch never faults, and nobody waits for it.  A load that comes sooner takes as long as without a prefetch.
"""

from ..shim import gl, gluon

_BRING = gl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $3; }"
)


@gluon.jit
def bring_near(address, size, wanted):
    """Have the L2 fetch `size` bytes from `address` on, both multiples of 16, for each thread where `wanted`."""
    operands = [address, size, wanted.to(gl.int32)]
    gl.inline_asm_elementwise(_BRING, "=r,l,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


_BRING_LINE = gl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, $2; }")


@gluon.jit
def bring_line(address, wanted):
    """Have the L2 fetch the line of memory that holds `address`, for each thread where `wanted`."""
    operands = [address, wanted.to(gl.int32)]
    gl.inline_asm_elementwise(_BRING_LINE, "=r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)
