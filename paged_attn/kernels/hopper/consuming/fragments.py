"""Accumulator fragments of wgmma: views of products and rows in the threads that hold them.

A quad of threads holds a row, and each thread has two neighbouring columns of every eight.
"""

import triton.language as tl

from ..layouts import threads_layout
from ..shim import gl, gluon

PROPAGATE_NAN = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def by_thread(x):
    """Return a product x [R, N] as [R, N / 8, 4, 2].

    Axis 1 is the group of eight columns, axis 2 the thread of the row's quad, axis 3 the thread's two columns.
    """
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def as_product(x, like):
    """Return x [R, N / 8, 4, 2] as a product [R, N] with the layout of `like`, the inverse of `by_thread`."""
    return gl.convert_layout(x.reshape(like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def spread(x, ROWS: gl.constexpr):
    """Return x [R] as [R, 4]: each of a row's four threads gets the row's number."""
    LAYOUT: gl.constexpr = threads_layout(ROWS)
    x = gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return gl.expand_dims(x, 1) + gl.full([ROWS, 4], 0.0, gl.float32, LAYOUT)


@gluon.jit
def of_rows(row_max, sums, like):
    """(maxima, sums) of rows, each [R] in the layout of `like`, from each thread's, [R, 4]; sums may be [R, N]."""
    LAYOUT: gl.constexpr = like.type.layout
    return gl.convert_layout(gl.max(row_max, axis=1), LAYOUT), gl.convert_layout(gl.sum(sums, axis=1), LAYOUT)


@gluon.jit
def beside_pairs(rows, x):
    """Return rows [R, 4], a number for each thread of a row, as [R, 1, 4] in the layout of x [R, N, 4]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.expand_dims(gl.convert_layout(rows, LAYOUT, assert_trivial=True), 1)


@gluon.jit
def beside(rows, x):
    """Return rows [R, 4], a number for each thread of a row, as [R, 1, 4, 1] in the layout of x [R, N / 8, 4, 2]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    rows = gl.expand_dims(gl.convert_layout(rows, LAYOUT, assert_trivial=True), 1)
    return gl.expand_dims(rows, 3)


@gluon.jit
def thread_sums(weights, ROWS: gl.constexpr):
    """Return each thread's sum of each row, [R, 4], of weights [R, N / 8, 4, 2] (`by_thread`)."""
    return gl.convert_layout(gl.sum(gl.sum(weights, axis=1), axis=2), threads_layout(ROWS), assert_trivial=True)


@gluon.jit
def first_of_thread(x, ROWS: gl.constexpr):
    """Return each thread's first element of each row, [R, 4], of x [R, N, 4]."""
    for _ in gl.static_range(5):  # halvings, enough for tiles of 256 keys
        if x.shape[1] > 1:
            x, _rest = gl.split(x.reshape([ROWS, 2, x.shape[1] // 2, 4]).permute((0, 2, 3, 1)))
    return gl.convert_layout(x.reshape([ROWS, 4]), threads_layout(ROWS), assert_trivial=True)


@gluon.jit
def larger(x, y):
    """The larger of two numbers; NaN if one is NaN."""
    return gl.maximum(x, y, propagate_nan=PROPAGATE_NAN)


@gluon.jit
def thread_maxima(scores, ROWS: gl.constexpr, NAN: gl.constexpr):
    """Return each thread's largest score of each row, [R, 4], of scores [R, N / 8, 4, 2]; NAN: NaN is largest."""
    if NAN:
        top = gl.reduce(gl.reduce(scores, 1, larger), 2, larger)
    else:
        top = gl.max(gl.max(scores, axis=1), axis=2)
    return gl.convert_layout(top, threads_layout(ROWS), assert_trivial=True)


@gluon.jit
def split_product(acc, like):
    """Return a product [R, DIM] as a tuple of parts with the shape [R, N, 4] and layout of `like`.

    Nothing moves between threads.
    """
    ROWS: gl.constexpr = like.shape[0]
    N: gl.constexpr = like.shape[1]
    LAYOUT: gl.constexpr = like.type.layout
    x = by_thread(acc)
    if 2 * x.shape[1] == N:
        parts = (x.permute((0, 1, 3, 2)).reshape([ROWS, N, 4]),)
    else:
        parts = gl.split(x)
    for _ in gl.static_range(2):  # halvings, enough for 256 dims and tiles of 64 keys
        if parts[0].shape[1] > N:
            halves = ()
            for i in gl.static_range(len(parts)):
                x = parts[i]
                halves = halves + gl.split(x.reshape([ROWS, 2, x.shape[1] // 2, 4]).permute((0, 2, 3, 1)))
            parts = halves
    placed = ()
    for i in gl.static_range(len(parts)):
        placed = placed + (gl.convert_layout(parts[i], LAYOUT, assert_trivial=True),)
    return placed


@gluon.jit
def whole_of(parts, like):
    """Return the parts of `split_product` as a product [R, DIM] in the layout of `like`."""
    if len(parts) == 1:
        x = parts[0]
        return as_product(x.reshape([x.shape[0], x.shape[1] // 2, 2, 4]).permute((0, 1, 3, 2)), like)
    else:
        for _ in gl.static_range(2):
            if len(parts) > 2:
                wholes = ()
                for i in gl.static_range(len(parts) // 2):
                    x = gl.join(parts[2 * i], parts[2 * i + 1])
                    wholes = wholes + (x.permute((0, 3, 1, 2)).reshape([x.shape[0], 2 * x.shape[1], 4]),)
                parts = wholes
        return as_product(gl.join(parts[0], parts[1]), like)


@gluon.jit
def packed(weights):
    """Return 16-bit weights [R, N] as int32 words [R, N / 8, 4] of two weights, as `weigh_at_once` returns them."""
    even, odd = gl.split(by_thread(weights.to(gl.int16, bitcast=True)))
    return (even.to(gl.int32) & 0xFFFF) | (odd.to(gl.int32) << 16)


@gluon.jit
def unpacked(words, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Return words [R, N / 8, 4] of two 16-bit weights as weights [R, N] in LAYOUT, the inverse of `packed`."""
    dtype: gl.constexpr = S.COMPUTE
    lower = words.to(gl.int16).to(dtype, bitcast=True)
    upper = (words >> 16).to(gl.int16).to(dtype, bitcast=True)
    x = gl.join(lower, upper)
    return gl.convert_layout(x.reshape([x.shape[0], 8 * x.shape[1]]), LAYOUT, assert_trivial=True)
