"""Exchange between ranks: each rank's results over its own keys are joined with the results of all other ranks.

An owner is a rank that joins rows, either of all heads or of OWN_HEADS heads of its own.  An owner's rows are
token-major: row = token * OWN_HEADS + head.

A block holds one rank's results for one owner's rows.  In a block of a collective, float32, [room, VALUE_DIM] results
come first, then [room] log-sum-exps.  The number of rows, room, is a multiple of 4, so every block begins on 16 bytes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .merge import STATES_PER_LOAD, add_result, add_sinks, join_results, store_joined


class Exchange(NamedTuple):
    """How an exchange is compiled."""

    RANKS: int
    HEADS: int  # heads of a rank's results
    OWN_HEADS: int  # heads of an owner's rows; HEADS if every rank owns all rows
    BLOCK: int  # rows that a program handles at a time
    ROOM: int = 0  # rows of a block, if ranks store to peers; a collective's block has as many rows as a call needs
    PROGRAMS: int = 0  # most programs of a call
    THREADS: int = 1  # threads of a program
    SEND: bool = True
    RECEIVE: bool = True
    TIMED: bool = True  # programs wait for words until a timeout; otherwise they look once
    DEPENDENT: bool = False  # a programmatic dependent launch


@triton.constexpr_function
def lanes_for(count):
    """`count` rounded up to a power of two."""
    return 1 << (count - 1).bit_length()


@triton.jit
def rows_of_step(step, tokens, E: tl.constexpr):
    """(rows [BLOCK] of an owner in step `step`, mask of the rows that exist)."""
    row = step * E.BLOCK + tl.arange(0, E.BLOCK)
    return row, row < tokens * E.OWN_HEADS


@triton.jit
def first_head(owner, E: tl.constexpr):
    """Number of an owner's first head among the heads of a rank's results."""
    if E.OWN_HEADS == E.HEADS:
        return 0
    else:
        return owner * E.OWN_HEADS


@triton.jit
def load_rows(out, lse, owner, row, valid, dim, E: tl.constexpr, S: tl.constexpr):
    """Load this rank's (results [R, D] as float32, log-sum-exps [R]) for rows of an owner."""
    token = (row // E.OWN_HEADS).to(tl.int64)
    head = first_head(owner, E) + row % E.OWN_HEADS
    inside = valid[:, None] & (dim < S.VALUE_DIM)[None, :]
    found = tl.load(lse + token * E.HEADS + head, mask=valid, other=0.0)
    ptr = out.ptr + (token * out.stride_token + head.to(tl.int64) * out.stride_head)[:, None] + dim[None, :]
    return tl.load(ptr, mask=inside, other=0.0).to(tl.float32), found


@triton.jit
def finish_rows(out, lse, sinks, owner, acc, top, total, row, valid, dim, E: tl.constexpr, S: tl.constexpr):
    """Add the sinks to joined rows [R] of an owner, finish them and store them."""
    index, head = (row // E.OWN_HEADS).to(tl.int64), row % E.OWN_HEADS
    acc, top, total = add_sinks(acc, top, total, sinks, first_head(owner, E) + head, valid)
    store_joined(out, lse, acc, top, total, row, tl.cast(0, tl.int64), index, head, valid, dim, S)


# In pack_kernel and unpack_kernel, the argument `fours` is a quarter of `room`, the number of rows of a block.


@triton.jit(do_not_specialize=["fours", "tokens"])
def pack_kernel(blocks, fours, out, lse, tokens, E: tl.constexpr, S: tl.constexpr):
    """Write the blocks that a collective sends: one for each owner, in the owners' order.

    If every rank owns all rows, one block serves all owners.
    """
    OWNERS: tl.constexpr = E.HEADS // E.OWN_HEADS
    owner, room = tl.program_id(0) % OWNERS, 4 * tl.cast(fours, tl.int64)
    row, valid = rows_of_step(tl.program_id(0) // OWNERS, tokens, E)
    dim = tl.arange(0, S.VALUE_PADDED)
    x, found = load_rows(out, lse, owner, row, valid, dim, E, S)
    block = blocks + owner * room * (S.VALUE_DIM + 1)
    at = block + row.to(tl.int64)[:, None] * S.VALUE_DIM + dim[None, :]
    tl.store(at, x, mask=valid[:, None] & (dim < S.VALUE_DIM)[None, :])
    tl.store(block + room * S.VALUE_DIM + row, found, mask=valid)


@triton.jit(do_not_specialize=["fours", "tokens", "rank"])
def unpack_kernel(out, lse, blocks, fours, sinks, tokens, rank, E: tl.constexpr, S: tl.constexpr):
    """Join the rows that this rank owns from the blocks that a collective has received."""
    row, valid = rows_of_step(tl.program_id(0), tokens, E)
    room, dim = 4 * tl.cast(fours, tl.int64), tl.arange(0, S.VALUE_PADDED)
    size, at = room * (S.VALUE_DIM + 1), row.to(tl.int64)
    lses = blocks + room * S.VALUE_DIM
    acc, top, total = join_results(blocks, lses, at, valid, dim, size, size, E.RANKS, S.VALUE_DIM)
    finish_rows(out, lse, sinks, rank, acc, top, total, row, valid, dim, E, S)


# ---- by stores to peers --------------------------------------------------------------------------
#
# All ranks write words into each rank's memory, blocks [2, RANKS, ROOM, VALUE_DIM].  Axis 0 is the turn, and axis 1 the
# rank that writes the block.  A word is an int64.  Its low half is one element of the result, its high half the row's
# log-sum-exp, both float32.  A log-sum-exp of 0 is sent as -0, so no word is 0.  Words are loaded and stored whole.
# So a word that is not 0 has arrived, and needs neither a flag behind it nor a fence before a flag.  A rank stores 0
# again in the words that it has read.
#
# Calls alternate between two turns, so call n + 2 writes over the blocks of call n.  Before that, in call n + 1, the
# rank has read words of every peer.  A peer begins call n + 1 only after its call n has ended.  By then it has read the
# words of call n and set them to 0.
#
# This holds as long as every rank reads words of every rank in every call.  A rank that has waited in vain has FAILED:
# its later calls send nothing, wait for nobody and give NaN.  Otherwise a late word would count as a word of a later
# call.

NO_WORD = tl.constexpr(-(1 << 63))  # where there is no row: not 0, and no high half is below its own
MINUS_ZERO = tl.constexpr(-(1 << 31))  # bits of -0.0; Triton makes 0.0 of the literal -0.0


@triton.jit
def now(lane):
    """Nanoseconds of the device's clock, as the thread of each lane reads it."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def words_of(x, lse):
    """Words [R, D] of results x [R, D] and log-sum-exps [R], float32."""
    high = tl.where(lse == 0, MINUS_ZERO, lse.to(tl.int32, bitcast=True)).to(tl.int64) << 32
    return high[:, None] | x.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def state_of(words):
    """(results [R, D], log-sum-exps [R]) of words that have arrived."""
    high = tl.max((words >> 32).to(tl.int32), 1)  # the same in all words of a row
    return words.to(tl.int32).to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def words_at(address, block, row, dim, E: tl.constexpr, S: tl.constexpr):
    """Addresses of the words [R, D] of rows of a block in a rank's memory, which begins on 16 bytes."""
    memory = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    return memory + (block * E.ROOM + row).to(tl.int64)[:, None] * S.VALUE_DIM + dim[None, :]


@triton.jit
def send_all(peers, turn, sends, out, lse, tokens, rank, program, programs, E: tl.constexpr, S: tl.constexpr):
    """Store this program's rows of each owner in the owner's memory, if this rank `sends`."""
    RANKS: tl.constexpr = E.RANKS
    dim = tl.arange(0, S.VALUE_PADDED)
    for step in range(program, tl.cdiv(tokens * E.OWN_HEADS, E.BLOCK), programs):
        row, valid = rows_of_step(step, tokens, E)
        loaded = ()
        for i in tl.static_range(RANKS):  # all loads before the first store
            loaded = loaded + (load_rows(out, lse, (rank + 1 + i) % RANKS, row, valid, dim, E, S),)  # type: ignore[assignment]
        inside = (valid & sends)[:, None] & (dim < S.VALUE_DIM)[None, :]
        for i in tl.static_range(RANKS):
            at = words_at(peers[i], turn * RANKS + rank, row, dim, E, S)
            # ".wt" makes it STG.STRONG.SYS, whose words other devices may load at any time
            tl.store(at, words_of(loaded[i][0], loaded[i][1]), mask=inside, cache_modifier=".wt")


@triton.jit
def look(memory, turn, first: tl.constexpr, row, inside, dim, E: tl.constexpr, S: tl.constexpr):
    """Load the words of rows from the blocks of up to STATES_PER_LOAD ranks: (tuple of words [R, D], absent).

    absent: RANKS - r for the first rank r from `first` on with a word that has not arrived; 0 if all have.
    """
    RANKS: tl.constexpr = E.RANKS
    COUNT: tl.constexpr = min(STATES_PER_LOAD, RANKS - first)
    words = ()
    for i in tl.static_range(COUNT):
        at = words_at(memory, turn * RANKS + first + i, row, dim, E, S)
        words = words + (tl.load(at, mask=inside, other=NO_WORD, volatile=True),)  # type: ignore[assignment]
    absent = tl.full([E.BLOCK, S.VALUE_PADDED], 0, tl.int32)
    for i in tl.static_range(COUNT):
        absent = tl.maximum(absent, tl.where(words[i] == 0, RANKS - first - i, 0))
    return words, tl.max(tl.max(absent, 1), 0)


# Threads load words and read clocks at different moments, but must leave the loop together.  So one reduction over all
# words decides for all threads, and another over their clocks, for which there is a lane for each thread.


@triton.jit
def wait_for(memory, turn, first: tl.constexpr, row, inside, dim, timeout, E: tl.constexpr, S: tl.constexpr):
    """Look until all words have arrived, or `timeout` nanoseconds are over.  Returns what the last look returned."""
    words, absent = look(memory, turn, first, row, inside, dim, E, S)
    if E.TIMED:  # noqa: SIM102 (one is decided at compile time)
        if absent > 0:
            lane = tl.arange(0, E.THREADS)
            until, late = now(lane) + timeout, absent * 0
            while (absent > 0) & (late == 0):
                late = tl.max((now(lane) >= until).to(tl.int32), 0)
                words, absent = look(memory, turn, first, row, inside, dim, E, S)
    return words, absent


@triton.jit
def receive_all(
    merged, merged_lse, peers, turn, has_failed, failed, word, sinks, tokens, rank, program, programs, timeout,
    E: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Wait for this program's rows of every rank, join them in the ranks' order, and store them.

    If a rank does not answer, the rows become NaN, the int32 at `word` becomes 1 + the rank, and the one at `failed` 1.
    """
    RANKS: tl.constexpr = E.RANKS
    memory = peers[RANKS - 1]
    dim = tl.arange(0, S.VALUE_PADDED)
    for step in range(program, tl.cdiv(tokens * E.OWN_HEADS, E.BLOCK), programs):
        row, valid = rows_of_step(step, tokens, E)
        inside = valid[:, None] & (dim < S.VALUE_DIM)[None, :]
        acc = tl.full([E.BLOCK, S.VALUE_PADDED], 0, tl.float32)
        top, total = tl.full([E.BLOCK], float("-inf"), tl.float32), tl.full([E.BLOCK], 0, tl.float32)
        for first in tl.static_range(0, RANKS, STATES_PER_LOAD):
            limit = tl.where(has_failed > 0, 0, timeout)
            words, absent = wait_for(memory, turn, first, row, inside, dim, limit, E, S)
            if (absent > 0) & (has_failed == 0):
                tl.store(word.to(tl.pointer_type(tl.int32)), 1 + RANKS - absent)
                tl.store(failed, 1)
            has_failed = tl.where(absent > 0, 1, has_failed)
            for i in tl.static_range(min(STATES_PER_LOAD, RANKS - first)):
                x, lse = state_of(words[i])
                acc, top, total = add_result(acc, top, total, x, lse)
            if first + STATES_PER_LOAD > RANKS:
                acc += 0.0  # `join_results` adds states of no rank, which makes 0 of -0
        for i in tl.static_range(RANKS):
            at = words_at(memory, turn * RANKS + i, row, dim, E, S)
            tl.store(at, tl.full([E.BLOCK, S.VALUE_PADDED], 0, tl.int64), mask=inside)
        total = tl.where(has_failed > 0, float("nan"), total)
        finish_rows(merged, merged_lse, sinks, rank, acc, top, total, row, valid, dim, E, S)


@triton.jit
def take_turn(turns, turn, program, programs, E: tl.constexpr):
    """Store the next call's turn for this program, and for the programs that only larger calls have."""
    other = tl.arange(0, lanes_for(E.PROGRAMS))
    tl.store(turns + other, 1 - turn, mask=(other < E.PROGRAMS) & (other % programs == program))


@triton.jit(do_not_specialize=["tokens", "rank"])
def exchange_kernel(
    merged, merged_lse, out, lse, sinks, peers, turns, word, tokens, rank, timeout, E: tl.constexpr, S: tl.constexpr
):
    """Send rows to their owners, and join the rows that this rank owns.

    peers: addresses of all ranks' memory, from the next rank on; this rank's address is last.

    turns: int32 [PROGRAMS + 1]: the turn of each program, then FAILED, which is 1 once a rank did not answer.

    word: address of an int32 on the host, which becomes 1 + the rank that did not answer.
    """
    if E.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    failed = turns + E.PROGRAMS
    turn, has_failed = tl.load(turns + program), tl.load(failed)
    if E.SEND:
        send_all(peers, turn, has_failed == 0, out, lse, tokens, rank, program, programs, E, S)
    if E.RECEIVE:
        receive_all(
            merged, merged_lse, peers, turn, has_failed, failed, word, sinks, tokens, rank, program, programs, timeout,
            E, S,
        )  # fmt: skip
        take_turn(turns, turn, program, programs, E)
