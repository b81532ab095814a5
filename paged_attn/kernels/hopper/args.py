"""Records of the Hopper kernels, beside the records of `kernels/common`."""

from typing import Any, NamedTuple

import triton


class Pipe(NamedTuple):
    """Compile-time options: how the warps of a kernel share the work."""

    SHARES: bool  # even shares of all tiles; otherwise items from a counter
    CONSUMERS: int  # partitions that multiply, each for ROWS rows or COLUMNS columns
    KEY_STAGES: int  # slots of the ring of keys that consumers read
    # slots of the ring of values; 0: keys and values take turns in one ring.  Latents: slots of the dims behind values
    VALUE_STAGES: int
    LOADERS: int  # warps for each ring; each loads its part of every tile
    BOX: int  # keys that one message of the copy engine (TMA) brings
    ROWS_PER_PAGE: Any  # rows from page to page, a row being one slot's stride; x-packed: 1, in pages
    SKIP: int  # rows of scratch from a block's first state to its second
    STRIDE: int  # rows of scratch between later states
    ROWS: int = 64  # of a consumer, 64 for each of its warpgroups
    JOINED: int = 8  # pieces of few rows whose states are loaded together
    GROUPED: int = 0  # pieces of a block beyond which they are joined in groups; 0: always all at once
    BRIEF: bool = False  # as little machine code as possible, because it has to be fetched: one loader, a shorter join
    AT_ONCE: bool = False  # weights of rows use the maximum so far, and are made again where it was too small
    IN_TURN: bool = False  # a consumer's two warpgroups start products in turn: tile_loop.py
    AHEAD: bool = False  # an item's first keys are multiplied while the previous item's results are stored
    MIXED: bool = False  # items come from two lists, one of long and one of short queries
    COLUMNS: int = 0  # few query rows, as columns of products; 0: query rows are rows of products
    PREFETCH: bool = False  # descriptors are fetched while the schedule is made
    PACKED: bool = False  # the cache is x-packed: packed.py
    FP8: int = 0  # mantissa bits of an fp8 cache; 0: 16 bits
    CONVERT: int = 0  # what a warpgroup does to tiles between loaders and consumers: convert.py; 0: there is none
    CONVERT_REGISTERS: int = 56  # of each thread of that warpgroup
    RAW_STAGES: int = 0  # slots of the rings from which that warpgroup reads
    FP8_KEYS: bool = False  # keys are multiplied as fp8: by fp8 queries, or by 16-bit queries in two parts
    FP8_PRODUCTS: bool = False  # queries, keys, weights and values are multiplied as fp8
    COARSE: bool = False  # fp8 weights come from a line through each octave instead of exponentials
    TANH: bool = False  # the softcap takes tanh.approx, off by up to 2^-11 of a score, instead of exponentials
    TERMS: int = 0  # of the polynomial that caps small scores where AT_ONCE, see asm/weights.py; 0: none
    QUERY_BOX: bool = False  # queries come through the copy engine
    QUERY_SLOTS: int = 1  # blocks whose queries fit shared memory, with QUERY_BOX; 2: the next block's may come early
    BESIDE: bool = False  # a warpgroup serves few rows beside blocks: mixed.py
    FOLLOWS: bool = False  # the second of two launches: waits for the first launch at its own end
    HEADS_ABREAST: int = 0  # KV heads of a sequence whose blocks come before the next heads' blocks; 0: all heads
    PARTS: int = 1  # parts of a KV head's query heads; each part is scheduled like a KV head
    HALVES: bool = False  # a latent tile takes two slots, each with half of the values' dims
    FROM_DIM: int = 0  # first value dim of this launch, which has VALUE_PADDED dims; another launch has the others


@triton.constexpr_function
def is_shared(P):
    """Whether a consumer is two or four warpgroups of one code, each of which waits by itself (`gates.make_gates`)."""
    return P.ROWS >= 128


@triton.constexpr_function
def is_gated(P):
    """Whether each warp of a consumer waits for tiles and releases them by itself (`gates.make_gates`)."""
    return P.ROWS >= 128 or P.CONSUMERS == 3 or P.BESIDE


@triton.constexpr_function
def queries_leave_early(P):
    """Whether a consumer that is an item ahead has one query slot, so the next queries wait for its release."""
    return P.AHEAD and P.QUERY_SLOTS == 1


@triton.constexpr_function
def in_one_ring(S, P):
    """Whether each tile's keys and values are in neighbouring slots of one ring."""
    return P.VALUE_STAGES == 0 and S.REST is None


@triton.constexpr_function
def slots_of_tile(P):
    """Slots of the ring of keys that one tile takes."""
    return 2 if P.HALVES else 1


