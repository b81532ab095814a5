"""The online softmax of rows, with as little work for each tile as possible; `common/softmax.py` begins and ends it."""

from ...common.numerics import rounded_product
from ...common.softmax import base_of
from ..asm import maxima, weights
from ..asm.conversions import exp2_words, line_words
from ..asm.maxima import raise_max, rescale
from ..asm.weights import DIGEST_OF_CAPS, cap_of, weigh_again, weigh_pairs
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

SLACK, MAX_NEGLIGIBLE_EXPONENT = gl.constexpr(maxima.SLACK), gl.constexpr(weights.MAX_NEGLIGIBLE_EXPONENT)
MIN_NORMAL, MAX_POWER_OF_2 = gl.constexpr(2.0**-126), gl.constexpr(2.0**127)  # least and largest power in float32

# fp8 weights are multiplied by 2^FP8_OFFSET, which brings them to the top of e4m3's range: the largest e4m3 number,
# 448, is a little more than 2^(FP8_OFFSET + FP8_SLACK).  The offset is an integer, so that the weight of a new maximum
# is exact.  An error of this weight would show in rows of few keys.
FP8_OFFSET = gl.constexpr(5.0)


@gluon.jit
def times(x, factor, BY_ROW: gl.constexpr):
    """Return x [R, N] * factor; factor is a scalar or, if BY_ROW, [R]."""
    if BY_ROW:
        return x * gl.expand_dims(factor, 1)
    else:
        return x * factor


@gluon.jit
def exp2_by_word(scores, unit, shift, S: gl.constexpr, P: gl.constexpr):
    """(words [R, TILE / 4] of four e4m3 weights exp2(scores * unit + shift), each thread's sums [R, 4]).

    shift [R, 4].  Keys are permuted as in `convert.transpose`.  With COARSE weights, sums is 0.0.  Weights pass between
    rounds of the loop as words, because ptxas would unpack 8-bit numbers.
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
    """Return acc [R, VALUE_PADDED] times each row's factor; factor [R, 4]: equal in the row's four threads."""
    x = by_thread(acc)
    return as_product(rescale(x, beside(factor, x), S.VALUE_PADDED), acc)


@gluon.jit
def exp2_below(scores, factor, base, S: gl.constexpr):
    """Return 2^(scores * factor - base); operands have shapes that broadcast."""
    if S.NORMALIZED:
        # normalized queries: an unrounded product may differ much from a rounded maximum as large as 2^30
        return gl.exp2(rounded_product(scores, factor) - base)
    else:
        return gl.exp2(gl.fma(scores, factor, -base))


@gluon.jit
def weigh(scores, row_max, unit, shift, S: gl.constexpr, P: gl.constexpr):
    """(weights, decay, maximum, sums) of scores [R, N]; weights are 2^(scores * unit + shift - maximum).

    weights are [R, N] of 16 bits or, for fp8 products, int32 words of four, [R, N / 4].

    decay and maximum are float32 [R, 4], equal in a row's four threads.  decay is the factor of earlier results.

    sums are float32 [R, 4], each thread's own part of its row's sum, or 0.0 with COARSE weights.  A shift of None is 0.
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
    """(coefficients, cap) of the exponents of scores x, for `weigh_pairs` and `weigh_again`.

    RELATIVE: exponents are x.  TERMS > 0: exponents are a polynomial that approximates unit * tanh(x * cap_factor).
    Otherwise exponents are x * unit.
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
        # with an extreme scale float32 has no such coefficient, and every row is weighed again
        usable = (last >= MIN_NORMAL) & (last <= MAX_POWER_OF_2)
        least_max = gl.where(usable, -MAX_NEGLIGIBLE_EXPONENT - largest, float("inf"))
        # never 0: the square of a masked score is infinity, and infinity * 0 is NaN
        return coefficients + (gl.maximum(last, MIN_NORMAL),), (cap_factor, least_max, largest)


@gluon.jit
def weigh_at_once(
    scores, row_max, acc, unit, shift, cap_factor, RELATIVE: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """(words [R, N / 8, 4] of two 16-bit weights, decay, maximum, sums, acc) of scores [R, N], by the maximum so far.

    A row is weighed again if it has no maximum yet, or if a thread's sum shows that its maximum is far too small.
    A polynomial and normalized queries add further cases (`weigh_again`).  The branch that weighs rows again waits for
    the running product, and multiplies acc by decay.  `weigh` explains decay, maximum and sums.

    RELATIVE: scores are exponents from which the base of the maximum is already subtracted.

    cap_factor, if given: a polynomial caps the scores, and exponents are unit * tanh(score * cap_factor).
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
