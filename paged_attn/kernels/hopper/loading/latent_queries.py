"""Queries against latents, in parts: for the key dims that are values, and for the key dims behind them (the rest).

Few rows are columns of one or two consumers.  Blocks of 64 rows are shared by two consumers, whose products need
shared-memory addresses.
"""

import triton

from ...common.bounds import row_tile
from ...common.decoding import decode
from ...common.numerics import normalize_by
from ...common.output import addresses
from ..args import Queries, Ring, slots_of_tile
from ..asm.barriers import TAG, find_tags, meet_other
from ..layouts import line_layout, rows_layout, threads_layout
from ..shim import fence_async_shared, gl, gluon, reinterpret, thread_barrier
from .ring import bytes_of_slot


@triton.constexpr_function
def rows_brought(P):
    """Number of query rows that a consumer loads: its columns, or half of the rows that two consumers share."""
    return P.COLUMNS if P.COLUMNS > 0 else P.ROWS // 2


@gluon.jit
def load_part(
    query, block, mods, NUMBER: gl.constexpr, BEGIN: gl.constexpr, END: gl.constexpr, PADDED: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Load dims [BEGIN, END) of the query rows that consumer NUMBER loads: [rows_brought, PADDED], zero behind END.

    The result has the compute type, or float32 if rows are to be normalized.
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
    """(parts in the compute type, powers of two [R] by which scores of rows are multiplied), as `numerics.normalize`.

    The largest element of all parts of a row decides the row's power.  Layouts are converted, because parts of
    different widths have their rows in different threads.
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
    """Return query rows [N, D] with the dims of slot i of a tile's slots; number: consumer * (slots of a tile) + i."""
    slot = queries.slots.index(number)
    return slot.reshape([slot.shape[0] * slot.shape[1], slot.shape[2]]).slice(0, P.COLUMNS, dim=0)


@gluon.jit
def take_parts(
    query, queries, rest, block, scale, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load all parts of a consumer's queries into shared memory, through registers; return the scale of their scores.

    The scale is a scalar, or [N] if rows are normalized.
    """
    PARTS: gl.constexpr = slots_of_tile(P)
    DIMS: gl.constexpr = S.DIM // PARTS
    thread_barrier()  # products with the previous queries must be done
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


# ---- 64 rows of two consumers --------------------------------------------------------------------


@gluon.jit
def take_rows(
    query, queries, rest, numbers, block, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a consumer's half of the rows into shared memory through registers; then wait for the other consumer's half.

    Return the factor of each row's scores, float32 [P.ROWS], or 1.0 if rows are not normalized.  Consumers exchange
    these factors in the second consumer's `numbers`, which are free until the first consumer has written weights.
    """
    ROWS: gl.constexpr = P.ROWS // 2
    slot = queries.slots.index(0).reshape([P.ROWS, S.DIM])
    meet_other()  # products with the previous queries must be done
    parts = (load_part(query, block, mods, NUMBER, 0, S.VALUE_DIM, S.DIM, S, P),)
    if S.REST > 0:
        y = load_part(query, block, mods, NUMBER, S.VALUE_DIM, S.HEAD_DIM, S.REST, S, P)
        parts = parts + (y,)  # type: ignore[assignment]
    units = numbers.index(1)
    if S.NORMALIZED:
        parts, unit = normalize_parts(parts, S)
        unit = gl.expand_dims(unit, 1)
        unit += gl.full([ROWS, 4], 0.0, gl.float32, unit.type.layout)
        units.slice(NUMBER * ROWS, ROWS, dim=0).store(unit)
    if S.REST > 0:
        rest.index(0).slice(NUMBER * ROWS, ROWS, dim=0).store(parts[1])  # type: ignore[misc]
    slot.slice(NUMBER * ROWS, ROWS, dim=0).store(parts[0])
    fence_async_shared()
    meet_other()
    if S.NORMALIZED:
        return gl.convert_layout(gl.max(units.load(threads_layout(P.ROWS)), axis=1), LAYOUT)
    else:
        return 1.0


@gluon.jit
def _tagged(slots, KIND: gl.constexpr, P: gl.constexpr):
    """Write tag KIND, from each warp, into the first 32 int64 words of slot 0; return these words."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = reinterpret(slots.index(0), gl.int64, [bytes_of_slot(slots) // 8], WORDS).slice(0, 32, dim=0)
    words.store(gl.full([32], TAG + 1 + KIND, gl.int64, line_layout(P.ROWS // 16)))
    return words


@gluon.jit
def find_addresses(keys, rests, queries, rest, S: gl.constexpr, P: gl.constexpr):
    """(keys, rests, queries, address of `rest`): the records, with the shared-memory addresses that products need.

    The tags are erased, as in `ring.address_of`, because later programs on the multiprocessor must not find them.
    """
    THREADS: gl.constexpr = line_layout(P.ROWS // 16)
    nothing = gl.full([32], 0, gl.int64, THREADS)
    first, second = _tagged(keys.slots, 0, P), _tagged(queries.slots, 1, P)
    if S.REST > 0:
        third, fourth = _tagged(rests.slots, 2, P), _tagged(rest, 3, P)
        at, q_at, rests_at, rest_at = find_tags(gl.to_tensor(TAG + 1), 4, 1024)
    else:
        at, q_at = find_tags(gl.to_tensor(TAG + 1), 2, 1024)
        rests_at, rest_at = at, q_at  # never used
    thread_barrier()  # all warps have found the tags
    first.store(nothing)
    second.store(nothing)
    if S.REST > 0:
        third.store(nothing)
        fourth.store(nothing)
    keys = Ring(keys.slots, keys.full, keys.empty, 0, 0, at, 0)
    rests = Ring(rests.slots, rests.full, rests.empty, 0, 0, rests_at, 0)
    return keys, rests, Queries(queries.slots, queries.full, queries.empty, 0, 0, q_at), rest_at
