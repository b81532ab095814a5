"""What the library will do for a call with known lengths, and its expected cost, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..arguments import bound
from ..calls.ways import scale_and_cap
from ..launching.platform import ASKED, HAS_TRITON
from ..planning.dialects import torch_dialect
from ..preparation.model import Lengths, Model, call_of
from . import words
from .question import Question, memory, operations


def explain(question: Question) -> Iterator[tuple[str, str]]:
    """Yield the lines of the explanation as (name, text)."""
    if question.device.in_torch:
        yield from _in_torch(question)
    else:
        from .launches import explained  # needs Triton

        yield from explained(question)


def _in_torch(question: Question) -> Iterator[tuple[str, str]]:
    """Yield the lines for a call in plain torch: groups of sequences, how each is computed, bytes and operations."""
    yield "call", words.call_of(question)
    yield "device", f"{question.device.arch}, {question.device.multiprocessors} threads"
    if question.shard is not None:
        yield "shard", words.shard_of(question)
    yield "kernels", f"{torch_dialect().TITLE}: {_why(question.device.arch)}"
    for number, text in enumerate(_ways(question), 1):
        yield f"group {number}", text
    moved = memory(question)
    yield (
        "memory",
        f"{words.bytes_of(sum(moved.values()))}: "
        + ", ".join(f"{name} {words.bytes_of(count)}" for name, count in moved.items()),
    )
    yield "operations", f"{words.operations_of(operations(question))} that count"
    if assumed := words.assumed_of(question):
        yield "assumed", assumed


def _why(device: str) -> str:
    if ASKED == "torch":
        return "PAGED_ATTN_DIALECT asks for it"
    if not HAS_TRITON:
        return "Triton is not installed"
    return f"tensors on {device} meet no kernel of ours, unless PAGED_ATTN_DIALECT is interpreter"


def _ways(question: Question) -> list[str]:
    """Describe how plain torch computes each group of the call's sequences."""
    model, tokens = question.model, sum(question.query_lens)
    lengths = Lengths(question.ragged, len(question.seq_lens), tokens, question.max_seqlen_q, question.max_seqlen_k)
    given, options = bound(call_of(model, lengths))
    told = {name: READ[name](model, x) for name, x in given._asdict().items() if name in READ and isinstance(x, Tensor)}
    starts = torch.tensor([0, *question.query_lens]).cumsum(0) if question.ragged else None
    given = given._replace(**told | {"seq_lens": torch.tensor(question.seq_lens), "cu_seqlens_q": starts})
    return torch_dialect().ways(given, options, *scale_and_cap(options, model.head_dim))


def _of(value: Any, like: Tensor) -> Tensor:
    """A tensor on the host with the shape and dtype of `like`; value: a number, or the numbers along the last axis."""
    return torch.tensor(value, dtype=like.dtype).expand(like.shape).contiguous()


def _scales_apart(model: Model, like: Tensor) -> Tensor:
    """Scales that differ between any two KV heads."""
    return _of([1.0 + head for head in range(like.shape[-1])] if like.dim() else 1.0, like)


# Tensors besides lengths that plain torch reads on the host -> contents that are assumed.  words.ASSUMED tells the
# assumptions, except that scales of KV heads differ.
READ: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "causal_seqs": lambda model, like: _of(model.causal, like),
    "head_windows": lambda model, like: _of(model.window_size, like),
    **dict.fromkeys(("prefix_lens", "spans"), lambda _, like: _of(0, like)),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), _scales_apart),
}
