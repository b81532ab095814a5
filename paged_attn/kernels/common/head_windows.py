"""Windows of heads: how far each query head sees to its left and right, and the least and most of a KV head's.

Where a call has them, `left` and `right` of its modifiers say that there are bounds, and these say which.
"""

import triton
import triton.language as tl

from .numerics import load_int

LEFT, RIGHT = tl.constexpr(0), tl.constexpr(1)
# Farther than any key, and a position plus it still fits 32 bits; as attend.py has it.
FAR_KEYS = tl.constexpr(1 << 30)


@triton.jit
def load_side(head, SIDE: tl.constexpr, mods):
    """What the call says of query heads, one or [N], of a side: keys without a sign, of which -1 are the most."""
    if mods.head_windows_stride is None:
        at = mods.head_windows + (2 * head + SIDE)
    else:
        at = mods.head_windows + tl.cast(head, tl.int64) * mods.head_windows_stride + SIDE
    return load_int(at).to(tl.uint32, bitcast=True)


@triton.jit
def bounded(keys):
    """Keys that positions can be moved by."""
    return tl.minimum(keys, FAR_KEYS).to(tl.int32, bitcast=True)


@triton.jit
def side_of_rows(number, kv_head, member, SIDE: tl.constexpr, mods, S: tl.constexpr):
    """Keys that rows see to a side: `number` of all heads alike, or each row's by its head."""
    if mods.head_windows is None:
        return number
    else:
        return bounded(load_side(kv_head * S.GROUP + member, SIDE, mods))


@triton.jit
def side_of_block(number, kv_head, SIDE: tl.constexpr, mods, S: tl.constexpr):
    """(least, most) that a head of a KV head sees to a side; kv_head None: of a head that may be any."""
    if mods.head_windows is None:
        return number, number
    elif kv_head is None:
        return 0, FAR_KEYS
    else:
        least = load_side(kv_head * S.GROUP, SIDE, mods)
        most = least
        for i in range(1, S.GROUP):
            keys = load_side(kv_head * S.GROUP + i, SIDE, mods)
            least, most = tl.minimum(least, keys), tl.maximum(most, keys)
        return bounded(least), bounded(most)
