"""The registered attention function, and plain `generate`.

`forward` refuses some arguments and leaves continuous batching to continuous.py.  In plain `generate`, the host's
[B, kv_heads, T, D] keys and values are viewed as pages, or copied if their strides do not allow a view.  The host's
masks become bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import paged_attention
from ...strides import settled
from . import continuous

# Page size of batches without bounds (see `mask`), if T and the rows from one sequence to the next are multiples of it.
# Other batches have pages of one token.  A page size is compiled into a kernel, so it cannot be T, which grows with
# each token.
PAGE = 16
CHUNKED = "chunked_overlay.<locals>.inner_mask"
KNOWN = ("causal_mask_function", "sliding_window_overlay.<locals>.inner_mask", CHUNKED)
# Arguments of some models' attention that would change the result, and are refused.  Other keywords are ignored.
UNKNOWN = ("head_mask", "position_bias", "indices", "block_indices", "output_attentions")


class Scores(NamedTuple):
    """Options for scores, as arguments of paged_attention."""

    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None


@torch.compiler.disable
def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in transformers' shapes: q [B, heads, n, D], k and v [B, kv_heads, T, D] -> ([B, n, heads, D], None)."""
    if dropout:
        raise ValueError(f"paged_attn has no dropout, got dropout = {dropout}: call model.eval()")
    for name in UNKNOWN:
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise ValueError(f"paged_attn does not know the argument {name} of {type(module).__name__}")
    scores = Scores(scaling, softcap or 0.0, s_aux if s_aux is not None else sinks)
    if cache is not None:
        return continuous.attend(module, query, key, value, cache, sliding_window, scores, kwargs), None
    name = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
    if name.startswith("paged|"):  # with this prefix the host makes no mask, so padding would be seen
        raise ValueError(f"{name} works in generate_batch only: without the prefix it serves generate, too")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise ValueError(f"paged_attn serves causal attention here, {type(module).__name__} asks for is_causal = False")
    if sliding_window is None:
        sliding_window = getattr(module, "sliding_window", None)
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    return attend(query, key, value, attention_mask, sliding_window, scores, chunk), None


# ---- plain `generate` ----------------------------------------------------------------------------


