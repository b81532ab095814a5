"""Reads and writes of the cache: gathers keys and values of some positions from any layout, and writes new ones.

Where possible, whole pages are gathered, and slots outside the positions are cut off.  Otherwise single slots are
gathered.  Slots outside the positions never reach a result.

Shapes: B sequences, N positions of each, G KV heads, D dims.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...arguments import scales_slots
from ...records.formats import INT4, LARGEST
from .call import Call, Seq, narrow, per_head, quiet

# Maximum bytes of a scratch tensor that is kept for later calls.  In new memory, page faults would take longer than the
# copy into it.
KEPT = 16 << 20
_scratch = threading.local()


class Layout(NamedTuple):
    """Orders of a cache's axes, as `permute` takes them, for one cache layout."""

    slots: tuple[int, ...]  # makes [pages, page_size, kv_heads, dims ...]
    heads: tuple[int, ...]  # makes [kv_heads, pages, page_size, dims ...]


NHD = Layout((0, 1, 2, 3), (2, 0, 1, 3))
HND = Layout((0, 2, 1, 3), (1, 0, 2, 3))
PACKED_KEYS = Layout((0, 3, 1, 2, 4), (1, 0, 3, 2, 4))
PACKED_VALUES = Layout((0, 3, 1, 2), (1, 0, 3, 2))


def layouts_of(k_cache: Tensor, kv_layout: str) -> tuple[Layout, Layout]:
    """The layouts of keys and of values."""
    if k_cache.ndim == 5:
        return PACKED_KEYS, PACKED_VALUES
    return (HND, HND) if kv_layout == "HND" else (NHD, NHD)


class Span(NamedTuple):
    """Positions [first, end) of one sequence, empty if end <= first; with a shard, numbers of own keys."""

    first: int
    end: int


