"""The launch that copies a call's keys into whole pages, and the call that later launches see."""

from typing import NamedTuple

from triton.language import constexpr

from ..arguments import LEFT
from ..launching.launch import Step, own
from ..records import layout
from ..records.call import Call
from ..records.copies import PAGE, Copies
from ..records.rounding import cdiv, next_power_of_2
from .common.copying import copy_pages_kernel
from .common.records import KV, KeyValues, Modifiers

WARPS = 4
BYTES_AT_ONCE = 16 << 10  # of keys, and as many of values: eight times 16 bytes in the registers of each thread
# If bounds are far above lengths, most programs find nothing to copy: 8 on a multiprocessor at a time, which takes a
# microsecond or two.  Large copies have more tiles than programs; a program may then copy several.
MAX_PROGRAMS = 8192


class Tiles(NamedTuple):
    """Tile of a program, and the number of programs."""

    keys: int
    heads: int
    groups: int  # of heads, over all sequences
    parts: int  # of the tiles of each group

    @property
    def programs(self) -> int:
        return self.groups * self.parts


def tiles_of_copies(copies: Copies) -> Tiles:
    """Return tiles of as many keys and heads as registers allow."""
    rows = BYTES_AT_ONCE // (max(_padded(copies.head_dim), _padded(copies.value_dim)) * copies.dtype.itemsize)
    heads = min(next_power_of_2(copies.kv_heads), rows)
    keys = min(rows // heads, PAGE)
    groups = copies.seqs * cdiv(copies.kv_heads, heads)
    return Tiles(keys, heads, groups, min(copies.pages * (PAGE // keys), cdiv(MAX_PROGRAMS, groups)))


def copied(copies: Copies, call: Call) -> tuple[Step, Call]:
    """Return the copying launch, and the call over the copied pages."""
    assert copies.bytes < 1 << 31  # places in a sequence's pages are counted in 32 bits
    tensors, tiles = copies.tensors(), tiles_of_copies(copies)
    keys, values, table = own(tensors)
    cache = layout.cache(keys, values, "NHD")
    args = (
        call.cache, KeyValues(*map(_known, cache)), table, call.query_starts, call.seq_lens, call.page_table,
        0 if call.page_starts is not None else call.page_table.stride(0), call.page_starts, _bound(call.mods),
        copies.shortest, copies.pages, tiles.parts, copies.from_page, PAGE, tiles.keys, tiles.heads, copies.kv_heads,
        copies.head_dim, _padded(copies.head_dim), copies.value_dim, _padded(copies.value_dim), call.new is not None,
        copies.dependent, copies.stripes,
    )  # fmt: skip
    options = {"num_warps": WARPS} | ({"launch_pdl": True} if copies.dependent else {})
    step = Step(copy_pages_kernel, (tiles.programs,), args, options, own=tensors)
    return step, call._replace(cache=cache, page_table=table, page_starts=None)


def _known(kv: KV) -> KV:
    """Return a cache with compile-time strides, because 64-bit products are most of a copy's arithmetic."""
    page, slot, head = (constexpr(x) for x in (kv.stride_page, kv.stride_slot, kv.stride_head))
    return kv._replace(stride_page=page, stride_slot=slot, stride_head=head)


def _padded(dims: int) -> int:
    """Dims of a Triton block: rounded up to a power of two, at least 16."""
    return max(16, next_power_of_2(dims))


def _bound(mods: Modifiers) -> Modifiers:
    """Return the modifiers that bound keys to the left; pages of keys before the bound may be gone."""
    if mods.left is None:
        return Modifiers(shard_rank=mods.shard_rank)
    assert mods.prefix_lens is None  # pages between a prefix and a window may be gone, too
    return Modifiers(**{name: getattr(mods, name) for name in LEFT})
