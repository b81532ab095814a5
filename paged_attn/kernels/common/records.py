"""Arguments and compile-time constants of kernels, and arguments of device functions: records without behaviour.

An absent field is None, and costs nothing: Triton resolves None at compile time.  Strides are in elements.
"""

from typing import Any, NamedTuple

import triton.language as tl

# ---- from the host -------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A [tokens, heads, head_dim] tensor, head_dim contiguous."""

    ptr: Any
    stride_token: Any
    stride_head: Any
    # constexpr format of the bytes at a uint8 pointer (records/formats.MANTISSA): 3 = e4m3, 2 = e5m2, 7 = int8, 4 = two
    # int4 numbers.  0: the pointer has the elements' own type
    FP8: Any
    WIDE: Any = None  # constexpr True: strides so large that offsets inside a block take 64 bits


class KV(NamedTuple):
    """Keys or values of any layout: RUN neighbouring elements are contiguous, and runs are stride_run apart.

    An element is PARTS dims of a head: 1 or, if bytes are read as pairs through an int16 pointer, 2 (4 for int4).
    Kernels that write or copy int4 ignore PARTS: their elements are bytes of two dims.
    """

    ptr: Any
    stride_page: Any
    stride_slot: Any
    stride_head: Any
    stride_run: Any
    RUN: Any  # constexpr
    FP8: Any  # as in Rows
    ALIGN: Any  # constexpr power of two that divides address and strides, in elements; used if RUN is 1 or PARTS > 1
    PARTS: Any = tl.constexpr(1)
    # constexpr True: each slot and KV head has a scale.  The next fields are never None, because Triton 3.6 cannot
    # compare a tuple that holds None with None.
    SCALED: Any = tl.constexpr(False)
    scale_ptr: Any = tl.constexpr(0)  # float32 or float16
    scale_stride_page: Any = tl.constexpr(0)
    scale_stride_slot: Any = tl.constexpr(0)
    scale_stride_head: Any = tl.constexpr(0)


class KeyValues(NamedTuple):
    """Keys and values."""

    key: Any  # KV
    value: Any  # KV


class Batch(NamedTuple):
    """The ragged batch, on the device, and the query lengths that this launch serves.

    Numbers reach the kernel as single arguments.  If they came in a record, Triton would compile one more kernel for a
    number of 1, and one for multiples of 16.
    """

    query_starts: Any  # int32 or int64 [seqs + 1]; None = one query token per sequence
    seq_lens: Any  # int32 or int64 [seqs]
    page_table: Any  # int32 or int64 [seqs, max_pages]; with page_starts: [page ids of all rows]
    page_table_stride: Any  # elements from row to row
    num_seqs: Any
    num_tokens: Any
    shortest: Any  # fewest query tokens of a sequence that this launch serves, inclusive
    longest: Any  # most query tokens of such a sequence, inclusive; other launches serve the other sequences
    least: Any  # fewest tiles of a share or piece
    slots: Any  # number of states in scratch for each share or, on Hopper, for the whole launch
    page_starts: Any = None  # PageStarts of a ragged page table; None: one row for each sequence


class PageStarts(NamedTuple):
    """Start of each row of a ragged page table: row s begins at entry starts[s * stride]; entries are `step` apart."""

    starts: Any  # int32 or int64 [seqs + 1]; the last one is never read
    stride: Any
    step: Any


