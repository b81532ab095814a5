"""Ping-pong: two warpgroups send their products in turn, so that those of one run under the other's softmax.

Left to themselves they settle like that or in step, each waiting for the products of both and the tensor cores for both
softmaxes: a fifth longer.  Some cycles decide which, and a build mostly keeps to it: where its loop lies in a line of
code, or what a launch does before.  To be told costs 1 to 3%, so the planner says who is.
"""

from ..asm.turns import begin_turns, give_turn, take_turn
from ..shim import gl, gluon


@gluon.jit
def begin(P: gl.constexpr):
    """Before a consumer's first item."""
    if P.IN_TURN:
        begin_turns()


@gluon.jit
def take(P: gl.constexpr):
    """Wait for this warpgroup's turn."""
    if P.IN_TURN:
        take_turn()


@gluon.jit
def give(P: gl.constexpr):
    """It is the other's turn."""
    if P.IN_TURN:
        give_turn()
