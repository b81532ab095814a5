"""Queries of keys that hold their values, in two parts: against the dims that are the values, and against the rest."""

from ...common.bounds import row_tile
from ...common.numerics import decode
from ...common.output import addresses
from ..layouts import rows_layout
from ..shim import fence_async_shared, gl, gluon, thread_barrier
from .queries import rows_of


@gluon.jit
def make_rest(dtype: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Room for the second part of each consumer's queries."""
    SHAPE: gl.constexpr = [P.COLUMNS, S.REST]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
    return gl.allocate_shared_memory(dtype, [P.CONSUMERS, P.COLUMNS, S.REST], layout)


@gluon.jit
def load_part(
    query, block, kv_head, mods, NUMBER: gl.constexpr, BEGIN: gl.constexpr, END: gl.constexpr, PADDED: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Dims BEGIN ... END - 1 of a consumer's rows, as many as it has columns, in the compute type."""
    READ: gl.constexpr = rows_layout(8, PADDED, P.ROWS // 16)
    row = NUMBER * P.COLUMNS + gl.arange(0, P.COLUMNS, layout=gl.SliceLayout(1, READ))
    rows = row_tile(block, kv_head, row, mods, P.CONSUMERS * P.COLUMNS // S.GROUP, S)
    dim = BEGIN + gl.arange(0, PADDED, layout=gl.SliceLayout(0, READ))
    ptr, inside = addresses(rows, dim, query, END, S)
    return decode(gl.load(ptr, mask=inside, other=0), query.FP8, S.COMPUTE, S.NATIVE_FP8)


@gluon.jit
def take_parts(
    query, queries, rest, block, kv_head, done, mods, NUMBER: gl.constexpr, S: gl.constexpr, P: gl.constexpr
):
    """Bring both parts into shared memory, through registers."""
    first = rows_of(queries, done, NUMBER, S, P).parts[0].slice(0, P.COLUMNS, dim=0)
    thread_barrier()  # nobody may still multiply by the last ones
    x = load_part(query, block, kv_head, mods, NUMBER, 0, S.VALUE_DIM, S.DIM, S, P)
    if S.REST > 0:
        y = load_part(query, block, kv_head, mods, NUMBER, S.VALUE_DIM, S.HEAD_DIM, S.REST, S, P)
        rest.index(NUMBER).store(y)
    first.store(x)
    fence_async_shared()
    thread_barrier()
