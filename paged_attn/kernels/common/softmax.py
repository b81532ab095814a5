"""The online softmax as a State (acc, max, sum), base 2: start, update with a tile, merge two states, finish."""

import triton
import triton.language as tl

from .numerics import LN2, LOG2E, dot, first_of, inverse_of_power, less, power_above, rounded_product, scaled
from .records import State

# Limit of the maxima from `seen`, because a difference of infinities is NaN.  A sink of infinity gets this maximum and
# an infinite sum.
MAX_MAXIMUM = tl.constexpr(2.0**127)


@triton.jit
def start(sinks, rows, first, S: tl.constexpr):
    """(max, sum), each [R], before any key; where `first`, scalar or [R], with the sink: score sinks[head], value 0."""
    row_sum = rows.slot * 0.0
    row_max = row_sum + float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + rows.kv_head * S.GROUP + rows.member, mask=rows.valid & first, other=float("-inf"))
        row_max, row_sum = seen(sink.to(tl.float32))
    return row_max, row_sum


@triton.jit
def seen(score):
    """(max, sum) of one key with this score, or of keys with this log-sum-exp; -inf: no key."""
    row_max = score * LOG2E
    row_sum = tl.where(row_max > float("-inf"), tl.where(row_max > MAX_MAXIMUM, float("inf"), 1.0), 0.0)
    return tl.where(row_max > MAX_MAXIMUM, MAX_MAXIMUM, row_max), row_sum  # NaN stays


@triton.jit
def base_of(row_max):
    """Number [R] that is subtracted from exponents: the maximum, or 0 for rows that saw no key (-inf - -inf is NaN)."""
    return tl.where(row_max > float("-inf"), row_max, 0.0)


@triton.jit
def update(state, scores, unit, v, S: tl.constexpr, ALL_SEE: tl.constexpr, of_values=None, zeros=None):
    """Fold scores [R, N] and values into the state (Milakov & Gimelshein 2018).

    unit [R]: factor that brings scores to base 2.  ALL_SEE: every row sees a key of the tile.

    of_values [N]: scales of the values, by which their weights are multiplied.  These weights are also divided by a
    power of two, the last element of state.acc, which is at least the largest scale so far.  So weights stay in
    float16's range.  None: the values have one scale, which is applied later.

    zeros [N]: zero points, which come with of_values.  A value is (v - zero) * scale.
    """
    row_max = tl.maximum(state.max, tl.max(scores, 1) * unit)
    base = row_max if ALL_SEE else base_of(row_max)
    if S.NORMALIZED:
        # normalized queries: an unrounded product may differ much from a rounded maximum as large as 2^30
        p = tl.exp2(rounded_product(scores, unit[:, None]) - base[:, None])
    else:
        p = tl.exp2(tl.fma(scores, unit[:, None], -base[:, None]))
    decay = tl.exp2(state.max - base)
    weights, fade, parts = p, decay, state.acc
    if of_values is not None:
        before = state.acc[len(v)]
        power = tl.maximum(before, power_above(tl.max(of_values, 0)))
        inverse = inverse_of_power(power)
        weights = p * (of_values * inverse)[None, :]
        fade = decay * (before * inverse)
        parts = first_of(state.acc, len(v))
    old = scaled(parts, fade[:, None])
    if zeros is not None:  # by rounded weights, as in the product, so that rounding errors are multiplied by v - zero
        old = less(old, tl.sum(weights.to(v[0].dtype).to(tl.float32) * zeros[None, :], 1)[:, None])
    acc = ()
    for i in tl.static_range(len(v)):
        acc = acc + (dot(weights.to(v[i].dtype), v[i], old[i], S),)  # type: ignore[assignment]
    if of_values is not None:
        acc = acc + (power,)  # type: ignore[assignment]
    return State(acc, row_max, state.sum * decay + tl.sum(p, 1))


@triton.jit
def merge(state, acc, row_max, row_sum):
    """Join a state with acc [R, D], row_max [R], row_sum [R]; acc of rows that saw no key is arbitrary."""
    both = tl.maximum(state.max, row_max)
    base = base_of(both)
    decay = tl.exp2(state.max - base)
    weight = tl.exp2(row_max - base)
    acc = state.acc * decay[:, None] + tl.where((weight > 0)[:, None], acc, 0.0) * weight[:, None]
    return State(acc, both, state.sum * decay + row_sum * weight)


@triton.jit
def finish(acc, row_sum):
    """acc [R, D] / row_sum [R, 1]; zero for rows that saw nothing."""
    # one division for each row: with one for each element, divisions were a tenth of a Hopper kernel's machine code
    return acc * (1.0 / tl.where(row_sum != 0, row_sum, 1.0))


@triton.jit
def log_sum_exp(row_max, row_sum):
    """Natural logarithm of the softmax's denominator, [R]; -inf for rows that saw nothing."""
    return tl.where(row_sum != 0, (row_max + tl.log2(tl.where(row_sum != 0, row_sum, 1.0))) * LN2, float("-inf"))
