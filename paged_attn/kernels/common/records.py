"""What a launcher hands to a kernel, and what helpers hand to each other: records of a few fields, no behaviour.

Absent is None and costs nothing: Triton resolves it at compile time.  Strides are in elements.
"""

from typing import Any, NamedTuple

import triton.language as tl

# ---- from the host -------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A [tokens, heads, head_dim] tensor, head_dim contiguous."""

    ptr: Any
    stride_token: Any
    stride_head: Any
    FP8: Any  # constexpr mantissa bits: bytes behind a uint8 pointer, 3 = e4m3, 2 = e5m2; 0: the pointer's own type
    WIDE: Any = None  # constexpr True: strides so large that offsets inside a block take 64 bits


class KV(NamedTuple):
    """Keys or values of any layout: RUN consecutive elements lie together, runs are stride_run apart.

    An element is PARTS dims of a head: 1, or 2 where fp8 is read as pairs through an int16 pointer.
    """

    ptr: Any
    stride_page: Any
    stride_slot: Any
    stride_head: Any
    stride_run: Any
    RUN: Any  # constexpr
    FP8: Any  # as in Rows
    ALIGN: Any  # constexpr power of two that divides the address and the strides, where RUN is 1 or PARTS 2
    PARTS: Any = tl.constexpr(1)


class KeyValues(NamedTuple):
    """Keys and the values beside them."""

    key: Any  # KV
    value: Any


class Batch(NamedTuple):
    """The ragged batch, on the device, and the query lengths that this launch serves.

    Its numbers reach the kernel one by one: in a record Triton would compile anew for 1 and for multiples of 16.
    """

    query_starts: Any  # int32 or int64 [seqs + 1]; None = one query token per sequence
    seq_lens: Any  # int32 or int64 [seqs]
    page_table: Any  # int32 or int64 [seqs, max_pages], or with page_starts [pages of all rows]
    page_table_stride: Any  # from row to row
    num_seqs: Any
    num_tokens: Any
    shortest: Any  # query lengths outside [shortest, longest] belong to another launch
    longest: Any
    least: Any  # tiles of a share
    slots: Any  # scratch states of a share
    page_starts: Any = None  # PageStarts of a ragged page table; None: a row for each sequence


class PageStarts(NamedTuple):
    """Where rows of a ragged page table begin: row s with entry starts[s * stride], entries being `step` apart."""

    starts: Any  # int32 or int64 [seqs + 1], of which the last is never read
    stride: Any
    step: Any


class Modifiers(NamedTuple):
    """What a score meets between <q, k> and the softmax, and the sink beside the keys."""

    left: Any = None  # keys visible before and after a query's own position; None = all
    right: Any = None  # causal is right = 0
    softcap: Any = None  # float
    alibi_slopes: Any = None  # float32 [heads], or of each sequence
    qq_bias: Any = None  # [n, n]
    qq_bias_stride: Any = None
    qq_bias_size: Any = None  # n
    sinks: Any = None  # [heads]
    score_mod_args: Any = None  # what Shape.SCORE_MOD is given behind (score, query_pos, key_pos, head)
    query_positions: Any = None  # int [tokens], also of the call's own keys; None = slots
    position_right: Any = None  # with them `right` counts slots, and this positions, of the call's own keys
    causal: Any = None  # bool [seqs]: of which sequences `right`, which comes with it, is 0
    prefix_lens: Any = None  # int [seqs]: keys before these are visible whatever hides others
    spans: Any = None  # int [seqs, spans_count, 2]: places from the first of two to before the second see each other
    spans_count: Any = None
    spans_stride: Any = None
    spans_step: Any = None
    CLIP_SPANS: Any = None  # constexpr True: the window bounds them, too, to the right by spans_right
    spans_right: Any = None
    chunk: Any = None  # keys of a query's own chunk of so many positions only; comes with a `left` that is less
    qq_bias_stride_seq: Any = None  # of a matrix of each sequence; None: of one for all
    qq_mask: Any = None  # int32 [tokens, qq_words]: bits of the call's own keys that a query sees
    qq_mask_stride: Any = None
    qq_words: Any = None
    head_windows: Any = None  # int [heads, 2]: keys seen before and after by head, -1 = all; comes with left and right
    head_windows_stride: Any = None  # from head to head; None: 2
    BY_HEAD_TO_THE_RIGHT: Any = None  # constexpr True: `right` may be less for a head, by slots
    alibi_stride_seq: Any = None  # of slopes of each sequence; None: all have the same
    ALIBI_SYMMETRIC: Any = None  # constexpr True: keys after a query are as far as those before it


# All but these say where the keys begin that some query sees.
NO_BOUND_TO_THE_LEFT = (
    "right", "softcap", "alibi_slopes", "qq_bias", "qq_bias_stride", "qq_bias_size", "sinks", "score_mod_args",
    "position_right", "causal", "qq_bias_stride_seq", "qq_mask", "qq_mask_stride", "qq_words",
    "alibi_stride_seq", "ALIBI_SYMMETRIC",
)  # fmt: skip


