"""Cures: what an error tells the caller to do about an argument, as code where possible.

Each public function returns ": cure", or "" if it knows none.  No function here decides whether a call is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .kernel_tensors import FLOAT, FP8, INT4, SCALED, names

OUT = ": leave it out, or torch.empty makes it"  # out has no contents to convert
SINGLE = {"n": "one set of keys", "batch": "one sequence"}  # name of a first axis -> what a tensor without it holds
CACHES = ("k_cache", "v_cache")
Sizes = Mapping[str, int]


def of_no_tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> str:
    """How to make a tensor from a value that is no tensor."""
    word = name.split()[0]  # the caller's variable in "indptr of page_table"
    if name == "out":
        return OUT
    if type(value).__module__ == "numpy":
        return f": torch.as_tensor({word}, device=...)"
    if value is None and name == "v_cache":
        return ": k_cache[..., :value_dim] where keys hold their values"
    if not isinstance(value, (list, tuple)):
        return ""
    if value and all(isinstance(x, Tensor) for x in value):
        return f": torch.stack({word})"
    if name == "page_table":
        return ": pad_batch makes a tensor of rows"
    return f": torch.tensor({word}, dtype=torch.{names(dtypes[:1])}, device=...)"


def of_dtype(
    name: str, given: torch.dtype, dtypes: tuple[torch.dtype, ...], beside: str, decides: torch.dtype | None
) -> str:
    """A conversion of a tensor, or another view of a cache's bytes.

    Args:
        given: the dtype of the tensor.
        dtypes: the dtypes wanted.
        beside, decides: name and dtype of the argument that determines `dtypes`.  None: no argument does.
    """
    if name == "out":
        return OUT
    bytes_of = tuple([x for x in dtypes if x in SCALED])
    if name in CACHES and bytes_of and given in (torch.uint8, torch.int8):
        return _view(name, bytes_of[0])
    if name == "k_cache" and given in FLOAT and decides in FLOAT:
        return f": {beside}.to(torch.{names((given,))}), or a cache of {names((decides,))}"
    return f": {name.split()[0]}.to(torch.{names(dtypes[:1])})"


def _view(name: str, dtype: torch.dtype) -> str:
    """A view of a cache's bytes as this dtype."""
    form = "fp8" if dtype in FP8 else "int4" if dtype == INT4 else "int8"
    return f": {name}.view(torch.{names((dtype,))}) if its bytes are {form}"


def of_bytes(name: str, shape: Sequence[int], dims: int) -> str:
    """A view as fp8 of a uint8 cache that has a byte for each dim, and so is not int4."""
    return _view(name, FP8[0]) if len(shape) == 4 and shape[-1] == dims else ""


def of_strides(name: str) -> str:
    """A contiguous copy; for out, a new tensor, because a copy of out would get the results in its place."""
    return OUT if name == "out" else f": {name}.contiguous()"


def of_shape(name: str, shape: Sequence[int], axes: Sequence[str], sizes: Sizes) -> str:
    """The first cure that a rule of `VIEWS` yields for a wrong shape.

    Args:
        shape: the shape of the tensor.
        axes: names of the axes wanted.
        sizes: known sizes of axes, by name.
    """
    word = name.split()[0]
    found = (view for rule in VIEWS for view in rule(word, tuple(shape), tuple(axes), sizes))
    return next((f": {view}" for view in found), "")


def _fits(shape: Sequence[int], axes: Sequence[str], sizes: Sizes) -> bool:
    return len(shape) == len(axes) and all(sizes.get(axis, size) == size for axis, size in zip(axes, shape))


def _both_caches(name: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Sizes) -> Iterator[str]:
    """One tensor of keys and values, [2, pages, ...] or [pages, 2, ...], was passed as a cache."""
    if name in CACHES and len(shape) == 5 and 2 in shape[:2] and shape[-1] == sizes.get("head_dim"):
        parts = "cache[0], cache[1]" if shape[0] == 2 else "cache.unbind(1)"
        yield f"k_cache, v_cache = {parts}, if this is one tensor of both"


