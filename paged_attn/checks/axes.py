"""Checks of tensors: axes by name, dtypes, device, scales.

The first tensor with an axis settles the size of that axis; later tensors are compared with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import scales_tokens
from ..strides import lies_in
from . import cures
from .kernel_tensors import CACHE_FOR, FLOAT32, FP8, INT4, SAME, SCALED, SLOT_SCALE, names, plain
from .options import choice, kind, refused, scale_number
from .swapped import LAYOUTS, OTHER, reading, shares_out

MAX_DIM = 512  # dims of queries and keys, and of values
MAX_LATENT_DIM = 576  # dims of keys that hold their values
MAX_WORDS = 32  # words of a query's row of qq_mask

PACKED = ("pages", "kv_heads", "head_dim // x", "page_size", "x")
NO_VALUES = "for such keys hold no values"

ScaleLike = float | Tensor | None


def values_apart(v_cache: Any) -> ValueError:
    """The error of write_kv if v is None, and v_cache is neither None nor the view k_cache[..., :value_dim]."""
    given = f"{list(v_cache.shape) if isinstance(v_cache, Tensor) else kind(v_cache)}: pass v, too"
    return ValueError(f"v_cache must be None, or k_cache[..., :value_dim], with v = None, got {given}")


class Axes(NamedTuple):
    """Sizes of a call's axes, 0 for an axis that the call does not have.

    max_pages: for a ragged page table, the number of all indices.  x: size of the innermost axis of an x-packed
    k_cache.  parts: number of states that merge_states joins.
    """

    tokens: int
    seqs: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    pages: int = 0
    page_size: int = 0
    max_pages: int = 0
    x: int = 0
    parts: int = 0
    value_dim: int = 0


class Door:
    """What the tensors of a call have settled so far: sizes of named axes, and the device."""

    __slots__ = ("cache", "device", "first", "settled", "sizes")

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.first = ""
        self.sizes: dict[str, int] = {}
        self.settled: dict[str, str] = {}  # by axis: the argument that settled its size
        self.cache: tuple[str, torch.Size] | None = None  # kv_layout and shape of a 4-D k_cache

    def tensor(
        self, name: str, value: Any, axes: tuple[str, ...], dtypes: tuple[torch.dtype, ...], beside: str = "",
        decides: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Check a tensor's axes and dtype, and that its last axis is contiguous.

        beside, decides: name and dtype of the argument that determines `dtypes`.  None: no argument does.
        """
        self.place(name, value, dtypes, beside, decides)
        self.bind(name, value, axes)
        if value.stride(-1) != 1 and value.shape[-1] > 1 and value.numel():
            axis = f"its last axis of {axes[-1]}" if axes[-1].isdigit() else axes[-1]
            given = f"{list(value.stride())}{cures.of_strides(name)}"
            raise ValueError(f"{name} must be contiguous along {axis}, got strides {given}")

    def place(
        self, name: str, value: Any, dtypes: tuple[torch.dtype, ...], beside: str = "",
        decides: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Check that a value is a tensor of one of these dtypes, on the device of the first tensor."""
        wanted = names(dtypes) if decides is None else f"{names(dtypes)}, for {beside} is {names((decides,))}"
        if not isinstance(value, Tensor):
            given = f"{kind(value)}{cures.of_no_tensor(name, value, dtypes)}"
            raise TypeError(f"{name} must be a tensor of {wanted}, got {given}")
        if value.dtype not in dtypes:
            given = f"{names((value.dtype,))}{cures.of_dtype(name, value.dtype, dtypes, beside, decides)}"
            raise TypeError(f"{name} must be {wanted}, got {given}")
        if value.device != self.device:
            if self.device is not None:
                raise ValueError(f"{name} must be on {self.device} like {self.first}, got {value.device}")
            self.device, self.first = value.device, name
        plain(name, value)
        if value.is_neg():  # its memory holds the negated numbers, which kernels would read
            raise ValueError(f"{name} must hold its numbers, got a lazily negated view: pass {name}.resolve_neg()")

        if value.is_conj():
            raise ValueError(f"{name} must hold its numbers, got a lazily conjugated view: pass {name}.resolve_conj()")

    def bind(self, name: str, value: Tensor, axes: tuple[str, ...]) -> None:
        """Settle the sizes of axes that are new, and compare the sizes of other axes with those settled."""
        shape, sizes = value.shape, self.sizes
        if len(shape) != len(axes):
            raise self.wrong_shape(name, shape, axes)
        for axis, size in zip(axes, shape):
            if sizes.setdefault(axis, size) != size:
                raise self.wrong_shape(name, shape, axes)
            self.settled.setdefault(axis, name)

    def wrong_shape(self, name: str, shape: torch.Size, axes: tuple[str, ...]) -> ValueError:
        """The error for a shape: it names the axes that differ, or all known axes if the rank differs."""
        got = shape if len(shape) == len(axes) else [None] * len(axes)
        known = [axis for axis, size in zip(axes, got) if self.sizes.get(axis, size) != size]
        wanted = f"[{', '.join(axes)}]" + (f" with {self._known(name, known)}" if known else "")
        hint = self._swapped(name, shape, axes) or cures.of_shape(name, shape, axes, self.sizes)
        given = f"{list(shape)}{hint}"
        return ValueError(f"{name} must be {wanted}, got {given}")

    def _known(self, name: str, axes: list[str]) -> str:
        """Sizes of axes as text: "tokens = 5, heads = 6 from q, value_dim = 32 from v_cache"."""
        told = [f"{axis} = {self.sizes[axis]}" for axis in axes]
        whose = [self._settled(axis, name) for axis in axes]
        ends = [whose[i + 1 : i + 2] != [mine] for i, mine in enumerate(whose)]
        return ", ".join(f"{x} from {mine}" if end and mine else x for x, mine, end in zip(told, whose, ends))

    def _settled(self, axis: str, name: str) -> str:
        """The argument that settled an axis; "" if `name` itself did, or none."""
        kin = axis.removesuffix(" + 1") if axis.endswith(" + 1") else f"{axis} + 1"
        found = self.settled.get(axis) or self.settled.get(kin, "")
        return "" if found == name else found

    def _swapped(self, name: str, shape: torch.Size, axes: tuple[str, ...]) -> str:
        """A hint that the other kv_layout would give the number of KV heads wanted, or ""."""
        sizes = self.sizes
        # kv_heads is known before k_cache only in write_kv and write_qkv, where k settles it
        layout = next((x for x, its in LAYOUTS.items() if its[:3] == axes[:3]), "")
        if name == "k_cache" and len(shape) == 4 and layout:
            other = dict(zip((*LAYOUTS[OTHER[layout]][:3], axes[3]), shape))
            fits = all(other[axis] == sizes.get(axis) for axis in ("kv_heads", axes[3]))
            return f": {reading(layout, shape, True)}" if fits and shape[1] != shape[2] else ""
        if self.cache is None or "kv_heads" not in axes or len(shape) != len(axes):
            return ""
        given = shape[axes.index("kv_heads")]
        fits = given == sizes["page_size"] != sizes["kv_heads"]
        return f": {reading(*self.cache, True)}" if fits and name not in ("v_cache", "k_scale", "v_scale") else ""

    def wrong_heads(self, heads: int) -> ValueError:
        """The error for a number of query heads that kv_heads does not divide.

        The text also says how a 4-D k_cache was read, because kv_layout may be wrong.
        """
        sizes, read = self.sizes, ""
        if self.cache is not None:
            read = f": {reading(*self.cache, shares_out(heads, sizes['page_size']))}"
        wanted = f"heads a positive multiple of kv_heads = {sizes['kv_heads']}"
        return ValueError(f"q must have {wanted}, got heads = {heads}{read}")

    def caches(self, k_cache: Any, v_cache: Any, kv_layout: Any, beside: str, decides: torch.dtype) -> None:
        """Check both caches.  A 5-D k_cache is x-packed.  beside, decides: as in `tensor`."""
        self._keys(k_cache, kv_layout, beside, decides)
        axes = ("pages", "kv_heads", "value_dim", "page_size")
        axes = axes if k_cache.ndim == 5 else (*LAYOUTS[kv_layout][:3], "value_dim")
        if k_cache.dtype == INT4:
            self._packed("v_cache", v_cache, axes, SAME[INT4], "k_cache", INT4)
            if lies_in(v_cache, k_cache):
                raise refused("v_cache", f"apart from k_cache over int4, {NO_VALUES}", "k_cache[..., :value_dim / 2]")
        else:
            self.tensor("v_cache", v_cache, axes, SAME[k_cache.dtype], "k_cache", k_cache.dtype)
        self._page(k_cache)
        for axis in ("head_dim", "value_dim"):
            if not 1 <= self.sizes[axis] <= MAX_DIM:
                self._wide_keys(axis, k_cache, v_cache)

    def latent(self, k_cache: Any, v_cache: Any, kv_layout: Any, beside: str, decides: torch.dtype) -> None:
        """Check a cache whose keys hold their values; v_cache is None, or the view of the values."""
        self._keys(k_cache, kv_layout, beside, decides)
        if k_cache.dtype == INT4:
            raise refused("v", f"given over int4, {NO_VALUES}", None)
        self._page(k_cache)
        if v_cache is not None and not lies_in(v_cache, k_cache):
            raise values_apart(v_cache)
        axis = "head_dim"
        if not 1 <= self.sizes[axis] <= MAX_LATENT_DIM:
            raise ValueError(f"{axis} must be between 1 and {MAX_LATENT_DIM}, got {self.sizes[axis]}")

    def _keys(self, k_cache: Any, kv_layout: Any, beside: str, decides: torch.dtype) -> None:
        choice("kv_layout", kv_layout, tuple(LAYOUTS))
        dtypes = CACHE_FOR[decides]
        if isinstance(k_cache, Tensor) and k_cache.dtype == INT4:
            if k_cache.ndim == 5:
                wanted = f"[{', '.join((*LAYOUTS[kv_layout][:3], 'head_dim / 2'))}] over int4, which is not x-packed"
                raise refused("k_cache", wanted, list(k_cache.shape))
            self._packed("k_cache", k_cache, LAYOUTS[kv_layout], dtypes, beside, decides)
            self.cache = kv_layout, k_cache.shape
        elif isinstance(k_cache, Tensor) and k_cache.ndim == 5:
            self.tensor("k_cache", k_cache, PACKED, dtypes, beside, decides)
            if self.sizes["head_dim // x"] * self.sizes["x"] != self.sizes["head_dim"]:
                wanted = f"[{', '.join(PACKED)}] with {self._known('k_cache', ['head_dim'])}"
                given = f"{list(k_cache.shape)}{cures.of_shape('k_cache', k_cache.shape, PACKED, self.sizes)}"
                raise ValueError(f"k_cache must be {wanted}, got {given}")
        else:
            self.tensor("k_cache", k_cache, LAYOUTS[kv_layout], dtypes, beside, decides)
            self.cache = kv_layout, k_cache.shape

    def _packed(
        self, name: str, cache: Any, axes: tuple[str, ...], dtypes: tuple[torch.dtype, ...], beside: str,
        decides: torch.dtype,
    ) -> None:  # fmt: skip
        """Check an int4 cache, and settle the size of its last axis in dims.

        A byte holds two dims.  Kernels read two bytes at a time, so the address and the strides must be even.
        """
        dim = axes[-1]
        half, known = f"{dim} / 2", self.sizes.get(dim)
        if known is not None:
            if known % 4:
                raise refused(dim, "a multiple of 4 over int4", known)
            self.sizes[half], self.settled[half] = known // 2, self.settled[dim]
            if isinstance(cache, Tensor) and (cure := cures.of_bytes(name, cache.shape, known)):
                wanted = f"[{', '.join((*axes[:-1], half))}] with {self._known(name, [half])}, for uint8 is int4"
                raise refused(name, wanted, f"{list(cache.shape)}{cure}")
        self.tensor(name, cache, (*axes[:-1], half), dtypes, beside, decides)
        if known is None:
            self.sizes[dim], self.settled[dim] = 2 * cache.shape[-1], name
            if cache.shape[-1] % 2:
                raise refused(dim, "a multiple of 4 over int4", self.sizes[dim])
        steps = [stride for stride, size in zip(cache.stride()[:-1], cache.shape) if size > 1]
        if any(step % 2 for step in steps) or cache.data_ptr() % 2:
            at = f"strides {list(cache.stride())} at an {'odd' if cache.data_ptr() % 2 else 'even'} address"
            raise refused(name, "at an even address and of even strides over int4", at)

    def _page(self, k_cache: Tensor) -> None:
        for axis in ("kv_heads", "page_size"):
            if self.sizes[axis] < 1:
                raise ValueError(f"k_cache must have {axis} >= 1, got {list(k_cache.shape)}")

    def _wide_keys(self, axis: str, k_cache: Tensor, v_cache: Tensor) -> None:
        """Refuse a head_dim or value_dim outside of 1 to 512.  Keys that hold their values may have up to 576 dims."""
        size = self.sizes[axis]
        if axis == "value_dim" or not MAX_DIM < size <= MAX_LATENT_DIM:
            raise ValueError(f"{axis} must be between 1 and {MAX_DIM}, got {size}")
        if not lies_in(v_cache, k_cache):
            raise ValueError(
                f"{axis} must be between 1 and {MAX_DIM}, or {MAX_LATENT_DIM} where v_cache is "
                f"k_cache[..., :value_dim], got {size}"
            )

    def scale(
        self, name: str, value: Any, of: str, dtype: torch.dtype, axis: str | None = "kv_heads", more: str = ""
    ) -> None:
        """Check a scale: required for a tensor of fp8 or int8, refused for a tensor of another dtype.

        of, dtype: name and dtype of the tensor that is scaled.  axis: name of the axis along which the scale may
        differ.  None: one number only.  more: further shapes, for the error.
        """
        if value is None:
            if dtype in SCALED:
                cure = "pass it, or a bfloat16 out" if of == "out" else "1.0 if what is stored is not scaled"
                told = f"{names((dtype,))}: {cure}"
                raise ValueError(f"{name} is required, for {of} is {told}")
        elif dtype not in SCALED:
            kinds = "fp8 or int8" if of in cures.CACHES else "fp8"
            raise ValueError(f"{name} must be None, for {of} is {names((dtype,))} and not {kinds}")
        elif not isinstance(value, Tensor):
            scale_number(name, value)
        else:
            self.place(name, value, FLOAT32)
            self._scale_shape(name, value, axis, more)

    def cache_scale(self, name: str, value: Any, of: str, dtype: torch.dtype, order: str | None = None) -> None:
        """Check the scale of a cache: as in `scale`, or by token, with a number for each slot and KV head of the cache.

        int4 requires scales by token.  Axes of scales by token are in the order "NHD" or "HND"; None: that of the cache
        that `caches` or `latent` has checked, or HND if x-packed.
        """
        axes = LAYOUTS[order or ("HND" if self.cache is None else self.cache[0])][:3]
        if dtype == INT4:
            wanted = f"float32 [{', '.join(axes)}], for {of} is int4 (uint8)"
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be {wanted}, got {kind(value)}")
            if value.ndim != 3:
                raise refused(name, wanted, list(value.shape))
            self.place(name, value, FLOAT32, of, dtype)
            self.bind(name, value, axes)
        elif isinstance(value, Tensor) and value.ndim > 2 and dtype in SCALED:
            self.place(name, value, SLOT_SCALE)
            self.bind(name, value, axes)
        else:
            self.scale(name, value, of, dtype, more=f", or by token [{', '.join(axes)}]")

    def _scale_shape(self, name: str, value: Tensor, axis: str | None, by_token: str) -> None:
        """Check a scale's shape: one number, [axis], [1, axis] or [seqs, axis].

        by_token: shapes of scales by token, for the error.
        """
        *others, last = value.shape or (1,)
        if value.numel() == 1 and len(others) <= 1:
            return
        if axis is not None and others in ([], [1]) and last == self.sizes[axis]:
            return
        if axis is None:
            raise ValueError(f"{name} must be one number, [] or [1], got {list(value.shape)}")
        if others != [self.sizes.get("seqs")] or last != self.sizes[axis]:
            known = [f"{x} = {self.sizes[x]}" for x in (axis, "seqs") if x in self.sizes]
            more = f", [1, {axis}] or [seqs, {axis}]" if "seqs" in self.sizes else f" or [1, {axis}]"
            more += by_token
            raise ValueError(f"{name} must be [], [1], [{axis}]{more} with {', '.join(known)}, got {list(value.shape)}")


def check_query_scale(door: Door, value: Any, q: Tensor) -> None:
    """Check q_scale.

    For fp8 queries, q_scale is one number, or has a number for each KV head, for each sequence and KV head, for each
    token, or for each token and KV head.  For other queries, q_scale is None or has a number for each token.
    """
    name = "q_scale"
    if not isinstance(value, Tensor):
        door.scale(name, value, "q", q.dtype)
        return
    door.place(name, value, FLOAT32)
    shape, sizes = list(value.shape), door.sizes
    tokens, kv_heads = sizes["tokens"], sizes["kv_heads"]
    if q.dtype not in FP8:
        if shape not in ([tokens], [tokens, 1]):
            wanted = f"None, [tokens] or [tokens, 1] with tokens = {tokens} beside {names((q.dtype,))} queries"
            raise ValueError(f"{name} must be {wanted}, got {shape}")
    elif shape not in ([tokens, 1], [tokens, kv_heads]) or not (value.stride(0) == 0 or scales_tokens(value, q)):
        door.scale(name, value, "q", q.dtype, more=", by token [tokens, 1] or [tokens, kv_heads]")
