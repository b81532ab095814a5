"""Kernels that copy whole pages of any tensors, and gather rows of pages."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.copying import addresses_of_heads, load_heads
from ..common.decoding import decode
from ..common.encoding import encode

# Fields of a row of the table, which has a row for each `strides.PageRuns`.  Pairs are (source, target).
#   0, 1   addresses                        5      runs along the inner axis
#   2, 3   strides of pages, in bytes       6, 7   strides of the inner axis, in units
#   4      a run, in units                  8, 9   strides of the outer axis, in units
#                                           10     a page, in units
FIELDS = tl.constexpr(11)


class RowScale(NamedTuple):
    """Scale of a cache's elements: a number or, if ptr is given, that in memory for a page, slot and head."""

    number: Any
    ptr: Any
    stride_page: Any
    stride_slot: Any
    stride_head: Any


@triton.jit
def memory_at(address, UNIT: tl.constexpr):
    """A pointer to words of min(UNIT, 4) bytes, at an address that UNIT divides."""
    if UNIT >= 4:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), UNIT)
    elif UNIT == 2:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int16)), UNIT)
    else:
        return address.to(tl.pointer_type(tl.int8))


@triton.jit
def places_of(row, unit, FLAT: tl.constexpr):
    """Offsets [N] of a page's units [N] in the source and in the target, in units; FLAT: a page is one run."""
    if FLAT:
        return unit, unit
    else:
        run, many = tl.load(row + 4), tl.load(row + 5)
        inner, outer = unit // run % many, unit // run // many
        source = unit % run + inner * tl.load(row + 6) + outer * tl.load(row + 8)
        target = unit % run + inner * tl.load(row + 7) + outer * tl.load(row + 9)
        return source, target


@triton.jit
def move_part(row, source_page, target_page, part, parts, UNIT: tl.constexpr, LANES: tl.constexpr, FLAT: tl.constexpr):
    """Copy part `part` of `parts` of a page, by a row of the table, LANES units at a time."""
    WORDS: tl.constexpr = UNIT // 4 if UNIT > 4 else 1
    source = memory_at(tl.load(row) + source_page * tl.load(row + 2), UNIT)
    target = memory_at(tl.load(row + 1) + target_page * tl.load(row + 3), UNIT)
    units = tl.load(row + 10)
    word = tl.arange(0, WORDS)[None, :]
    for first in range(part * LANES, units.to(tl.int32), parts * LANES):
        unit = first + tl.arange(0, LANES).to(tl.int64)
        live = (unit < units)[:, None]
        at, to = places_of(row, unit, FLAT)
        x = tl.load(source + at[:, None] * WORDS + word, mask=live)
        tl.store(target + to[:, None] * WORDS + word, x, mask=live)


@triton.jit(do_not_specialize=["pairs", "tensors", "parts"])
def move_pages_kernel(
    src, dst, table, pairs, tensors, parts, UNIT: tl.constexpr, LANES: tl.constexpr, FLAT: tl.constexpr
):
    """Copy page src[i] of each tensor of the table to page dst[i]; a negative id skips the pair.

    UNIT: number of bytes, at most 16, that divides all addresses, strides and runs.  FLAT: every page is one run.
    """
    for task in range(tl.program_id(0), pairs * tensors * parts, tl.num_programs(0)):
        pair, tensor = task // parts // tensors, task // parts % tensors
        source_page, target_page = tl.load(src + pair).to(tl.int64), tl.load(dst + pair).to(tl.int64)
        if (source_page >= 0) & (target_page >= 0):
            row = table + tensor * FIELDS
            move_part(row, source_page, target_page, task % parts, parts, UNIT, LANES, FLAT)


@triton.jit
def sequence_of(row, starts, seqs, steps):
    """Sequence [N] of each row [N]: the last sequence that begins at the row or earlier, by `steps` bisections."""
    found = tl.zeros_like(row).to(tl.int32)
    for i in range(steps):
        probe = found + (1 << (steps - 1 - i))
        begin = tl.load(starts + probe, mask=probe < seqs, other=0)
        found = tl.where((probe < seqs) & (begin <= row), probe, found)
    return found


