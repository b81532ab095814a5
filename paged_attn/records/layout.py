"""A call's tensors as kernels take them: layouts as strides, so that kernels need one address formula for all layouts.

`Call` is the record of all tensors of a call, which every launch of its plan shares.
"""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..arguments import scales_slots
from ..kernels.common.records import KV, KeyValues, Modifiers, PageStarts, Rows, Scales, Scratch, Shape
from ..launching.launch import COUNTERS, STATES
from .formats import MANTISSA

# If a tensor's stride of tokens or of heads is at least this large, offsets inside a block of rows need 64 bits.
# With smaller strides, 32 bits suffice for 256 rows, for 128 heads (`output.MAX_HEADS_OF_NARROW_ROWS`), and for the
# tokens of 16 warps x 132 programs in `queries.bring_queries`.
FAR_TOKENS, FAR_HEADS = 1 << 19, 1 << 23


def _stored(x: torch.Tensor) -> tuple[torch.Tensor, tl.constexpr]:
    """(tensor that kernels read, its format as in `Rows.FP8`).

    Kernels read fp8, int8 and int4 as bytes, because the interpreter and some targets lack fp8 types.
    """
    fp8 = MANTISSA.get(x.dtype, 0)
    return x.view(torch.uint8) if fp8 else x, tl.constexpr(fp8)


def rows(x: torch.Tensor) -> Rows:
    """A tensor [tokens, heads, head_dim] with the strides by which kernels address it."""
    stored, fp8 = _stored(x)
    token, head = x.stride(0), x.stride(1)
    wide = (x.shape[0] > 1 and token >= FAR_TOKENS) or (x.shape[1] > 1 and head >= FAR_HEADS)
    return Rows(stored, token, head, fp8, tl.constexpr(True) if wide else None)


def packed_rows(x: torch.Tensor, head_dim: int) -> Rows:
    """All heads of a tensor [tokens, heads * head_dim] that is not fp8."""
    return Rows(x, x.stride(0), head_dim, tl.constexpr(0))


def contiguous(x: torch.Tensor) -> KV:
    """Keys or values [tokens, kv_heads, head_dim] outside the cache, as one page whose slots are tokens."""
    stored, fp8 = _stored(x)
    return KV(stored, 0, x.stride(0), x.stride(1), 0, tl.constexpr(x.shape[2]), fp8, tl.constexpr(1))


def paged(x: torch.Tensor, kv_layout: str) -> KV:
    """A cache in NHD [pages, page_size, kv_heads, head_dim] or HND [pages, kv_heads, page_size, head_dim]."""
    stored, fp8 = _stored(x)
    page, slot, head, _ = x.stride() if kv_layout == "NHD" else (x.stride(i) for i in (0, 2, 1, 3))
    return KV(stored, page, slot, head, 0, tl.constexpr(x.shape[3]), fp8, tl.constexpr(1))


def packed_key(x: torch.Tensor) -> KV:
    """x-packed keys [pages, kv_heads, head_dim // x, page_size, x]."""
    stored, fp8 = _stored(x)
    page, head, run, slot, _ = x.stride()
    # the stride of slots, x elements, is a constexpr: the compiler then knows that a slot has 16 bytes
    return KV(stored, page, tl.constexpr(slot), head, run, tl.constexpr(x.shape[4]), fp8, tl.constexpr(1))


def packed_value(x: torch.Tensor) -> KV:
    """Values beside x-packed keys, [pages, kv_heads, head_dim, page_size]; no neighbouring dims are contiguous."""
    stored, fp8 = _stored(x)
    page, head, run, slot = x.stride()
    align = _align(stored, page, head, run) if slot == 1 else tl.constexpr(1)
    return KV(stored, page, slot, head, run, tl.constexpr(1), fp8, align)


