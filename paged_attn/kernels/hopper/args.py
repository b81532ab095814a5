"""Records of the Hopper kernels alone: compile-time options, rings, queries, work items.

`common/records.py` has the records that all dialects share.
"""

from typing import Any, NamedTuple

import triton


class Pipe(NamedTuple):
    """Compile-time options of a kernel: its warps, its rings, and forms of its arithmetic."""

    SHARES: bool  # a launch of even shares (shares.py, few rows of mixed.py); False: of blocks (blocks.py, mixed.py)
    # number of warp partitions that multiply.  Each has ROWS query rows as rows of products, or COLUMNS query rows as
    # columns.
    # Latent rows: two consumers share ROWS rows
    CONSUMERS: int
    KEY_STAGES: int  # slots of the ring of keys that consumers read
    # slots of the ring of values; 0: keys and values alternate in the ring of keys.  Latents: slots of the ring of the
    # key dims behind the values, 0 if there are none
    VALUE_STAGES: int
    LOADERS: int  # loader warps for each ring; each loads an equal part of every tile
    BOX: int  # keys of one TMA box
    ROWS_PER_PAGE: Any  # rows of the TMA descriptor, a slot's stride apart, from one page to the next; x-packed: 1
    SKIP: int  # rows of scratch from a block's first state to its second
    STRIDE: int  # rows of scratch from each later state to the next
    ROWS: int = 64  # query rows of a consumer: 64 for each of its warpgroups
    JOINED: int = 8  # maximum number of states of pieces that a joining program loads together
    GROUPED: int = 0  # a block with more pieces than this is joined in groups of pieces; 0: never in groups
    BRIEF: bool = False  # as little machine code as possible, because a small decode waits for code; one loader warp
    AT_ONCE: bool = False  # softmax weights use the maximum so far, and are made again if that maximum was too small
    IN_TURN: bool = False  # ping-pong: a consumer's two warpgroups start products in turn (tile_loop.py)
    AHEAD: bool = False  # the next item's first keys are multiplied while an item's results are stored
    MIXED: bool = False  # items come from two lists, one of long and one of short queries; False in the mixed kernel
    COLUMNS: int = 0  # few query rows of a consumer, as columns of products; 0: query rows are rows of products
    PREFETCH: bool = False  # boxes from outside the caches let TMA fetch descriptors while the schedule is computed
    PACKED: bool = False  # the cache is x-packed (packed.py)
    FP8: int = 0  # format of a cache of bytes (records/formats.MANTISSA); 0: a cache of 16 bits
    CONVERT: int = 0  # what the converter warpgroup does to tiles (convert.py); 0: there is no converter
    CONVERT_REGISTERS: int = 56  # registers of each thread of the converter
    RAW_STAGES: int = 0  # slots of each ring that the converter reads; latents' rest has `raw_slots_of_rest`
    FP8_KEYS: bool = False  # q @ k^T has fp8 operands: fp8 queries, or 16-bit queries as sums of two fp8 terms
    FP8_PRODUCTS: bool = False  # both products have fp8 operands: queries, keys, weights and values
    COARSE: bool = False  # fp8 weights come from a straight line through each octave instead of exponentials
    TANH: bool = False  # the softcap takes tanh.approx, with a relative error up to 2^-11, instead of exponentials
    TERMS: int = 0  # terms of the polynomial that caps small scores with AT_ONCE (asm/weights.py); 0: no polynomial
    QUERY_BOX: bool = False  # queries come through TMA; otherwise through the consumers' registers
    QUERY_SLOTS: int = 1  # with QUERY_BOX, query slots that blocks take in turn; 2: the next queries may come early
    BESIDE: bool = False  # True for the pipe of few rows that one warpgroup serves beside blocks (mixed.py)
    # this launch begins before the previous one ends, but ends after it; shares: the previous one is a copy of keys
    FOLLOWS: bool = False
    HEADS_ABREAST: int = 0  # all blocks of a sequence come for this many KV heads, then for the next; 0: for all heads
    PARTS: int = 1  # parts into which a KV head's query heads are cut; each part is scheduled like a KV head
    HALVES: bool = False  # a latent tile takes two slots, each with half of the value dims
    SLOT_SCALES: bool = False  # each slot and KV head of the cache has a scale (slot_scales.py)
    FROM_DIM: int = 0  # first of this launch's VALUE_PADDED value dims; wider values take two launches