class Modifiers(NamedTuple):
    """Masks and modifiers of scores between q @ k^T and the softmax, and sinks."""

    left: Any = None  # number of keys visible before a query's own position; None: all
    right: Any = None  # number of keys visible after a query's own place; None: all, causal: 0
    softcap: Any = None  # float
    alibi_slopes: Any = None  # float32 [heads]; with alibi_stride_seq [seqs, heads]
    qq_bias: Any = None  # [n, n], or [seqs, n, n] with qq_bias_stride_seq: bias of the call's own tokens
    qq_bias_stride: Any = None
    qq_bias_size: Any = None  # n
    sinks: Any = None  # [heads]
    score_mod_args: Any = None  # arguments of Shape.SCORE_MOD after (score, query_pos, key_pos, head)
    query_positions: Any = None  # int [tokens], positions of queries and of the call's own keys; None: their places
    # number of positions after its own that a query sees among the call's own keys, with query_positions; None: all
    position_right: Any = None
    causal: Any = None  # bool [seqs]: sequences for which `right` is 0; comes with `right`
    prefix_lens: Any = None  # int [seqs]: keys before these places are always visible
    spans: Any = None  # int [seqs, spans_count, 2]: places in [first, second) see each other
    spans_count: Any = None
    spans_stride: Any = None
    spans_step: Any = None
    CLIP_SPANS: Any = None  # constexpr True: the window and the chunk bound spans, too
    spans_right: Any = None  # with CLIP_SPANS: number of keys visible after a query's own place in a span; None: all
    chunk: Any = None  # positions of a chunk; queries see only keys of their own chunk.  `left` is then less than chunk
    qq_bias_stride_seq: Any = None  # from a sequence's matrix to the next; None: all sequences share one matrix
    qq_mask: Any = None  # int32 [tokens, qq_words]: a bit for each of the call's own keys, 1 if the query sees the key
    qq_mask_stride: Any = None
    qq_words: Any = None
    head_windows: Any = None  # int [heads, 2]: numbers of keys visible before and after, -1: all; comes with left
    head_windows_stride: Any = None  # from head to head; None: 2
    BY_HEAD_TO_THE_RIGHT: Any = None  # constexpr True: heads may have a smaller `right`, counted by place
    alibi_stride_seq: Any = None  # from a sequence's slopes to the next; None: all sequences share the slopes
    ALIBI_SYMMETRIC: Any = None  # constexpr True: the bias is -slope * |key - query|
    # 16 * rank + 2, if keys lie over ranks (`shards.py`): never 1 or a multiple of 16, for which Triton compiles anew
    shard_rank: Any = None


class Scales(NamedTuple):
    """Each scale is a number, multiplied by ptr[KV head * stride] if ptr is given.  Stride 0: KV heads share the scale.

    With a stride_seq, ptr has a row for each sequence.  A scale's fields are not a record of their own, because
    `record is None` fails inside a `while` loop of Triton.
    """

    softmax: Any
    query: Any = 1.0
    key: Any = 1.0
    value: Any = 1.0
    out: Any = 1.0
    query_ptr: Any = None
    key_ptr: Any = None
    value_ptr: Any = None
    out_ptr: Any = None
    query_stride: Any = None
    key_stride: Any = None
    value_stride: Any = None
    out_stride: Any = None
    gate_ptr: Any = None  # [tokens, heads, value_dim]: results are multiplied by the gate's logistic function
    gate_stride_token: Any = None
    gate_stride_head: Any = None
    token_ptr: Any = None  # float32 [tokens, KV heads]: another factor of scores
    token_stride: Any = None
    token_stride_head: Any = None
    query_stride_seq: Any = None  # from sequence to sequence; None: all sequences share the scale
    key_stride_seq: Any = None
    value_stride_seq: Any = None
    # Scales of each slot and KV head, for Hopper kernels alone; portable kernels find these scales in KV
    slot_key_ptr: Any = None  # float32 or float16
    slot_key_stride_page: Any = None
    slot_key_stride_slot: Any = None
    slot_key_stride_head: Any = None
    slot_value_ptr: Any = None
    slot_value_stride_page: Any = None
    slot_value_stride_slot: Any = None
    slot_value_stride_head: Any = None


