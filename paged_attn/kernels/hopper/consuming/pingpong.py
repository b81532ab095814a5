"""Ping-pong: two warpgroups send products in turn, so that products of one run under the softmax of the other.

Warpgroups that are not told either alternate by themselves or run in step.  In step, each waits for the products of
both, and the tensor cores wait for both softmaxes, which takes a fifth longer.  A few cycles decide: the place of the
loop in a line of code, or the launch's prologue; one build mostly behaves one way.  Telling costs 1 to 3%, so the
planner decides (Pipe.IN_TURN).
"""

from ..asm.barriers import begin_turns, give_turn, take_turn
from ..shim import gl, gluon


@gluon.jit
def begin(P: gl.constexpr):
    """Prepare the turns before a consumer's first item."""
    if P.IN_TURN:
        begin_turns()


@gluon.jit
def take(P: gl.constexpr):
    """Wait for this warpgroup's turn."""
    if P.IN_TURN:
        take_turn()


@gluon.jit
def give(P: gl.constexpr):
    """Give the turn to the other warpgroup."""
    if P.IN_TURN:
        give_turn()
