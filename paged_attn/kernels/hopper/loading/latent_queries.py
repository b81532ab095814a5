"""Queries against latents, in parts: for the key dims that are values, and for the dims behind them (the rest)."""

import triton

from ...common.bounds import row_tile
from ...common.numerics import decode, normalize_by
from ...common.output import addresses
from ..args import slots_of_tile
from ..layouts import rows_layout
from ..shim import fence_async_shared, gl, gluon, thread_barrier


@gluon.jit
def make_rest(dtype: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Allocate [CONSUMERS, COLUMNS, REST] for the part of the queries against the rest."""
    SHAPE: gl.constexpr = [P.COLUMNS, S.REST]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return gl.allocate_shared_memory(dtype, [P.CONSUMERS, P.COLUMNS, S.REST], layout)


@triton.constexpr_function
def rows_brought(P):
    """Rows that a consumer loads: all of its columns, or half of the rows of two consumers."""
    return P.COLUMNS if P.COLUMNS > 0 else P.ROWS // 2


@gluon.jit
def load_part(
    query, block, mods, NUMBER: gl.constexpr, BEGIN: gl.constexpr, END: gl.constexpr, PADDED: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Load dims [BEGIN, END), at most PADDED, of a consumer's `rows_brought`: [rows, PADDED].

    The type is the compute type, or float32 if rows are to be normalized.
    """
    dtype: gl.constexpr = gl.float32 if S.NORMALIZED else S.COMPUTE
    READ: gl.constexpr = rows_layout(8, PADDED, P.ROWS // 16)
    ROWS: gl.constexpr = rows_brought(P)
    row = NUMBER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, READ))
    rows = row_tile(block, row, mods, P.CONSUMERS * ROWS // S.GROUP, S)
    dim = BEGIN + gl.arange(0, PADDED, layout=gl.SliceLayout(0, READ))
    ptr, inside = addresses(rows, dim, query, END, S)
    return decode(gl.load(ptr, mask=inside, other=0), query.FP8, dtype, S.NATIVE_FP8)


@gluon.jit
def normalize_parts(parts, S: gl.constexpr):
    """(parts in the compute type, powers of two [R] by which scores of their rows are multiplied), as `normalize`.

    Rows of parts of different widths lie in different threads.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, parts[0].type.layout)
    largest = gl.max(gl.abs(parts[0]), axis=1)
    for i in gl.static_range(1, len(parts)):
        largest = gl.maximum(largest, gl.convert_layout(gl.max(gl.abs(parts[i]), axis=1), ROWS))
    x, unit = normalize_by(parts[0], largest)
    done = (x.to(S.COMPUTE),)
    for i in gl.static_range(1, len(parts)):
        of_part = gl.convert_layout(largest, gl.SliceLayout(1, parts[i].type.layout))
        x, _unit = normalize_by(parts[i], of_part)
        done = done + (x.to(S.COMPUTE),)  # type: ignore[assignment]
    return done, unit


@gluon.jit
def queries_of(queries, number, P: gl.constexpr):
    """Queries [N, D] against the dims of one slot of a tile; number: of the slot, over all consumers."""
    slot = queries.slots.index(number)
    return slot.reshape([slot.shape[0] * slot.shape[1], slot.shape[2]]).slice(0, P.COLUMNS, dim=0)


@gluon.jit
def take_parts(
    query, queries, rest, block, scale, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load all parts into shared memory through registers; return the scale of their scores, as `take_queries`."""
    PARTS: gl.constexpr = slots_of_tile(P)
    DIMS: gl.constexpr = S.DIM // PARTS
    thread_barrier()  # products with the queries before must be done
    parts = ()  # all loads begin before the first store
    for j in gl.static_range(PARTS):
        x = load_part(query, block, mods, NUMBER, j * DIMS, S.VALUE_DIM, DIMS, S, P)
        parts = parts + (x,)  # type: ignore[assignment]
    if S.REST > 0:
        y = load_part(query, block, mods, NUMBER, S.VALUE_DIM, S.HEAD_DIM, S.REST, S, P)
        parts = parts + (y,)  # type: ignore[assignment]
    if S.NORMALIZED:
        parts, unit = normalize_parts(parts, S)
        scale = gl.convert_layout(unit, LAYOUT) * scale
    if S.REST > 0:
        rest.index(NUMBER).store(parts[PARTS])
    for j in gl.static_range(PARTS):
        queries_of(queries, NUMBER * PARTS + j, P).store(parts[j])
    fence_async_shared()
    thread_barrier()
    return scale
