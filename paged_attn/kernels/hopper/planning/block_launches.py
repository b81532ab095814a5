"""Launches of blocks of many rows, with items from a counter: warpgroups, slots and programs from a problem."""

import math
from typing import Annotated

from ....records.formats import MANTISSA, cdiv, next_power_of_2
from ....records.plan import UNBOUNDED, Launch, Threshold
from ....records.problem import Problem
from ...common.pieces import PIECES_PER_PROGRAM
from ..args import Pipe
from . import cost
from .block_kinds import block_kind, blocks_see_as_many_keys, one_block_may_see_most_keys
from .block_tiles import (
    ELEMENTS_OF_TILES_BESIDE,
    RINGS_BESIDE_FEW_ROWS,
    block_rings,
    blocks_of_half_tiles,
    dims_of_results,
    key_dims_of,
    keys_in_parts,
    rings_of_wide_blocks,
)
from .conditions import parts_of
from .operands import NONE, TRANSPOSE, WIDEN_VALUES, columns_of_list, conversion, has_tanh, terms_of
from .shapes import is_wide, loaders_of, merged, new_launch, padded_dim, padded_value_dim, shape_of, widest_of

MIN_TILES_PER_PIECE: Annotated[
    int,
    Threshold(
        "tiles of a piece of a block",
        "writing, counting and reading a piece takes as long as 640 keys",
        "chunk of 2048 at 16384 735 us as before, of 256 172 -> 123; pieces of less are never chosen",
    ),
] = 8
_MERGE = "a merge launch joins pieces sooner than the program of a block's last piece"
MIN_PIECES_WORTH_A_MERGE: Annotated[
    int,
    Threshold(
        "pieces of each block, if blocks share all programs",
        _MERGE,
        "64 of 1 x 16384 (16 pieces) 43.3 -> 39.5 us, of four pieces 0.98 to 1.04x, of two 1.00 to 1.07x",
    ),
] = 6
MIN_FP8_PIECES_WORTH_A_MERGE: Annotated[
    int,
    Threshold("pieces of each block, fp8", f"{_MERGE}; no piece is in registers", "over e4m3, of four pieces 0.89x"),
] = 4

_ABREAST = "if programs work on 128 heads at once, each reads its tiles from memory; on 4 heads, 33 share a tile in L2"
MAX_HEADS_ABREAST: Annotated[
    int,
    Threshold(
        "KV heads of a sequence, whose blocks come before the blocks of the next heads",
        _ABREAST,
        "H100, 1 x 4096 of 128/128 heads 1531 -> 775 us, 4 x 4096 of 32/32 799 -> 759, of 64/16 1603 -> 1572; 8 heads "
        "774, 757, 1617, 2 heads 784, 771, 1596",
    ),
] = 4
BYTES_THAT_LEAVE_L2: Annotated[
    int,
    Threshold(
        "bytes of a sequence's keys and values, which an L2 of 50 MB would not keep",
        _ABREAST,
        "H100, 16 x 1024 of 32/32 heads (17 MB) 279 us, 4 heads abreast 286; 4 x 4096 of 64/16 (34 MB) 1603, 1572",
    ),
] = 32 << 20


