"""The launch that copies a call's keys into whole pages, and the call as the launches behind it have it."""

from ..launching.launch import Step, own
from ..records import layout
from ..records.call import Call
from ..records.copies import PAGE, Copies
from ..records.rounding import cdiv, next_power_of_2
from .common.copies import copy_pages_kernel
from .common.records import Modifiers

WARPS = 4
BYTES_AT_ONCE = 16 << 10  # of keys, and of values as many: eight times 16 bytes of each thread, in registers
# Where bounds are far above lengths most programs find nothing, and some 2000 of these a microsecond are begun; fewer
# than the largest copies have tiles, for a program may have several.
MAX_PROGRAMS = 8192


def copied(copies: Copies, call: Call) -> tuple[Step, Call]:
    """The launch, and the call over its results."""
    tensors = copies.tensors()
    keys, values, table = own(tensors)
    cache = layout.cache(keys, values, "NHD")
    dim, value_padded = (max(16, next_power_of_2(x)) for x in (copies.head_dim, copies.value_dim))
    rows = BYTES_AT_ONCE // (max(dim, value_padded) * copies.dtype.itemsize)
    heads = min(next_power_of_2(copies.kv_heads), rows)
    at_once = min(rows // heads, PAGE)
    groups = copies.seqs * cdiv(copies.kv_heads, heads)
    parts = min(copies.pages * (PAGE // at_once), cdiv(MAX_PROGRAMS, groups))
    args = (
        call.cache, cache, table, call.query_starts, call.seq_lens, call.page_table,
        0 if call.page_starts is not None else call.page_table.stride(0), call.page_starts, _bound(call.mods),
        copies.shortest, copies.pages, parts, copies.from_page, PAGE, at_once, heads, copies.kv_heads, copies.head_dim,
        dim, copies.value_dim, value_padded, call.new is not None, copies.dependent,
    )  # fmt: skip
    options = {"num_warps": WARPS} | ({"launch_pdl": True} if copies.dependent else {})
    step = Step(copy_pages_kernel, (groups * parts,), args, options, own=tensors)
    return step, call._replace(cache=cache, page_table=table, page_starts=None)


def _bound(mods: Modifiers) -> Modifiers:
    """What says which keys come before all that some query of a sequence sees; their pages may be gone."""
    if mods.left is None:
        return Modifiers()
    assert mods.prefix_lens is None  # between a prefix and a window pages may be gone, too
    names = ("left", "chunk", "query_positions", "spans", "spans_count", "spans_stride", "spans_step", "CLIP_SPANS")
    return Modifiers(**{name: getattr(mods, name) for name in (*names, "spans_right")})
