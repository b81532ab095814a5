"""The converter warpgroup of fp8 latents: widens each slot to float16, once for all readers.

Latents are multiplied twice, and by two consumers; consumers that widened them in registers would do so each time.
Widening to bfloat16 would take twice the conversions, so bfloat16 queries are normalized to float16 instead.
"""

import triton

from ..args import Turns, raw_slots_of_rest, slots_of_tile
from ..asm.conversions import widen_bytes
from ..layouts import rows_layout
from ..shim import fence_async_shared, gl, gluon, mbarrier
from .ring import advance, release, wait_empty, wait_full, words_of

MAX_WORDS_WIDENED_TOGETHER = gl.constexpr(16)  # fp8 words of a thread, which become twice as many words


@triton.constexpr_function
def rows_widened_together(tile, words):
    """Rows of `words` fp8 words each that are widened together."""
    return min(tile, 128 * MAX_WORDS_WIDENED_TOGETHER.value // words)


@gluon.jit
def widen_slot(raw, raw_turn, ready, turn, DIMS: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Widen the next raw slot into the next ready slot, with keys that no row may see; consumers clear those."""
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
    """Widen `count` tiles, each the slots of values and then the rest; return (raw turns, turns)."""
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