@triton.constexpr_function
def raw_slots_of_rest(P):
    """Raw slots of the latent dims behind the values, which loaders fill and a warpgroup widens."""
    return -(-P.RAW_STAGES // (2 if P.HALVES else 1))  # slots_of_tile, which Triton 3.6 cannot call from here


@triton.constexpr_function
def rows_of_consumer(P):
    """Rows of a block that one consumer has, as rows of products or, of two consumers that share columns, as columns.

    With two lists, few rows alone are columns, all of them the first consumer's.
    """
    return P.COLUMNS if P.SHARES and P.COLUMNS > 0 and P.CONSUMERS > 1 else P.ROWS


@triton.constexpr_function
def has_latent_rows(S, P):
    """Whether two consumers have the same rows of latents: tiles in turn, and half of the values' dims each."""
    return S.REST is not None and P.COLUMNS == 0


@triton.constexpr_function
def query_parts(P):
    """Number of fp8 terms of each query element; 1: queries are fp8, or 16 bits."""
    return 2 if P.FP8_KEYS and not P.FP8_PRODUCTS else 1


@triton.constexpr_function
def dim_parts(dims):
    """Parts of 64 dims into which 192 dims are cut, for Triton's shapes are powers of two; 1: not cut."""
    return dims // 64 if dims & (dims - 1) else 1


class Ring(NamedTuple):
    """Slots of shared memory that loaders fill and consumers empty, with a full and an empty barrier for each slot."""

    # [STAGES, TILE, 1, DIM].  Transposed values: [STAGES, DIM, 1, TILE].  x-packed: [STAGES, boxes, 1, ...].
    # Dims in parts: [STAGES x parts, TILE, 1, 64].
    slots: Any
    full: Any  # mbarriers [STAGES, 1]
    empty: Any
    full_at: Any  # address of the first full barrier, if warps wait by themselves; otherwise never used
    empty_at: Any
    at: Any  # address of the first slot of keys that assembly multiplies; otherwise never used


class Loader(NamedTuple):
    """A warp that loads tiles: what the copy engine reads, and the ring that it fills."""

    box: Any  # descriptor of the cache
    new_box: Any  # descriptor of keys, or values, outside the cache
    ring: Any  # Ring


class Gates(NamedTuple):
    """Array of all barriers at which warps of a consumer wait by themselves, and its address."""

    barriers: Any  # int64 [kinds, DEPTH]
    at: Any  # address in shared memory


class Turn(NamedTuple):
    """Position of a loader or consumer in a ring."""

    stage: Any
    phase: Any  # parity of the completed rounds


class Queries(NamedTuple):
    """A block's queries in shared memory."""

    slots: Any  # [CONSUMERS x parts, R, 1, DIM or 64]; [QUERY_SLOTS x parts, ...] if blocks take slots in turn
    full: Any  # mbarriers [CONSUMERS, 1] or [QUERY_SLOTS, 1]
    empty: Any  # mbarriers [QUERY_SLOTS, 1] if blocks take slots in turn; otherwise never used
    full_at: Any  # addresses, as in Ring
    empty_at: Any
    at: Any


class QueryRows(NamedTuple):
    """A consumer's queries of one block."""

    parts: Any  # matrices [R, D] that add up to the queries, or [R, 64] with neighbouring dims
    at: Any  # address of the first matrix, if known


class Rings(NamedTuple):
    """Inputs of a consumer in shared memory, and shared memory of its own."""

    key: Any  # Ring
    value: Any  # Ring; latents: of the dims behind the values
    queries: Any  # Queries
    room: Any  # sums of fp8 products or of pieces, or weights of few rows; otherwise never used
    extra: Any  # the operand of ones for coarse weights, flags of columns, or LatentRoom; otherwise never used


class LatentRoom(NamedTuple):
    """`Rings.extra` of latents."""

    flags: Any  # int32 [CONSUMERS, lanes, warps] of columns
    rest: Any  # queries against the dims behind the values: [CONSUMERS, N, REST]; rows: [1, ROWS, REST]
    both: Any  # columns: barrier at which two consumers meet; rows: float32 [2, ROWS, 4] that they exchange
    rest_at: Any  # address of `rest` for rows; otherwise never used


class Turns(NamedTuple):
    """Position of a consumer in all rings."""

    key: Any  # Turn
    value: Any  # Turn
    query: Any  # blocks done


class Mail(NamedTuple):
    """Two letters in shared memory, in which the scheduling warp hands out items."""

    letters: Any  # int32 [2 * FIELDS, 1]
    full: Any  # [2, 1]
    empty: Any
    full_at: Any  # as in Ring
    empty_at: Any


class Item(NamedTuple):
    """One piece of one block of queries x one KV head, or several pieces of a fixed size."""

    block: Any  # Block; its kv_head is -1 after the last item
    begin: Any  # tiles [begin, end); pieces of a fixed size count whole, with tiles that the block does not see
    end: Any
    first: Any  # 1: this piece has the block's first keys; pieces of a fixed size: always 1
    pieces: Any  # of the block; 1: not cut
    holders: Any  # programs that have some of the pieces
    first_row: Any  # row of the block's first state in scratch: its first piece's; of a fixed size: its last piece's
    row: Any  # row of this piece's state; of a fixed size: of this item's last piece's state
    counter: Any  # index of the block's counter of holders that are done


class Jobs(NamedTuple):
    """Work of a partition: where items come from, and the batch."""

    mail: Any  # Mail
    counters: Any  # int32 [3]: items taken from each list, programs done; zero before and after every launch
    batch: Any  # Batch
    mods: Any  # Modifiers


class Results(NamedTuple):
    """Destinations of results beside `out`, whose compile-time field would be lost in a record that a kernel builds."""

    lse: Any
    partial: Any  # Partial
    # int32 counters of holders that are done: of blocks, then of groups of pieces; zero before and after every launch.
    # With a merge launch: the cuts that it reads, `merge.cuts_of`.
    told: Any
    scales: Any  # Scales
