"""The online softmax with as little work per tile as its result allows; its ends are those of `kernels/softmax.py`."""

from .shim import gl, gluon

# Exponents are taken relative to a maximum that may be this much too small (2^8), so that most tiles rescale nothing.
SLACK = gl.constexpr(8.0)


@gluon.jit
def weigh(scores, row_max, unit, S: gl.constexpr):
    """(weights [R, N], factor of what was there before, maximum, partial sums [R, 4] of the weights), base 2."""
    top = gl.maximum(row_max, gl.max(scores, axis=1) * unit)
    top = gl.where(top > row_max + SLACK, top, row_max)
    base = gl.where(top > float("-inf"), top, 0.0)  # -inf - -inf is NaN: rows that have seen nothing use 0
    weights = gl.exp2(scores * unit - gl.expand_dims(base, 1))
    # over the registers of a thread only: the four threads of a row are added up once, at the end
    sums = gl.sum(gl.sum(gl.reshape(weights, [64, S.TILE // 8, 4, 2]), axis=3), axis=1)
    return weights, gl.exp2(row_max - base), top, sums
