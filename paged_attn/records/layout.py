"""Cache layouts: each is a handful of strides, decided here, so that kernels know one address formula."""

import math

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kernels.common.records import KV, KeyValues, PageStarts, Rows
from ..kernels.common.shape import Shape
from .formats import MANTISSA

# Strides of tokens and heads from which on offsets inside a block of rows are counted in 64 bits.  Below, 32 are enough
# for 256 rows, 128 heads (`output.MAX_HEADS_OF_NARROW_ROWS`) and, of tokens, the 16 warps x 132 programs of
# `queries.bring_queries`.
FAR_TOKENS, FAR_HEADS = 1 << 19, 1 << 23


def _stored(x: torch.Tensor) -> tuple[torch.Tensor, tl.constexpr]:
    """(tensor to point at, FP8): fp8 goes as bytes, since not every target and not the interpreter knows the types."""
    fp8 = MANTISSA.get(x.dtype, 0)
    return x.view(torch.uint8) if fp8 else x, tl.constexpr(fp8)


def rows(x: torch.Tensor) -> Rows:
    """[tokens, heads, head_dim]."""
    stored, fp8 = _stored(x)
    token, head = x.stride(0), x.stride(1)
    wide = (x.shape[0] > 1 and token >= FAR_TOKENS) or (x.shape[1] > 1 and head >= FAR_HEADS)
    return Rows(stored, token, head, fp8, tl.constexpr(True) if wide else None)


def contiguous(x: torch.Tensor) -> KV:
    """[tokens, kv_heads, head_dim] outside the cache: one page, token = slot."""
    stored, fp8 = _stored(x)
    return KV(stored, 0, x.stride(0), x.stride(1), 0, tl.constexpr(x.shape[2]), fp8, tl.constexpr(1))


def paged(x: torch.Tensor, kv_layout: str) -> KV:
    """NHD [pages, page_size, kv_heads, head_dim] or HND [pages, kv_heads, page_size, head_dim]."""
    stored, fp8 = _stored(x)
    page, slot, head, _ = x.stride() if kv_layout == "NHD" else (x.stride(i) for i in (0, 2, 1, 3))
    return KV(stored, page, slot, head, 0, tl.constexpr(x.shape[3]), fp8, tl.constexpr(1))


def packed_key(x: torch.Tensor) -> KV:
    """x-packed keys [pages, kv_heads, head_dim // x, page_size, x]."""
    stored, fp8 = _stored(x)
    page, head, run, slot, _ = x.stride()
    # a slot is x elements on: at compile time, so that the compiler knows it for 16 bytes
    return KV(stored, page, tl.constexpr(slot), head, run, tl.constexpr(x.shape[4]), fp8, tl.constexpr(1))


def packed_value(x: torch.Tensor) -> KV:
    """The values beside x-packed keys [pages, kv_heads, head_dim, page_size]: every dim is a run of its own."""
    stored, fp8 = _stored(x)
    page, head, run, slot = x.stride()
    align = _align(stored, page, head, run) if slot == 1 else tl.constexpr(1)
    return KV(stored, page, slot, head, run, tl.constexpr(1), fp8, align)


