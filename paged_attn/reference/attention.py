"""Attention over a paged cache, one sequence at a time, and the merge of attention over several sets of keys.

Tensors may be on any device.  Lengths are copied to the host, and nothing is checked.  Shapes: T query tokens of one
sequence, N keys that some of these tokens may see, H query heads, G KV heads, D head_dim, or value_dim for values and
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .cache import gather, own_number, pages_of_seq, scaled
from .scales import INT4, Scale, by_slot, narrow, per_kv_head, per_seq, per_token


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | Sequence[Tensor],
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    kv_layout: str = "NHD",
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    shard: tuple[int, int, int] | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = True,
    window_size: tuple[int, int] | Tensor = (-1, -1),
    prefix_lens: Tensor | None = None,
    spans: Tensor | None = None,
    clip_spans: bool = False,
    chunk: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    alibi_symmetric: bool = False,
    sinks: Tensor | None = None,
    qq_bias: Tensor | None = None,
    qq_mask: Tensor | None = None,
    query_positions: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    score_mod_args: Sequence[Tensor | float] = (),
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Scale = None,
    return_lse: bool = False,
    only: str | None = None,
    batch_invariant: bool = False,
    check: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `paged_attn.paged_attention` must return; its docstring explains the arguments.

    `max_seqlen_q`, `max_seqlen_k`, `batch_invariant` and `check` cannot change a result and are ignored.
    Without `out` the result is float64 and not rounded, and `out_scale` divides it without a clamp.  Rows that `only`
    leaves out are then 0.  With `out` the result is rounded to the dtype of `out`, for fp8 also clamped, and written
    there.  Rows that `only` leaves out then keep their contents.
    With a `shard`, caches hold the rank's own keys, one after another, but lengths and positions are those of whole
    sequences.
    `score_mod` is a function in torch here.  Its arguments are scores [H, T, N] float64, positions of queries [T, 1]
    and of keys [1, N], heads [H, 1, 1], and score_mod_args.  It returns the new scores.
    Returns: out [tokens, heads, value_dim], and with `return_lse` also lse [tokens, heads] in float64.  lse is -inf for
    padding, for rows left out, and for rows without a sink that see no key.
    """
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1] if k_cache.dim() == 5 or kv_layout == "HND" else k_cache.shape[2]
    value_dim = v_cache.shape[2 if k_cache.dim() == 5 else 3] * (2 if v_cache.dtype == INT4 else 1)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = _sides(window_size, q)  # [H or 1, 1, 1]
    reach = None if (left < 0).any() else int(left.max())  # keys before a query that some head sees; None: all

    result = torch.zeros(tokens, num_heads, value_dim, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, num_heads), -torch.inf, dtype=torch.float64, device=q.device)
    written = torch.full((tokens,), only is None, dtype=torch.bool, device=q.device)

    lengths = seq_lens.tolist()
    starts = list(range(len(lengths) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    score_scale = scale * per_token(q_scale, starts, num_kv_heads, q)  # [tokens, G]
    v_scale = k_scale if v_scale is None else v_scale  # None beside a k_scale: values lie in the keys
    key_scales, value_scales = (
        per_seq(None if by_slot(x) else x, len(lengths), num_kv_heads, q)[..., None] for x in (k_scale, v_scale)
    )
    for seq, seq_len in enumerate(lengths):
        start, end = starts[seq], starts[seq + 1]
        query_len = end - start
        context_len = seq_len - query_len  # negative if seq_len < query_len: first queries lie before key 0
        if query_len == 0 or (only is not None and (only == "decode") != (query_len == 1)):
            continue
        written[start:end] = True

        # Besides the prefix, only keys [first, seq_len) are visible to any query.  Pages of other keys need not exist.
        first = 0 if reach is None else max(0, context_len - reach)
        if chunk is not None:
            first = max(first, context_len // chunk * chunk)
        ranges = [] if spans is None else spans[seq].tolist()
        if not clip_spans:
            first = max(0, min([first, *[a for a, b in ranges if a <= context_len < b]]))
        key = torch.arange(first, max(first, seq_len), device=q.device)  # places in the sequence
        prefix = 0 if prefix_lens is None else int(prefix_lens[seq])
        if prefix > 0:
            key = torch.cat([torch.arange(min(prefix, first, max(seq_len, 0)), device=q.device), key])
        if shard is not None:
            rank, world, stripe = shard
            key = key[key // stripe % world == rank]
        cached = key if k_new is None else key[key < context_len]
        pages, number = pages_of_seq(page_table, seq), own_number(cached, shard)
        k, v = gather(k_cache, v_cache, pages, number, kv_layout)
        k, v = k * key_scales[seq], v * value_scales[seq]
        k, v = (scaled(x, scale, k_cache, pages, number, kv_layout) for x, scale in ((k, k_scale), (v, v_scale)))
        if k_new is not None:
            own = start + key[key >= context_len] - context_len
            values = k_new[..., :value_dim] if v_new is None else v_new
            k, v = torch.cat([k, k_new[own].double()]), torch.cat([v, values[own].double()])
        query = context_len + torch.arange(query_len, device=q.device)
        key_pos, query_pos = key, query
        if query_positions is not None:
            query_pos = query_positions[start:end].long()
            key_pos = torch.where(key < context_len, key, query_pos[(key - context_len).clamp(min=0)])

        for row in range(0, query_len, 1024):  # rows are independent; a block bounds the memory of long prompts
            rows = slice(start + row, min(start + row + 1024, end))
            block = slice(row, row + rows.stop - rows.start)
            scores = _scores(q[rows].double(), k, score_scale[rows])  # [H, T, N]
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            distance = key_pos[None, :] - query_pos[block, None]  # [T, N]
            if alibi_slopes is not None:
                slopes = (alibi_slopes[seq] if alibi_slopes.ndim == 2 else alibi_slopes).double()
                scores = scores + slopes[:, None, None] * (-distance.abs() if alibi_symmetric else distance)
            if qq_bias is not None:
                bias = qq_bias[seq] if qq_bias.ndim == 3 else qq_bias
                scores = scores + _bias(bias, query[block] - context_len, key - context_len)
            if score_mod is not None:
                asked = [x.clamp(0, max(seq_len - 1, 0)) for x in (query_pos[block, None], key_pos[None])]
                head = torch.arange(num_heads, device=q.device)[:, None, None]
                scores = score_mod(scores, *asked, head, *score_mod_args).to(scores.dtype)
            ahead = key[None, :] > query[block, None]
            if not (causal if isinstance(causal, bool) else causal[seq]):
                ahead = torch.zeros_like(ahead)
            together = torch.zeros_like(ahead)
            for a, b in ranges:
                together |= (
                    (a <= query[block, None]) & (query[block, None] < b) & (a <= key[None, :]) & (key[None, :] < b)
                )
            visible = ~ahead | together if clip_spans else ~ahead
            before, behind = (left < 0) | (distance >= -left), (right < 0) | (distance <= right)
            visible = visible & before & behind  # [H or 1, T, N]
            if chunk is not None:
                visible &= key_pos[None, :] // chunk == query_pos[block, None] // chunk
            visible |= key[None, :] < prefix
            if not clip_spans:
                visible |= together
            if qq_mask is not None:
                visible &= _bits(qq_mask[rows], key - context_len)
            scores = scores.masked_fill(~visible, -torch.inf)
            result[rows], lse[rows] = _attend(scores, v, sinks)

    if gate is not None:
        result = torch.where(result == 0, 0.0, result * torch.sigmoid(gate.double()))
    result = result / per_kv_head(out_scale, 1, q)
    if out is not None:
        out[written] = narrow(result[written], out.dtype)
        result = out
    return (result, lse) if return_lse else result


def _sides(window_size: tuple[int, int] | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return (left, right) of windows, each [H, 1, 1], or [1, 1, 1] for one window of all heads; -1: no limit."""
    windows = torch.as_tensor(window_size, device=like.device).long().view(-1, 2, 1, 1)
    return windows[:, 0], windows[:, 1]


def _scores(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """scale [T, G] * <q, k> as [H, T, N].  Each KV head serves a group of H // G query heads."""
    grouped = q.unflatten(1, (k.shape[1], -1)) * scale[:, :, None, None]
    return torch.einsum("tgid,ngd->gitn", grouped, k).flatten(0, 1)


def _bias(qq_bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """qq_bias[query, key] as [T, N]; 0 outside the matrix.  query, key: indices among the call's own tokens."""
    n = qq_bias.shape[0]
    inside = (query[:, None] < n) & (key[None, :] >= 0) & (key[None, :] < n)
    picked = qq_bias.double()[query.clamp(0, n - 1)[:, None], key.clamp(0, n - 1)[None, :]]
    return torch.where(inside, picked, 0.0)


def _bits(qq_mask: Tensor, key: Tensor) -> Tensor:
    """Whether masks [T, words] show keys [N] to queries, as bool [T, N].  Keys without a bit are shown.

    key: [N], index of each key among the call's own keys; negative for keys before these.
    """
    inside = (key >= 0) & (key < 32 * qq_mask.shape[1])
    at = key.clamp(0, max(0, 32 * qq_mask.shape[1] - 1))
    words = qq_mask.long()[:, at // 32] if qq_mask.shape[1] else qq_mask.new_zeros(len(qq_mask), len(key))
    return ~inside | (words >> (at % 32) & 1).bool()


def _attend(scores: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, D], lse [T, H]) of scores [H, T, N] and values [N, G, D]; a sink is a key of value 0."""
    sink = scores.new_full((*scores.shape[:2], 1), -torch.inf)
    if sinks is not None:
        sink = sink.copy_(sinks[:, None, None])
    weights, lse = softmax(torch.cat([scores, sink], dim=2), 2)  # [H, T, N + 1], [H, T]
    grouped = weights[:, :, :-1].unflatten(0, (v.shape[1], -1))
    out = torch.einsum("gitn,ngd->tgid", grouped, v).flatten(1, 2)
    return out, lse.T


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What `paged_attn.merge_states` must return, in float64.

    outs [n, tokens, heads, head_dim] and lses [n, tokens, heads] are attention over n sets of keys; the result is
    attention over their union.  A set with lse = -inf has no key, and its out may hold anything.  A set with lse = inf
    has a sink of infinity, which takes all weight and has value 0.  sinks [heads] are one more set, of value 0.
    """
    outs, lses = outs.double(), lses.double()
    if sinks is not None:
        outs = torch.cat([outs, torch.zeros_like(outs[:1])])
        lses = torch.cat([lses, sinks.double().expand_as(lses[:1])])
    weights, lse = softmax(lses, 0)
    weights = weights[..., None]
    return torch.where(weights == 0, 0.0, weights * outs).sum(0), lse


def softmax(scores: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(weights, logarithm of the denominator) along an axis.

    Weights are divided by their sum and not computed from the logarithm, because 1e30 + log(2) is 1e30.  A score of
    infinity is a sink that leaves no weight to keys: all weights, its own included, are 0, and the logarithm is
    infinity.  If all scores are minus infinity, all weights are 0, and the logarithm is minus infinity.
    """
    top = scores.amax(dim, keepdim=True)
    weights = torch.where(scores.isinf(), 0.0, torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0)))
    total = weights.sum(dim, keepdim=True)
    lse = torch.where(top.isinf(), top, top + total.log())
    return weights / total.masked_fill(total == 0, 1.0), lse.squeeze(dim)
