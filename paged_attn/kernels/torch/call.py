"""One call: its tensors, sizes, sequences and scales, as all files of this folder see them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...arguments import Options, Tensors, scales_slots, scales_tokens
from ...records.formats import LARGEST
from ...strides import lies_in


class Sizes(NamedTuple):
    """Sizes of a call, from the shapes of its tensors."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


class Seq(NamedTuple):
    """A sequence that has queries in this call, as Python numbers."""

    number: int  # its index in seq_lens
    start: int  # index of its first token in q
    query_len: int
    seq_len: int

    @property
    def context_len(self) -> int:
        """Keys before the first query; negative if a sequence has more queries than keys."""
        return self.seq_len - self.query_len


class Call(NamedTuple):
    """The tensors and options of a call, and what this dialect derives from them once."""

    given: Tensors
    options: Options
    sizes: Sizes
    scale: float  # softmax scale
    cap: float | None  # softcap; None: scores are not capped
    lse: Tensor | None  # log-sum-exps to write, float32 [tokens, heads]; None: they are not asked for

    @property
    def device(self) -> torch.device:
        device: torch.device = self.given.q.device
        return device

    @property
    def latent(self) -> bool:
        """Whether values are the first dims of keys."""
        return lies_in(self.given.v_cache, self.given.k_cache) and self.given.v_new is None

    @property
    def compute(self) -> torch.dtype:
        """The dtype of gathered keys and values, and of flash attention's products.

        The dtype holds every query and key exactly, and is never float16, which CPUs do not multiply.
        """
        found = {x.dtype for x in (self.given.q, self.given.k_cache, self.given.k_new) if x is not None}
        return torch.float32 if {torch.float32, torch.float16} & found else torch.bfloat16

    @property
    def slot_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """(k_scale, v_scale), with None for a scale that is not by slot; v_scale = None in a call means k_scale."""
        scales = self.given.k_scale, self.given.v_scale
        found = tuple([x if scales_slots(x) else None for x in scales])
        return (found[0], found[0] if scales[1] is None else found[1])

    @property
    def v_scale(self) -> Any:
        """v_scale; values within keys have the scale of keys by default."""
        return self.given.k_scale if self.given.v_scale is None else self.given.v_scale

    @property
    def by_token(self) -> bool:
        """Whether q_scale has a number for each token."""
        return scales_tokens(self.given.q_scale, self.given.q)


@contextlib.contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """A scope without autocast and in inference mode, where tensors that were made in that mode can be written, too."""
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield


def sequences(call: Call) -> Iterator[Seq]:
    """The sequences whose rows the call computes."""
    given, only = call.given, call.options.only
    seq_lens = given.seq_lens.tolist()
    starts = range(len(seq_lens) + 1) if given.cu_seqlens_q is None else given.cu_seqlens_q.tolist()
    for number, seq_len in enumerate(seq_lens):
        query_len = starts[number + 1] - starts[number]
        if query_len > 0 and (only is None or (only == "decode") == (query_len == 1)):
            yield Seq(number, starts[number], query_len, seq_len)


def tokens_of(group: Sequence[Seq], first: int, end: int, device: torch.device) -> Tensor | slice:
    """Indices into q of tokens [first, end) of each sequence, [B * (end - first)]; a slice if tokens are adjacent."""
    start, count = group[0].start, end - first
    if len(group) == 1 or (
        count == group[0].query_len and all(b.start - a.start == count for a, b in itertools.pairwise(group))
    ):
        return slice(start + first, start + first + len(group) * count)
    begins = torch.tensor([seq.start + first for seq in group], device=device)
    return (begins[:, None] + torch.arange(count, device=device)).flatten()


def rows_of(call: Call, x: Tensor, group: Sequence[Seq], first: int, end: int) -> Tensor:
    """Tokens [first, end) of each sequence as [B, T, kv_heads, group, dims]."""
    sizes = call.sizes
    return x[tokens_of(group, first, end, call.device)].view(
        len(group), end - first, sizes.kv_heads, sizes.group, x.shape[2]
    )


def per_head(scale: Any, kv_heads: int) -> Tensor | float:
    """A scale as a float if all its numbers are equal, else as a tensor.

    The tensor is [seqs, kv_heads] if the scale has several rows, else [kv_heads].  Scales by slot of the cache are
    applied elsewhere, and count as 1 here.
    """
    if scale is None or scales_slots(scale):
        return 1.0
    if not isinstance(scale, Tensor):
        return float(scale)
    numbers = scale.flatten().tolist()
    if len({*numbers}) <= 1:
        return float(numbers[0]) if numbers else 1.0
    by_seq = scale.ndim == 2 and scale.shape[0] > 1
    return scale.expand(-1, kv_heads) if by_seq else scale.flatten().expand(kv_heads)


def of_group(scale: Tensor | float, group: Sequence[Seq]) -> Tensor | float:
    """A result of `per_head` for the sequences of a group: a float, or [B or 1, kv_heads]."""
    if not isinstance(scale, Tensor):
        return scale
    return scale[None] if scale.ndim == 1 else scale[[seq.number for seq in group]]


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded to the nearest numbers of dtype; fp8 and int8 saturate, and int8 has 0 for NaN."""
    if dtype in LARGEST:
        values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return values.round().nan_to_num_(nan=0.0).to(dtype) if dtype == torch.int8 else values.to(dtype)
