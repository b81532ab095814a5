"""Windows by query head: the keys that a head sees to its left and right, and the extremes over a KV head's group.

In a call with head_windows, the modifiers `left` and `right` only say that bounds exist; head_windows has the bounds.
"""

import triton
import triton.language as tl

from .numerics import load_int

LEFT, RIGHT = tl.constexpr(0), tl.constexpr(1)
# Farther than any key; a position plus this number still fits 32 bits, as in attend.py.
FAR_KEYS = tl.constexpr(1 << 30)


@triton.jit
def load_side(head, SIDE: tl.constexpr, mods):
    """Keys that query heads, one or [N], see to a side, as uint32; -1 (all keys) becomes the largest number."""
    if mods.head_windows_stride is None:
        at = mods.head_windows + (2 * head + SIDE)
    else:
        at = mods.head_windows + tl.cast(head, tl.int64) * mods.head_windows_stride + SIDE
    return load_int(at).to(tl.uint32, bitcast=True)


@triton.jit
def bounded(keys):
    """Number of keys, at most FAR_KEYS, as int32."""
    return tl.minimum(keys, FAR_KEYS).to(tl.int32, bitcast=True)


@triton.jit
def side_of_rows(number, kv_head, member, SIDE: tl.constexpr, mods, S: tl.constexpr):
    """Keys that rows see to a side: `number` for all heads, or [R] by each row's head."""
    if mods.head_windows is None:
        return number
    else:
        return bounded(load_side(kv_head * S.GROUP + member, SIDE, mods))


@triton.jit
def side_of_block(number, kv_head, SIDE: tl.constexpr, mods, S: tl.constexpr):
    """(fewest, most) keys that the heads of a KV head see to a side; kv_head None: bounds for any head."""
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