class Norm(NamedTuple):
    """RMS norm of each head: x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    weight: Any  # [dims of a head], contiguous
    eps: Any
    offset: Any


class Rotary(NamedTuple):
    """Angles of the rotary embedding."""

    table: Any  # [length, 2 * pairs]: cosines, then sines; contiguous rows
    stride: Any  # from row to row
    length: Any = None  # rows of the table; comes with positions
    positions: Any = None  # int32 or int64 [tokens], or [3, tokens] with sections; None: row t is for token t
    positions_stride: Any = None  # from section to section; None: there are no sections


class Scratch(NamedTuple):
    """Scratch for the states of cut blocks, and counters that decide which program joins them."""

    # float32: maxima, sums, accumulators (`merge.partial_of`).  With a merge launch, int32 [blocks, KV_HEADS, 2] come
    # next: pieces of a block (1: whole), and the row of its first state.
    states: Any
    # int32, 0 between launches: how many programs have stored states of a cut block.  A block's counter belongs to its
    # KV head and to the share in which the block begins; in Hopper's kernel for blocks, to the block's first slot.  On
    # Hopper, counters of the scheduler come first (coverage.COUNTERS_PER_LAUNCH), and counters of groups of pieces last
    # (hopper/schedule/join.py).
    counters: Any


class Partial(NamedTuple):
    """States of pieces, float32.

    Every share has two slots: 0 for a piece whose block began in an earlier share, 1 for a piece that begins its block.
    Pieces of a fixed size (Shape.PIECE) lie side by side instead, in the slots of the share in which the block begins.
    In Hopper's kernel for blocks, the pieces of each block lie side by side in the launch's slots.
    """

    # [shares, slots, KV_HEADS, LIVE, VALUE_PADDED]; in hopper/schedule/join.py a state may be [DIM / 16, ROWS, 16]
    acc: Any
    max: Any  # [shares, slots, KV_HEADS, LIVE]
    sum: Any


# ---- what a kernel is compiled for ---------------------------------------------------------------


class Shape(NamedTuple):
    """Compile-time constants of a kernel."""

    GROUP: int  # query heads of a KV head
    KV_HEADS: int
    HEAD_DIM: int
    DIM: int  # HEAD_DIM rounded up to a power of two, or to 192 in Hopper's blocks; latents: VALUE_PADDED
    VALUE_DIM: int  # dims of values and results; mostly HEAD_DIM
    VALUE_PADDED: int  # VALUE_DIM rounded up to a power of two; less if a launch has only some of the value dims
    PAGE: int  # slots of a page
    BLOCK_Q: int  # query tokens of a block
    ROWS: int  # BLOCK_Q * GROUP rounded up to a power of two; Hopper's blocks: 64 for each warpgroup
    LIVE: int  # rows of a state in scratch
    TILE: int  # keys per step
    CHUNK: int  # keys of a tile that are sure to lie in one page: gcd(TILE, PAGE); 0 on Hopper
    STAGES: int  # pipeline stages: tiles in flight; 0 on Hopper (Pipe has its stages)
    COMPUTE: Any  # tl.dtype of the operands of both products, unless the operands are fp8
    PRECISION: str  # of a float32 dot
    ONE_BLOCK: bool  # a sequence's queries fit one block: block = sequence, no search
    SPLIT: bool  # blocks may be cut, into even shares of all work or, by Hopper's kernel for blocks, into items
    PIECE: int | None  # keys are cut only at multiples of this, and states are folded in order; None: anywhere
    MERGE: int  # rows of a cut block that its last program joins at a time; 0: a merge launch joins the pieces
    SCAN: int  # sequences that the search for a share's begin reads at once
    ONE_SCAN: bool  # SCAN covers all sequences, whose work a program then computes once and keeps
    PEEL: bool  # tiles that every row sees completely run in a loop of their own, without masks
    SCALE_FIRST: bool  # scores are scaled before they are modified and masked, not inside the exponent
    CLEAR: bool  # this launch writes zeros, and log-sum-exps of -inf, to the tokens behind the last sequence
    NATIVE_FP8: bool  # the target converts e4m3 in hardware; only on such targets does inline PTX convert int8 and int4
    NORMALIZED: bool = False  # bfloat16 queries of any magnitude are brought into float16's range, row by row
    # If blocks are about equally long, shares begin where blocks or equal parts of blocks begin.  Needs ONE_SCAN
    WHOLE: bool = False
    PAIRED: bool = False  # two neighbouring KV heads are read as one head of twice the dims: DIM counts these
    LEADS: bool = False  # the call's next launch, of other sequences, need not wait for the end of this one
    FAR_CAP: bool = False  # the softcap is too large for exponentials alone (`scores.softcap`)
    APART: bool = False  # new keys begin a tile of their own behind the cache's last tile
    BY_HEAD: bool = False  # KV heads have programs in proportion to the keys that their heads see (`head_programs`)
    BY_ROW: bool = False  # Hopper: scores have a scale for each row, by NORMALIZED or by token scales
    SCORE_MOD: Any = None  # a user's function, `score_mod.of_this_dialect`
    WORLD: int = 1  # ranks that keys lie over (`shards.py`)
    STRIPE: int | None = None  # consecutive positions that lie with one rank
    REST: int | None = None  # latents: padded key dims behind the values, 0: none; None: not latents


class Heads(NamedTuple):
    """The fields of a Shape that storing rows needs, for kernels that read no cache."""

    KV_HEADS: int
    GROUP: int
    VALUE_DIM: int
    VALUE_PADDED: int
    PAIRED: bool = False


# ---- inside a kernel -----------------------------------------------------------------------------


class Block(NamedTuple):
    """One block of query tokens of one sequence x the heads of one KV head."""

    seq: Any
    first_token: Any  # the sequence's first token in the batch
    query_len: Any
    seq_len: Any
    first: Any  # the block's first query token, counted from the sequence's first query token
    kv_head: Any = None  # None: any


class Share(NamedTuple):
    """One program's part of the line, in units of one tile, and how the line is cut into all shares."""

    index: Any
    begin: Any  # units [begin, end) of the line
    end: Any
    size: Any  # units of a share
    extra: Any  # the first `extra` shares have size + 1 units
    tiles: Any  # units of each block on the line, if shares begin with blocks or equal parts of blocks; otherwise 0


