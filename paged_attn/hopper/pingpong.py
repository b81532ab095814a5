"""Ping-pong: two warpgroups send their products in turn, so that those of one run under the other's softmax.

Left to themselves they settle like that or in step, each waiting for the products of both and the tensor cores for both
softmaxes: a fifth longer.  Some cycles decide which, and a build mostly keeps to it: where its loop lies in a line of
code, or what a launch does before.
"""

import triton

from .asm import begin_turns, give_turn, take_turn
from .shim import gl, gluon


@triton.constexpr_function
def is_ordered(S, P):
    """Whether they do: where blocks may be cut, for these are long, and no converter is between, 1-3% slower so."""
    return P.ROWS == 128 and S.SPLIT and P.CONVERT == 0


@gluon.jit
def begin(S: gl.constexpr, P: gl.constexpr):
    """Before a consumer's first item."""
    if is_ordered(S, P):
        begin_turns()


@gluon.jit
def take(S: gl.constexpr, P: gl.constexpr):
    """Wait for this warpgroup's turn."""
    if is_ordered(S, P):
        take_turn()


@gluon.jit
def give(S: gl.constexpr, P: gl.constexpr):
    """It is the other's turn."""
    if is_ordered(S, P):
        give_turn()
