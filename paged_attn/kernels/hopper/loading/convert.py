"""The converter warpgroup between loaders and consumers, which makes operands of fp8 and int8 tiles.

WIDEN: keys and values, or latents, become float16, which holds every fp8 and int8 number.
WIDEN_VALUES: values become float16.  Keys stay e4m3, and queries are sums of two e4m3 numbers.
TRANSPOSE: e4m3 values are transposed, because in fp8 operands of wgmma the summed dimension must be contiguous.

For blocks, values of keys before the first one that some row sees, and behind the sequence's last one, become zero
here, because 0 * NaN is NaN.  Consumers of latents zero such values themselves.
"""

import triton

from ..args import Turns, raw_slots_of_rest, slots_of_tile
from ..asm.conversions import widen_bytes
from ..asm.registers import transpose_bytes
from ..layouts import rows_layout, transposing_layout
from ..planning import operands
from ..shim import fence_async_shared, gl, gluon, mbarrier
from .gates import WIDEN
from .ring import advance, release, wait_empty, wait_full, words_of

NONE = gl.constexpr(operands.NONE)
TRANSPOSE = gl.constexpr(operands.TRANSPOSE)


@triton.constexpr_function
def widened_together(P):
    """Number of a tile's keys that a block's converter widens together, as many as registers allow."""
    return 64 if P.CONVERT_REGISTERS > 56 else 32


