"""Loader warps: load pages of keys or values into shared memory by TMA."""

from ...common.blocking import gap_before, in_cache, page_at, pages_of
from ...common.bounds import visible_range
from ...common.shards import own_block
from ..args import in_one_ring, slots_of_tile
from ..shim import gl, gluon, load_box, mbarrier
from .packed import boxes_of, places_of_slot
from .ring import advance, bytes_of_slot, wait_empty
from .slot_scales import load_pages, load_scales, store_scales

NOWHERE = gl.constexpr(0x7FFFFF00)  # a row outside every tensor; TMA writes zeros for boxes from there


@gluon.jit
def fetch_descriptors(key_box, value_box, queries, S: gl.constexpr, P: gl.constexpr):
    """Let TMA read its descriptors while the schedule is computed, by loading boxes from outside the caches.

    The boxes write zeros to the memory of the first consumer's queries, and complete a phase of the queries' barrier.
    A box of values comes only if it fits there: if values are as wide as keys, and not parts of latents.
    """
    if P.PREFETCH:
        nothing = queries.slots.index(0).slice(0, P.BOX, dim=0)
        arrived = queries.full.index(0)
        ALIKE: gl.constexpr = S.DIM == S.VALUE_PADDED and S.REST is None
        DIMS: gl.constexpr = S.DIM // slots_of_tile(P)
        mbarrier.expect(arrived, P.BOX * DIMS * (1 + ALIKE) * (key_box.dtype.primitive_bitwidth // 8))
        load_box(key_box, [NOWHERE, 0, 0], arrived, nothing)
        if ALIKE:
            load_box(value_box, [NOWHERE, 0, 0], arrived, nothing)


@gluon.jit
def page_rows(table, starts, tile, first, end, PART: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Tuple of each box's first cache row, int32, for one loader's part of a tile; x-packed: the box's page.

    first: first key that some row of the block sees.  end: end of the sequence's keys in the cache, exclusive.  Boxes
    from `end` on, or in pages before the page of `first`, come from NOWHERE.
    """
    PART_KEYS: gl.constexpr = S.TILE // P.LOADERS
    rows = ()
    for i in gl.static_range(PART_KEYS // P.BOX):
        pos = tile * S.TILE + PART * PART_KEYS + i * P.BOX
        page = pos // S.PAGE
        live = (page >= first // S.PAGE) & (pos < end)
        row = gl.load(page_at(table, page, starts), mask=live, other=0).to(gl.int32) * P.ROWS_PER_PAGE
        if not P.PACKED:
            row += pos % S.PAGE
        rows = rows + (gl.where(live, row, NOWHERE),)  # type: ignore[assignment]
    return rows


@gluon.jit
def new_rows(block, tile, PART: gl.constexpr, S: gl.constexpr, P: gl.constexpr):
    """Tuple of each box's first row in the new keys' tensor, or NOWHERE, for one loader's part of a tile."""
    PART_KEYS: gl.constexpr = S.TILE // P.LOADERS
    context_len = block.seq_len - block.query_len
    first = tile * S.TILE - gap_before(tile, context_len, S) + PART * PART_KEYS
    rows = ()
    for i in gl.static_range(PART_KEYS // P.BOX):
        pos = first + i * P.BOX
        row = block.first_token + pos - context_len
        rows = rows + (gl.where(pos < block.seq_len, row, NOWHERE),)  # type: ignore[assignment]
    return rows


@gluon.jit
def send_part(
    box, ring, turn, rows, tile, kv_head, PART: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    FROM: gl.constexpr = 0,
):  # fmt: skip
    """Start the loads of one loader's part of a tile into the next slot, once all its readers have released the slot.

    rows: first row of each box (`page_rows`, `new_rows`).  FROM: first dim, to which P.FROM_DIM is added.
    """
    PART_KEYS: gl.constexpr = S.TILE // P.LOADERS
    DIM_PARTS: gl.constexpr = ring.slots.shape[0] // STAGES
    AXES: gl.constexpr = len(box.block_shape)
    full = ring.full.index(turn.stage)
    wait_empty(ring, turn)
    mbarrier.expect(full, DIM_PARTS * bytes_of_slot(ring.slots) // P.LOADERS)
    slot = ring.slots.index(turn.stage if DIM_PARTS == 1 else turn.stage * DIM_PARTS)
    if AXES == 5:
        slot = boxes_of(slot, box, S, P)
    for i in gl.static_range(PART_KEYS // P.BOX):
        first = (tile * S.TILE + PART * PART_KEYS + i * P.BOX) % S.PAGE
        if AXES == 5:  # x-packed, in groups of keys
            group = first // (P.BOX // box.block_shape[2])
            part = slot.slice(PART * (PART_KEYS // P.BOX) + i, 1, dim=0)
            load_box(box, [rows[i], kv_head, group, 0, 0], full, part)
        elif AXES == 4:
            gl.static_assert(P.LOADERS == 1)
            place = first * places_of_slot(box.block_shape, P.BOX)
            load_box(box, [rows[i], kv_head, 0, place], full, slot.slice(i, 1, dim=0))
        else:
            for j in gl.static_range(DIM_PARTS):
                beside = slot if j == 0 else ring.slots.index(turn.stage * DIM_PARTS + j)
                part = beside.slice(PART * PART_KEYS + i * P.BOX, P.BOX, dim=0)
                load_box(box, [rows[i], kv_head, FROM + P.FROM_DIM + j * box.block_shape[2]], full, part)


@gluon.jit
def fill_slots(
    box, ring, turn, rows, tile, kv_head, PART: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
    FROM: gl.constexpr,
):  # fmt: skip
    """Start the loads of one loader's part of a tile into all slots that the tile takes; return the next turn."""
    send_part(box, ring, turn, rows, tile, kv_head, PART, STAGES, S, P, FROM)
    turn = advance(turn, STAGES)
    if P.HALVES and FROM == 0:
        send_part(box, ring, turn, rows, tile, kv_head, PART, STAGES, S, P, S.DIM // 2)
        turn = advance(turn, STAGES)
    return turn


@gluon.jit
def begin_item(batch, item, mods, S: gl.constexpr, P: gl.constexpr):
    """(block, address of its first page id, the cache's KV head, first key that some row sees) of an item."""
    block = item.block
    table = pages_of(batch, block.seq)
    lo = visible_range(block, mods, S.BLOCK_Q, S).lo
    head = block.kv_head
    if P.PARTS > 1:
        head = head // P.PARTS
    return own_block(block, mods, S), table, head, lo


@gluon.jit
def load_tile(
    loader, turn, table, batch, block, kv_head, tile, first_key, PART: gl.constexpr, STAGES: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr, FROM: gl.constexpr = 0,
):  # fmt: skip
    """Load one loader's part of a tile into the ring, from the cache or from the new keys; return the next turn.

    first_key: first key that some row sees, inclusive.
    """
    box, ring = loader.box, loader.ring
    if S.APART:
        context_len = block.seq_len - block.query_len
        if in_cache(tile, context_len, S):
            rows = page_rows(table, batch.page_starts, tile, first_key, context_len, PART, S, P)
            turn = fill_slots(box, ring, turn, rows, tile, kv_head, PART, STAGES, S, P, FROM)
        else:
            rows = new_rows(block, tile, PART, S, P)
            turn = fill_slots(loader.new_box, ring, turn, rows, tile, kv_head, PART, STAGES, S, P, FROM)
        return turn
    else:
        rows = page_rows(table, batch.page_starts, tile, first_key, block.seq_len, PART, S, P)
        return fill_slots(box, ring, turn, rows, tile, kv_head, PART, STAGES, S, P, FROM)


@gluon.jit
def load_tiles(
    loader, turn, table, batch, block, kv_head, begin, end, first_key, PART: gl.constexpr, STAGES: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr, FROM: gl.constexpr = 0,
):  # fmt: skip
    """Load tiles [begin, end) of a block into the ring, the last tile first; return the next turn."""
    for i in range(end - begin):
        turn = load_tile(
            loader, turn, table, batch, block, kv_head, end - 1 - i, first_key, PART, STAGES, S, P, FROM
        )  # fmt: skip
    return turn


@gluon.jit
def load_scaled_tiles(
    loader, turn, table, batch, block, kv_head, begin, end, first_key, STAGES: gl.constexpr, OF_VALUES: gl.constexpr,
    S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Do `load_tiles` for tiles with a scale for each slot.

    Scales are loaded one tile ahead, and the page ids of scales two tiles ahead, so the warp waits for neither after
    the first tile.
    """
    first = gl.maximum(first_key, begin * S.TILE)
    pages = load_pages(table, batch, end - 1, first, block.seq_len, S)
    scales = load_scales(loader.scales, pages, kv_head, end - 1, first, block.seq_len, OF_VALUES, S)
    pages = load_pages(table, batch, end - 2, first, block.seq_len, S)
    for i in range(end - begin):
        tile = end - 1 - i
        at = turn
        turn = load_tile(loader, turn, table, batch, block, kv_head, tile, first_key, 0, STAGES, S, P)
        # stored before the next scales are loaded: a copy of loaded scales would wait for them
        store_scales(loader.ring, at, scales, OF_VALUES, P)
        scales = load_scales(loader.scales, pages, kv_head, tile - 1, first, block.seq_len, OF_VALUES, S)
        pages = load_pages(table, batch, tile - 2, first, block.seq_len, S)
    return turn


@gluon.jit
def load_both(
    keys, values, turn, table, batch, block, kv_head, tile, first_key, STAGES: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """Load a tile's keys and values by one warp; return the next turn.

    Keys and values take the next two slots of one ring, or the next slot of each of two rings of equal depth.
    """
    IN_TURN: gl.constexpr = in_one_ring(S, P)
    if S.APART:
        after = load_tile(keys, turn, table, batch, block, kv_head, tile, first_key, 0, STAGES, S, P)
        if IN_TURN:
            turn = after
        return load_tile(values, turn, table, batch, block, kv_head, tile, first_key, 0, STAGES, S, P)
    else:
        rows = page_rows(table, batch.page_starts, tile, first_key, block.seq_len, 0, S, P)
        send_part(keys.box, keys.ring, turn, rows, tile, kv_head, 0, STAGES, S, P)
        if IN_TURN:
            turn = advance(turn, STAGES)
        send_part(values.box, values.ring, turn, rows, tile, kv_head, 0, STAGES, S, P)
        return advance(turn, STAGES)