@triton.jit
def load_scale(scale, page, slot, head, live):
    """Scales of rows at pages [R], slots [R] and KV heads [C]: a number, or float32 [R, C]."""
    if scale.ptr is None:
        return scale.number
    else:
        at = (page * scale.stride_page + slot * scale.stride_slot)[:, None] + (head * scale.stride_head)[None, :]
        return tl.load(scale.ptr + at, mask=live, other=1.0).to(tl.float32)


@triton.jit
def gather_heads(
    out, cache, row, page, slot, inside, live,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write rows [R] of HEADS heads of a cache whose record has scales.

    inside: rows that out has.  live: rows that have a page.
    """
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = (head < KV_HEADS)[None, :]
    x = load_heads(cache, page, slot, head, live[:, None] & there, out.ptr.dtype.element_ty, NATIVE, HEAD_DIM, DIM)
    to = addresses_of_heads(out.ptr, row * out.stride_token, head.to(tl.int64) * out.stride_head, DIM)
    tl.store(to, x, mask=(inside[:, None] & there)[:, :, None] & (tl.arange(0, DIM) < HEAD_DIM)[None, None, :])


@triton.jit
def gather_columns(
    out, cache, scale, row, page, slot, inside, live,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, RAW: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write COLUMNS columns of rows [R]; a column is one dim of one head.  Rows as in `gather_heads`."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head, dim = (column // HEAD_DIM).to(tl.int64), column % HEAD_DIM
    there = (column < KV_HEADS * HEAD_DIM)[None, :]
    offset = head * cache.stride_head + dim
    if cache.RUN < HEAD_DIM:
        run = column // cache.RUN % (HEAD_DIM // cache.RUN)
        offset = head * cache.stride_head + run * cache.stride_run + column % cache.RUN
    at = (page * cache.stride_page + slot * cache.stride_slot)[:, None] + offset[None, :]
    asked = live[:, None] & there
    x = tl.load(cache.ptr + at, mask=asked, other=0)
    if not RAW:
        value = decode(x, cache.FP8, tl.float32, NATIVE) * load_scale(scale, page, slot, head, asked)
        x = encode(tl.where(asked, value, 0.0), 0, out.ptr.dtype.element_ty)
    to = row[:, None] * out.stride_token + (head * out.stride_head + dim)[None, :]
    tl.store(out.ptr + to, x, mask=inside[:, None] & there)


@triton.jit(do_not_specialize=["tokens", "seqs", "steps", "table_stride", "starts_stride"])
def gather_pages_kernel(
    out, cache, scale, table, table_stride, table_starts, starts_stride, starts, tokens, seqs, steps,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DIM: tl.constexpr, RAW: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows into dense rows: COLUMNS columns of them or, if cache.SCALED, COLUMNS // DIM heads.

    Rows without a page, and rows behind the last sequence, become zeros.
    starts: int64 [seqs + 1], first row of each sequence, then the number of rows of all sequences.
    table_starts: indptr of a ragged page table, whose indices are `table`; None: `table` is dense.
    table_stride: stride between rows of a dense table, or between entries of a ragged one.
    starts_stride: stride between entries of table_starts.
    steps: number of steps of a bisection among the sequences.
    cache: its record has the scales by slot of bytes that are not x-packed.  scale: all other scales.
    DIM: HEAD_DIM rounded up to a power of two.
    RAW: elements keep their bits, and no scale is applied.
    NATIVE: the device has instructions that convert e4m3.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < tokens) & (row < tl.load(starts + seqs))
    seq = sequence_of(row, starts, seqs, steps)
    pos = row - tl.load(starts + seq, mask=live, other=0)
    if table_starts is None:
        entry = seq.to(tl.int64) * table_stride + pos // PAGE
    else:
        begin = tl.load(table_starts + seq.to(tl.int64) * starts_stride, mask=live, other=0)
        entry = (begin + pos // PAGE) * table_stride
    page = tl.load(table + entry, mask=live, other=-1).to(tl.int64)
    slot, inside, live = pos % PAGE, row < tokens, live & (page >= 0)
    if cache.SCALED:
        gather_heads(out, cache, row, page, slot, inside, live, KV_HEADS, HEAD_DIM, COLUMNS // DIM, DIM, NATIVE)
    else:
        gather_columns(out, cache, scale, row, page, slot, inside, live, KV_HEADS, HEAD_DIM, COLUMNS, RAW, NATIVE)