class Scales(NamedTuple):
    """Each scale is a number times, if it lies in memory, ptr[KV head * stride]: stride 0 = one for all, 1 = one each.

    A scale with a stride_seq also has a row for each sequence.

    Not a record each: a loop cannot ask whether a record is absent.
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
    gate_ptr: Any = None  # [tokens, heads, head_dim]: results are multiplied by its logistic function
    gate_stride_token: Any = None
    gate_stride_head: Any = None
    token_ptr: Any = None  # float32: what scores of a token, and KV head, are multiplied by besides
    token_stride: Any = None
    token_stride_head: Any = None
    query_stride_seq: Any = None  # from sequence to sequence; None: all have the same
    key_stride_seq: Any = None
    value_stride_seq: Any = None


class Scratch(NamedTuple):
    """Room for the states of blocks that are cut, and who joins them."""

    # float32, cut up by merge.partial_of; behind them, where a launch of its own joins, int32 [blocks, KV_HEADS, 2]: of
    # how many pieces each is (1: it is whole), and the row of the first
    states: Any
    # int32, who has stored of cut blocks, by KV head and the share of the begin, and of groups of pieces by the slot of
    # the first (hopper/schedule/arrival.py); 0 between launches
    counters: Any


class Partial(NamedTuple):
    """States of pieces, float32.

    Every share has two slots: 0 for a piece that began in an earlier share, 1 for one that goes on in the next.
    Pieces of a fixed size (Shape.PIECE) lie side by side instead, in the slots of the share where their block begins.
    """

    # [shares, slots, KV_HEADS, LIVE, VALUE_PADDED]; in hopper/schedule/join.py a state may be [DIM / 16, ROWS, 16]
    acc: Any
    max: Any  # [shares, slots, KV_HEADS, LIVE]
    sum: Any


# ---- inside a kernel -----------------------------------------------------------------------------


class Block(NamedTuple):
    """One block of query tokens of one sequence, and the heads of one KV head."""

    seq: Any
    first_token: Any  # of the sequence, in the batch
    query_len: Any
    seq_len: Any
    first: Any  # first query of the block, within the sequence
    kv_head: Any = None  # None: any


class Share(NamedTuple):
    """One program's part of the batch's work, in units of tiles, and how all parts are cut."""

    index: Any
    begin: Any
    end: Any
    size: Any
    extra: Any  # so many shares, the first ones, have size + 1
    tiles: Any  # room for every block on the line where shares begin with blocks; otherwise 0


class RowTile(NamedTuple):
    """The R rows of a block: query tokens x heads of the group.

    What is the same for all rows is a scalar; offsets inside a block fit 32 bits: they hold registers all through the
    loop.
    """

    token: Any  # int64, the block's first, in the batch
    kv_head: Any
    index: Any  # [R], token within the block
    member: Any  # [R], head within the group
    slot: Any  # [R], in the sequence
    pos: Any  # [R], the same unless queries have positions of their own
    first_key: Any  # [R], slots of the first and last visible key; last < first where nothing is
    last_key: Any
    valid: Any  # [R]
    context_len: Any
    first_token: Any  # of the sequence, in the batch
    query_len: Any
    span_begin: Any  # [R], of the spans that hold a row's slot; any number where there are none
    span_end: Any
    prefix: Any  # keys before it are visible, too; any number where no sequence has a prefix
    seq: Any


class Span(NamedTuple):
    """Half-open ranges of key slots: [lo, hi) some row may see, [full_lo, full_hi) every row sees.

    Where queries have positions of their own, keys of the call may be hidden in either (`scores.cut_own`).
    """

    lo: Any
    hi: Any
    full_lo: Any
    full_hi: Any
    prefix: Any  # nobody sees keys [prefix, resume); any numbers where there is no prefix, or no bound to the left
    resume: Any


class Source(NamedTuple):
    """Where keys at positions [first, end) are found; this piece visits none at or past end.

    Apart from KeyValues, because a compile-time field does not survive in a record that a kernel builds.
    """

    pages: Any  # this sequence's row of the page table; None = contiguous
    shift: Any  # contiguous: position p is row p + shift
    first: Any
    end: Any
    scale: Any  # of the scores: softmax, query and key scales in one
    page_starts: Any = None  # of the page table
    prefix: Any = None  # keys before it are found, too


class Query(NamedTuple):
    """Queries as both dots of a tile want them."""

    parts: Any  # tuple of [R, D / PARTS] in the compute type: every first dim of PARTS, every second, ...
    unit: Any  # float32 [R]: the query is parts * unit


class State(NamedTuple):
    """Softmax over the keys seen so far, base 2."""

    acc: Any  # float32 [R, D], D of the values; within the loop over keys a tuple of parts as in Query
    max: Any  # float32 [R]
    sum: Any  # float32 [R]
