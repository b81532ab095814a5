"""The launch that copies a call's keys into whole pages, and the call as the launches behind it have it."""

from typing import NamedTuple

from triton.language import constexpr

from ..launching.launch import Step, own
from ..records import layout
from ..records.call import Call
from ..records.copies import PAGE, Copies
from ..records.rounding import cdiv, next_power_of_2
from .common.copying import copy_pages_kernel
from .common.records import KV, NO_BOUND_TO_THE_LEFT, KeyValues, Modifiers

WARPS = 4
BYTES_AT_ONCE = 16 << 10  # of keys, and of values as many: eight times 16 bytes of each thread, in registers
# Where bounds are far above lengths most programs find nothing: 8 a multiprocessor at a time, in a microsecond or two.
# Fewer than the largest copies have tiles, for a program may have several.
MAX_PROGRAMS = 8192


class Tiles(NamedTuple):
    """What a program copies at a time, and which programs there are."""

    keys: int
    heads: int
    groups: int  # of heads, of all sequences
    parts: int  # of each group's tiles

    @property
    def programs(self) -> int:
        return self.groups * self.parts


def tiles_of_copies(copies: Copies) -> Tiles:
    """As many keys of as many heads as a program has registers for."""
    rows = BYTES_AT_ONCE // (max(_padded(copies.head_dim), _padded(copies.value_dim)) * copies.dtype.itemsize)
    heads = min(next_power_of_2(copies.kv_heads), rows)
    keys = min(rows // heads, PAGE)
    groups = copies.seqs * cdiv(copies.kv_heads, heads)
    return Tiles(keys, heads, groups, min(copies.pages * (PAGE // keys), cdiv(MAX_PROGRAMS, groups)))


def copied(copies: Copies, call: Call) -> tuple[Step, Call]:
    """The launch, and the call over its results."""
    assert copies.bytes < 1 << 31  # places in a sequence's pages are counted in 32 bits
    tensors, tiles = copies.tensors(), tiles_of_copies(copies)
    keys, values, table = own(tensors)
    cache = layout.cache(keys, values, "NHD")
    args = (
        call.cache, KeyValues(*map(_known, cache)), table, call.query_starts, call.seq_lens, call.page_table,
        0 if call.page_starts is not None else call.page_table.stride(0), call.page_starts, _bound(call.mods),
        copies.shortest, copies.pages, tiles.parts, copies.from_page, PAGE, tiles.keys, tiles.heads, copies.kv_heads,
        copies.head_dim, _padded(copies.head_dim), copies.value_dim, _padded(copies.value_dim), call.new is not None,
        copies.dependent,
    )  # fmt: skip
    options = {"num_warps": WARPS} | ({"launch_pdl": True} if copies.dependent else {})
    step = Step(copy_pages_kernel, (tiles.programs,), args, options, own=tensors)
    return step, call._replace(cache=cache, page_table=table, page_starts=None)


def _known(kv: KV) -> KV:
    """The same with strides that the compiler knows: products of 64 bits are most of what a copy computes."""
    page, slot, head = (constexpr(x) for x in (kv.stride_page, kv.stride_slot, kv.stride_head))
    return kv._replace(stride_page=page, stride_slot=slot, stride_head=head)


def _padded(dims: int) -> int:
    """Dims as blocks have them, whose sizes are powers of two."""
    return max(16, next_power_of_2(dims))


def _bound(mods: Modifiers) -> Modifiers:
    """What says which keys come before all that some query of a sequence sees; their pages may be gone."""
    if mods.left is None:
        return Modifiers()
    assert mods.prefix_lens is None  # between a prefix and a window pages may be gone, too
    return Modifiers(**{name: value for name, value in mods._asdict().items() if name not in NO_BOUND_TO_THE_LEFT})
