"""Merging of states: pieces of one launch, or finished results by their log-sum-exps."""

import triton
import triton.language as tl

from .blocking import find_block
from .numerics import LN2, LOG2E
from .output import rows_from, store_results, store_rows
from .records import Batch, Partial, RowTile, State
from .schedule import place_of, slot_of, slots_between
from .softmax import base_of, finish, merge

MAX_FLOAT32 = tl.constexpr(3.4028234663852886e38)  # the largest float32
STATES_PER_LOAD = tl.constexpr(8)  # states loaded at a time; a thread holds few elements of each


@triton.jit
def join(parts, at, valid, dim, skip, stride, num_parts, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Join num_parts states of rows [R] in order: the first lies at `at`, the others from at + skip on, stride apart.

    CHUNK states are loaded at a time, so that their loads overlap.
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
            row_sum = tl.load(parts.sum + index, mask=valid & live, other=0.0)
            loaded = loaded + ((acc, row_max, row_sum),)  # type: ignore[assignment]
        for i in tl.static_range(CHUNK):
            state = merge(state, loaded[i][0], loaded[i][1], loaded[i][2])
    return state


@triton.jit
def partial_of(scratch, rows):
    """Partial of `rows` rows in scratch, which holds first their maxima, then their sums, then their accumulators."""
    return Partial(scratch.states + 2 * rows, scratch.states, scratch.states + rows)


@triton.jit
def join_rows(
    out, lse, partial, share, slots, pieces, token, tokens, kv_head, ahead, first, scales, S: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Join and store rows [first, first + ROWS) of a cut block; share: number of the share where the block begins."""
    row = first + tl.arange(0, ROWS)
    valid = row < tokens * S.GROUP
    SLOT: tl.constexpr = slots_between(S.KV_HEADS, ahead is None) * S.LIVE
    at = slot_of(share, slots, 0, kv_head, ahead, S) * S.LIVE + row
    dim = tl.arange(0, S.VALUE_PADDED)
    if S.PIECE is None:
        # slot 1 of the share in which the block begins, slot 0 of later shares
        state = join(partial, at + SLOT, valid, dim, SLOT, 2 * SLOT, pieces, STATES_PER_LOAD, S.VALUE_PADDED)
    else:
        state = join(partial, at, valid, dim, SLOT, SLOT, pieces, STATES_PER_LOAD, S.VALUE_PADDED)
    rows = rows_from(tl.cast(token, tl.int64), kv_head, row, valid, S)
    store_rows(out, lse, rows, dim, state, scales, S)


@triton.jit
def join_if_last(
    out, lse, partial, counters, share, holders, pieces, token, tokens, kv_head, ahead, slots, scales, S: tl.constexpr
):  # fmt: skip
    """Count this share, which has stored its pieces of a block; the last share to be counted joins all pieces in order.

    share: number of the share in which the block begins.  holders: how many shares have pieces of the block.
    """
    tl.debug_barrier()  # one thread counts, after the stores of all threads
    counter = counters + place_of(share, kv_head, ahead, S)
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    if before == holders - 1:
        tl.store(counter, 0)  # for the next launch
        for first in range(0, tokens * S.GROUP, S.MERGE):
            join_rows(
                out, lse, partial, share, slots, pieces, token, tokens, kv_head, ahead, first, scales, S, S.MERGE
            )  # fmt: skip


@triton.jit
def cuts_of(scratch, rows, S: tl.constexpr):
    """Address of the cuts of blocks, int32 [blocks, KV_HEADS, 2], behind the states of `rows` rows."""
    return (scratch.states + rows * (S.VALUE_PADDED + 2)).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def cut_of(cuts, block, S: tl.constexpr):
    """Address of the cut of a block."""
    number = block.seq
    if not S.ONE_BLOCK:  # as blocking.find_block counts them
        number += block.first_token // S.BLOCK_Q + tl.cdiv(block.query_len - block.first, S.BLOCK_Q) - 1
    return cuts + 2 * (number * S.KV_HEADS + block.kv_head)


@triton.jit
def tell_cut(cuts, block, pieces, first_row, S: tl.constexpr):
    """Store the number of pieces of a block (1: whole), and the row of its first state."""
    cut = cut_of(cuts, block, S)
    tl.store(cut, pieces)
    tl.store(cut + 1, first_row)


@triton.jit
def load_pieces(partial, at, there, dim, BEYOND: tl.constexpr, S: tl.constexpr):
    """Load (maxima [R], sums [R], accumulators [R, D]) of scratch rows at + BEYOND; empty states where not `there`."""
    row_max = tl.load(partial.max + at + BEYOND, there, float("-inf"))
    row_sum = tl.load(partial.sum + at + BEYOND, there, 0.0)
    acc = partial.acc + at[:, None] * S.VALUE_PADDED + dim[None, :] + BEYOND * S.VALUE_PADDED
    return row_max, row_sum, tl.load(acc, there[:, None], 0.0)


@triton.jit
def join_lanes(
    partial, row, valid, dim, pieces, SKIP: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Join the states of ROWS rows: each of LANES lanes joins every LANES-th piece, then the lanes' states are joined.

    row [LANES * ROWS]: scratch row of each row's first state, once for each lane.  SKIP: scratch rows from the first
    state to the second.  STRIDE: scratch rows from each later state to the next.

    States that are loaded together share one maximum and one base address, so there is less code to fetch.
    """
    lane = tl.arange(0, LANES * ROWS) // ROWS
    zero = lane * 0.0
    state = State(zero[:, None] + (dim * 0.0)[None, :], zero + float("-inf"), zero)
    at = row + SKIP + (lane - 1) * STRIDE
    for first in range(0, pieces, STATES_PER_LOAD * LANES):
        piece = first + lane
        loaded = (load_pieces(partial, tl.where(piece == 0, row, at), valid & (piece < pieces), dim, 0, S),)
        for i in tl.static_range(1, STATES_PER_LOAD):
            there = valid & (piece + i * LANES < pieces)
            loaded = loaded + (load_pieces(partial, at, there, dim, i * LANES * STRIDE, S),)  # type: ignore[assignment]
        at += STATES_PER_LOAD * LANES * STRIDE
        top = state.max
        for i in tl.static_range(STATES_PER_LOAD):
            top = tl.maximum(top, loaded[i][0])
        base = base_of(top)
        decay = tl.exp2(state.max - base)
        acc, row_sum = state.acc * decay[:, None], state.sum * decay
        for i in tl.static_range(STATES_PER_LOAD):
            weight = tl.exp2(loaded[i][0] - base)
            # the accumulator of a state that saw nothing is arbitrary
            acc += tl.where((weight > 0)[:, None], loaded[i][2], 0.0) * weight[:, None]
            row_sum += loaded[i][1] * weight
        state = State(acc, top, row_sum)
    if LANES == 1:
        return state
    else:
        row_max = tl.reshape(state.max, [LANES, ROWS])
        top = tl.max(row_max, 0)
        weight = tl.exp2(row_max - base_of(top)[None, :])
        acc = tl.sum(tl.reshape(state.acc, [LANES, ROWS, dim.shape[0]]) * weight[:, :, None], 0)
        return State(acc, top, tl.sum(tl.reshape(state.sum, [LANES, ROWS]) * weight, 0))


@triton.jit(do_not_specialize=["num_seqs", "states", "most"])
def merge_blocks_kernel(
    out, lse, scratch, query_starts, seq_lens, num_seqs, shortest, longest, states, most, scales, S: tl.constexpr,
    SKIP: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The merge launch: join the pieces of ROWS rows of a block, if the block is cut, and store results.

    most: rows of the largest block.  DIMS: number of dims of a program; other programs have the other dims.
    """
    PARTS: tl.constexpr = S.VALUE_PADDED // DIMS
    program = tl.program_id(0)
    if PARTS > 1:
        program //= PARTS
    batch = Batch(query_starts, seq_lens, None, 0, num_seqs, 0, shortest, longest, 1, 0, None)
    groups = tl.cdiv(most, ROWS)
    first = program // S.KV_HEADS % groups * ROWS
    block = find_block(batch, program // (S.KV_HEADS * groups), program % S.KV_HEADS, S)
    live = tl.minimum(block.query_len - block.first, S.BLOCK_Q) * S.GROUP
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # for the previous launch's states; lengths were written before that launch began
    if (block.query_len > 0) & (first < live):
        cut = cut_of(cuts_of(scratch, states, S), block, S)
        pieces, first_row = tl.load(cut), tl.load(cut + 1)  # one wait for both
        if pieces > 1:
            row = first + tl.arange(0, LANES * ROWS) % ROWS
            dim = tl.arange(0, DIMS)
            if PARTS > 1:
                dim += tl.program_id(0) % PARTS * DIMS
            partial = partial_of(scratch, states)
            at = first_row + row
            if S.PIECE is None:
                state = join_lanes(partial, at, row < live, dim, pieces, SKIP, STRIDE, ROWS, LANES, S)
            else:  # in order, as a program folds the pieces of a block that it has whole
                state = join(partial, at, row < live, dim, SKIP, STRIDE, pieces, STATES_PER_LOAD, S.VALUE_PADDED)
            row = first + tl.arange(0, ROWS)
            token = tl.cast(block.first_token + block.first, tl.int64)
            store_rows(out, lse, rows_from(token, block.kv_head, row, row < live, S), dim, state, scales, S)


@triton.jit
def exp_below(x):
    """e^x for x <= 0."""
    return tl.exp2(tl.maximum(x, -1000.0, propagate_nan=tl.PropagateNan.ALL) * LOG2E)


@triton.jit
def add_result(acc, top, total, out, lse):
    """Add results out [R, D], with natural log-sum-exps lse [R], to a state (accumulator, maximum, sum) of rows."""
    # inf - inf is NaN, so an infinite log-sum-exp, such as a sink's, becomes MAX_FLOAT32 with an infinite sum
    score = tl.minimum(lse, MAX_FLOAT32, propagate_nan=tl.PropagateNan.ALL)
    both = tl.maximum(top, score)
    base = base_of(both)
    decay, weight = exp_below(top - base), exp_below(score - base)
    total = total * decay + tl.where(lse == float("inf"), float("inf"), weight)
    weight = tl.where(lse == float("inf"), 0.0, weight)
    acc = acc * decay[:, None] + tl.where((weight > 0)[:, None], out, 0.0) * weight[:, None]
    return acc, both, total


@triton.jit
def add_sinks(acc, top, total, sinks, head, valid):
    """Add the sinks of heads [R], which have the value 0, to a state, if there are sinks."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=float("-inf")).to(tl.float32)
        acc, top, total = add_result(acc, top, total, acc * 0.0, sink)
    return acc, top, total


@triton.jit
def join_results(outs, lses, at, valid, dim, out_stride, lse_stride, num_parts, HEAD_DIM: tl.constexpr):
    """Join num_parts results of rows [R] by their natural log-sum-exps: (accumulator [R, D], maximum, sum).

    Large log-sum-exps may differ by little, so they are subtracted before they are converted to base 2.
    Strides: from part to part, in elements.
    """
    inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
    zero = at * 0.0
    acc, top, total = zero[:, None] + (dim * 0.0)[None, :], zero + float("-inf"), zero
    for first in range(0, num_parts, STATES_PER_LOAD):
        # all loads of a chunk before their first use
        loaded = ()
        for i in tl.static_range(STATES_PER_LOAD):
            live = first + i < num_parts
            lse_at = lses + (at + (first + i) * lse_stride)
            lse = tl.load(lse_at, mask=valid & live, other=float("-inf"))
            out_at = outs + (at * HEAD_DIM + (first + i) * out_stride)[:, None] + dim[None, :]
            out = tl.load(out_at, mask=inside & live, other=0.0)
            loaded = loaded + ((out.to(tl.float32), lse),)  # type: ignore[assignment]
        for i in tl.static_range(STATES_PER_LOAD):
            acc, top, total = add_result(acc, top, total, loaded[i][0], loaded[i][1])
    return acc, top, total


@triton.jit
def store_joined(out, lse, acc, top, total, row, token, index, head, valid, dim, S: tl.constexpr):
    """Finish and store joined rows [R] of heads `head` and tokens token + index; row [R]: index of the row in lse."""
    rows = RowTile(token, 0, index, head, head, head, head, head, valid, 0, 0, 0, 0, 0, 0, 0)
    store_results(out, rows, dim, finish(acc, total[:, None]), None, S)
    if lse is not None:
        seen = total != 0  # also where total is NaN
        found = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)) * LN2, float("-inf"))
        tl.store(lse + row, found, mask=valid)


@triton.jit
def merge_states_kernel(out, lse, outs, lses, sinks, num_parts, part_stride, S: tl.constexpr, ROWS: tl.constexpr):
    """Join num_parts finished results of ROWS heads of one token, and the sinks, by log-sum-exps, and store them.

    part_stride: rows (a token's head each) from one part to the next.
    """
    HEADS: tl.constexpr = S.KV_HEADS * S.GROUP
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = head < HEADS
    at = token * HEADS + head
    dim = tl.arange(0, S.VALUE_PADDED)
    stride = tl.cast(part_stride, tl.int64)
    acc, top, total = join_results(outs, lses, at, valid, dim, stride * S.VALUE_DIM, stride, num_parts, S.VALUE_DIM)
    acc, top, total = add_sinks(acc, top, total, sinks, head, valid)
    store_joined(out, lse, acc, top, total, at, token, tl.zeros_like(head), head, valid, dim, S)