def blocks_launch(p: Problem, shortest: int, two_lists: bool) -> Launch:
    """Return the launch of blocks of 128, 192 or 256 rows, with items from a counter.

    two_lists: long and short queries have a list and a counter each; never with a converter.
    """
    parts = 1 if two_lists else parts_of(p, shortest > 1)
    p = p._replace(kv_heads=p.kv_heads * parts)
    pipe, tile = _pipe_of(p, two_lists)
    launch = _launch_of_blocks(p, pipe._replace(PARTS=parts), tile, shortest)
    return merged(p, launch, p.device.multiprocessors // p.kv_heads) if _merge_joins_sooner(p, launch) else launch


def blocks_beside_launch(p: Problem, shortest: int) -> Launch:
    """Return the launch of blocks of 128 rows that leave shared memory for few rows, which each program also serves."""
    pipe, _ = _pipe_of(p, False)
    tile = ELEMENTS_OF_TILES_BESIDE // padded_dim(p)
    keys, values = RINGS_BESIDE_FEW_ROWS
    pipe = pipe._replace(
        CONSUMERS=1,
        ROWS=128,
        KEY_STAGES=keys,
        VALUE_STAGES=values,
        LOADERS=1,
        BOX=math.gcd(p.page_size, tile),
        TERMS=0,
        QUERY_SLOTS=1,
        SKIP=128,
        STRIDE=128,
    )
    launch = _launch_of_blocks(p, pipe, tile, shortest)
    programs = p.device.multiprocessors  # few rows also use programs without a block
    pipe = launch.pipe._replace(AHEAD=False, IN_TURN=True)
    return launch._replace(pipe=pipe, programs=programs, slots=2 * PIECES_PER_PROGRAM * programs)


def _launch_of_blocks(p: Problem, pipe: Pipe, tile: int, shortest: int) -> Launch:
    """Return the launch of the blocks that `pipe` describes, with tiles of `tile` keys.

    shortest: fewest query tokens of a sequence that the launch serves.
    """
    rows = pipe.CONSUMERS * pipe.ROWS
    tokens = pipe.CONSUMERS * (pipe.ROWS // (p.heads // p.kv_heads))
    tiles = cdiv(p.keys_seen(tokens), tile)
    split = tiles > MIN_TILES_PER_PIECE and _blocks_may_be_cut(p, pipe, tokens)
    shape = shape_of(p, tile, tokens, rows, split)
    shape = shape._replace(
        DIM=key_dims_of(p), VALUE_PADDED=min(shape.VALUE_PADDED, dims_of_results(p)), CLEAR=p.ragged and p.only is None
    )
    pipe = pipe._replace(AHEAD=_begins_next_item(p, pipe, split), IN_TURN=_sends_products_in_turn(p, pipe, split))
    pipe = pipe._replace(HEADS_ABREAST=_heads_abreast(p, split))
    items = cost.blocks_at_most(p, tokens) * p.kv_heads
    programs = min(p.device.multiprocessors, items * (tiles if split else 1))
    slots = 2 * PIECES_PER_PROGRAM * programs  # twice, because a block's number of pieces may be rounded up
    longest = min(tokens, p.max_seqlen_q)
    return new_launch(shape, pipe, programs, MIN_TILES_PER_PIECE, shortest, UNBOUNDED, longest, slots)


def _blocks_may_be_cut(p: Problem, pipe: Pipe, tokens: int) -> bool:
    """Whether blocks of `tokens` tokens that see more than a few tiles may be cut."""
    if blocks_of_half_tiles(p) or p.widest > 256:
        return False
    if pipe.MIXED:
        return True
    blocks_of_one = cdiv(p.max_seqlen_q, tokens)
    if p.seqs == 1 and cost.whole_blocks_suffice(p, blocks_of_one, known=True):
        return False
    if one_block_may_see_most_keys(p):
        return True
    return not cost.whole_blocks_suffice(p, cost.blocks_at_most(p, tokens), known=False)


def _heads_abreast(p: Problem, split: bool) -> int:
    """Return the number of KV heads whose blocks come before the next heads' blocks; 0: all KV heads side by side.

    The number is the largest divisor of kv_heads up to MAX_HEADS_ABREAST.  All heads stay side by side if this divisor
    is 1, or if there are up to twice MAX_HEADS_ABREAST heads, because their programs share tiles anyhow.  All heads
    also stay side by side if a sequence's keys and values fit the L2, or if blocks may be cut, because cut blocks have
    to come last.
    """
    head_bytes = p.max_seqlen_k * (p.head_dim + p.value_width) * p.cache.itemsize
    if split or p.kv_heads <= 2 * MAX_HEADS_ABREAST or p.kv_heads * head_bytes < BYTES_THAT_LEAVE_L2:
        return 0
    most = next(n for n in range(MAX_HEADS_ABREAST, 0, -1) if p.kv_heads % n == 0)
    return most if most > 1 else 0


def _merge_joins_sooner(p: Problem, launch: Launch) -> bool:
    """Whether a merge launch joins pieces, because few blocks have many pieces each.

    False with several consumers, because a merge launch needs a block's rows side by side in scratch.  Between the rows
    of two consumers, rows may be empty.
    """
    shape, pipe = launch.shape, launch.pipe
    if not shape.SPLIT or pipe.MIXED or pipe.CONSUMERS > 1:
        return False
    blocks = next_power_of_2(cost.blocks_likely(p, shape.BLOCK_Q)) * p.kv_heads
    pieces = MIN_PIECES_WORTH_A_MERGE if p.cache.itemsize == 2 else MIN_FP8_PIECES_WORTH_A_MERGE
    return pieces * blocks <= p.device.multiprocessors


def _begins_next_item(p: Problem, pipe: Pipe, split: bool) -> bool:
    """Whether a single consumer begins the next item ahead: queries come by TMA, and registers hold the next scores.

    False for blocks that may be cut, because states and joining take too many registers.
    """
    alone = pipe.CONSUMERS == 1 and pipe.CONVERT == NONE and not pipe.MIXED and not (p.packed and p.new)
    return alone and pipe.QUERY_BOX and not split and padded_value_dim(p) <= 128


def _sends_products_in_turn(p: Problem, pipe: Pipe, split: bool) -> bool:
    """Whether two warpgroups start products in turn (ping-pong), because some builds ran in step without turns.

    True for blocks that may be cut, because these see many keys.  True for modified scores, new keys, groups that leave
    rows empty, and log-sum-exps with a long context and no window.  Other blocks, and all blocks with a converter, only
    lose time by turns.
    """
    if pipe.ROWS != 128 or pipe.CONVERT != NONE:
        return False
    uneven = 64 % (p.heads // p.kv_heads) != 0
    return split or p.modified or p.new or uneven or (p.lse and p.window_left < 0 and blocks_see_as_many_keys(p))


def _weighs_at_once(p: Problem, tile: int) -> bool:
    """Whether registers keep a tile's scores until its weights are known to be final (Pipe.AT_ONCE).

    With a converter, registers hold scores only with heads of 64 dims, or with tiles of 64 keys and heads of up to 128
    dims.  Never with fp8 products.
    """
    convert = conversion(p)
    return convert == NONE or (convert != TRANSPOSE and widest_of(p) <= 128 and (tile == 64 or widest_of(p) == 64))


def _pipe_of(p: Problem, two_lists: bool) -> tuple[Pipe, int]:
    """Return (pipe, keys of a tile) of blocks."""
    convert, kind = conversion(p), block_kind(p, two_lists)
    query_slots = 2 if padded_dim(p) <= 128 else 1  # large heads leave no shared memory for two
    if is_wide(p) or keys_in_parts(p):
        rings = rings_of_wide_blocks(p, kind.consumers * kind.rows, query_slots)
    else:
        rings = block_rings(p, kind.consumers, kind.rows, two_lists)
    terms = 0 if two_lists else terms_of(p)
    loaders = 1 if p.widest > 256 else loaders_of(p, rings.tile, p.modified and not (terms and rings.tile == 128))
    # with two lists, code that makes weights again would be too much
    at_once = _weighs_at_once(p, rings.tile) and not two_lists and rings.tile > 32
    pipe = Pipe(
        SHARES=False,
        AT_ONCE=at_once,
        MIXED=two_lists,
        COLUMNS=columns_of_list(p) if two_lists else 0,
        CONSUMERS=kind.consumers,
        ROWS=kind.rows,
        KEY_STAGES=rings.keys,
        VALUE_STAGES=rings.values,
        CONVERT=convert,
        RAW_STAGES=rings.raw,
        CONVERT_REGISTERS=88 if at_once else 56,  # consumers of small tiles or heads leave 88
        FP8=MANTISSA.get(p.cache, 0),
        FP8_KEYS=convert in (TRANSPOSE, WIDEN_VALUES),
        FP8_PRODUCTS=convert == TRANSPOSE,
        COARSE=convert == TRANSPOSE and not p.lse,  # log-sum-exps need exact weights
        TANH=has_tanh(p),
        TERMS=terms,
        LOADERS=loaders,
        BOX=math.gcd(p.page_size, rings.tile // loaders),
        PACKED=p.packed,
        ROWS_PER_PAGE=p.rows_per_page,
        QUERY_BOX=p.query_box and convert in (NONE, TRANSPOSE),  # other converters change the type of queries, too
        QUERY_SLOTS=query_slots,
        SKIP=kind.rows * kind.consumers,
        STRIDE=kind.rows * kind.consumers,
    )
    return pipe, rings.tile
