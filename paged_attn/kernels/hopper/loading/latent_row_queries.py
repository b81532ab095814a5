"""Queries of two consumers that share rows, against latents, and the addresses of their products' operands."""

from ..args import Queries, Ring
from ..asm.barriers import TAG, find_tags, meet_other
from ..layouts import threads_layout
from ..shim import fence_async_shared, gl, gluon, reinterpret, thread_barrier
from .latent_queries import load_part, normalize_parts
from .ring import bytes_of_slot


@gluon.jit
def make_rest_of_rows(dtype: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Allocate [1, ROWS, REST] for queries against the key dims behind the values."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P.ROWS, S.REST], dtype)
    return gl.allocate_shared_memory(dtype, [1, P.ROWS, S.REST], layout)


@gluon.jit
def take_rows(
    query, queries, rest, numbers, block, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a consumer's half of the rows into shared memory through registers; afterwards both consumers have all rows.

    Returns the factor of each row's scores, [ROWS] float32, or 1.0 if rows are not normalized.  Factors pass between
    the consumers in the second consumer's numbers, which are free until the first consumer has written.
    """
    ROWS: gl.constexpr = P.ROWS // 2
    slot = queries.slots.index(0).reshape([P.ROWS, S.DIM])
    meet_other()  # products with the queries before must be done
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
    """Write a tag for each warp into the first words of a matrix, or of slots of matrices; return these words."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = reinterpret(slots.index(0), gl.int64, [bytes_of_slot(slots) // 8], WORDS).slice(0, 32, dim=0)
    words.store(gl.full([32], TAG + 1 + KIND, gl.int64, gl.BlockedLayout([1], [32], [P.ROWS // 16], [0])))
    return words


@gluon.jit
def find_addresses(keys, rests, queries, rest, S: gl.constexpr, P: gl.constexpr):
    """(keys, rests, queries, address of rest): records with the addresses that products of rows need.

    The tags are erased, as in `ring.address_of`: later programs on the multiprocessor must not find them.
    """
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [P.ROWS // 16], [0])
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
    keys = Ring(keys.slots, keys.full, keys.empty, 0, 0, at)
    rests = Ring(rests.slots, rests.full, rests.empty, 0, 0, rests_at)
    return keys, rests, Queries(queries.slots, queries.full, queries.empty, 0, 0, q_at), rest_at