def cached(call: Call, group: Sequence[Seq], spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Keys and values [B, N, G, D] of the cache, in the call's compute type; N is the length of the longest span.

    A shorter span is filled up with copies of its own keys and values, an empty span with zeros.
    """
    caches = (call.given.k_cache,) if call.latent else (call.given.k_cache, call.given.v_cache)
    layouts = layouts_of(call.given.k_cache, call.options.kv_layout)
    found = [_gathered(call, x, at, which, group, spans) for which, (x, at) in enumerate(zip(caches, layouts))]
    keys, values = found[0], found[-1]
    return keys, values[..., : call.sizes.value_dim]


def scaled(call: Call, group: Sequence[Seq], spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Keys and values as `cached` returns them, in float32, minus zero points and times their scales by slot."""
    layout = HND if call.given.k_cache.ndim == 5 or call.options.kv_layout == "HND" else NHD
    keys, values = (x.float() for x in cached(call, group, spans))
    of_keys, of_values = (
        None if x is None else _gathered(call, x[..., None], layout, 4 + which, group, spans, torch.float32)
        for which, x in enumerate(call.slot_scales)
    )
    int4 = call.given.k_cache.dtype == INT4
    return times(keys, of_keys, int4), times(values, of_values, int4)


def times(rows: Tensor, scales: Tensor | float | None, int4: bool) -> Tensor:
    """Rows [..., D] times a number, or scales [..., 1]; an int4 scale has a zero point in its lowest four bits."""
    if scales is None:
        return rows
    if not (int4 and isinstance(scales, Tensor)):
        return rows * scales
    bits = scales.contiguous().view(torch.int32)
    return (rows - (bits & 15)) * (bits & -16).view(torch.float32)


def own(call: Call, group: Sequence[Seq], spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """New keys and values, outside the cache, in the form of `cached`.

    spans: as for `cached`, places in the whole sequence, so the first new key is at context_len.
    """
    k_new, v_new = call.given.k_new, call.given.v_new
    values = k_new if v_new is None else v_new
    shifts = [seq.start - seq.context_len for seq in group]
    if len(group) == 1:
        rows: slice | Tensor = slice(spans[0].first + shifts[0], spans[0].end + shifts[0])
    else:
        rows = _positions(spans, call.device) + torch.tensor(shifts, device=call.device)[:, None]
        rows = torch.where(_live(spans, call.device), rows, 0)
    keys, values = (x[rows].to(call.compute).view(len(group), -1, *x.shape[1:]) for x in (k_new, values))
    keys, values = (_without_empty(x, spans) for x in (keys, values))
    return keys, values[..., : call.sizes.value_dim]


Source = Callable[[Call, Sequence[Seq], Sequence[Span]], tuple[Tensor, Tensor]]


def sources(call: Call, group: Sequence[Seq], spans: Sequence[Span]) -> Iterator[tuple[Source, list[Span]]]:
    """Yield (source, the part of each span that this source holds) for the cache, then for new keys."""
    if call.given.k_new is None:
        yield cached, [*spans]
        return
    borders = [max(seq.context_len, 0) for seq in group]
    before = [Span(x.first, min(x.end, border)) for x, border in zip(spans, borders)]
    behind = [Span(max(x.first, border), x.end) for x, border in zip(spans, borders)]
    for source, part in ((cached, before), (own, behind)):
        if any(x.end > x.first for x in part):
            yield source, part


def pages_of(call: Call, seq: Seq) -> Tensor:
    """One sequence's row of the page table; the row of a dense table includes the table tail."""
    table, starts = call.given.page_table, call.given.page_starts
    row: Tensor = table[seq.number] if starts is None else table[int(starts[seq.number]) : int(starts[seq.number + 1])]
    return row


def _gathered(
    call: Call, cache: Tensor, layout: Layout, which: int, group: Sequence[Seq], spans: Sequence[Span],
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    dtype = call.compute if dtype is None else dtype
    bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    found = None
    if len(group) == 1 and spans[0].end > spans[0].first:
        found = _of_one(call, bits, layout, which, group[0], spans[0])
    if found is None:
        found = _slots(call, bits, layout, which, group, spans)
    found = found.view(cache.dtype) if bits is not cache else found
    if cache.dtype == INT4:
        numbers = scratch(2 + which, 2 * found.numel(), dtype, call.device).view(*found.shape, 2)
        numbers[..., 0], numbers[..., 1] = found & 15, found >> 4
        return numbers.flatten(-2)
    if found.dtype == dtype:
        return found
    return scratch(2 + which, found.numel(), dtype, call.device).view(found.shape).copy_(found)


def _of_one(call: Call, cache: Tensor, layout: Layout, which: int, seq: Seq, span: Span) -> Tensor | None:
    """Keys or values of one sequence, [1, N, G, D]; None if its pages lie apart and are not one piece of memory each.

    Pages that lie side by side in the cache are used in place, if strides allow.  Pages that lie apart are copied.
    """
    size = call.sizes.page_size
    first = span.first // size
    ids = pages_of(call, seq)[first : -(-span.end // size)]
    begin = int(ids[0])
    if len(ids) == 1 or (int(ids[-1]) - begin == len(ids) - 1 and bool((ids.diff() == 1).all())):
        pages = cache[begin : begin + len(ids)]
    elif _dense(cache):
        pages = _copied(cache, ids, which)
    else:
        return None
    heads = pages.permute(layout.heads).flatten(3).flatten(1, 2)  # [G, slots, D], a view if strides allow
    heads = heads if heads.stride(2) == 1 else heads.contiguous()
    begin = span.first - first * size
    return heads[:, begin : begin + span.end - span.first].transpose(0, 1)[None]


def _dense(cache: Tensor) -> bool:
    """Whether the elements of a page are contiguous, in the order of the cache's axes."""
    size = 1
    for length, stride in zip(reversed(cache.shape[1:]), reversed(cache.stride()[1:])):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _copied(cache: Tensor, ids: Tensor, which: int) -> Tensor:
    """Copies of pages, one after another, in scratch memory."""
    count = cache[0].numel()
    flat = cache.as_strided((cache.shape[0], count), (cache.stride(0), 1))
    room = scratch(which, len(ids) * count, cache.dtype, cache.device).view(len(ids), count)
    return torch.index_select(flat, 0, ids, out=room).view(len(ids), *cache.shape[1:])


def _slots(
    call: Call, cache: Tensor, layout: Layout, which: int, group: Sequence[Seq], spans: Sequence[Span]
) -> Tensor:
    """Keys or values of a group of sequences, [B, N, G, D].

    Whole pages are gathered if the cache is NHD and its pages are contiguous, and if `_in_whole_pages`.
    """
    size, position = call.sizes.page_size, _positions(spans, call.device)
    whole = layout is NHD and _dense(cache) and _in_whole_pages(spans, size)
    column, slot = (position[:, ::size] if whole else position) // size, position % size
    table, starts = call.given.page_table, call.given.page_starts
    index = torch.tensor([seq.number for seq in group], device=call.device)
    if starts is None:
        page = table[index[:, None], column]
    else:
        page = table[starts[index][:, None] + column]
    page = torch.where(_live(spans, call.device), page, 0).long()
    if whole:
        pages = _copied(cache, page.flatten(), which)
        return _without_empty(pages.view(len(group), -1, *cache.shape[2:])[:, : position.shape[1]], spans)
    rows = cache.permute(layout.slots)
    if layout is NHD and _dense(cache) and cache.stride(0) == cache[0].numel():
        flat = cache.view(-1, cache.shape[2] * cache.shape[3])
        room = scratch(which, page.numel() * flat.shape[1], cache.dtype, cache.device).view(-1, flat.shape[1])
        torch.index_select(flat, 0, (page * size + slot).flatten(), out=room)
        found = room.view(*page.shape, *cache.shape[2:])
    else:
        found = rows[page, slot]
    return _without_empty(found.flatten(3), spans)


def _in_whole_pages(spans: Sequence[Span], size: int) -> bool:
    """Whether every span begins where a page begins, and ends where a page ends or is as long as the longest span."""
    longest = max(span.end - span.first for span in spans)
    return all(span.first % size == 0 and (span.end % size == 0 or span.end - span.first == longest) for span in spans)


def _positions(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Positions int64 [B, N] of spans; a shorter span repeats its last position, an empty span has any positions."""
    count = max(span.end - span.first for span in spans)
    first = torch.tensor([span.first for span in spans], device=device)[:, None]
    last = torch.tensor([max(span.end - 1, 0) for span in spans], device=device)[:, None]
    return (first + torch.arange(count, device=device)).minimum(last)


def _live(spans: Sequence[Span], device: torch.device) -> Tensor:
    """Whether each span holds a position, bool [B, 1]."""
    return torch.tensor([span.end > span.first for span in spans], device=device)[:, None]


def _without_empty(found: Tensor, spans: Sequence[Span]) -> Tensor:
    """`found`, with zeros for sequences whose span is empty; anything may have been gathered for them."""
    empty = [i for i, span in enumerate(spans) if span.end <= span.first]
    if empty:
        found = found.clone()
        found[empty] = 0
    return found


def scratch(which: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for `count` elements, valid until the next call of this thread with the same `which`."""
    if count * dtype.itemsize > KEPT:
        return torch.empty(count, dtype=dtype, device=device)
    key = which, dtype, device
    kept: dict[Any, Tensor] = _scratch.__dict__
    found = kept.get(key)
    if found is None or found.numel() < count:
        with torch.inference_mode(False):  # outside inference mode, a tensor made inside could not be written
            found = kept[key] = torch.empty(count, dtype=dtype, device=device)
    return found[:count]


# ---- new keys and values ------------------------------------------------------------------------


def write(
    k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slot_mapping: Tensor, k_scale: Any,
    v_scale: Any, kv_layout: str, part: str | None,
) -> None:  # fmt: skip
    """Write the keys, the values, or both, of tokens whose slot is not negative."""
    layouts = layouts_of(k_cache, kv_layout)
    size = k_cache.permute(layouts[0].slots).shape[1]
    with quiet(k.device):
        kept = slot_mapping >= 0
        slots = slot_mapping.long()
        if not bool(kept.all()):
            slots, k, v = slots[kept], k[kept], v if v is None else v[kept]
        if part != "values":
            _scatter(k_cache, layouts[0], k, slots, size, k_scale)
        if part != "keys" and v is not None and v_cache is not None:
            _scatter(v_cache, layouts[1], v, slots, size, v_scale)


def _quantised(new: Tensor, cache: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """(stored numbers [tokens, kv_heads, dims], scales [tokens, kv_heads]) of `new`, quantised as write_kv specifies.

    new: [tokens, kv_heads, dims].  like: the cache's scales, whose dtype new scales get.  A byte of int4 has two dims.
    """
    new = new.float()
    if cache.dtype == INT4:
        return _quantised_with_zero(new)
    scales = new.abs().amax(-1).div_(LARGEST[cache.dtype])
    stored_scales = torch.where(scales.isfinite(), scales.clamp(max=torch.finfo(like.dtype).max), torch.nan)
    stored_scales = stored_scales.to(like.dtype)
    by = stored_scales.float()[..., None]
    return narrow(torch.where(by > 0, new / by, 0.0), cache.dtype), stored_scales


def _quantised_with_zero(new: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes, scales with zero points in their lowest four bits) of an int4 cache, as `_quantised` returns them."""
    least, most = new.amin(-1).clamp_(max=0.0), new.amax(-1).clamp_(min=0.0)
    scales = torch.where(new.isfinite().all(-1), most.div_(15) - least / 15, torch.nan)
    bits = scales.view(torch.int32) & 0x7FFFFFF0
    scales = bits.view(torch.float32)
    by, usable = torch.where(scales > 0, scales, 1.0), scales > 0
    zero = torch.where(usable, (-least / by).round_(), 0.0).clamp_(max=15)
    numbers = (torch.where(usable[..., None], new, 0.0) / by[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)
    numbers = numbers.to(torch.uint8)
    return numbers[..., ::2] | numbers[..., 1::2] << 4, (bits | zero.int()).view(torch.float32)


def _scatter(cache: Tensor, layout: Layout, new: Tensor, slots: Tensor, size: int, scale: Any) -> None:
    """Store new [tokens, kv_heads, dims] / scale into slots [tokens] of a cache, rounded to nearest.

    size: slots of a page.  If `scale` is the tensor of scales by slot, new scales are computed, and stored in it, too.
    """
    if scales_slots(scale):
        stored, scales = _quantised(new, cache, scale)
        by_slot = scale if layout is NHD else scale.transpose(1, 2)
        by_slot[slots // size, slots % size] = scales
    else:
        by = per_head(scale, new.shape[1])
        if isinstance(by, Tensor):
            new = new.float() / by[:, None]
        elif by != 1.0:
            new = new.float() / by
        stored = narrow(new, cache.dtype)
    if cache.dtype.itemsize == 1:
        cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
    rows = cache.permute(layout.slots)
    rows[slots // size, slots % size] = stored.unflatten(-1, rows.shape[3:]) if rows.ndim == 5 else stored
