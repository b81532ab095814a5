"""Records of the Hopper kernels; those of the portable ones travel along unchanged."""

from typing import Any, NamedTuple

import triton


class Pipe(NamedTuple):
    """How a kernel's warps share the work: compile-time."""

    SHARES: bool  # even shares of all tiles; otherwise items from a counter
    CONSUMERS: int  # partitions that multiply, ROWS rows each, or few
    KEY_STAGES: int  # slots of the rings that consumers read
    # 0: values take slots of the keys' ring, in turn with these; of keys that hold their values, slots of the rest
    VALUE_STAGES: int
    LOADERS: int  # warps per ring: each loads its part of every tile
    BOX: int  # keys that one message of the copy engine brings
    ROWS_PER_PAGE: Any  # the caches as the copy engine sees them: rows of one slot's stride; of x-packed ones pages, 1
    SKIP: int  # from a block's first state to its second, in rows
    STRIDE: int  # and from there on
    ROWS: int = 64  # of a consumer: 64 for each of its warpgroups
    JOINED: int = 8  # pieces of few rows whose states are loaded together
    GROUPED: int = 0  # pieces of a block beyond which groups of them are joined first; 0: all at once
    BRIEF: bool = False  # as little machine code as will do, for that has to be fetched: one loader, a shorter join
    AT_ONCE: bool = False  # rows that are no columns are weighed by the maximum so far, again where that was too small
    IN_TURN: bool = False  # a consumer's two warpgroups send products in turn: pingpong.py
    AHEAD: bool = False  # an item's first keys are multiplied while the results before it leave
    MIXED: bool = False  # items come from two lists, of long and of short queries
    COLUMNS: int = 0  # few rows of queries as the columns of products; 0: rows of queries are rows
    PREFETCH: bool = False  # descriptors are fetched while the schedule is made
    PACKED: bool = False  # the cache is x-packed: packed.py
    FP8: int = 0  # mantissa bits of a cache of fp8 numbers
    CONVERT: int = 0  # what a warpgroup does to tiles between loaders and consumers: 0 nothing, see convert.py
    CONVERT_REGISTERS: int = 56  # of a thread of that warpgroup
    RAW_STAGES: int = 0  # slots of the rings that loaders fill for it
    FP8_KEYS: bool = False  # keys are multiplied as they are: by fp8 queries, or by 16-bit ones in two parts
    FP8_PRODUCTS: bool = False  # queries and weights are fp8, too
    COARSE: bool = False  # and weights are rounded from a line through each octave, not from exponentials
    TANH: bool = False  # a softcap by one instruction, up to 2^-11 of a score off, not by exponentials
    TERMS: int = 0  # of the polynomial that caps small scores, where they are weighed at once; see asm/caps.py
    QUERY_BOX: bool = False  # queries come through the copy engine
    QUERY_SLOTS: int = 1  # for those of a block each, of warpgroups of one code or few: two, where one may be ahead
    BESIDE: bool = False  # few rows by a warpgroup beside blocks: mixed.py
    FOLLOWS: bool = False  # of two launches of a call the second: it waits for the first at its end, not at its begin
    HEADS_ABREAST: int = 0  # KV heads of a sequence whose blocks come before those of the next ones; 0: of all heads
    PARTS: int = 1  # of a KV head's query heads, each of which is scheduled as if it had that head for itself
    HALVES: bool = False  # keys that hold their values have two slots a tile, each with half of the dims that are these
    FROM_DIM: int = 0  # the first of the values' dims, where a launch has VALUE_PADDED of them and others have the rest


@triton.constexpr_function
def is_shared(P):
    """Whether a consumer is two or four warpgroups of one code, each waiting for itself (`gates.make_gates`)."""
    return P.ROWS >= 128


@triton.constexpr_function
def is_gated(P):
    """Whether each warp of a consumer waits for tiles, and releases them, by itself (`gates.make_gates`)."""
    return P.ROWS >= 128 or P.CONSUMERS == 3 or P.BESIDE


@triton.constexpr_function
def queries_leave_early(P):
    """Whether a consumer that is an item ahead has one slot for queries, which the next ones wait for."""
    return P.AHEAD and P.QUERY_SLOTS == 1


@triton.constexpr_function
def in_one_ring(S, P):
    """Whether each tile's keys and values are in neighbouring slots of one ring."""
    return P.VALUE_STAGES == 0 and S.REST is None


@triton.constexpr_function
def slots_of_tile(P):
    """Slots of the keys' ring that a tile takes."""
    return 2 if P.HALVES else 1


