"""Attention over a set of keys as a state (acc, max, sum), base 2: start, update with a tile, merge two, finish."""

import triton
import triton.language as tl

from .numerics import LN2, LOG2E, dot, rounded_product, scaled
from .records import State

# Of maxima, for a difference of infinities would be NaN.  Of a sink of infinity it is the sum that is infinite.
MAX_MAXIMUM = tl.constexpr(2.0**127)


@triton.jit
def start(sinks, rows, first, S: tl.constexpr):
    """(max, sum) before any key; where `first`, of all rows or [R], the sink: a key of score sinks[head], value 0."""
    row_sum = rows.slot * 0.0
    row_max = row_sum + float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + rows.kv_head * S.GROUP + rows.member, mask=rows.valid & first, other=float("-inf"))
        row_max, row_sum = seen(sink.to(tl.float32))
    return row_max, row_sum


@triton.jit
def seen(score):
    """(max, sum) of one key of this score, or of keys of this log-sum-exp; -inf: of none."""
    row_max = score * LOG2E
    row_sum = tl.where(row_max > float("-inf"), tl.where(row_max > MAX_MAXIMUM, float("inf"), 1.0), 0.0)
    return tl.where(row_max > MAX_MAXIMUM, MAX_MAXIMUM, row_max), row_sum  # NaN stays


@triton.jit
def base_of(row_max):
    """What exponents are taken relative to: -inf - -inf is NaN, so rows that have seen nothing use 0."""
    return tl.where(row_max > float("-inf"), row_max, 0.0)


@triton.jit
def update(state, scores, unit, v, S: tl.constexpr, ALL_SEE: tl.constexpr):
    """Fold scores [R, N] (times unit [R]: base 2) and values into the state (Milakov & Gimelshein 2018)."""
    row_max = tl.maximum(state.max, tl.max(scores, 1) * unit)
    base = row_max if ALL_SEE else base_of(row_max)
    if S.NORMALIZED:
        # scores of any magnitude: beside a maximum of 2^30 that was rounded, an exact product may be far away
        p = tl.exp2(rounded_product(scores, unit[:, None]) - base[:, None])
    else:
        p = tl.exp2(tl.fma(scores, unit[:, None], -base[:, None]))
    decay = tl.exp2(state.max - base)
    old = scaled(state.acc, decay[:, None])
    acc = ()
    for i in tl.static_range(len(v)):
        acc = acc + (dot(p.to(v[i].dtype), v[i], old[i], S),)  # type: ignore[assignment]
    return State(acc, row_max, state.sum * decay + tl.sum(p, 1))


@triton.jit
def merge(state, acc, row_max, row_sum):
    """Join with another state of the same rows; one that saw nothing may hold anything in acc."""
    both = tl.maximum(state.max, row_max)
    base = base_of(both)
    decay = tl.exp2(state.max - base)
    weight = tl.exp2(row_max - base)
    acc = state.acc * decay[:, None] + tl.where((weight > 0)[:, None], acc, 0.0) * weight[:, None]
    return State(acc, both, state.sum * decay + row_sum * weight)


@triton.jit
def finish(acc, row_sum):
    """The output; zero where nothing was seen."""
    # one division for a row: one for each element was a tenth of a Hopper kernel's machine code
    return acc * (1.0 / tl.where(row_sum != 0, row_sum, 1.0))


@triton.jit
def log_sum_exp(row_max, row_sum):
    """Natural logarithm of the softmax's denominator; -inf where nothing was seen."""
    return tl.where(row_sum != 0, (row_max + tl.log2(tl.where(row_sum != 0, row_sum, 1.0))) * LN2, float("-inf"))
