"""Loads of page ids, keys, values and queries; contents of slots without a key never reach a result."""

import triton
import triton.language as tl

from ..common.blocking import page_at
from ..common.decoding import decode, unpack
from ..common.numerics import in_parts, normalize, opaque
from ..common.output import addresses, load_query
from ..common.records import Query


@triton.jit
def chunks(tile, S: tl.constexpr):
    """First positions [N // CHUNK] of a tile's chunks, each of which lies in one page; a scalar for one chunk."""
    if S.CHUNK == S.TILE:
        return tile
    else:
        return tile + tl.arange(0, S.TILE // S.CHUNK) * S.CHUNK


@triton.jit
def lives(pos, source):
    """Whether a source has keys at positions [N] that some row may see."""
    live = pos >= source.first
    if source.prefix is not None:
        live |= pos < source.prefix
    return live & (pos < source.end)


@triton.jit
def load_ids(source, tile, S: tl.constexpr):
    """Load the page ids of a tile's chunks, int32 [N // CHUNK].

    Ids are loaded one tile ahead.  Loads of keys and values then depend on no load of the same tile, so the pipeliner
    gives them all stages.
    """
    if source.pages is None:
        return 0
    else:
        column = chunks(tile, S) // S.PAGE
        # entries without a visible key may hold anything: page 0 replaces them, and no result depends on what is read
        inside = column >= source.first // S.PAGE
        if source.prefix is not None:
            inside &= source.first < source.end  # otherwise only the prefix is visible
            inside |= column * S.PAGE < source.prefix
        inside &= column * S.PAGE < source.end
        return tl.load(page_at(source.pages, column, source.page_starts), mask=inside, other=0).to(tl.int32)


@triton.jit
def per_key(x, S: tl.constexpr):
    """Repeat a value of each chunk, [N // CHUNK], for each key of the chunk: [N]."""
    if S.CHUNK == S.TILE:
        return x + tl.full([S.TILE], 0, tl.int32)
    else:
        return tl.reshape(tl.broadcast_to(x[:, None], (S.TILE // S.CHUNK, S.CHUNK)), (S.TILE,))


@triton.jit
def locate(source, ids, tile, S: tl.constexpr):
    """(page, slot), each int64 [N], of a tile's keys, by the ids from `load_ids`; contiguous keys: (0, row)."""
    CHUNK: tl.constexpr = S.CHUNK
    key = tl.arange(0, S.TILE)
    if source.pages is None:
        row = tl.minimum(tile + key, source.end - 1) + source.shift
        return tl.full([S.TILE], 0, tl.int64), row.to(tl.int64)
    else:
        page = per_key(ids, S)
        if S.TILE % S.PAGE == 0:
            slot = key % S.PAGE
        else:
            slot = per_key(chunks(tile, S) % S.PAGE, S) + key % CHUNK
        return page.to(tl.int64), slot.to(tl.int64)


@triton.jit
def load_box(box, page, slot, kv_head, DIM: tl.constexpr, S: tl.constexpr):
    """Load rows [N, D] of one page by TMA, which computes the addresses and writes shared memory."""
    return box.load([page, slot, kv_head, 0]).reshape([S.TILE, DIM])


@triton.jit
def load_scales(kv, page, slot, kv_head, tile, source, S: tl.constexpr, FULL: tl.constexpr):
    """Load the scale of each key of a tile, float32 [N]; 0 for keys that are not live.  FULL: all are live."""
    ptr = kv.scale_ptr + tl.cast(kv_head, tl.int64) * kv.scale_stride_head
    ptr += page * kv.scale_stride_page + slot * kv.scale_stride_slot
    if FULL:
        return tl.load(ptr).to(tl.float32)
    else:
        return tl.load(ptr, mask=lives(tile + tl.arange(0, S.TILE), source), other=0.0).to(tl.float32)


@triton.jit
def load_kv(
    kv, page, slot, kv_head, live, WIDTH: tl.constexpr, PADDED: tl.constexpr, S: tl.constexpr, BEGIN: tl.constexpr = 0
):  # fmt: skip
    """Load rows [N, PADDED / PARTS] of stored elements: dims [BEGIN, BEGIN + WIDTH).

    live [N]: rows that are not live become zeros.  None: no row is replaced, and rows of dead slots hold anything.
    """
    HEAD_DIM: tl.constexpr = WIDTH // kv.PARTS
    DIM: tl.constexpr = PADDED // kv.PARTS
    dim = tl.arange(0, DIM)
    head = kv.ptr + tl.cast(kv_head, tl.int64) * kv.stride_head
    row = page * kv.stride_page + slot * kv.stride_slot
    if kv.PARTS > 1:
        head = tl.multiple_of(head, 2 * kv.ALIGN)  # bytes
        row = tl.multiple_of(row, kv.ALIGN)
    if kv.RUN == 1:
        # wide loads go along the slots; hints tell the compiler what the reshape in `per_key` hides
        WIDE: tl.constexpr = min(kv.ALIGN, S.CHUNK)
        row = tl.max_contiguous(tl.multiple_of(row, WIDE), WIDE)
    if BEGIN > 0:  # only for keys whose dims are contiguous
        head += BEGIN // kv.PARTS
    ptr = head + row[:, None] + (dim // kv.RUN * kv.stride_run + dim % kv.RUN)[None, :]
    if kv.RUN == 1 or live is None:
        # a mask would cut wide loads along the slots into single elements, so dead slots are loaded, and dropped below
        x = tl.load(ptr) if DIM == HEAD_DIM else tl.load(ptr, mask=(dim < HEAD_DIM)[None, :], other=0)
    elif DIM == HEAD_DIM:
        x = tl.load(ptr, mask=live[:, None], other=0)
    else:
        x = tl.load(ptr, mask=live[:, None] & (dim < HEAD_DIM)[None, :], other=0)
    if kv.RUN == 1 and live is not None:
        x = tl.where(live[:, None], x, 0)  # the bits of zero in every format
    return x


# ---- latents (values within keys) ----------------------------------------------------------------
#
# A tile is read once, and its first dims are multiplied twice.  A key of 576 dims would be rounded up to 1024.  So a
# key is read in two parts, rounded to powers of two: the VALUE_DIM dims that are also the value, and the dims behind
# them (the rest).


@triton.jit
def turned(parts):
    """Each part [N, D] as [D, N]."""
    done = ()
    for i in tl.static_range(len(parts)):
        done = done + (parts[i].T,)
    return done


@triton.jit
def load_latent(kv, page, slot, kv_head, live, S: tl.constexpr):
    """Load a tile of latents: (keys in parts [D, N], values in parts [N, D]).

    live [N]: values of keys that are not live become zeros.  None: all keys are live.
    """
    v = unpack(load_kv(kv, page, slot, kv_head, live, S.VALUE_DIM, S.VALUE_PADDED, S), kv, S)
    k = turned(v)
    if S.REST > 0:
        rest = load_kv(kv, page, slot, kv_head, None, S.HEAD_DIM - S.VALUE_DIM, S.REST, S, S.VALUE_DIM)
        k = turned(unpack(rest, kv, S)) + k
    return k, v


@triton.jit
def _rows(query, rows, BEGIN: tl.constexpr, END: tl.constexpr, PADDED: tl.constexpr, S: tl.constexpr):
    """Load dims [BEGIN, END) of the queries: [R, PADDED], zeros beyond END."""
    ptr, inside = addresses(rows, BEGIN + tl.arange(0, PADDED), query, END, S)
    return tl.load(ptr, mask=inside, other=0)


@triton.jit
def load_queries(query, rows, PARTS: tl.constexpr, S: tl.constexpr):
    """Load queries in as many parts as keys; of latents with a rest: the rest's parts, then those of the value dims."""
    if S.REST is None or S.REST == 0:
        return load_query(query, rows, tl.arange(0, S.DIM), PARTS, S)
    else:
        x = _rows(query, rows, 0, S.VALUE_DIM, S.VALUE_PADDED, S)
        rest = _rows(query, rows, S.VALUE_DIM, S.HEAD_DIM, S.REST, S)
        unit = tl.where(rows.valid, 1.0, 1.0)
        if x.dtype == tl.bfloat16 and tl.bfloat16 != S.COMPUTE:
            x, of_first = normalize(decode(x, query.FP8, tl.float32, S.NATIVE_FP8))
            rest, of_rest = normalize(decode(rest, query.FP8, tl.float32, S.NATIVE_FP8))
            # both units are powers of two; the larger one is the unit of the whole row
            unit = tl.maximum(of_first, of_rest)
            x = (x * (of_first / unit)[:, None]).to(S.COMPUTE)
            rest = (rest * (of_rest / unit)[:, None]).to(S.COMPUTE)
        else:
            x = decode(x, query.FP8, S.COMPUTE, S.NATIVE_FP8)
            rest = decode(rest, query.FP8, S.COMPUTE, S.NATIVE_FP8)
            if query.FP8 > 0 and PARTS == 2 and S.NATIVE_FP8:
                x, rest = opaque(x), opaque(rest)  # as in load_query
        return Query(in_parts(rest, PARTS) + in_parts(x, PARTS), unit)