def _align(x: torch.Tensor, *steps: int) -> tl.constexpr:
    """The largest power of two, up to 16, that divides a tensor's address in elements and these strides."""
    return tl.constexpr(math.gcd(16, x.data_ptr() // x.element_size(), *steps))


def keys(k_cache: torch.Tensor, kv_layout: str, k_scale: Any = None) -> KV:
    """The key cache of a call; a 5-D tensor is x-packed.  The record includes k_scale if that is a scale by slot."""
    if k_cache.ndim == 5:
        return _by_slot(packed_key(k_cache), k_scale, "HND")
    return _by_slot(paged(k_cache, kv_layout), k_scale, kv_layout)


def cache(
    k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str, k_scale: Any = None, v_scale: Any = None
) -> KeyValues:
    """The caches of a call.  The records include k_scale and v_scale if these are scales by slot."""
    if k_cache.ndim == 5:
        value = _by_slot(packed_value(v_cache), v_scale, "HND")
    else:
        value = _by_slot(paged(v_cache, kv_layout), v_scale, kv_layout)
    return KeyValues(keys(k_cache, kv_layout, k_scale), value)


def _by_slot(kv: KV, scale: Any, order: str) -> KV:
    """Keys or values with their scale, if that is a scale by slot; otherwise `kv` unchanged.

    order: "NHD" if the axes of `scale` are [pages, page_size, kv_heads], "HND" if [pages, kv_heads, page_size].
    """
    if not scales_slots(scale):
        return kv
    page, slot, head = scale.stride() if order == "NHD" else (scale.stride(i) for i in (0, 2, 1))
    return kv._replace(
        SCALED=tl.constexpr(True), scale_ptr=scale,
        scale_stride_page=page, scale_stride_slot=slot, scale_stride_head=head,
    )  # fmt: skip


def pairable(kv: KV, head_dim: int) -> bool:
    """Whether a cache of bytes can be read two bytes at a time.

    The address and all strides must be even.  The two bytes of a pair belong to different parts of a head, and a dot
    needs 16 dims of each part.  So head_dim must be more than 16, and is then padded to 32 or more.  Over int4 it may
    be less, because each part is padded to 16 dims.
    """
    if kv.FP8 == 0 or (head_dim <= 16 and kv.FP8 != 4):
        return False
    steps = (kv.stride_page, kv.stride_slot, kv.stride_head, kv.stride_run, kv.RUN)
    return math.gcd(*steps, kv.ptr.storage_offset(), kv.ptr.data_ptr()) % 2 == 0


def pairs(cache: KeyValues, head_dim: int, value_dim: int) -> KeyValues:
    """The caches as int16, with two bytes an element.  Keys or values that are not `pairable` are unchanged."""
    return KeyValues(*(_pairs(kv) if pairable(kv, n) else kv for kv, n in zip(cache, (head_dim, value_dim))))


def _pairs(kv: KV) -> KV:
    ptr = kv.ptr.view(torch.int16)
    steps = (kv.stride_page, kv.stride_slot, kv.stride_head, kv.stride_run)
    page, slot, head, run = (step // 2 for step in steps)
    return kv._replace(
        ptr=ptr,
        stride_page=page,
        stride_slot=slot,
        stride_head=head,
        stride_run=run,
        RUN=kv.RUN // 2,
        ALIGN=_align(ptr, page, slot, head, run),
        PARTS=tl.constexpr(4 if kv.FP8 == 4 else 2),
    )


def of_known_steps(keys: KeyValues) -> KeyValues:
    """Keys and values with a constexpr stride of slots.

    Addresses of a tile's rows then differ by constants, and take one register.
    """
    return KeyValues(*(kv._replace(stride_slot=tl.constexpr(kv.stride_slot)) for kv in keys))


def of_one_head(keys: KeyValues) -> KeyValues:
    """Keys and values with a head stride of 0, so that every KV head reads the keys and values of the first one."""
    return KeyValues(
        *(kv._replace(stride_head=0, scale_stride_head=0 if kv.SCALED else kv.scale_stride_head) for kv in keys)
    )


def page_starts(page_table: torch.Tensor, starts: torch.Tensor | None) -> PageStarts | None:
    """Where the rows of a ragged page table start in its indices; None for a dense table."""
    return None if starts is None else PageStarts(starts, starts.stride(0), page_table.stride(0))


def boxable(*caches: torch.Tensor) -> bool:
    """Whether TMA can read these caches: 16-bit elements, 64, 128 or 256 dims, and addresses and strides `aligned`."""
    return all(
        x.element_size() == 2 and x.ndim == 4 and x.shape[0] > 0 and x.shape[3] in (64, 128, 256) and aligned(x)
        for x in caches
    )


def rows_per_page(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str) -> int:
    """Stride of pages divided by stride of slots; 0 if this ratio differs between the caches, or boxes cannot use it.

    Boxes of x-packed caches have an axis of pages instead.  Then the result is 1 if TMA can read the caches, else 0.
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
    """Whether TMA can read an x-packed cache.

    x dims must take 16 bytes, and slots must be adjacent.  Addresses, other strides and the slots of a page in v_cache
    must be multiples of 16 bytes.
    """
    x, size = k_cache.shape[4], k_cache.element_size()
    dense = x * size == 16 and k_cache.stride()[3:] == (x, 1) and v_cache.stride(3) == 1
    return (
        dense
        and v_cache.shape[3] * size % 16 == 0
        and all(cache.shape[0] > 0 and aligned(cache) for cache in (k_cache, v_cache))
    )


def adjacent(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str) -> bool:
    """Whether a slot's heads are adjacent in both caches, so that two heads can be read as one of twice the dims."""
    caches = (k_cache, v_cache)
    return all(x.ndim == 4 and paged(x, kv_layout).stride_head == x.shape[3] for x in caches)


def rows_boxable(k_new: torch.Tensor, v_new: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether k_new and v_new have the dtype `dtype`, and TMA can read them.

    v_new = None: the values are dims of k_new.
    """
    return all(x.dtype == dtype and x.shape[0] > 0 and aligned(x) for x in (k_new, v_new) if x is not None)


def aligned(x: torch.Tensor) -> bool:
    """Whether TMA can address a tensor of 8- or 16-bit elements: address and strides are multiples of 16 bytes."""
    return (
        x.element_size() <= 2
        and x.data_ptr() % 16 == 0
        and not any(stride * x.element_size() % 16 or stride <= 0 for stride in x.stride()[:-1])
    )


def boxes(cache: KeyValues, shape: Shape) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of keys and values; a box is a tile of keys of one page and one head."""

    def box(kv: KV, dim: int, padded: int) -> TensorDescriptor:
        sizes = [kv.ptr.shape[0], shape.PAGE, shape.KV_HEADS, dim]
        strides = [kv.stride_page, kv.stride_slot, kv.stride_head, 1]
        return TensorDescriptor(kv.ptr, sizes, strides, [1, shape.TILE, 1, padded])

    return box(cache.key, shape.HEAD_DIM, shape.DIM), box(cache.value, shape.VALUE_DIM, shape.VALUE_PADDED)


# ---- a call's record, and its scales -------------------------------------------------------------

ROOM = Scratch(STATES, COUNTERS)  # two Holes, which each launch fills with scratch memory of its stream


class Call(NamedTuple):
    """The tensors of a call.  In a kept call, a Hole (launching/template.py) stands for each tensor."""

    out: Rows
    lse: torch.Tensor | None
    query: Rows
    cache: KeyValues
    new: KeyValues | None
    query_starts: torch.Tensor | None
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    page_starts: PageStarts | None
    mods: Modifiers
    scales: Scales


def scales(
    softmax: float,
    query: Any = None,
    key: Any = None,
    value: Any = None,
    out: Any = None,
    gate: Any = None,
    by_token: bool = False,
    seqs: int | None = None,
) -> Scales:
    """Scales as kernels take them.  An absent scale is 1.

    A tensor of two axes has a row for each of `seqs` sequences, or one row for all.  seqs None: one row for all.
    If by_token is True, `query` has a row for each token.  A scale by slot is part of its cache's record (`cache`), and
    1 here.
    """
    of_tokens: tuple[Any, Any, Any] = (None, None, None)
    if by_token:
        of_tokens = (query, query.stride(0), query.stride(1) if query.ndim == 2 and query.shape[1] > 1 else 0)
        query = None
    given = (query, *[1.0 if scales_slots(x) else x for x in (key, value)], out)
    numbers = [float(x) if isinstance(x, (int, float)) else 1.0 for x in given]
    tensors = [None if isinstance(x, (int, float)) else x for x in given]
    strides = [None if x is None else 0 if x.ndim == 0 or x.shape[-1] == 1 else x.stride(-1) for x in tensors]
    of_seqs = [None if x is None or seqs is None else _stride_of_seqs(x, seqs) for x in tensors[:3]]
    of_gate: tuple[Any, Any, Any] = (None, None, None) if gate is None else (gate, *gate.stride()[:2])
    values = (softmax, *numbers, *tensors, *strides, *of_gate, *of_tokens, *of_seqs)
    return Scales(**dict(zip(Scales._fields, values)))  # `launch_arguments` sets the last fields, for Hopper kernels


def _stride_of_seqs(scale: Any, seqs: int) -> int | None:
    """Stride from a sequence's scale to the next sequence's; None if all sequences have one scale.

    If a single sequence has the only row, this is the stride of contiguous rows.  Kernels read no row of a sequence
    without keys then, and need not be compiled for one sequence and for several.
    """
    if scale.ndim < 2 or (scale.shape[0] > 1 and scale.stride(0) == 0):
        return None
    if scale.shape[0] > 1:
        return int(scale.stride(0))
    return int(scale.shape[1]) if seqs == 1 else None
