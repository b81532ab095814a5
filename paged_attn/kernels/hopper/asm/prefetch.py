"""Prefetches: what the L2 is to fetch before anybody loads it.

`bring_near` of $2 bytes at $1, for each thread whose $3 is not 0, is

    { .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $3; }

Inline assembly has a result, so there is $0, which nobody reads.  `bring_line` fetches the line of memory that holds an
address, which may lie anywhere, while `bring_near` needs steps of 16 bytes:

    { .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, $2; }

A prefetch never faults and nobody waits for it: what is not there in time is loaded as if there had been none.
"""

from ..shim import gl, gluon

_BRING = gl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, $3; }"
)


@gluon.jit
def bring_near(address, size, wanted):
    """Have the L2 fetch so many bytes, steps of 16, from an address in memory on, for each thread that wants some."""
    operands = [address, size, wanted.to(gl.int32)]
    gl.inline_asm_elementwise(_BRING, "=r,l,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


_BRING_LINE = gl.constexpr("{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, $2; }")


@gluon.jit
def bring_line(address, wanted):
    """`bring_near` of the line of memory that holds an address, which need not be a step of 16 bytes."""
    operands = [address, wanted.to(gl.int32)]
    gl.inline_asm_elementwise(_BRING_LINE, "=r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)
