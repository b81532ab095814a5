"""Checks of calls that copy whole pages or gather their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .axes import PACKED, Door
from .kernel_tensors import FLOAT, FLOAT32, INT4, INTEGER, SCALED, names
from .options import boolean, choice, integer, kind, refused, scale_number, unboxed
from .overlap import first_overlap, no_overlap, pairs_that_meet, same_elements, writable
from .page_table import STARTS, admit_page_table, first_true
from .swapped import LAYOUTS

VALUES = "HDN"  # x-packed values
LAYOUT_OF_ROWS = LAYOUTS | {VALUES: ("pages", "kv_heads", "head_dim", "page_size")}
GATHERED = (*FLOAT, *SCALED)  # dtypes that gather_pages can convert or multiply by a scale
SCALES = (*FLOAT32, torch.float16)


def _wrong_type(name: str, wanted: str, given: str) -> TypeError:
    return TypeError(f"{name} must be {wanted}, got {given}")


def listed(name: str, caches: Any) -> list[Tensor]:
    """Tensors of an argument that is a tensor or a list of tensors."""
    if isinstance(caches, Tensor):
        return [caches]
    if not isinstance(caches, (list, tuple)):
        cure = f": list({name})" if hasattr(caches, "__iter__") else ""
        raise _wrong_type(name, "a tensor or a list of tensors", f"{kind(caches)}{cure}")
    if not caches:
        raise refused(name, "at least one tensor", "an empty list")
    return [*caches]


def check_in_trace(page_axis: Any, check: Any, scale: Any = None) -> None:
    """Check arguments whose types the schema of an operator would convert."""
    integer("page_axis", page_axis, 0, "an int")
    if check is not None:
        boolean("check", check, "True, False or None")
    if scale is not None and not isinstance(scale, Tensor):
        scale_number("scale", scale)


# ---- copies of pages ---------------------------------------------------------------------------------------------


def check_moves(sources: Any, targets: Any, src: Any, dst: Any, page_axis: Any) -> tuple[int, int]:
    """Check all that the host knows of a call of copy_pages or move_pages.

    Returns the numbers of pages of sources and targets.  targets is None: the sources themselves are written.
    """
    integer("page_axis", page_axis, 0, "an int")
    name = "caches" if targets is None else "sources"
    given = _named(name, sources)
    pages = _admit(given, page_axis)
    if targets is None:
        into, count = given, pages
    else:
        into = _named("targets", targets)
        count = _admit(into, page_axis)
        _check_alike(given, into, page_axis)
    for label, tensor in into:
        writable(label, tensor)
    _check_apart([x for _, x in given], into)
    door = Door()
    door.first, device = given[0][0], given[0][1].device
    if device.type == "cpu":
        door.first, device = into[0][0], into[0][1].device
    door.device = device
    door.tensor("src", src, ("pairs",), INTEGER)
    door.tensor("dst", dst, ("pairs",), INTEGER)
    return pages, count


def _named(name: str, tensors: Any) -> list[tuple[str, Any]]:
    """Tensors of an argument, each with its name in errors."""
    many = isinstance(tensors, (list, tuple))
    return [(f"{name}[{i}]" if many else name, x) for i, x in enumerate(listed(name, tensors))]


def _admit(given: Sequence[tuple[str, Any]], page_axis: int) -> int:
    """Check that tensors of one argument have one device and number of pages; returns this number."""
    door = Door()
    for name, x in given:
        if not isinstance(x, Tensor):
            raise _wrong_type(name, "a tensor", kind(x))
        door.place(name, x, (x.dtype,))
        if x.ndim <= page_axis:
            raise refused(name, f"a tensor with page_axis = {page_axis}", list(x.shape))
        pages = door.sizes.setdefault("pages", x.shape[page_axis])
        if x.shape[page_axis] != pages:
            wanted = f"pages = {pages} along axis {page_axis}, like {given[0][0]}"
            raise refused(name, wanted, f"{list(x.shape)}: page_axis says which axis has the pages")
    return door.sizes["pages"]


def _check_alike(given: Sequence[tuple[str, Tensor]], into: Sequence[tuple[str, Tensor]], page_axis: int) -> None:
    """Check that targets match sources in number, dtype and shape; numbers of pages may differ.

    A target is on the device of its source, or one of the two is on the host.  Targets share no memory with sources.
    """
    if len(given) != len(into):
        raise refused("targets", f"{len(given)} tensors, as many as sources", len(into))
    for (source_name, source), (name, target) in zip(given, into):
        wanted = [*source.shape]
        wanted[page_axis] = target.shape[page_axis] if target.ndim == source.ndim else -1
        if target.dtype != source.dtype:
            dtype = names((source.dtype,))
            given_type = f"{names((target.dtype,))}: {name}.view(torch.{dtype}), for bytes are copied"
            raise _wrong_type(name, f"{dtype} like {source_name}", given_type)
        if [*target.shape] != wanted:
            axes = ", ".join("pages" if axis == page_axis else str(size) for axis, size in enumerate(source.shape))
            raise refused(name, f"[{axes}] like {source_name}", list(target.shape))
        if source.device != target.device and "cpu" not in (source.device.type, target.device.type):
            raise refused(name, f"on {source.device} like {source_name}, or in pinned host memory", target.device)
    shared = first_overlap([x for _, x in into], [x for _, x in given])
    if shared is not None:
        (name, target), (source_name, source) = into[shared[0]], given[shared[1]]
        no_overlap(name, target, "copy_pages copies within caches", **{source_name: source})


def _check_apart(given: Sequence[Tensor], into: Sequence[tuple[str, Tensor]]) -> None:
    """Check that no two targets share memory, because either could be written last.

    Layers may share a cache.  So a target may be given twice with the same source, and gets the same bytes twice.
    """
    for i, j in pairs_that_meet([x for _, x in into]):
        (name, target), (other_name, other) = into[j], into[i]
        if not (same_elements(target, other) and same_elements(given[i], given[j])):
            no_overlap(name, target, **{other_name: other})


def refuse_pageable(name: str, x: Tensor) -> None:
    """Refuse host memory that torch has not pinned."""
    if not x.is_pinned():
        raise refused(
            name, "in pinned host memory", f"pageable memory: torch.empty(..., pin_memory=True), or {name}.pin_memory()"
        )


def check_pairs(src: Tensor, dst: Tensor, pages: int, count: int, within: bool) -> None:
    """Check page ids, which are read back.  within: pages are copied within the same caches."""
    given, into = src.cpu().long(), dst.cpu().long()
    live = (given >= 0) & (into >= 0)
    for name, ids, most in (("src", given, pages), ("dst", into, count)):
        for i in first_true(live & (ids >= most)):
            raise ValueError(f"{name}[{i}] = {ids[i]}, but the cache has {most} pages")
    pairs = live.nonzero()[:, 0].tolist()
    readers = {int(given[i]): i for i in reversed(pairs)}
    writers: dict[int, int] = {}
    for i in pairs:
        page = int(into[i])
        if page in writers:
            raise ValueError(f"dst[{i}] = {page}, but dst[{writers[page]}] is the same page")
        if within and page in readers:
            raise ValueError(f"dst[{i}] = {page}, but src[{readers[page]}] is the same page, and copies have no order")
        writers[page] = i


# ---- rows gathered from pages ------------------------------------------------------------------------------------


def rows_of(out: Any, cache: Any, seq_lens: Any, kv_layout: Any, tokens: Any, dtype: Any, scale: Any = None) -> Tensor:
    """Memory for the rows of gather_pages: `out`, compared with tokens and dtype, or a new tensor if out is None."""
    tokens = unboxed(tokens)
    integer("tokens", tokens, 0)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise _wrong_type("dtype", "None or a torch.dtype", kind(dtype))
    if out is not None:
        if isinstance(out, Tensor) and dtype not in (None, out.dtype):
            raise refused("dtype", f"{names((out.dtype,))}, which out has", names((dtype,)))
        if isinstance(out, Tensor) and out.ndim and tokens not in (None, out.shape[0]):
            raise refused("tokens", f"{out.shape[0]}, which out has", tokens)
        given: Tensor = out
        return given
    scaled = scale is not None or (dtype is not None and isinstance(cache, Tensor) and dtype != cache.dtype)
    heads, dims = shape_of_rows(cache, kv_layout, scaled)
    if dtype not in (None, cache.dtype, *FLOAT):
        raise _wrong_type("dtype", f"{names(FLOAT)}, or that of cache", names((dtype,)))
    if scale is not None and cache.dtype in SCALED and (cache.dtype if dtype is None else dtype) not in FLOAT:
        given_dtype = f"None, that of cache, {names((cache.dtype,))}" if dtype is None else names((dtype,))
        raise _wrong_type("dtype", f"{names(FLOAT)} with a scale", given_dtype)
    if tokens is None:
        if not isinstance(seq_lens, Tensor) or seq_lens.device.type != "cpu":
            given_lens = "None: pass tokens, or out, because lengths are on the device"
            raise _wrong_type("tokens", "an int >= 0", given_lens)
        # lengths of another dtype will be refused
        tokens = int(seq_lens.clamp(min=0).sum()) if seq_lens.dtype in INTEGER else 0
        if not torch.compiler.is_compiling():
            integer("the sum of seq_lens", tokens, 0, "an int")
    return torch.empty(tokens, heads, dims, dtype=cache.dtype if dtype is None else dtype, device=cache.device)


def shape_of_rows(cache: Any, kv_layout: Any, scaled: bool) -> tuple[int, int]:
    """(KV heads, dims) of a cache of gather_pages.  scaled: numbers are asked for; a byte of int4 then has two dims."""
    choice("kv_layout", kv_layout, tuple(LAYOUT_OF_ROWS))
    if not isinstance(cache, Tensor):
        raise _wrong_type("cache", "a tensor", kind(cache))
    axes = PACKED if cache.ndim == 5 else LAYOUT_OF_ROWS[kv_layout]
    if len(axes) != cache.ndim:
        cure = ": cache.unsqueeze(2), if these are latents" if cache.ndim == 3 else ""
        raise refused("cache", f"[{', '.join(axes)}]", f"{list(cache.shape)}{cure}")
    size = dict(zip(axes, cache.shape))
    if scaled and cache.dtype == INT4:
        if axes not in LAYOUTS.values():
            wanted = f"[{', '.join((*LAYOUTS['HND'][:3], 'head_dim / 2'))}] over int4, which is not x-packed"
            raise refused("cache", wanted, list(cache.shape))
        return size["kv_heads"], 2 * size["head_dim"]
    return size["kv_heads"], size["head_dim // x"] * size["x"] if cache.ndim == 5 else size["head_dim"]


def check_gather(
    cache: Any, page_table: Any, page_starts: Any, seq_lens: Any, out: Any, kv_layout: Any, scale: Any
) -> Door:
    """Check all that the host knows of a call of gather_pages; returns the Door with the sizes of its axes."""
    scaled = scale is not None or (isinstance(out, Tensor) and isinstance(cache, Tensor) and out.dtype != cache.dtype)
    heads, dims = shape_of_rows(cache, kv_layout, scaled)
    door = Door()
    axes = PACKED if cache.ndim == 5 else LAYOUT_OF_ROWS[kv_layout]
    int4 = scaled and cache.dtype == INT4
    if int4:
        axes = (*axes[:3], "head_dim / 2")
        door.settled["head_dim"] = "cache"
    if cache.dtype.itemsize > 8:
        raise _wrong_type("cache", "a tensor of elements of up to 8 bytes", names((cache.dtype,)))
    door.tensor("cache", cache, axes, GATHERED if scaled else (cache.dtype,))
    door.sizes["head_dim"] = dims
    if min(heads, dims, door.sizes["page_size"]) < 1:
        raise refused("cache", f"[{', '.join(axes)}], none but pages 0", list(cache.shape))
    admit_page_table(door, page_table, page_starts, seq_lens)
    if not isinstance(out, Tensor) or scaled:
        door.tensor("out", out, ("tokens", "kv_heads", "head_dim"), FLOAT)
    else:
        door.tensor("out", out, ("tokens", "kv_heads", "head_dim"), (cache.dtype,))
    writable("out", out)
    others = {"cache": cache, "page_table": page_table, STARTS: page_starts, "seq_lens": seq_lens, "scale": scale}
    no_overlap("out", out, **others)
    if int4:
        door.cache_scale("scale", scale, "cache", INT4, kv_layout)
    elif isinstance(scale, Tensor):
        _check_scale(door, scale, "NHD" if cache.ndim == 4 and kv_layout == "NHD" else "HND")
    elif scale is not None:
        scale_number("scale", scale)
    return door


def _check_scale(door: Door, scale: Tensor, order: str) -> None:
    door.place("scale", scale, SCALES)
    if scale.ndim == 3:
        door.bind("scale", scale, LAYOUTS[order][:3])
        return
    heads = door.sizes["kv_heads"]
    if [*scale.shape] not in ([], [1], [heads], [1, 1], [1, heads]):
        wanted = f"[], [1], [kv_heads], [1, kv_heads] or [{', '.join(LAYOUTS[order][:3])}] with kv_heads = {heads}"
        raise refused("scale", wanted, list(scale.shape))


def check_rows(door: Door, page_table: Tensor, page_starts: Tensor | None, seq_lens: Tensor) -> None:
    """Check lengths and page ids, which are read back."""
    size, pages, tokens = (door.sizes[name] for name in ("page_size", "pages", "tokens"))
    lengths, table = seq_lens.cpu().long().clamp(min=0), page_table.cpu().long()
    if page_starts is None:
        begin = torch.arange(len(lengths)) * table.shape[1]
        end, table = begin + table.shape[1], table.flatten()
    else:
        bounds = page_starts.cpu().long()
        begin, end = bounds[:-1], bounds[1:]
    for i in first_true((lengths > 0) & ((begin < 0) | (end > len(table)) | (lengths > (end - begin) * size))):
        held = f"row {i} of page_table holds {end[i] - begin[i]} pages of {size}"
        raise ValueError(f"seq_lens[{i}] = {lengths[i]} needs {lengths[i]} keys in the cache, but {held}")
    if int(lengths.sum()) > tokens:
        raise ValueError(f"seq_lens need {int(lengths.sum())} rows, but out has {tokens}")
    needed = (lengths + size - 1) // size
    seq = torch.arange(len(lengths)).repeat_interleave(needed)
    column = torch.arange(len(seq)) - (needed.cumsum(0) - needed)[seq]
    ids = table[begin[seq] + column]
    for i in first_true(ids >= pages):
        raise ValueError(f"page_table[{seq[i]}, {column[i]}] = {ids[i]}, but the cache has {pages} pages")
