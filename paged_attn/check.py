"""Bad input, and what it gets: axes bound by name on first sight, dtypes, devices, strides, texts, the checked mode.

The fast checks (each call) look only at what the host knows; `*_contents` read the device. Nothing launches or writes.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALF = (torch.float16, torch.bfloat16)
FLOAT = (*HALF, torch.float32)
QUERY = (*FLOAT, *FP8)
FLOAT32, INT32, INT64 = (torch.float32,), (torch.int32,), (torch.int64,)
SAME = {dtype: (dtype,) for dtype in QUERY}
# by q's dtype: what the cache may be, and what sinks and qq_bias may be
CACHE_FOR = {dtype: (dtype, *FP8) if dtype in FLOAT else (*HALF, *FP8) for dtype in QUERY}
BIAS_FOR = {dtype: (torch.float32, dtype) if dtype in HALF else FLOAT32 for dtype in FLOAT} | dict.fromkeys(FP8, FLOAT)

LAYOUTS = {
    "NHD": ("pages", "page_size", "kv_heads", "head_dim"),
    "HND": ("pages", "kv_heads", "page_size", "head_dim"),
}
MAX_HEAD_DIM = 256
# numbers reach the kernels as int32 and float32
INT32_MAX = torch.iinfo(torch.int32).max
TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class Axes(NamedTuple):
    """The sizes of one call, 0 where it has no such axis; x = elements of a packed group, 0 without x-packing."""

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


class _Door:
    """What the tensors admitted so far have settled: the size of each named axis, and the device."""

    __slots__ = ("device", "first", "sizes")

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.first = ""
        self.sizes: dict[str, int] = {}

    def tensor(self, name: str, value: Any, axes: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        """Admit a tensor of these axes and one of these dtypes, its last axis contiguous."""
        self.place(name, value, dtypes)
        self.bind(name, value, axes)
        if value.stride(-1) != 1 and value.shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous along {axes[-1]}, got strides {list(value.stride())}")

    def place(self, name: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> None:
        """One of these dtypes, on the device of the first tensor."""
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor of {_names(dtypes)}, got {_kind(value)}")
        if value.dtype not in dtypes:
            raise TypeError(f"{name} must be {_names(dtypes)}, got {_names((value.dtype,))}")
        if value.device != self.device:
            if self.device is not None:
                raise ValueError(f"{name} must be on {self.device} like {self.first}, got {value.device}")
            self.device, self.first = value.device, name

    def bind(self, name: str, value: Tensor, axes: tuple[str, ...], instead: str = "") -> None:
        """Bind each axis on first sight, compare it ever after."""
        shape, sizes = value.shape, self.sizes
        if len(shape) != len(axes):
            raise self.wrong_shape(name, shape, axes, instead)
        for axis, size in zip(axes, shape):
            if sizes.setdefault(axis, size) != size:
                raise self.wrong_shape(name, shape, axes, instead)

    def wrong_shape(self, name: str, shape: torch.Size, axes: tuple[str, ...], instead: str = "") -> ValueError:
        """Names the axes that differ or, where the number of axes does, every axis already known."""
        got = shape if len(shape) == len(axes) else [None] * len(axes)
        known = [f"{axis} = {self.sizes[axis]}" for axis, size in zip(axes, got) if self.sizes.get(axis, size) != size]
        wanted = f"{instead}[{', '.join(axes)}]" + (f" with {', '.join(known)}" if known else "")
        return ValueError(f"{name} must be {wanted}, got {list(shape)}")

    def caches(self, k_cache: Any, v_cache: Any, kv_layout: Any, dtypes: tuple[torch.dtype, ...]) -> None:
        """Both caches, in any layout; the rank of k_cache tells x-packed ones."""
        _choice("kv_layout", kv_layout, tuple(LAYOUTS))
        if isinstance(k_cache, Tensor) and k_cache.ndim == 5:
            self.tensor("k_cache", k_cache, ("pages", "kv_heads", "head_dim // x", "page_size", "x"), dtypes)
            if self.sizes["head_dim // x"] * self.sizes["x"] != self.sizes["head_dim"]:
                wanted = f"[pages, kv_heads, head_dim // x, page_size, x] with head_dim = {self.sizes['head_dim']}"
                raise ValueError(f"k_cache must be {wanted}, got {list(k_cache.shape)}")
            self.tensor("v_cache", v_cache, ("pages", "kv_heads", "head_dim", "page_size"), SAME[k_cache.dtype])
        else:
            self.tensor("k_cache", k_cache, LAYOUTS[kv_layout], dtypes)
            self.tensor("v_cache", v_cache, LAYOUTS[kv_layout], SAME[k_cache.dtype])
        for axis in ("kv_heads", "page_size"):
            if self.sizes[axis] < 1:
                raise ValueError(f"k_cache must have {axis} >= 1, got {list(k_cache.shape)}")
        if not 1 <= self.sizes["head_dim"] <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be between 1 and {MAX_HEAD_DIM}, got {self.sizes['head_dim']}")

    def scale(self, name: str, value: Any, of: str, dtype: torch.dtype, axis: str | None = "kv_heads") -> None:
        """A scale belongs to an fp8 tensor, always, and to no other."""
        if value is None:
            if dtype in FP8:
                raise ValueError(f"{name} is required, for {of} is {_names((dtype,))}")
        elif dtype not in FP8:
            raise ValueError(f"{name} must be None, for {of} is {_names((dtype,))} and not fp8")
        elif not isinstance(value, Tensor):
            _number(name, value, "a finite number > 0, or a float32 tensor", TINY)
        else:
            self.place(name, value, FLOAT32)
            if value.shape != (1,):
                if axis is None:
                    raise ValueError(f"{name} must be [1], got {list(value.shape)}")
                self.bind(name, value, (axis,), "[1] or ")


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    *,
    kv_layout: str,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    qq_bias: Tensor | None,
    q_scale: float | Tensor | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    out: Tensor | None,
    out_scale: float | Tensor | None,
    return_lse: bool,
    only: str | None,
    batch_invariant: bool,
) -> Axes:
    """Everything the host can know about a call of paged_attention: raises, or returns its sizes."""
    door = _Door()
    door.tensor("q", q, ("tokens", "heads", "head_dim"), QUERY)
    door.caches(k_cache, v_cache, kv_layout, CACHE_FOR[q.dtype])
    door.tensor("page_table", page_table, ("seqs", "max_pages"), INT32)
    door.tensor("seq_lens", seq_lens, ("seqs",), INT32)
    sizes = door.sizes
    tokens, seqs, heads, kv_heads = sizes["tokens"], sizes["seqs"], sizes["heads"], sizes["kv_heads"]
    if heads < 1 or heads % kv_heads:
        raise ValueError(f"q must have heads a positive multiple of kv_heads = {kv_heads}, got heads = {heads}")
    if cu_seqlens_q is not None:
        sizes["seqs + 1"] = seqs + 1
        door.tensor("cu_seqlens_q", cu_seqlens_q, ("seqs + 1",), INT32)
    elif tokens != seqs:
        raise ValueError(f"cu_seqlens_q = None needs tokens = seqs, got q with tokens = {tokens} and seqs = {seqs}")
    if k_new is not None or v_new is not None:
        _both("k_new", k_new, "v_new", v_new)
        unscaled = (k_cache if q.dtype in FP8 else q).dtype
        dtypes = HALF if unscaled in FP8 else SAME[unscaled]
        door.tensor("k_new", k_new, ("tokens", "kv_heads", "head_dim"), dtypes)
        door.tensor("v_new", v_new, ("tokens", "kv_heads", "head_dim"), SAME[k_new.dtype])  # type: ignore[union-attr]
    if alibi_slopes is not None:
        door.tensor("alibi_slopes", alibi_slopes, ("heads",), FLOAT32)
    if sinks is not None:
        door.tensor("sinks", sinks, ("heads",), BIAS_FOR[q.dtype])
    if qq_bias is not None:
        door.tensor("qq_bias", qq_bias, ("n", "n"), BIAS_FOR[q.dtype])
    if out is not None:
        door.tensor("out", out, ("tokens", "heads", "head_dim"), QUERY)
        _writable("out", out)
    door.scale("q_scale", q_scale, "q", q.dtype)
    door.scale("k_scale", k_scale, "k_cache", k_cache.dtype)
    door.scale("v_scale", v_scale, "v_cache", v_cache.dtype)
    door.scale("out_scale", out_scale, "out", (q if out is None else out).dtype, axis=None)
    _integer("max_seqlen_q", max_seqlen_q, 0)
    _integer("max_seqlen_k", max_seqlen_k, 0)
    _window(window_size)
    if softmax_scale is not None:
        _number("softmax_scale", softmax_scale, "a finite number or None")
    _number("softcap", softcap, "a finite number >= 0", 0)
    _bool("causal", causal)
    _bool("return_lse", return_lse)
    if only is not None:
        _choice("only", only, ("decode", "prefill"))
    _bool("batch_invariant", batch_invariant)
    if batch_invariant and k_new is not None:
        # a tile at the border would be two, one of the cache and one of k_new
        raise ValueError(
            "k_new must be None with batch_invariant = True, for results would depend on where the cache ends"
        )
    if q.requires_grad and torch.is_grad_enabled():
        raise ValueError("q requires grad, but paged attention has no backward pass: call it under torch.no_grad()")
    return Axes(
        tokens,
        seqs,
        heads,
        kv_heads,
        sizes["head_dim"],
        sizes["pages"],
        sizes["page_size"],
        sizes["max_pages"],
        sizes.get("x", 0),
    )


def check_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: str,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> Axes:
    """Everything the host can know about a call of write_kv: raises, or returns its sizes."""
    door = _Door()
    door.tensor("k", k, ("tokens", "kv_heads", "head_dim"), FLOAT)
    door.tensor("v", v, ("tokens", "kv_heads", "head_dim"), SAME[k.dtype])
    door.caches(k_cache, v_cache, kv_layout, CACHE_FOR[k.dtype])
    door.tensor("slot_mapping", slot_mapping, ("tokens",), INT64)
    _writable("k_cache", k_cache)
    _writable("v_cache", v_cache)
    door.scale("k_scale", k_scale, "k_cache", k_cache.dtype)
    door.scale("v_scale", v_scale, "v_cache", v_cache.dtype)
    size = door.sizes
    return Axes(
        size["tokens"],
        kv_heads=size["kv_heads"],
        head_dim=size["head_dim"],
        pages=size["pages"],
        page_size=size["page_size"],
        x=size.get("x", 0),
    )


def check_merge(outs: Tensor, lses: Tensor) -> Axes:
    """Everything the host can know about a call of merge_states: raises, or returns its sizes."""
    door = _Door()
    door.place("outs", outs, FLOAT)
    door.bind("outs", outs, ("n", "tokens", "heads", "head_dim"))
    door.place("lses", lses, FLOAT32)
    door.bind("lses", lses, ("n", "tokens", "heads"))
    size = door.sizes
    if size["n"] < 1:
        raise ValueError(f"outs must be [n, tokens, heads, head_dim] with n >= 1, got {list(outs.shape)}")
    return Axes(size["tokens"], heads=size["heads"], head_dim=size["head_dim"], parts=size["n"])


def asked() -> bool:
    """What PAGED_ATTN_CHECK says now."""
    return os.environ.get("PAGED_ATTN_CHECK", "").lower() in ("1", "true", "yes", "on")


ALWAYS = asked()  # read once: a look into the environment takes a tenth of a kept call's time


def enabled(check: bool | None) -> bool:
    """Whether this call is a checked one: `check` itself or, where it is None, what PAGED_ATTN_CHECK said at import."""
    if check is None:
        return ALWAYS
    _bool("check", check, "True, False or None")
    return check


def check_attention_contents(
    axes: Axes,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    *,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    k_new: Tensor | None,
    window_size: tuple[int, int],
    only: str | None,
) -> None:
    """What only the device knows, read back; empty sequences, and those that `only` leaves out, may hold anything."""
    length = seq_lens.cpu().long()
    query = _query_lens(axes, cu_seqlens_q)
    live = (query > 0) & (length > 0)
    if only is not None:
        live &= (query == 1) if only == "decode" else (query != 1)

    for i in _first(live & (query > (query if max_seqlen_q is None else max_seqlen_q))):
        raise ValueError(f"sequence {i} has {query[i]} query tokens, but max_seqlen_q = {max_seqlen_q}")
    for i in _first(live & (length > (length if max_seqlen_k is None else max_seqlen_k))):
        raise ValueError(f"seq_lens[{i}] = {length[i]}, but max_seqlen_k = {max_seqlen_k}")
    for i in _first(live & (length < query)):
        raise ValueError(f"seq_lens[{i}] = {length[i]}, but sequence {i} has {query[i]} query tokens, which count too")

    # the positions that some query of the sequence may see, and that are in the cache: first ... end - 1
    context = length - query
    first = (context - window_size[0]).clamp(min=0) if window_size[0] >= 0 else torch.zeros_like(context)
    end = length if k_new is None else context
    live &= first < end
    for i in _first(live & (end > axes.max_pages * axes.page_size)):
        held = f"page_table[{i}] holds max_pages = {axes.max_pages} pages of {axes.page_size}"
        raise ValueError(f"seq_lens[{i}] = {length[i]} needs {end[i]} keys in the cache, but {held}")
    column, table = torch.arange(axes.max_pages), page_table.cpu()
    used = live[:, None] & (column >= (first // axes.page_size)[:, None]) & (column * axes.page_size < end[:, None])
    for i in _first((used & ((table < 0) | (table >= axes.pages))).flatten()):
        seq, col = divmod(i, axes.max_pages)
        raise ValueError(f"page_table[{seq}, {col}] = {table[seq, col]}, but the cache has {axes.pages} pages")


def check_write_contents(axes: Axes, slot_mapping: Tensor) -> None:
    """Slots that only the device knows, read back: each inside the cache, none twice, negative ones skipped."""
    slots = slot_mapping.cpu()
    for i in _first(slots >= axes.pages * axes.page_size):
        held = f"{axes.pages} pages of {axes.page_size} slots"
        raise ValueError(f"slot_mapping[{i}] = {slots[i]} (token {i}), but the cache has {held}")
    order = slots.argsort(stable=True)
    again = (slots[order[1:]] == slots[order[:-1]]) & (slots[order[1:]] >= 0)
    for j in _first(again):
        i, before = int(order[j + 1]), int(order[j])
        raise ValueError(f"slot_mapping[{i}] = {slots[i]} (token {i}), but token {before} has the same slot")


def _query_lens(axes: Axes, cu_seqlens_q: Tensor | None) -> Tensor:
    """Query tokens of each sequence [seqs], after making sure that cu_seqlens_q starts at 0, ascends and ends in q."""
    if cu_seqlens_q is None:
        return torch.ones(axes.seqs, dtype=torch.int64)
    bounds = cu_seqlens_q.cpu().long()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens_q[0] = {bounds[0]}, but it must be 0")
    query = bounds.diff()
    for i in _first(query < 0):
        before = f"cu_seqlens_q[{i}] = {bounds[i]}"
        raise ValueError(f"cu_seqlens_q[{i + 1}] = {bounds[i + 1]} is less than {before} (sequence {i})")
    if bounds[-1] > axes.tokens:
        raise ValueError(f"cu_seqlens_q[{axes.seqs}] = {bounds[-1]}, but q has tokens = {axes.tokens}")
    return query


def _first(wrong: Tensor) -> list[int]:
    """Index of the first True of [N] in a list, which is empty if there is none."""
    return wrong.nonzero()[:1, 0].tolist()


def _writable(name: str, value: Tensor) -> None:
    """Expanded memory cannot be written: two elements would share one place."""
    for size, stride in zip(value.shape, value.stride()):
        if stride == 0 and size > 1:
            raise ValueError(f"{name} must not overlap itself, got {list(value.shape)} strides {list(value.stride())}")


def _both(name: str, value: Any, other_name: str, other: Any) -> None:
    """Two arguments that come together."""
    if value is None or other is None:
        given, missing = (other_name, name) if value is None else (name, other_name)
        raise ValueError(f"{name} and {other_name} must be given together, got {given} without {missing}")


def _integer(name: str, value: Any, least: int, wanted: str = "None or an int") -> None:
    """An int32, which a bool is not; None only where the text says so."""
    if value is None and wanted != "an int":
        return
    if not isinstance(value, int) or value is True or value is False:
        raise TypeError(f"{name} must be {wanted} >= {least}, got {_kind(value)}")
    if not least <= value <= INT32_MAX:
        raise ValueError(f"{name} must be {wanted} >= {least} and < 2^31, got {value}")


def _window(value: Any) -> None:
    """(left, right), two ints, -1 = no limit."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"window_size must be (left, right), two ints >= -1, got {_kind(value)}")
    if len(value) != 2:
        raise ValueError(f"window_size must be (left, right), two ints >= -1, got {value!r}")
    _integer("window_size[0]", value[0], -1, "an int")
    _integer("window_size[1]", value[1], -1, "an int")


def _bool(name: str, value: Any, wanted: str = "True or False") -> None:
    if value is not True and value is not False:
        raise TypeError(f"{name} must be {wanted}, got {_kind(value)}")


def _number(name: str, value: Any, wanted: str, least: float = -HUGE) -> None:
    """A number that is finite in float32 and at least `least`."""
    if not isinstance(value, (float, int)) or value is True or value is False:
        raise TypeError(f"{name} must be {wanted}, got {_kind(value)}")
    if not least <= value <= HUGE:
        raise ValueError(f"{name} must be {wanted}, got {value}")


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {' or '.join(map(repr, choices))}, got {_kind(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " | ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
