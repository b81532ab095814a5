"""Turns and meetings of a kernel's first two warpgroups, by named barriers 11 to 15; Triton takes the lowest ones.

Each warpgroup waits at its own barrier, where the other arrives.  No warpgroup waits for the final hand-over.
`take_turn` is

    { .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; add.u32 t, t, 14; bar.sync t, 256; mov.u32 $0, $1; }

Threads 0 to 127 wait at barrier 14, and threads 128 to 255 at barrier 15, each for 256 threads that wait or arrive.
"""

import triton

from ..shim import gl, gluon

_BEGIN_TURNS = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.ge.u32 p, t, 128; @p bar.arrive 14, 256; mov.u32 $0, $1; }"
)
_TAKE_TURN = gl.constexpr(
    "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; add.u32 t, t, 14; bar.sync t, 256; mov.u32 $0, $1; }"
)
_GIVE_TURN = gl.constexpr(
    "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; sub.u32 t, 15, t; bar.arrive t, 256; mov.u32 $0, $1; }"
)


@gluon.jit
def _execute(ASM: gl.constexpr):
    """Execute ASM once in each thread of two warpgroups."""
    nothing = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [8], [0]))
    gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [nothing], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_turns():
    """The second warpgroup gives the first one a turn."""
    _execute(_BEGIN_TURNS)


@gluon.jit
def take_turn():
    """Wait until the other warpgroup has given its turn."""
    _execute(_TAKE_TURN)


@gluon.jit
def give_turn():
    """Give the turn to the other warpgroup."""
    _execute(_GIVE_TURN)


@triton.constexpr_function
def _at(what, barrier):
    return f"bar.{what} {barrier}, 256; mov.u32 $0, $1;"


@gluon.jit
def _alike(WHAT: gl.constexpr, BARRIER: gl.constexpr):
    """Execute bar.WHAT at BARRIER once in each thread of one consumer, of two with a warpgroup each."""
    ASM: gl.constexpr = _at(WHAT, BARRIER)
    gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet_other():
    """Wait until all threads of both consumers are here."""
    _alike("sync", 13)


@gluon.jit
def tell_written(NUMBER: gl.constexpr):
    """Consumer NUMBER tells that it has written; the other consumer calls `wait_written(NUMBER)`."""
    _alike("arrive", 11 + NUMBER)


@gluon.jit
def wait_written(NUMBER: gl.constexpr):
    """Wait until consumer NUMBER, the other one, has written; that consumer calls `wait_read` before writing again."""
    _alike("sync", 11 + NUMBER)


@gluon.jit
def tell_read(NUMBER: gl.constexpr):
    """Tell consumer NUMBER, the other one, that data awaited by `wait_written` is read and may be overwritten."""
    _alike("arrive", 14 + NUMBER)


@gluon.jit
def wait_read(NUMBER: gl.constexpr):
    """Consumer NUMBER waits until the other consumer has read its data."""
    _alike("sync", 14 + NUMBER)
