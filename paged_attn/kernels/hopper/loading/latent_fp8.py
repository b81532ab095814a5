"""A warpgroup between loaders and consumers of fp8 latents: each slot becomes one of float16, once for all readers.

Keys are multiplied twice, and by two consumers: whoever widened them on their way into registers would do so as often.
bfloat16 holds every fp8 number, too, but wants twice the conversions, so queries of bfloat16 are normalized instead.
"""

import triton

from ..args import Turns, raw_slots_of_rest, slots_of_tile
from ..asm.widening import widen_bytes
from ..layouts import rows_layout
from ..shim import fence_async_shared, gl, gluon, mbarrier
from .ring import advance, release, wait_empty, wait_full, words_of

MAX_WORDS_WIDENED_TOGETHER = gl.constexpr(16)  # by a thread, which then has twice as many to store


@triton.constexpr_function
def rows_widened_together(tile, words):
    """Of so many words each."""
    return min(tile, 128 * MAX_WORDS_WIDENED_TOGETHER.value // words)


@gluon.jit
def widen_slot(raw, raw_turn, ready, turn, DIMS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """The next slot of one ring into the next of the other; what no row may see, too: consumers clear it."""
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
    release(raw.empty.index(raw_turn.stage))
    fence_async_shared()
    mbarrier.arrive(ready.full.index(turn.stage), count=1)


@gluon.jit
def widen_tiles(raw, raw_turns, ready, turns, count, S: gl.constexpr, P: gl.constexpr):
    """(raw turns, turns) after so many tiles: each slot of keys, then what they have behind their values."""
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
