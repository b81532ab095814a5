"""How a block's rows leave: through shared memory, from registers, or as a state that the last piece's program merges."""

from ..kernels.args import RowTile
from ..kernels.merge import join
from ..kernels.output import store_lse, store_partial, store_rows
from ..kernels.softmax import finish
from .shim import fence_async_shared, gl, gluon, tma


@gluon.jit
def row_tile_of(token, kv_head, row, count, S: gl.constexpr):
    """Just enough of a RowTile to store `count` rows from a token on."""
    return RowTile(token, kv_head, row // S.GROUP, row % S.GROUP, row, row, row, row < count, 0)


@gluon.jit
def store_block(out, results, staging, NUMBER: gl.constexpr, rows, full, state, S: gl.constexpr):
    """Finished rows; a full block of 16-bit results as one message of the copy engine."""
    lse, out_box, scales = results.lse, results.box, results.scales
    LAYOUT: gl.constexpr = state.acc.type.layout
    dim = gl.arange(0, S.DIM, layout=gl.SliceLayout(0, LAYOUT))
    if out_box is not None:
        # the last block's results have to be out of the way
        tma.store_wait(0)
        gl.thread_barrier()
        if full:
            smem = staging.index(NUMBER)
            smem.reshape([64, S.DIM]).store(finish(state.acc, gl.expand_dims(state.sum, 1)).to(smem.dtype))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(out_box, [rows.token.to(gl.int32), rows.kv_head * S.GROUP, 0], smem)
        else:
            store_rows(out, None, rows, dim, state, scales, S)
        if lse is not None:
            store_lse(lse, rows, state, S)
    else:
        store_rows(out, lse, rows, dim, state, scales, S)


@gluon.jit
def merge_pieces(out, results, at, token, kv_head, count, pieces, stride, S: gl.constexpr):
    """Join `pieces` states of `count` rows, the first piece's rows at `at`, in order; a few rows at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    ROWS: gl.constexpr = 1024 // S.DIM
    dim = gl.arange(0, S.DIM, layout=gl.SliceLayout(0, LAYOUT))
    for first in range(0, count, ROWS):
        row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        rows = row_tile_of(token, kv_head, row, count, S)
        state = join(results.partial, at + row, rows.valid, dim, stride, stride, pieces, S.DIM)
        store_rows(out, results.lse, rows, dim, state, results.scales, S)


@gluon.jit
def store_piece(out, results, counter, rows, row, at, stride, count, pieces, state, S: gl.constexpr):
    """The state of one piece, its rows at `at` + piece * stride; the last of a block's pieces to come joins all."""
    partial = results.partial
    LAYOUT: gl.constexpr = state.acc.type.layout
    dim = gl.arange(0, S.DIM, layout=gl.SliceLayout(0, LAYOUT))
    store_partial(partial, row, rows, dim, state, S)
    gl.thread_barrier()  # every thread's rows are written before one of them tells
    arrived = gl.atomic_add(partial.counters + counter, 1, sem="acq_rel")
    if arrived == pieces - 1:
        merge_pieces(out, results, at, rows.token, rows.kv_head, count, pieces, stride, S)
        gl.store(partial.counters + counter, 0)