def _align(x: torch.Tensor, *steps: int) -> tl.constexpr:
    """The power of two, up to 16, that divides a tensor's address, in elements, and these strides."""
    return tl.constexpr(math.gcd(16, x.data_ptr() // x.element_size(), *steps))


def keys(k_cache: torch.Tensor, kv_layout: str) -> KV:
    """Keys alone; 5-D ones are x-packed."""
    return packed_key(k_cache) if k_cache.ndim == 5 else paged(k_cache, kv_layout)


def cache(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str) -> KeyValues:
    """The caches of a call."""
    return KeyValues(
        keys(k_cache, kv_layout), packed_value(v_cache) if k_cache.ndim == 5 else paged(v_cache, kv_layout)
    )


def pairable(kv: KV, head_dim: int) -> bool:
    """Whether this is fp8 whose dims can be read two at a time: everything even, and half a head enough for a dot."""
    if kv.FP8 == 0 or head_dim <= 16:
        return False
    steps = (kv.stride_page, kv.stride_slot, kv.stride_head, kv.stride_run, kv.RUN)
    return math.gcd(*steps, kv.ptr.storage_offset(), kv.ptr.data_ptr()) % 2 == 0


def pairs(cache: KeyValues, head_dim: int, value_dim: int) -> KeyValues:
    """The same cache through int16 pointers, keys and values each where they can be read so."""
    return KeyValues(*(_pairs(kv) if pairable(kv, n) else kv for kv, n in zip(cache, (head_dim, value_dim))))


def _pairs(kv: KV) -> KV:
    ptr = kv.ptr.view(torch.int16)
    steps = (kv.stride_page, kv.stride_slot, kv.stride_head, kv.stride_run)
    page, slot, head, run = (step // 2 for step in steps)
    return KV(ptr, page, slot, head, run, kv.RUN // 2, kv.FP8, _align(ptr, page, slot, head, run), tl.constexpr(2))


def of_known_steps(keys: KeyValues) -> KeyValues:
    """Slots so far apart at compile time: addresses of a tile's rows differ by constants, and hold one register."""
    return KeyValues(*(kv._replace(stride_slot=tl.constexpr(kv.stride_slot)) for kv in keys))


def of_one_head(keys: KeyValues) -> KeyValues:
    """Each KV head is the first."""
    return KeyValues(*(kv._replace(stride_head=0) for kv in keys))


def page_starts(page_table: torch.Tensor, starts: torch.Tensor | None) -> PageStarts | None:
    """Of a ragged page table, whose rows lie one behind the other or anywhere in a list of page ids."""
    return None if starts is None else PageStarts(starts, starts.stride(0), page_table.stride(0))


def boxable(*caches: torch.Tensor) -> bool:
    """Whether the copy engine can read these 16-bit caches: 16-byte steps, head_dim a power of two."""
    return all(
        x.element_size() == 2 and x.ndim == 4 and x.shape[0] > 0 and x.shape[3] in (64, 128, 256) and aligned(x)
        for x in caches
    )


def rows_per_page(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str) -> int:
    """Slot strides from page to page where boxes of several slots can be cut out of both caches; else 0.

    Of x-packed caches pages are an axis of the boxes: 1.
    """
    if k_cache.ndim == 5:
        return int(_packed_boxable(k_cache, v_cache))
    if not all(x.ndim == 4 and x.shape[0] > 0 and aligned(x) for x in (k_cache, v_cache)):
        return 0
    ratios = set()
    for cache in (paged(k_cache, kv_layout), paged(v_cache, kv_layout)):
        whole = cache.stride_slot > 0 and cache.stride_page % cache.stride_slot == 0
        ratios.add(cache.stride_page // cache.stride_slot if whole else 0)
    rows = ratios.pop()
    fits = rows * k_cache.shape[0] < 2**31 - 2**16
    return rows if not ratios and fits else 0


def _packed_boxable(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether a page's slots lie side by side, 16 bytes of keys each, and it and all else is in steps of 16 bytes."""
    x, size = k_cache.shape[4], k_cache.element_size()
    dense = x * size == 16 and k_cache.stride()[3:] == (x, 1) and v_cache.stride(3) == 1
    return (
        dense
        and v_cache.shape[3] * size % 16 == 0
        and all(cache.shape[0] > 0 and aligned(cache) for cache in (k_cache, v_cache))
    )


def adjacent(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str) -> bool:
    """Whether a slot's heads lie side by side in both caches, so that any two of them are one of twice the dims."""
    caches = (k_cache, v_cache)
    return all(x.ndim == 4 and paged(x, kv_layout).stride_head == x.shape[3] for x in caches)


def rows_boxable(k_new: torch.Tensor, v_new: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the copy engine can read keys and values outside the cache beside a cache of this type.

    v_new None: values lie in these keys.
    """
    return all(x.dtype == dtype and x.shape[0] > 0 and aligned(x) for x in (k_new, v_new) if x is not None)


def aligned(x: torch.Tensor) -> bool:
    """Whether the copy engine can address a tensor of 8 or 16 bits: every step is a multiple of 16 bytes."""
    return (
        x.element_size() <= 2
        and x.data_ptr() % 16 == 0
        and not any(stride * x.element_size() % 16 or stride <= 0 for stride in x.stride()[:-1])
    )


def boxes(cache: KeyValues, shape: Shape) -> tuple[TensorDescriptor, TensorDescriptor]:
    """One page's worth of one head, a tile of keys at a time, as the copy engine takes it."""

    def box(kv: KV, dim: int, padded: int) -> TensorDescriptor:
        sizes = [kv.ptr.shape[0], shape.PAGE, shape.KV_HEADS, dim]
        strides = [kv.stride_page, kv.stride_slot, kv.stride_head, 1]
        return TensorDescriptor(kv.ptr, sizes, strides, [1, shape.TILE, 1, padded])

    return box(cache.key, shape.HEAD_DIM, shape.DIM), box(cache.value, shape.VALUE_DIM, shape.VALUE_PADDED)