@triton.constexpr_function
def raw_slots_of_rest(P):
    """Slots that loaders fill of the dims that keys have behind their values, where a warpgroup widens them."""
    return -(-P.RAW_STAGES // (2 if P.HALVES else 1))  # slots_of_tile, which Triton 3.6 cannot call from here


@triton.constexpr_function
def rows_of_consumer(P):
    """Of a block: those that are columns of its products, or rows of them.

    Of two lists the few rows alone are columns, all of the first consumer.
    """
    return P.COLUMNS if P.SHARES and P.COLUMNS > 0 and P.CONSUMERS > 1 else P.ROWS


@triton.constexpr_function
def has_latent_rows(S, P):
    """Whether two consumers have the same rows, of latents: tiles in turn, and each half of the values' dims."""
    return S.REST is not None and P.COLUMNS == 0


@triton.constexpr_function
def query_parts(P):
    """fp8 numbers that a query's number is the sum of; 1: it is one, or not fp8."""
    return 2 if P.FP8_KEYS and not P.FP8_PRODUCTS else 1


@triton.constexpr_function
def dim_parts(dims):
    """Parts of 64 dims, side by side, of keys and queries whose dims are no power of two, as Triton's shapes are."""
    return dims // 64 if dims & (dims - 1) else 1


class Ring(NamedTuple):
    """Slots of shared memory that loaders fill and consumers empty, with a barrier of each kind for every slot."""

    # [STAGES, TILE, 1, DIM]; transposed values [STAGES, DIM, 1, TILE]; x-packed [STAGES, boxes, 1, ...]; of dims in
    # parts [STAGES x parts, TILE, 1, 64]
    slots: Any
    full: Any  # [STAGES, 1]
    empty: Any
    full_at: Any  # their addresses, where the consumer's warpgroups wait each for itself; otherwise never used
    empty_at: Any
    at: Any  # address of the first slot, of keys that assembly multiplies; otherwise never used


class Gates(NamedTuple):
    """All barriers that a consumer of several warpgroups meets: rows of an array, and where it lies."""

    barriers: Any  # int64 [kinds, DEPTH]
    at: Any  # address in shared memory


class Turn(NamedTuple):
    """Where in a ring a loader or consumer is."""

    stage: Any
    phase: Any  # parity of the rounds made


class Queries(NamedTuple):
    """A block's queries in shared memory."""

    slots: Any  # [CONSUMERS x parts, R, 1, DIM or 64], or as many that a consumer of several warpgroups takes in turn
    full: Any  # [CONSUMERS, 1]
    empty: Any  # as in Ring, of slots in turn; otherwise never used
    full_at: Any
    empty_at: Any
    at: Any  # as in Ring


class QueryRows(NamedTuple):
    """A consumer's queries of one block."""

    parts: Any  # matrices [R, D] whose sum they are, or [R, 64] whose dims lie side by side
    at: Any  # address of the first, where it is known


class Rings(NamedTuple):
    """All that a consumer is fed from, and shared memory of its own."""

    key: Any
    value: Any
    queries: Any
    room: Any  # sums of fp8 products or of pieces, or weights of few rows; otherwise never used
    extra: Any  # an operand that adds up coarse weights, or flags of columns; otherwise never used


class LatentRoom(NamedTuple):
    """`Rings.extra` of keys that hold their values, for each consumer."""

    flags: Any  # [CONSUMERS, lanes, warps]
    rest: Any  # queries [CONSUMERS, N, REST] against what keys have behind their values; of rows [1, ROWS, REST]
    both: Any  # barrier at which two consumers meet, of rows numbers [CONSUMERS, ROWS] of each; of one never used
    rest_at: Any  # address of `rest`, of rows; otherwise never used


class Turns(NamedTuple):
    """Where a consumer is in all of them."""

    key: Any  # Turn
    value: Any
    query: Any  # blocks done


class Mail(NamedTuple):
    """Two letters by which the scheduling warp hands out items."""

    letters: Any  # int32 [2 * FIELDS, 1]
    full: Any  # [2, 1]
    empty: Any
    full_at: Any  # as in Ring
    empty_at: Any


class Item(NamedTuple):
    """One piece of one block of queries x one KV head, or several of a fixed size."""

    block: Any  # Block; of KV head -1: no more work
    begin: Any  # tiles [begin, end); pieces of a fixed size whole, also those that the block does not see
    end: Any
    first: Any  # 1: the piece with the block's first keys; of a fixed size not asked for
    pieces: Any  # of the block; 1: not cut
    holders: Any  # programs that have some of these
    first_row: Any  # of the first state in scratch, the first piece's; of pieces of a fixed size the last one's
    row: Any  # of this piece's, or the last of these
    counter: Any  # of the holders that are done


class Jobs(NamedTuple):
    """What a partition needs to know its work."""

    mail: Any
    counters: Any  # int32 [3]: items taken of both lists, programs done; zero before and after every launch
    batch: Any  # Batch
    mods: Any  # Modifiers


class Results(NamedTuple):
    """Where results go, beside `out`: its compile-time field would not survive in a record that a kernel builds."""

    lse: Any
    partial: Any  # Partial
    # int32, holders that are done, of groups behind those of blocks; zero before and after every launch.
    # Or what a merge is told: `merge.cuts_of`
    told: Any
    scales: Any  # Scales
