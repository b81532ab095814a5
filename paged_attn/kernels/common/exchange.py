"""Exchange between ranks: each rank's results over its own keys are joined with the results of all other ranks.

An owner is a rank that joins rows, either of all heads or of OWN_HEADS heads of its own.  An owner's rows are
token-major: row = token * OWN_HEADS + head.

A block holds one rank's results for one owner's rows: [room, VALUE_DIM] results, then [room] log-sum-exps, both
float32.  The number of rows, room, is a multiple of 4, so every block begins on 16 bytes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .merge import add_sinks, join_results, store_joined


class Exchange(NamedTuple):
    """How an exchange is compiled."""

    RANKS: int
    HEADS: int  # heads of a rank's results
    OWN_HEADS: int  # heads of an owner's rows; HEADS if every rank owns all rows
    BLOCK: int  # rows that a program handles at a time
    ROOM: int = 0  # rows of a block, if ranks store to peers; a collective's block has as many rows as a call needs
    FLAGS: int = 0  # flags of each rank, one for each program
    THREADS: int = 1  # threads of a program, at least RANKS
    SEND: bool = True
    RECEIVE: bool = True
    TIMED: bool = True  # programs wait for flags until a timeout; otherwise they look at the flags once
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
def store_rows(block, room, x, lse, row, valid, dim, S: tl.constexpr):
    """Store results x [R, D] and log-sum-exps [R] into a block."""
    inside = valid[:, None] & (dim < S.VALUE_DIM)[None, :]
    tl.store(block + row.to(tl.int64)[:, None] * S.VALUE_DIM + dim[None, :], x, mask=inside)
    tl.store(block + room * S.VALUE_DIM + row, lse, mask=valid)


@triton.jit
def join_rows(
    out, lse, blocks, room, sinks, owner, row, valid, dim, E: tl.constexpr, S: tl.constexpr, VOLATILE: tl.constexpr, ok
):  # fmt: skip
    """Join rows [R] of an owner from the blocks of all ranks, in the ranks' order, and store them.

    ok: all blocks have arrived; otherwise the rows become NaN.
    """
    size = room * (S.VALUE_DIM + 1)
    lses, at = blocks + room * S.VALUE_DIM, row.to(tl.int64)
    acc, top, total = join_results(blocks, lses, at, valid, dim, size, size, E.RANKS, S.VALUE_DIM, VOLATILE)
    index, head = (row // E.OWN_HEADS).to(tl.int64), row % E.OWN_HEADS
    acc, top, total = add_sinks(acc, top, total, sinks, first_head(owner, E) + head, valid)
    total = tl.where(ok, total, float("nan"))
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
    store_rows(blocks + owner * room * (S.VALUE_DIM + 1), room, x, found, row, valid, dim, S)


@triton.jit(do_not_specialize=["fours", "tokens", "rank"])
def unpack_kernel(out, lse, blocks, fours, sinks, tokens, rank, E: tl.constexpr, S: tl.constexpr):
    """Join the rows that this rank owns from the blocks that a collective has received."""
    row, valid = rows_of_step(tl.program_id(0), tokens, E)
    room, dim = 4 * tl.cast(fours, tl.int64), tl.arange(0, S.VALUE_PADDED)
    join_rows(out, lse, blocks, room, sinks, rank, row, valid, dim, E, S, False, True)


# ---- by stores to peers --------------------------------------------------------------------------
#
# Each rank has memory that all peers can write.  Blocks [2, RANKS] come first: axis 0 is the turn, axis 1 the rank that
# writes the block.  Flags follow, int32 [2, RANKS, FLAGS] by turn, rank and program.  A flag becomes 1 when the rows of
# its rank and program have arrived.
#
# Calls alternate between two turns, so call n + 2 writes over the blocks of call n.  Before that, in call n + 1, the
# rank has seen a flag of every peer.  A peer raises its flag of call n + 1 after it has read the blocks of call n.
#
# This holds as long as every rank sees all flags in every call.  A rank that has waited in vain has FAILED: its later
# calls send nothing, wait for nobody and give NaN.  Otherwise a late flag would count as the flag of a later call.


@triton.jit
def now(lane):
    """Nanoseconds of the device's clock, as the thread of each lane reads it."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def look(flags, E: tl.constexpr):
    """Load flags.

    TIMED: with acquire semantics, so rows that were stored before a flag was raised can be loaded afterwards.
    """
    if E.TIMED:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [flags.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        return tl.load(flags)


# Threads read flags and clocks at different moments, but must leave the loop together.  So there is a lane for each
# thread, and one reduction over all lanes decides for all threads.


@triton.jit
def absence(flags, source, others, late, E: tl.constexpr):
    """0 if all flags are raised; otherwise 2 (RANKS - r), where r is the first rank whose flag is down.

    1 is added if a lane that reads r's flag is late.
    """
    absent = tl.where(others & (look(flags, E) == 0), E.RANKS - source, 0)
    return tl.max(2 * absent + tl.where((absent > 0) & late, 1, 0), 0)


@triton.jit
def wait_for(flags, source, others, timeout, lane, E: tl.constexpr):
    """RANKS - r for the first rank r whose flag is down after `timeout` ns; 0 as soon as all flags are raised."""
    found = absence(flags, source, others, lane < 0, E)
    if E.TIMED:
        until = now(lane) + timeout
        while (found > 0) & (found % 2 == 0):
            found = absence(flags, source, others, now(lane) >= until, E)
    return found // 2


@triton.jit
def memory_at(address):
    """Pointer to a rank's memory, float32, which begins on 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def flags_of(memory, E: tl.constexpr, S: tl.constexpr):
    """Pointer to the flags, int32, behind all blocks of a rank's memory."""
    BLOCKS: tl.constexpr = 2 * E.RANKS * E.ROOM * (S.VALUE_DIM + 1)
    return (memory + BLOCKS).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def send_all(peers, turn, out, lse, tokens, rank, program, programs, E: tl.constexpr, S: tl.constexpr):
    """Store this program's rows of each owner in the owner's memory, then raise the program's flag at all peers."""
    SIZE: tl.constexpr = E.ROOM * (S.VALUE_DIM + 1)
    LANES: tl.constexpr = lanes_for(E.RANKS)
    RANKS: tl.constexpr = E.RANKS
    dim = tl.arange(0, S.VALUE_PADDED)
    for step in range(program, tl.cdiv(tokens * E.OWN_HEADS, E.BLOCK), programs):
        row, valid = rows_of_step(step, tokens, E)
        loaded = ()
        for i in tl.static_range(RANKS):  # all loads before the first store
            loaded = loaded + (load_rows(out, lse, (rank + 1 + i) % RANKS, row, valid, dim, E, S),)  # type: ignore[assignment]
        for i in tl.static_range(RANKS):
            block = memory_at(peers[i]) + (turn * RANKS + rank) * SIZE
            store_rows(block, E.ROOM, loaded[i][0], loaded[i][1], row, valid, dim, S)
    tl.debug_barrier()  # a flag is one thread's store, and must not overtake the stores of other threads
    lane = tl.arange(0, LANES)
    address = lane.to(tl.int64) * 0 + peers[0]
    for i in tl.static_range(1, RANKS - 1):
        address = tl.where(lane == i, peers[i], address)
    flags = flags_of(address.to(tl.pointer_type(tl.float32)), E, S)
    flag = flags + (turn * RANKS + rank) * E.FLAGS + program
    tl.atomic_xchg(flag, 1, mask=lane < RANKS - 1, sem="release", scope="sys")


@triton.jit
def receive_all(
    merged, merged_lse, peers, turn, failed, word, sinks, tokens, rank, program, programs, timeout, E: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Wait for this program's rows of every other rank, join them, and lower the flags.

    If a rank does not answer, the int32 at `word` becomes 1 + the rank, and the one at `failed` becomes 1.
    """
    SIZE: tl.constexpr = E.ROOM * (S.VALUE_DIM + 1)
    RANKS: tl.constexpr = E.RANKS
    memory = memory_at(peers[RANKS - 1])
    lane = tl.arange(0, E.THREADS)
    source = lane % lanes_for(RANKS)
    others = (source < RANKS) & (source != rank)
    source = tl.where(others, source, rank)
    flags = flags_of(memory, E, S) + (turn * RANKS + source) * E.FLAGS + program
    has_failed = tl.load(failed)
    absent = wait_for(flags, source, others, tl.where(has_failed > 0, 0, timeout), lane, E)
    tl.debug_barrier()  # all threads have looked before any thread loads rows
    if (absent > 0) & (has_failed == 0):
        tl.store(word.to(tl.pointer_type(tl.int32)), 1 + RANKS - absent)
        tl.store(failed, 1)
    ok = (absent == 0) & (has_failed == 0)
    for step in range(program, tl.cdiv(tokens * E.OWN_HEADS, E.BLOCK), programs):
        row, valid = rows_of_step(step, tokens, E)
        blocks = memory + turn * (RANKS * SIZE)
        dim = tl.arange(0, S.VALUE_PADDED)
        join_rows(merged, merged_lse, blocks, E.ROOM, sinks, rank, row, valid, dim, E, S, True, ok)
    tl.store(flags, 0, mask=others)


@triton.jit
def take_turn(turns, turn, program, programs, E: tl.constexpr):
    """Store the next call's turn for this program, and for the programs that only larger calls have."""
    WORDS: tl.constexpr = lanes_for(E.FLAGS)
    word = tl.arange(0, WORDS)
    tl.store(turns + word, 1 - turn, mask=(word < E.FLAGS) & (word % programs == program))


@triton.jit(do_not_specialize=["tokens", "rank"])
def exchange_kernel(
    merged, merged_lse, out, lse, sinks, peers, turns, word, tokens, rank, timeout, E: tl.constexpr, S: tl.constexpr
):
    """Send rows to their owners, and join the rows that this rank owns.

    peers: addresses of all ranks' memory, from the next rank on; this rank's address is last.

    turns: int32 [FLAGS + 1]: the turn of each program, then FAILED, which is 1 once a rank did not answer.

    word: address of an int32 on the host, which becomes 1 + the rank that did not answer.
    """
    if E.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    turn, failed = tl.load(turns + program), turns + E.FLAGS
    if E.SEND:  # noqa: SIM102 (one is decided at compile time)
        if tl.load(failed) == 0:
            send_all(peers, turn, out, lse, tokens, rank, program, programs, E, S)
    if E.RECEIVE:
        receive_all(
            merged, merged_lse, peers, turn, failed, word, sinks, tokens, rank, program, programs, timeout, E, S
        )  # fmt: skip
        take_turn(turns, turn, program, programs, E)
