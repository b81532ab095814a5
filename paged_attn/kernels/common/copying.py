"""Keys and values of small pages into whole ones, through the page table, as they are."""

import triton
import triton.language as tl

from .bounds import visible_range
from .numerics import load_int
from .page_tables import page_at, pages_of
from .records import Batch, Block


@triton.jit
def rows_at(kv, page, slot, kv_head, PADDED: tl.constexpr):
    """Addresses [R, D] of keys, or values, of some slots and KV heads [R]."""
    row = page * kv.stride_page + slot * kv.stride_slot + kv_head * kv.stride_head
    return kv.ptr + row[:, None] + tl.arange(0, PADDED)[None, :]


@triton.jit
def inside(rows, DIMS: tl.constexpr, PADDED: tl.constexpr):
    """[R, D]: the dims that some rows have."""
    return rows[:, None] & (tl.arange(0, PADDED) < DIMS)[None, :]


@triton.jit(do_not_specialize=["page_table_stride", "shortest", "pages", "parts"])
def copy_pages_kernel(
    cache, copies, table, query_starts, seq_lens, page_table, page_table_stride, page_starts, mods, shortest, pages,
    parts, FROM_PAGE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr, NEW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One of some parts of a sequence's keys, KEYS at a time, x HEADS of its KV heads.

    From the page with the first key on that somebody may see; what lies before that key in it becomes zeros.
    NEW: the call's own keys lie elsewhere.  DEPENDENT: as in `write.write_kv_kernel`.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    HEAD_BLOCKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    index = tl.program_id(0)
    kv_head = (index % HEAD_BLOCKS * HEADS + tl.arange(0, KEYS * HEADS) % HEADS).to(tl.int64)
    part, seq = index // HEAD_BLOCKS % parts, index // HEAD_BLOCKS // parts
    batch = Batch(
        query_starts, seq_lens, page_table, page_table_stride, 0, 0, shortest, 0, 0, 0, page_starts
    )  # fmt: skip
    first_token, end = load_int(query_starts + seq), load_int(seq_lens + seq)
    query_len = load_int(query_starts + seq + 1) - first_token
    first = visible_range(Block(seq, first_token, query_len, end, 0), mods, 1).lo
    if NEW:
        end -= query_len
    end = tl.minimum(tl.where(query_len >= shortest, end, 0), pages * PAGE)
    from_pages = pages_of(batch, seq)
    first_page = tl.cast(seq, tl.int64) * pages
    key = tl.arange(0, KEYS * HEADS) // HEADS
    for tile in range(first // PAGE * (PAGE // KEYS) + part, tl.cdiv(end, KEYS), parts):
        pos = tile * KEYS + key
        there = kv_head < KV_HEADS
        live = there & (pos >= first) & (pos < end)
        ids = tl.load(page_at(from_pages, pos // FROM_PAGE, page_starts), mask=live, other=0).to(tl.int64)
        slot, page, to = (pos % FROM_PAGE).to(tl.int64), first_page + pos // PAGE, (pos % PAGE).to(tl.int64)
        # both are under way before either is stored: a compiler does not know that copies are apart from the cache
        keys = tl.load(
            rows_at(cache.key, ids, slot, kv_head, DIM), mask=inside(live, HEAD_DIM, DIM), other=0
        )  # fmt: skip
        values = tl.load(
            rows_at(cache.value, ids, slot, kv_head, VALUE_PADDED), mask=inside(live, VALUE_DIM, VALUE_PADDED), other=0
        )
        tl.store(rows_at(copies.key, page, to, kv_head, DIM), keys, mask=inside(there, HEAD_DIM, DIM))
        tl.store(
            rows_at(copies.value, page, to, kv_head, VALUE_PADDED), values, mask=inside(there, VALUE_DIM, VALUE_PADDED)
        )
        if tile % (PAGE // KEYS) == 0:
            number = first_page + tile // (PAGE // KEYS)
            tl.store(table + number, number.to(tl.int32))