def _turned_before(name: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Sizes) -> Iterator[str]:
    """Two axes of q or k are swapped.  q and k settle the sizes, so the error is about the cache."""
    if name != "k_cache" or len(shape) != len(axes) or axes[-1] != "head_dim":
        return
    given = dict(zip(axes, shape))
    if given["head_dim"] != sizes.get("head_dim"):
        if given["head_dim"] == sizes.get("heads"):
            yield "q.transpose(1, 2), if its heads come last"
        elif given["head_dim"] == sizes.get("kv_heads"):
            yield "k.transpose(1, 2), and v, if their heads come last"
    elif given["kv_heads"] != sizes.get("kv_heads") and given["kv_heads"] == sizes.get("tokens"):
        yield "k.transpose(0, 1), and v, if their heads come first"


def _turned(name: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Sizes) -> Iterator[str]:
    """Two axes of the tensor are swapped."""
    if name in CACHES or len(shape) != len(axes):
        return
    for i in range(len(axes)):
        for j in range(i + 1, len(axes)):
            other = list(shape)
            other[i], other[j] = other[j], other[i]
            if other != list(shape) and {axes[i], axes[j]} <= sizes.keys() and _fits(other, axes, sizes):
                yield f"{name}.transpose({i}, {j})"


def _an_axis_more(name: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Sizes) -> Iterator[str]:
    """The tensor has one axis more: an axis of one element, or a batch axis of sequences of one length."""
    if len(shape) != len(axes) + 1:
        return
    for i, size in enumerate(shape):
        if size == 1 and _fits(shape[:i] + shape[i + 1 :], axes, sizes):
            yield f"{name}.squeeze({i})"
    if axes[0] == "tokens" and len(axes) > 1:
        yield f"{name}.flatten(0, 1)" + ", with cu_seqlens_q" * (name == "q")


def _an_axis_less(name: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Sizes) -> Iterator[str]:
    """The tensor lacks an axis: heads and dims share one axis, or an axis of one element is missing."""
    if len(shape) != len(axes) - 1 or len({*axes}) < len(axes):
        return
    if axes[0] in SINGLE and _fits(shape, axes[1:], sizes):
        yield f"{name}.unsqueeze(0), if this is {SINGLE[axes[0]]}"
    if axes[-1].endswith("_dim"):
        many, dim = axes[-2:]
        count, width = sizes.get(many), sizes.get(dim)
        if width is None or (shape[-1] % width == 0 and shape[-1] // width == (count or shape[-1] // width) > 1):
            yield f"{name}.unflatten(-1, ({count or many}, {width or dim}))"
    for i in sorted(range(len(axes)), key=lambda i: axes[i] != "kv_heads"):
        if sizes.get(axes[i], 1) == 1 and _fits((*shape[:i], 1, *shape[i:]), axes, sizes):
            yield f"{name}.unsqueeze({i})"


def _sums_or_lengths(name: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Sizes) -> Iterator[str]:
    seqs = sizes.get("seqs")
    if seqs is not None and shape == (seqs,) and name == "cu_seqlens_q":
        yield "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), if these are lengths"
    if seqs is not None and shape == (seqs + 1,) and name == "seq_lens":
        yield "seq_lens.diff(), if these are sums of lengths"


def _by_kv_head(name: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Sizes) -> Iterator[str]:
    if axes == ("heads",) and shape == (sizes.get("kv_heads"),) and sizes["heads"] % shape[0] == 0:
        yield f"{name}.repeat_interleave({sizes['heads'] // shape[0]}), if these are of KV heads"


VIEWS: tuple[Callable[..., Iterator[str]], ...] = (
    _both_caches,
    _turned_before,
    _turned,
    _an_axis_more,
    _an_axis_less,
    _sums_or_lengths,
    _by_kv_head,
)
