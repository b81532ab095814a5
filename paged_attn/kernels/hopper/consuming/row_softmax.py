"""The online softmax with as little work per tile as its result allows; its ends are those of `common/softmax.py`."""

from ...common.numerics import rounded_product
from ...common.softmax import base_of
from ..asm import caps, maxima
from ..asm.caps import DIGEST_OF_CAPS, cap_of
from ..asm.maxima import raise_max, rescale
from ..asm.narrowing import exp2_words, line_words
from ..asm.weights import weigh_again, weigh_pairs
from ..layouts import threads_layout
from ..shim import gl, gluon
from .fragments import (
    as_product,
    beside,
    beside_pairs,
    by_thread,
    first_of_thread,
    split_product,
    spread,
    thread_maxima,
    thread_sums,
    whole_of,
)

SLACK, MAX_NEGLIGIBLE_EXPONENT = gl.constexpr(maxima.SLACK), gl.constexpr(caps.MAX_NEGLIGIBLE_EXPONENT)
MIN_NORMAL, MAX_POWER_OF_2 = gl.constexpr(2.0**-126), gl.constexpr(2.0**127)  # of normal float32 numbers

# fp8 weights use their type's range from the top: the largest, 448, is a little more than 2^(5 + FP8_SLACK).  A whole
# number, so that the weight of a new maximum is exact: rows of few keys would show it.
FP8_OFFSET = gl.constexpr(5.0)


@gluon.jit
def times(x, factor, BY_ROW: gl.constexpr):
    """x [R, N] * factor, one for all or one for every row."""
    if BY_ROW:
        return x * gl.expand_dims(factor, 1)
    else:
        return x * factor