class LayerArguments(NamedTuple):
    """Arguments of paged_attention that all layers with the same mask share."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor | None,
    window: int | None,
    scores: Any,
    chunk: int | None = None,
) -> Tensor:
    """Attend: query [B, heads, n, D], key [B, kv_heads, T, D], value [B, kv_heads, T, E] -> [B, n, heads, E].

    `bounds` is a result of `mask`.  `window` is the number of keys that a query sees, its own included, or None.
    `chunk` is the number of positions in the layer's chunks, and is ignored unless bounds have a third number.
    """
    seqs, heads, tokens, dim = query.shape
    if bounds is not None and (bounds.dtype != torch.int32 or bounds.shape not in ((seqs, 1, 1, 2), (seqs, 1, 1, 3))):
        raise ValueError(f"paged_attn takes no mask of its own kind, got {bounds.dtype} {list(bounds.shape)}")
    if bounds is None or bounds.shape[3] == 2:
        chunk = None
    elif chunk is None:
        raise ValueError("paged_attn was given a mask of chunks for a layer whose config has no attention_chunk_size")
    keys = key.shape[2]
    key, value = settled(key), settled(value)
    rows = [_rows_of_a_sequence(x) for x in (key, value)]
    if None in rows or rows[0] != rows[1]:
        key, value = key.contiguous(), value.contiguous()
    per_seq = _rows_of_a_sequence(key)
    assert per_seq is not None
    page = PAGE if bounds is None and keys % PAGE == 0 and per_seq % PAGE == 0 else 1
    per_seq //= page
    batch = _batch(seqs, tokens, keys, page, per_seq, bounds, chunk, query.device)
    out = paged_attention(
        query.transpose(1, 2).reshape(seqs * tokens, heads, dim),
        _pages(key, page, per_seq),
        _pages(value, page, per_seq),
        *batch,
        kv_layout="HND",
        max_seqlen_q=tokens,
        max_seqlen_k=batch.page_table.shape[1] * page,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        chunk=chunk,
        **scores._asdict(),
    )
    return out.view(seqs, tokens, heads, value.shape[3])  # type: ignore[union-attr]


def _rows_of_a_sequence(x: Tensor) -> int | None:
    """Number of rows from a sequence's first row to the next sequence's; 0 if there is one sequence.

    None: the number is not whole, or the dims of a row are not contiguous.
    """
    if x.stride(3) != 1 or (x.shape[0] > 1 and x.stride(0) % x.stride(2)):
        return None
    return x.stride(0) // x.stride(2) if x.shape[0] > 1 else 0


def _pages(x: Tensor, page: int, per_seq: int) -> Tensor:
    """View [B, kv_heads, T, D] as pages [N, kv_heads, page, D]; sequence s begins at page s * per_seq.

    Pages after a sequence's T keys hold other rows, for example of the next head.  A page table lists such pages,
    if at all, after the page of the sequence's last key, and calls never read those entries.
    """
    seqs, heads, keys, dim = x.shape
    count = (seqs - 1) * per_seq + keys // page
    return x.as_strided((count, heads, page, dim), (page * x.stride(2), x.stride(1), x.stride(2), 1))


def _batch(
    seqs: int, tokens: int, keys: int, page: int, per_seq: int, bounds: Tensor | None, chunk: int | None, device: Any
) -> LayerArguments:
    """Make the arguments that all layers share, or return kept ones.

    Arguments are kept as an attribute of bounds.  Without bounds, they are cached by sizes.
    """
    sizes = (seqs, tokens, keys, page, per_seq)
    if bounds is None:
        # A tensor that is made while a graph is captured has no contents before the replay, so it is not kept.
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return (_whole.__wrapped__ if captured else _whole)(*sizes, device)
    kept = getattr(bounds, "_paged_attn_batch", None)
    if kept is None or kept[0] != sizes:
        first, end, *place = bounds[:, 0, 0].unbind(1)
        whole = _whole.__wrapped__(*sizes, device)
        # Entries of the table after the last key may hold anything.
        table, lengths = whole.page_table + first[:, None], end - first
        if place and chunk is not None:
            table, lengths = _behind(table, place[0], chunk), lengths + place[0]
        batch = LayerArguments(table, lengths, whole.cu_seqlens_q)
        kept = (sizes, batch if tokens == 1 else _without_padding(batch, (tokens - (end - first)).clamp(min=0)))
        bounds._paged_attn_batch = kept  # type: ignore[attr-defined]
    return kept[1]


def _behind(table: Tensor, place: Tensor, chunk: int) -> Tensor:
    """Put `place` entries before each row of the table, so that chunks begin where the host's chunks begin.

    The host may have dropped the first keys of a chunk and kept the others.  `place` is the number of these dropped
    keys, for each of which the table gets an entry.  No query sees the dropped keys.  The host drops a key only if
    the first query is at least a chunk later, so the key lies in an earlier chunk than every query.
    """
    columns = torch.arange(table.shape[1] + chunk - 1, device=table.device) - place[:, None]
    return table.gather(1, columns.clamp_(0, table.shape[1] - 1))


def _without_padding(batch: LayerArguments, padding: Tensor) -> LayerArguments:
    """Turn the first queries of each sequence, which are padding, into a separate sequence without keys.

    A length below 0 tells checked calls that the queries are padding.
    """
    starts = batch.cu_seqlens_q[:-1]
    return LayerArguments(
        batch.page_table.repeat_interleave(2, 0),
        torch.stack([torch.full_like(batch.seq_lens, -1), batch.seq_lens], 1).flatten(),
        torch.cat([torch.stack([starts, starts + padding], 1).flatten(), batch.cu_seqlens_q[-1:]]),
    )


@functools.lru_cache(maxsize=8)
def _whole(seqs: int, tokens: int, keys: int, page: int, per_seq: int, device: Any) -> LayerArguments:
    """Arguments for a batch in which every sequence sees all keys."""
    integers = {"dtype": torch.int32, "device": device}
    starts = torch.arange(seqs, **integers)[:, None] * per_seq
    return LayerArguments(
        starts + torch.arange(keys // page, **integers),
        torch.full((seqs,), keys, **integers),
        torch.arange(seqs + 1, **integers) * tokens,
    )


# ---- the host's masks, reduced to bounds on keys and offsets in chunks ---------------------------


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Bounds on keys [B, 1, 1, 2] int32: first key, end (exclusive); None if every sequence sees all kv_length keys.

    With chunks that may hide keys, [B, 1, 1, 3]: the third number is the first key's offset within its chunk.  Chunks
    count from a sequence's first token, as in the host.  The host does not call this function for 4-D masks, which
    `attend` refuses.  Each call makes the CPU read attention_mask, and the host calls once for each kind of layers.
    """
    chunk = None if mask_function is None else _chunk(mask_function)
    end = q_offset + q_length - kv_offset  # a static cache has more slots than keys so far
    ends_early = isinstance(end, Tensor) or end < kv_length
    padded = attention_mask is not None and not bool(attention_mask.all())
    one_chunk = chunk is None or (not isinstance(end, Tensor) and end + kv_offset <= chunk)
    if not padded and not ends_early and one_chunk:
        return None
    device = attention_mask.device if attention_mask is not None else device
    bounds = torch.zeros(batch_size, 1, 1, 2 if one_chunk else 3, dtype=torch.int32, device=device)
    bounds[..., 1] = end.clamp(max=kv_length) if isinstance(end, Tensor) else min(end, kv_length)
    if padded:
        assert attention_mask is not None
        seen = attention_mask.bool()
        # A static cache's mask may be longer than the tokens so far.
        known = seen[:, : end + kv_offset] if not isinstance(end, Tensor) else seen
        if bool((known[:, :-1] & ~known[:, 1:]).any()):
            raise ValueError("paged_attn takes padding on the left only: attention_mask has a 0 behind a 1")
        start = (~known).sum(1, dtype=torch.int32) - kv_offset
        bounds[..., 0] = start.clamp(min=0)[:, None, None]
        place = -start
    else:
        place = torch.full((batch_size,), kv_offset, dtype=torch.int32, device=device)
    if chunk is not None and not one_chunk:
        bounds[..., 2] = (place.clamp(min=0) % chunk)[:, None, None]
    return bounds


def _chunk(function: Callable[..., Any]) -> int | None:
    """Positions in a chunk; None for a causal or sliding-window mask.  Raises ValueError for any other mask."""
    name = getattr(function, "__qualname__", repr(function))
    if name == "and_masks.<locals>.and_mask":
        parts = [_chunk(part) for part in function.__closure__[0].cell_contents]  # type: ignore[index]
        return next((part for part in parts if part is not None), None)
    if name not in KNOWN:
        raise ValueError(f"paged_attn serves causal, sliding window and chunked masks, not transformers' {name}")
    if name != CHUNKED:
        return None
    named = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))  # type: ignore[arg-type]
    return int(named["chunk_size"].cell_contents)
