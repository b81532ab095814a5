"""The online softmax with as little work per tile as its result allows; its ends are those of `kernels/softmax.py`."""

from ..kernels.numerics import rounded_product
from ..kernels.softmax import base_of
from . import asm
from .asm import raise_max
from .layouts import is_product
from .shim import gl, gluon

SLACK = gl.constexpr(asm.SLACK)

# fp8 weights use their type's range from the top: the largest, 448, is a little more than 2^(7 + FP8_SLACK).
FP8_OFFSET = gl.constexpr(7.0)


@gluon.jit
def times(x, factor, BY_ROW: gl.constexpr):
    """x [R, N] * factor, one for all or one for every row."""
    if BY_ROW:
        return x * gl.expand_dims(factor, 1)
    else:
        return x * factor


@gluon.jit
def thread_sums(weights, S: gl.constexpr, P: gl.constexpr):
    """[R, 4]: over the registers of a thread only; the four threads of a row are added up once, at the end.

    Of few rows, which are columns, whole sums.
    """
    if is_product(weights.type.layout, S.TILE, P.FP8_PRODUCTS, P.ROWS):
        return gl.sum(gl.sum(gl.reshape(weights, [P.ROWS, S.TILE // 8, 4, 2]), axis=3), axis=1)
    else:
        return gl.sum(weights, axis=1)


@gluon.jit
def weigh(scores, row_max, unit, shift, S: gl.constexpr, P: gl.constexpr):
    """(weights [R, N], factor of what was there before, maximum, thread sums of the weights), base 2.

    What weighs is scores * unit, plus a shift if there is one.
    """
    top = gl.max(scores, axis=1) * unit
    if shift is not None:
        top += shift
    if P.FP8_PRODUCTS:
        top -= FP8_OFFSET
    if is_product(scores.type.layout, S.TILE, P.FP8_PRODUCTS, P.ROWS):
        row_max, decay = raise_max(top, row_max, P.FP8_PRODUCTS)
        base = base_of(row_max)
    else:
        top = gl.where(top > row_max + SLACK, top, row_max)
        base = base_of(top)
        row_max, decay = top, gl.exp2(row_max - base)
    if shift is not None:
        base -= shift
    if S.NORMALIZED:
        # scores of any magnitude: beside a maximum of 2^30 that was rounded, an exact product may be far away
        factor = unit if S.SCALE_FIRST else gl.expand_dims(unit, 1)
        weights = gl.exp2(rounded_product(scores, factor) - gl.expand_dims(base, 1))
    else:
        weights = gl.exp2(gl.fma(scores, unit, -gl.expand_dims(base, 1)))
    return weights, decay, row_max, thread_sums(weights, S, P)