class Walk(NamedTuple):
    """Position of a program, or of one of its warps, on a KV head's line of units."""

    unit: Any  # number of the unit
    seq: Any  # sequence that holds the unit, or an earlier one
    before: Any  # number of units of the sequences before seq
    kv_head: Any


class RowTile(NamedTuple):
    """The R rows of a block: query tokens x heads of the group.

    Values that all rows share are scalars.  Offsets inside a block have 32 bits, because they take registers throughout
    the loop.
    """

    token: Any  # int64, the block's first token in the batch
    kv_head: Any
    index: Any  # [R], token within the block
    member: Any  # [R], head within the group
    slot: Any  # [R], the token's place in the whole sequence
    pos: Any  # [R], position; the place unless query_positions are given
    first_key: Any  # [R], first visible key, inclusive; with a shard, its number among own keys
    last_key: Any  # [R], last visible key, inclusive; less than first_key if no key is visible
    valid: Any  # [R]
    context_len: Any
    first_token: Any  # the sequence's first token in the batch
    query_len: Any
    span_begin: Any  # [R], begin of the union of the spans that hold a row's place; arbitrary without spans
    span_end: Any  # [R], end of this union, exclusive
    prefix: Any  # end, exclusive, of the prefix that is visible, too; arbitrary without prefixes
    seq: Any


class Span(NamedTuple):
    """Half-open ranges of keys as they lie in the cache: [lo, hi) some row may see, [full_lo, full_hi) every row sees.

    Keys in both ranges may still be hidden: the call's own keys by query_positions, by a qq_mask (`scores.cut_own`) or
    by a qq_bias, and any key by a score_mod.
    """

    lo: Any
    hi: Any
    full_lo: Any
    full_hi: Any
    prefix: Any  # no row sees keys [prefix, resume); arbitrary without a prefix or a bound to the left
    resume: Any


class Source(NamedTuple):
    """Location of the keys at positions [first, end), which some row may see.

    Separate from KeyValues, because a compile-time field does not survive in a record that a kernel builds.
    """

    pages: Any  # the sequence's row of the page table; None: keys are contiguous
    shift: Any  # contiguous keys: position p is row p + shift
    first: Any
    end: Any
    scale: Any  # scale of the scores: product of the softmax, query and key scales
    page_starts: Any = None  # PageStarts of the page table
    prefix: Any = None  # keys before this position are visible, too


class Query(NamedTuple):
    """Queries as operands of a tile's products."""

    parts: Any  # tuple of [R, D / PARTS] in the compute type: part i has dims i, i + PARTS, ...
    unit: Any  # float32 [R]: the query is parts * unit


class SummedQuery(NamedTuple):
    """A Query over int4 keys: `total` times a key's zero point is subtracted from the query's product with the key."""

    parts: Any  # as in Query
    unit: Any
    total: Any  # float32 [R]: sums over the dims of all parts


class State(NamedTuple):
    """Softmax over the keys seen so far, base 2."""

    # float32 [R, value dims].  In the portable loop over keys, a tuple of parts as in Query.  If values have scales by
    # slot, the tuple ends with the power of two by which the parts are divided.
    acc: Any
    max: Any  # float32 [R]
    sum: Any  # float32 [R]
