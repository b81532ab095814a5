"""The kernel that copies keys and values of a call into pages of PAGE slots, which only this call reads.

Elements keep their bits, or become 16-bit numbers that are already multiplied by the scales of their slots.  Gathered
rows are loaded by `load_heads`, too.
"""

import triton
import triton.language as tl

from .blocking import page_at, pages_of
from .bounds import visible_range
from .decoding import decode, split_scale
from .encoding import encode
from .numerics import load_int
from .records import Batch, Block
from .shards import own_before


@triton.jit
def addresses_of_heads(ptr, row, head, PADDED: tl.constexpr):
    """Addresses [N, H, PADDED] of slots with offsets row [N] and heads with offsets head [H], in elements."""
    return ptr + (row[:, None, None] + head[None, :, None]) + tl.arange(0, PADDED)[None, None, :]


@triton.jit
def load_heads(
    kv, page, slot, kv_head, inside, dtype: tl.constexpr, NATIVE: tl.constexpr, DIMS: tl.constexpr, PADDED: tl.constexpr
):
    """Load keys or values [N, H, PADDED] of slots [N] and KV heads [H] of a cache; zeros where not inside [N, H].

    Elements of another type become numbers of dtype.  If slots have scales, a number is multiplied by its scale; for
    int4, the zero point is subtracted first.
    """
    TOGETHER: tl.constexpr = 2 if kv.FP8 == 4 else 1  # dims of an element
    row = page * kv.stride_page + slot * kv.stride_slot
    mask = inside[:, :, None] & (tl.arange(0, PADDED // TOGETHER) < DIMS // TOGETHER)[None, None, :]
    at = addresses_of_heads(kv.ptr, row, kv_head.to(tl.int64) * kv.stride_head, PADDED // TOGETHER)
    x = tl.load(at, mask=mask, other=0)
    if x.dtype == dtype:
        return x
    else:
        if kv.FP8 == 4:
            # the bits of the float32 2^23 + number, which cost less than a conversion; 2^23 + zero point is subtracted
            x = (tl.interleave(x & 15, x >> 4).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        else:
            x = decode(x, kv.FP8, tl.float32, NATIVE)
        if kv.SCALED:
            of_slot = page * kv.scale_stride_page + slot * kv.scale_stride_slot
            of_head = kv_head.to(tl.int64) * kv.scale_stride_head
            scale = tl.load(kv.scale_ptr + of_slot[:, None] + of_head[None, :], mask=inside, other=0.0)
            if kv.FP8 == 4:
                scale, zero = split_scale(scale)
                x -= (zero | 0x4B000000).to(tl.float32, bitcast=True)[:, :, None]
            x *= scale.to(tl.float32)[:, :, None]
        return encode(x, 0, dtype)


@triton.jit
def long_sequence(query_starts, seqs, number, shortest):
    """Index of the `number`-th sequence (from 0) of `shortest` query tokens or more; -1 if there is none."""
    SCAN: tl.constexpr = 256
    found = -1
    before = 0
    for begin in range(0, seqs, SCAN):
        seq = begin + tl.arange(0, SCAN)
        inside = seq < seqs
        start = tl.load(query_starts + seq, mask=inside, other=0)
        end = tl.load(query_starts + seq + 1, mask=inside, other=0)
        is_long = (inside & (end - start >= shortest)).to(tl.int32)
        rank = before + tl.cumsum(is_long, 0) - 1
        found = tl.maximum(found, tl.max(tl.where((is_long > 0) & (rank == number), seq, -1), 0))
        before += tl.sum(is_long, 0)
    return found


@triton.jit
def store_heads(x, kv, first_page, pos, kv_head, inside, DIMS: tl.constexpr, PADDED: tl.constexpr):
    """Store x [N, H, PADDED] into a sequence's pages at positions pos [N]; its pages have less than 2^31 elements."""
    ptr = kv.ptr + first_page * kv.stride_page
    mask = inside[:, :, None] & (tl.arange(0, PADDED) < DIMS)[None, None, :]
    tl.store(addresses_of_heads(ptr, pos * kv.stride_slot, kv_head * kv.stride_head, PADDED), x, mask=mask)


@triton.jit(do_not_specialize=["page_table_stride", "shortest", "pages", "parts", "seqs"])
def copy_pages_kernel(
    cache, copies, table, query_starts, seq_lens, page_table, page_table_stride, page_starts, mods, shortest, pages,
    parts, FROM_PAGE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr, NEW: tl.constexpr, DEPENDENT: tl.constexpr, SHARD: tl.constexpr, RANKED: tl.constexpr,
    seqs, NATIVE: tl.constexpr,
):  # fmt: skip
    """Copy every `parts`-th tile of KEYS keys of one sequence, for HEADS of its KV heads.

    Copying begins with the page of the first visible key; earlier keys in this page become zeros.
    NEW: the call's own keys are not in the cache, and are not copied.  SHARD: how keys lie over ranks
    (`problem.Stripes`), or None.  DEPENDENT: as in `cache_write.write_kv_kernel`.
    The next launch must not begin before the wait: it may read what launches before this one have written.
    RANKED: only sequences of `shortest` query tokens or more have pages for copies, in the order of the sequences.
    NATIVE: the device has instructions that convert e4m3.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    HEAD_BLOCKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    index = tl.program_id(0)
    kv_head = index % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
    part, number = index // HEAD_BLOCKS % parts, index // HEAD_BLOCKS // parts
    seq = number
    if RANKED:
        seq = long_sequence(query_starts, seqs, number, shortest)
        if seq < 0:
            return
    batch = Batch(query_starts, seq_lens, page_table, page_table_stride, 0, 0, shortest, 0, 0, 0, page_starts)
    first_token, end = load_int(query_starts + seq), load_int(seq_lens + seq)
    query_len = load_int(query_starts + seq + 1) - first_token
    first = visible_range(Block(seq, first_token, query_len, end, 0), mods, 1, SHARD).lo
    if NEW:
        end -= query_len
    end = tl.minimum(tl.where(query_len >= shortest, own_before(end, mods, SHARD), 0), pages * PAGE)
    from_pages = pages_of(batch, seq)
    first_page = tl.cast(number, tl.int64) * pages
    for tile in range(first // PAGE * (PAGE // KEYS) + part, tl.cdiv(end, KEYS), parts):
        pos = tile * KEYS + tl.arange(0, KEYS)
        live = (pos >= first) & (pos < end)
        page = tl.load(page_at(from_pages, pos // FROM_PAGE, page_starts), mask=live, other=0).to(tl.int64)
        slot = (pos % FROM_PAGE).to(tl.int64)
        there = tl.broadcast_to((kv_head < KV_HEADS)[None, :], (KEYS, HEADS))
        asked = live[:, None] & there
        # both loads come before the stores: the compiler does not know that copies and cache do not overlap
        dtype: tl.constexpr = copies.key.ptr.dtype.element_ty
        keys = load_heads(cache.key, page, slot, kv_head, asked, dtype, NATIVE, HEAD_DIM, DIM)
        values = load_heads(cache.value, page, slot, kv_head, asked, dtype, NATIVE, VALUE_DIM, VALUE_PADDED)
        store_heads(keys, copies.key, first_page, pos, kv_head, there, HEAD_DIM, DIM)
        store_heads(values, copies.value, first_page, pos, kv_head, there, VALUE_DIM, VALUE_PADDED)
        if tile % (PAGE // KEYS) == 0:
            place = tile // (PAGE // KEYS)
            tl.store(table + tl.cast(seq, tl.int64) * pages + place, (first_page + place).to(tl.int32))