@gluon.jit
def widen(raw, ready, first, lo, end, EDGE: gl.constexpr, DIM: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Widen fp8 or int8 words [TILE, DIM / 4] to float16 pairs [TILE, DIM / 2]; EDGE: zeros for keys outside [lo, end).

    first: position of the tile's first key.
    """
    LAYOUT: gl.constexpr = rows_layout(2, DIM, 4)
    ROWS: gl.constexpr = widened_together(P)
    for i in gl.static_range(S.TILE // ROWS):
        x = raw.slice(i * ROWS, ROWS, dim=0).load(LAYOUT)
        if EDGE:
            key = first + i * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
            x = gl.where(gl.expand_dims((key >= lo) & (key < end), 1), x, 0)
        lower, upper = widen_bytes(x, P.FP8)
        pairs = gl.join(lower, upper).reshape([ROWS, DIM // 2])
        ready.slice(i * ROWS, ROWS, dim=0).store(pairs)


@gluon.jit
def transpose(raw, ready, first, lo, end, EDGE: gl.constexpr, S: gl.constexpr):
    """Transpose fp8 words of four dims [TILE, DIM / 4] to words of four keys [DIM, TILE / 4]; EDGE as in `widen`.

    Dim 4 q + j becomes row j * DIM / 4 + q, so that neighbouring threads store to different banks.  Keys are permuted
    within groups of 16, so that the weights that a thread computes are its fragment of the left operand.
    `consuming/fp8.py` relies on both orders.
    """
    Q: gl.constexpr = S.VALUE_PADDED // 4
    LAYOUT: gl.constexpr = transposing_layout(S.TILE, Q)
    x = raw.load(LAYOUT)
    if EDGE:
        key = first + gl.arange(0, S.TILE, layout=gl.SliceLayout(1, LAYOUT))
        x = gl.where(gl.expand_dims((key >= lo) & (key < end), 1), x, 0)
    # key 16 g + 8 h + 2 t + b becomes byte 4 t + 2 h + b of group g
    x = x.reshape([S.TILE // 16, 2, 4, 2, Q]).permute((0, 2, 4, 1, 3))
    even, odd = gl.split(x)
    lower_even, upper_even = gl.split(even)
    lower_odd, upper_odd = gl.split(odd)
    words = transpose_bytes(lower_even, lower_odd, upper_even, upper_odd)
    for j in gl.static_range(4):
        ready.slice(j * Q, Q, dim=0).store(words[j].permute((2, 0, 1)).reshape([Q, S.TILE // 4]))


@gluon.jit
def hand_over(raw, raw_turn, ready, turn):
    """Release a converted slot of ring `raw` to its loaders, and give consumers the slot of ring `ready`."""
    release(raw.empty.index(raw_turn.stage))
    fence_async_shared()
    mbarrier.arrive(ready.full.index(turn.stage), count=1)


@gluon.jit
def convert_tile(raw, raw_turn, ready, turn, tile, lo, end, VALUES: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Convert the next tile of ring `raw` into the next slot of ring `ready`; VALUES: a tile of values, not keys."""
    TURNED: gl.constexpr = P.CONVERT == TRANSPOSE
    DIM: gl.constexpr = S.VALUE_PADDED if VALUES else S.DIM
    wait_full(raw, raw_turn)
    wait_empty(ready, turn)
    words = words_of(raw, raw_turn, S.TILE, DIM)
    first = tile * S.TILE
    if TURNED:
        slot = words_of(ready, turn, DIM, S.TILE)
        if (first < lo) | (first + S.TILE > end):
            transpose(words, slot, first, lo, end, True, S)
        else:
            transpose(words, slot, first, lo, end, False, S)
    else:
        slot = words_of(ready, turn, S.TILE, 2 * DIM)
        if VALUES:
            if (first < lo) | (first + S.TILE > end):
                widen(words, slot, first, lo, end, True, DIM, S, P)
            else:
                widen(words, slot, first, lo, end, False, DIM, S, P)
        else:
            widen(words, slot, first, lo, end, False, DIM, S, P)
    hand_over(raw, raw_turn, ready, turn)


@gluon.jit
def convert_tiles(raw, raw_turns, ready, turns, begin, end, lo, end_key, S: gl.constexpr, P: gl.constexpr):
    """Convert an item's tiles [begin, end), the last tile first; return (raw turns, turns).

    Values are always converted, keys only by WIDEN.  lo: first key that some row of the block sees.  end_key: end of
    the sequence's keys, exclusive.
    """
    raw_key, raw_value, key, value = raw_turns.key, raw_turns.value, turns.key, turns.value
    if P.CONVERT == TRANSPOSE:  # noqa: SIM102 (one is decided at compile time)
        if begin < end:  # `fp8.attend_fp8` begins with a product of zero weights, for which any slot will do
            wait_empty(ready.value, value)
            mbarrier.arrive(ready.value.full.index(value.stage), count=1)
            value = advance(value, P.VALUE_STAGES)
    for i in range(end - begin):
        tile = end - 1 - i
        if P.CONVERT == WIDEN:
            convert_tile(raw.key, raw_key, ready.key, key, tile, lo, end_key, False, S, P)
            raw_key = advance(raw_key, P.RAW_STAGES)
            key = advance(key, P.KEY_STAGES)
        convert_tile(raw.value, raw_value, ready.value, value, tile, lo, end_key, True, S, P)
        raw_value = advance(raw_value, P.RAW_STAGES)
        value = advance(value, P.VALUE_STAGES)
    return Turns(raw_key, raw_value, 0), Turns(key, value, 0)


# ---- fp8 and int8 latents ------------------------------------------------------------------------
# Latents are multiplied twice, as keys and as values, by one or two consumers.  Consumers that widened latents in
# registers would widen each tile several times.  Widening to bfloat16 would take twice the conversions, so bfloat16
# queries are normalized to float16 instead.

MAX_WORDS_WIDENED_TOGETHER = gl.constexpr(16)  # stored words of a thread, which become twice as many


@triton.constexpr_function
def rows_widened_together(tile, words):
    """Number of a tile's keys that are widened together; words: number of int32 words of a stored key."""
    return min(tile, 128 * MAX_WORDS_WIDENED_TOGETHER.value // words)


@gluon.jit
def widen_slot(raw, raw_turn, ready, turn, DIMS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Widen the next slot of ring `raw`, bytes [TILE, DIMS], into the next slot of ring `ready`, float16 [TILE, DIMS].

    Keys that no row may see are widened, too.  Consumers zero them.
    """
    LAYOUT: gl.constexpr = rows_layout(2, DIMS, 4)
    ROWS: gl.constexpr = rows_widened_together(S.TILE, DIMS // 4)
    wait_full(raw, raw_turn)
    wait_empty(ready, turn)
    words = words_of(raw, raw_turn, S.TILE, DIMS)
    widened = words_of(ready, turn, S.TILE, 2 * DIMS)
    for i in gl.static_range(S.TILE // ROWS):
        x = words.slice(i * ROWS, ROWS, dim=0).load(LAYOUT)
        lower, upper = widen_bytes(x, P.FP8)
        pairs = gl.join(lower, upper).reshape([ROWS, DIMS // 2])
        widened.slice(i * ROWS, ROWS, dim=0).store(pairs)
    hand_over(raw, raw_turn, ready, turn)


@gluon.jit
def widen_tiles(raw, raw_turns, ready, turns, count, S: gl.constexpr, P: gl.constexpr):
    """Widen `count` tiles of latents, first a tile's value dims, then its rest; return (raw turns, turns)."""
    SLOTS: gl.constexpr = slots_of_tile(P)
    RESTS: gl.constexpr = raw_slots_of_rest(P)
    raw_key, raw_rest, key, rest = raw_turns.key, raw_turns.value, turns.key, turns.value
    for _ in range(count):
        for _ in gl.static_range(SLOTS):
            widen_slot(raw.key, raw_key, ready.key, key, S.DIM // SLOTS, S, P)
            raw_key, key = advance(raw_key, P.RAW_STAGES), advance(key, P.KEY_STAGES)
        if S.REST > 0:
            widen_slot(raw.value, raw_rest, ready.value, rest, S.REST, S, P)
            raw_rest, rest = advance(raw_rest, RESTS), advance(rest, P.VALUE_STAGES)
    return Turns(raw_key, raw_rest, 0), Turns(key, rest, 0)