@triton.constexpr_function
def is_shared(P):
    """Whether a consumer has two or four warpgroups, which run one copy of the code; each warp then waits by itself."""
    return P.ROWS >= 128


@triton.constexpr_function
def is_gated(P):
    """Whether each consumer warp waits for tiles and releases them by itself, at the barriers of `gates.make_gates`."""
    return P.ROWS >= 128 or P.CONSUMERS == 3 or P.BESIDE


@triton.constexpr_function
def queries_leave_early(P):
    """Whether a consumer releases its queries before the last value product: AHEAD with one query slot."""
    return P.AHEAD and P.QUERY_SLOTS == 1


@triton.constexpr_function
def in_one_ring(S, P):
    """Whether keys and values alternate in one ring: a tile's values take the slot behind its keys."""
    return P.VALUE_STAGES == 0 and S.REST is None


@triton.constexpr_function
def slots_of_tile(P):
    """Slots of the ring of keys that one tile takes."""
    return 2 if P.HALVES else 1


@triton.constexpr_function
def raw_slots_of_rest(P):
    """Slots of the ring of raw key dims behind the values of latents, which loaders fill and the converter reads."""
    return -(-P.RAW_STAGES // (2 if P.HALVES else 1))  # the divisor is slots_of_tile, which Triton 3.6 cannot call here


@triton.constexpr_function
def rows_of_consumer(P):
    """Rows of a block from a consumer's first row to the next consumer's.

    COLUMNS if several consumers of even shares have columns; otherwise ROWS.

    With two lists, blocks of at most COLUMNS rows are columns, and the first consumer alone serves these blocks.
    """
    return P.COLUMNS if P.SHARES and P.COLUMNS > 0 and P.CONSUMERS > 1 else P.ROWS


@triton.constexpr_function
def is_int4(P):
    """Whether the cache is int4: bytes of two dims, with a scale and a zero point for each slot and KV head."""
    return P.FP8 == 4


@triton.constexpr_function
def dims_of_element(fp8):
    """Dims of a head in one element of the cache.

    fp8: Pipe.FP8.  The argument is not the Pipe, because Triton would pass a whole Pipe as a plain tuple.
    """
    return 2 if fp8 == 4 else 1


@triton.constexpr_function
def has_latent_rows(S, P):
    """Whether two consumers share rows of latents: the two take tiles in turn, and each has half of the value dims."""
    return S.REST is not None and P.COLUMNS == 0


@triton.constexpr_function
def query_parts(P):
    """Number of fp8 terms that add up to a query element; 1: queries are multiplied as they are, fp8 or 16 bits."""
    return 2 if P.FP8_KEYS and not P.FP8_PRODUCTS else 1


@triton.constexpr_function
def dim_parts(dims):
    """Number of parts of 64 dims into which dims are divided; 1 for a power of two, which stays whole.

    192 dims take three parts, because Triton's shapes are powers of two.
    """
    return dims // 64 if dims & (dims - 1) else 1


class Ring(NamedTuple):
    """Slots of shared memory that loaders fill and consumers empty, with a full and an empty mbarrier for each slot."""

    # [STAGES, TILE, 1, DIM].  Transposed values: [STAGES, DIM, 1, TILE].  With dims in parts: [STAGES * parts, TILE, 1,
    # 64].  Even shares over an x-packed cache: [STAGES, boxes, 1, ...] (`packed.make_boxes`).
    slots: Any
    full: Any  # mbarriers [STAGES, 1]; with gates [DEPTH, 1]
    empty: Any  # as `full`
    full_at: Any  # shared-memory address of the first full mbarrier, if warps wait by themselves; otherwise never used
    empty_at: Any
    at: Any  # shared-memory address of the first slot, if assembly multiplies the slots; otherwise never used
    # with SLOT_SCALES float32 [kinds * STAGES, TILE] (slot_scales.py); otherwise never used
    scales: Any


class Loader(NamedTuple):
    """Source and destination of a loader warp: TMA descriptors, and a ring."""

    box: Any  # TMA descriptor of the cached keys, or values
    new_box: Any  # TMA descriptor of new keys, or values, outside the cache
    ring: Any  # Ring
    scales: Any  # Scales with Pipe.SLOT_SCALES; otherwise never used


class Gates(NamedTuple):
    """Array of the mbarriers at which each warp waits by itself, and the array's address."""

    barriers: Any  # int64 [kinds + 1, DEPTH]; the last row is for the tag
    at: Any  # shared-memory address of the array


class Turn(NamedTuple):
    """Position of a loader or consumer in a ring: the next slot, and the phase for its mbarriers."""

    stage: Any  # number of the slot
    phase: Any  # parity of the number of completed rounds


class Queries(NamedTuple):
    """A block's queries in shared memory."""

    # [slots, R, 1, D].  There is one slot for each consumer or, if blocks take slots in turn, one for each of
    # QUERY_SLOTS blocks.  Two terms of a sum (`query_parts`) take two slots instead of one, and dims in parts take one
    # slot for each part.  Latent rows: two consumers share a slot.
    slots: Any
    full: Any  # mbarriers [CONSUMERS, 1]; [DEPTH, 1] if blocks take slots in turn (`gates.gate`)
    empty: Any  # mbarriers [DEPTH, 1] if blocks take slots in turn; otherwise never used
    full_at: Any  # shared-memory addresses, as in Ring
    empty_at: Any
    at: Any


class QueryRows(NamedTuple):
    """A consumer's queries of one block, as operands in shared memory."""

    parts: Any  # tuple of matrices: [R, D] whose sum is the queries, or [R, 64] with 64 neighbouring dims each
    at: Any  # shared-memory address of the first matrix, if assembly multiplies the matrix; otherwise never used


class Rings(NamedTuple):
    """A consumer's inputs in shared memory, and its working memory there."""

    key: Any  # Ring
    value: Any  # Ring; latents: the ring of the key dims behind the values
    queries: Any  # Queries
    room: Any  # the bank (sums of fp8 products, or of fixed pieces), or weights of columns or latents; else never used
    extra: Any  # the operand of ones for COARSE, flags of columns, or LatentRoom; otherwise never used


class LatentRoom(NamedTuple):
    """`Rings.extra` of latents."""

    flags: Any  # columns: int32 [CONSUMERS, lanes, warps]; rows: never used
    rest: Any  # queries' dims behind the value dims: columns [CONSUMERS, N, REST]; rows [1, ROWS, REST]
    both: Any  # columns: mbarrier at which two consumers meet; rows: float32 [2, ROWS, 4] that two consumers exchange
    rest_at: Any  # rows: shared-memory address of `rest`; columns: never used


class Turns(NamedTuple):
    """Position of a consumer, or of the converter, in its rings."""

    key: Any  # Turn
    value: Any  # Turn
    query: Any  # number of blocks whose queries the consumer has used


class Mail(NamedTuple):
    """Two letters in shared memory, by which the scheduling warp tells all other warps the next items."""

    letters: Any  # int32 [2 * FIELDS, 1]
    full: Any  # mbarriers [2, 1]; with gates [DEPTH, 1]
    empty: Any  # as `full`
    full_at: Any  # as in Ring
    empty_at: Any


class Item(NamedTuple):
    """Work item: one piece of a block for one KV head or, with fixed pieces, some neighbouring pieces of the block.

    Fixed pieces (Shape.PIECE) have states in reverse order: scratch begins with the state of the block's last piece.
    """

    block: Any  # Block; its kv_head is -1 behind the last item
    begin: Any  # tiles [begin, end); fixed pieces count whole, including tiles that no row of the block sees
    end: Any
    first: Any  # 1: this piece has the block's first keys, 0: it has not; fixed pieces: always 1
    pieces: Any  # number of pieces of the block; 1: not cut
    holders: Any  # number of items of the block, each of which raises the block's counter by 1
    first_row: Any  # row in scratch of the block's first state; fixed pieces: of the block's last piece
    row: Any  # row in scratch of this piece's state; fixed pieces: of this item's last piece
    counter: Any  # index of the block's counter, which counts the block's items whose states are stored


class Jobs(NamedTuple):
    """Input of a warp partition of persistent programs: the source of items, and the batch."""

    mail: Any  # Mail
    counters: Any  # int32 [3]: items taken from each of two lists, programs that have ended; 0 between launches
    batch: Any  # Batch
    mods: Any  # Modifiers


class Results(NamedTuple):
    """Destinations and scales of results, except `out`, whose constant field a record made in a kernel would lose."""

    lse: Any
    partial: Any  # Partial
    # int32 counters of items whose states are stored: one for each block and consumer, then one for each group of
    # pieces.  All are 0 between launches.  With a merge launch: the cuts that the launch reads (`merge.cuts_of`).
    told: Any
    scales: Any  # Scales