@gluon.jit
def exp2_by_word(scores, unit, shift, S: gl.constexpr, P: gl.constexpr):
    """(exp2(scores * unit + shift [64, 4]) as words of four in fp8 [64, TILE / 4], sums [64, 4] by thread, if exact).

    Keys change places as in `convert.transpose`.  As words they go from one round of the loop to the next, for 8-bit
    numbers ptxas would unpack.
    """
    x = scores.reshape([P.ROWS, S.TILE // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(x)
    lower_even, upper_even = gl.split(even)
    lower_odd, upper_odd = gl.split(odd)
    shift = beside_pairs(shift, lower_even)
    if P.COARSE:
        words = line_words(lower_even, lower_odd, upper_even, upper_odd, unit, shift)
        return words.reshape([P.ROWS, S.TILE // 4]), 0.0
    else:
        words, sums = exp2_words(lower_even, lower_odd, upper_even, upper_odd, unit, shift)
        sums = gl.convert_layout(gl.sum(sums, axis=1), threads_layout(P.ROWS), assert_trivial=True)
        return words.reshape([P.ROWS, S.TILE // 4]), sums


@gluon.jit
def scale_rows(acc, factor, S: gl.constexpr):
    """A product's rows, each times the factor [R, 4] that its threads agree about."""
    x = by_thread(acc)
    return as_product(rescale(x, beside(factor, x), S.VALUE_PADDED), acc)


@gluon.jit
def exp2_below(scores, factor, base, S: gl.constexpr):
    """2^(scores * factor - base), whose operands are of one shape."""
    if S.NORMALIZED:
        # scores of any magnitude: beside a maximum of 2^30 that was rounded, an exact product may be far away
        return gl.exp2(rounded_product(scores, factor) - base)
    else:
        return gl.exp2(gl.fma(scores, factor, -base))


@gluon.jit
def weigh(scores, row_max, unit, shift, S: gl.constexpr, P: gl.constexpr):
    """(weights of a product [R, N], factor of what was there before, maximum, sums of the weights), base 2.

    What weighs is scores * unit, plus a shift if there is one.  All but the weights is [R, 4]: the factors and maxima
    that a row's four threads agree about, and the sums that each has of its own; weights have 16 bits, or of fp8
    products are words of four, [R, N / 4].  Coarse weights have no sums: 0.
    """
    BY_ROW: gl.constexpr = S.BY_ROW and not S.SCALE_FIRST
    x = by_thread(scores)
    top = thread_maxima(x, P.ROWS, P.COARSE)
    if BY_ROW:
        unit = spread(unit, P.ROWS)
    top *= unit
    if shift is not None:
        top += shift
    if P.FP8_PRODUCTS:
        top -= FP8_OFFSET
    row_max, decay = raise_max(top, row_max, P.FP8_PRODUCTS)
    base = base_of(row_max)
    if shift is not None:
        base -= shift
    if P.FP8_PRODUCTS:
        weights, sums = exp2_by_word(scores, unit, -base, S, P)
    else:
        factor = beside(unit, x) if BY_ROW else unit
        weights = exp2_below(x, factor, beside(base, x), S)
        sums = thread_sums(weights, P.ROWS)
        weights = as_product(weights, scores).to(S.COMPUTE)
    return weights, decay, row_max, sums


@gluon.jit
def powers_of(unit, cap_factor, RELATIVE, TERMS):
    """(coefficients, cap) by which scores x become powers of two, as `weigh_pairs` and `weigh_again` take them.

    TERMS: of a polynomial for unit * tanh(x * cap_factor); 0: x * unit, or RELATIVE x itself.
    """
    if RELATIVE:
        return (), ()
    elif TERMS == 0:
        return (unit,), ()
    else:
        CAP: gl.constexpr = cap_of(TERMS, DIGEST_OF_CAPS)
        power = unit * cap_factor
        coefficients = ()
        for i in gl.static_range(TERMS - 1):
            coefficients = coefficients + (power * CAP[0][i],)
            power *= cap_factor * cap_factor
        last, largest = power * CAP[0][TERMS - 1], unit * CAP[1]
        # a scale so small or large that float32 has no such coefficient: every row is weighed again
        usable = (last >= MIN_NORMAL) & (last <= MAX_POWER_OF_2)
        least_max = gl.where(usable, -MAX_NEGLIGIBLE_EXPONENT - largest, float("inf"))
        # never 0, of which the square of a masked score would make no number
        return coefficients + (gl.maximum(last, MIN_NORMAL),), (cap_factor, least_max, largest)


@gluon.jit
def weigh_at_once(
    scores, row_max, acc, unit, shift, cap_factor, RELATIVE: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """As `weigh`, of rows of a product, in words [R, N / 8, 4] of two weights of 16 bits: no maximum is looked for.

    The weights are those by the maximum so far; only where a thread's sum of them tells that it is too small by far,
    they are made again.  Last returned is acc, maybe still being added to, times the factor of what was there before.
    RELATIVE: scores are what the weights are powers of, less the base of that maximum already.
    cap_factor: tanh(score * cap_factor) takes a score's place, if a polynomial is to cap it.
    """
    dtype: gl.constexpr = S.COMPUTE
    even, odd = gl.split(by_thread(scores))
    base = base_of(row_max)
    if S.BY_ROW and not S.SCALE_FIRST:
        unit = beside_pairs(spread(unit, P.ROWS), even)
    coefficients, cap = powers_of(unit, cap_factor, RELATIVE, P.TERMS)
    if RELATIVE:
        unit, shift = 1.0, beside_pairs(base, even)
    elif shift is None:
        shift = 0.0
    else:
        base -= shift
    words, sums = weigh_pairs(even, odd, coefficients, beside_pairs(-base, even), dtype)
    sums = gl.convert_layout(gl.sum(sums, axis=1), threads_layout(P.ROWS), assert_trivial=True)
    sums, row_max = beside_pairs(sums, even), beside_pairs(row_max, even)
    found = weigh_again(
        words, even, odd, sums, row_max, unit, shift, split_product(acc, even), cap, S.NORMALIZED, P.TERMS, dtype
    )
    sums, row_max = first_of_thread(found[1], P.ROWS), first_of_thread(found[2], P.ROWS)
    return found[0], first_of_thread(found[3], P.ROWS), row_max, sums, whole_of(found[4:], acc)
