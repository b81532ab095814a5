"""Merging partial results: the pieces of one launch, or states that somebody else made."""

import triton
import triton.language as tl

from .args import Partial, RowTile, State
from .output import rows_from, store_rows
from .softmax import merge, seen

TOGETHER = tl.constexpr(8)  # states that are loaded at a time, where a thread holds few elements of each


@triton.jit
def join(parts, at, valid, dim, skip, stride, num_parts, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """num_parts states of rows [R] as one, in order: the first at `at`, the others from at + skip on, stride apart.

    CHUNK of them are loaded at a time, so that their loads overlap.
    """
    inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
    zero = at * 0.0
    state = State(zero[:, None] + (dim * 0.0)[None, :], zero + float("-inf"), zero)
    for first in range(0, num_parts, CHUNK):
        # all loads of a chunk before their first use
        loaded = ()
        for i in tl.static_range(CHUNK):
            part = first + i
            live = part < num_parts
            index = at + tl.where(part > 0, skip + (part - 1) * stride, 0)
            row_max = tl.load(parts.max + index, mask=valid & live, other=float("-inf"))
            acc = tl.load(parts.acc + index[:, None] * HEAD_DIM + dim[None, :], mask=inside & live, other=0.0)
            if parts.sum is None:
                acc = acc.to(tl.float32)
                row_max, row_sum = seen(row_max)
            else:
                row_sum = tl.load(parts.sum + index, mask=valid & live, other=0.0)
            loaded = loaded + ((acc, row_max, row_sum),)  # type: ignore[assignment]
        for i in tl.static_range(CHUNK):
            state = merge(state, loaded[i][0], loaded[i][1], loaded[i][2])
    return state


@triton.jit
def partial_of(scratch, rows):
    """The states of so many rows, in the room that the host gave: maxima, sums, accumulators."""
    return Partial(scratch.states + 2 * rows, scratch.states, scratch.states + rows)


@triton.jit
def join_rows(
    out, lse, partial, share, slots, pieces, token, tokens, kv_head, first, scales, S: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rows first ... first + ROWS - 1 of the block that begins in a share and is cut, from its pieces."""
    row = first + tl.arange(0, ROWS)
    valid = row < tokens * S.GROUP
    SLOT: tl.constexpr = S.KV_HEADS * S.LIVE
    at = share * slots * SLOT + kv_head * S.LIVE + row
    dim = tl.arange(0, S.DIM)
    if S.PIECE is None:
        # slot 1 of the share where the block begins, slot 0 of those after it
        state = join(partial, at + SLOT, valid, dim, SLOT, 2 * SLOT, pieces, TOGETHER, S.DIM)
    else:
        state = join(partial, at, valid, dim, SLOT, SLOT, pieces, TOGETHER, S.DIM)
    rows = rows_from(tl.cast(token, tl.int64), kv_head, row, valid, S)
    store_rows(out, lse, rows, dim, state, scales, S)


@triton.jit
def join_if_last(
    out, lse, partial, counters, share, holders, pieces, token, tokens, kv_head, slots, scales, S: tl.constexpr
):  # fmt: skip
    """Count a share that has stored its pieces of a block; the last of the holders joins all, in their order."""
    tl.debug_barrier()  # the count is one thread's: it must not overtake what the others have stored
    counter = counters + share * S.KV_HEADS + kv_head
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    if before == holders - 1:
        tl.store(counter, 0)  # for the next launch
        for first in range(0, tokens * S.GROUP, S.MERGE):
            join_rows(out, lse, partial, share, slots, pieces, token, tokens, kv_head, first, scales, S, S.MERGE)


@triton.jit(do_not_specialize=["slots"])
def merge_cuts_kernel(out, lse, scratch, slots, scales, S: tl.constexpr, ROWS: tl.constexpr):
    """Join the pieces of some rows, of one KV head, of the block that a share's end cut, if it cut one."""
    share = tl.program_id(0)
    pieces = tl.load(scratch.cuts + 3 * share)
    token = tl.load(scratch.cuts + 3 * share + 1)
    tokens = tl.load(scratch.cuts + 3 * share + 2)
    kv_head = tl.program_id(1) % S.KV_HEADS
    first = tl.program_id(1) // S.KV_HEADS * ROWS
    if (pieces > 0) & (first < tokens * S.GROUP):
        partial = partial_of(scratch, tl.num_programs(0) * slots * S.KV_HEADS * S.LIVE)
        join_rows(out, lse, partial, share, slots, pieces, token, tokens, kv_head, first, scales, S, ROWS)


@triton.jit
def merge_states_kernel(out, lse, parts, num_parts, part_stride, scales, S: tl.constexpr, ROWS: tl.constexpr):
    """Join num_parts finished results of some heads of one token; a finished result's sum is 1."""
    HEADS: tl.constexpr = S.KV_HEADS * S.GROUP
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = head < HEADS
    at = token * HEADS + head
    dim = tl.arange(0, S.DIM)
    state = join(parts, at, valid, dim, part_stride, part_stride, num_parts, TOGETHER, S.HEAD_DIM)
    rows = RowTile(token, 0, tl.zeros_like(head), head, head, head, head, valid, 0)
    store_rows(out, lse, rows, dim, state, scales, S)
