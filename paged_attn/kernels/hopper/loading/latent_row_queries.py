"""Queries of two consumers of the same rows, against latents, and where all lies that their products read."""

from ..args import Queries, Ring
from ..asm.barriers import TAG, find_tags
from ..asm.turns import meet_other
from ..layouts import threads_layout
from ..shim import fence_async_shared, gl, gluon, reinterpret, thread_barrier
from .latent_queries import load_part, normalize_parts
from .ring import bytes_of_slot


@gluon.jit
def make_rest_of_rows(dtype: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Room for queries against what keys have behind their values."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P.ROWS, S.REST], dtype)
    return gl.allocate_shared_memory(dtype, [1, P.ROWS, S.REST], layout)


@gluon.jit
def take_rows(
    query, queries, rest, numbers, block, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Bring a consumer's half of the rows into shared memory, through registers; all are there for both.

    Returns what the scores of each row are to be multiplied by, 1 if rows are not normalized.  On their way to the
    other consumer these are among the numbers of the second, which writes others there when the first has written.
    """
    ROWS: gl.constexpr = P.ROWS // 2
    slot = queries.slots.index(0).reshape([P.ROWS, S.DIM])
    meet_other()  # nobody may still multiply by the last ones
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
    """Where the first words of a matrix are, or slots of matrices, for a tag of each warp."""
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = reinterpret(slots.index(0), gl.int64, [bytes_of_slot(slots) // 8], WORDS).slice(0, 32, dim=0)
    words.store(gl.full([32], TAG + 1 + KIND, gl.int64, gl.BlockedLayout([1], [32], [P.ROWS // 16], [0])))
    return words


@gluon.jit
def find_addresses(keys, rests, queries, rest, S: gl.constexpr, P: gl.constexpr):
    """(keys, rests, queries, rest's address) that know where they lie, all that products of rows read.

    As `ring.address_of`: programs that follow on the multiprocessor must not find the tags.
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
    thread_barrier()  # all have found them
    first.store(nothing)
    second.store(nothing)
    if S.REST > 0:
        third.store(nothing)
        fourth.store(nothing)
    keys = Ring(keys.slots, keys.full, keys.empty, 0, 0, at)
    rests = Ring(rests.slots, rests.full, rests.empty, 0, 0, rests_at)
    return keys, rests, Queries(queries.slots, queries.full, queries.empty, 0, 0, q_at), rest_at
