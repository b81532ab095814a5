"""Turns and meetings of a kernel's first two warpgroups, by the last of a program's barriers: Triton takes the first.

Each waits at its own, where the other arrives.  That the last turn is given nobody waits for.  `take_turn` is

    { .reg .b32 t; mov.u32 t, %tid.x; shr.u32 t, t, 7; add.u32 t, t, 14; bar.sync t, 256; mov.u32 $0, $1; }

so threads 0 to 127 wait at barrier 14 and threads 128 to 255 at barrier 15, each for 256 that wait or arrive.
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
    """Once by each thread of two warpgroups."""
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
    """To the other warpgroup."""
    _execute(_GIVE_TURN)


@triton.constexpr_function
def _at(what, barrier):
    return f"bar.{what} {barrier}, 256; mov.u32 $0, $1;"


@gluon.jit
def _alike(WHAT: gl.constexpr, BARRIER: gl.constexpr):
    """Once by each thread of one of two consumers of a warpgroup each."""
    ASM: gl.constexpr = _at(WHAT, BARRIER)
    gl.inline_asm_elementwise(ASM, "=r,r,~{memory}", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet_other():
    """Until all threads of both consumers are here."""
    _alike("sync", 13)


@gluon.jit
def tell_written(NUMBER: gl.constexpr):
    """A consumer has written what the other waits for by `wait_written` of the same number."""
    _alike("arrive", 11 + NUMBER)


@gluon.jit
def wait_written(NUMBER: gl.constexpr):
    """Until a consumer, the other one, has told so; between two such times it waits by `wait_read`."""
    _alike("sync", 11 + NUMBER)


@gluon.jit
def tell_read(NUMBER: gl.constexpr):
    """What a consumer, the other one, has written is read, and may be written over."""
    _alike("arrive", 14 + NUMBER)


@gluon.jit
def wait_read(NUMBER: gl.constexpr):
    """Until the other consumer has told so of what this one has written."""
    _alike("sync", 14 + NUMBER)
