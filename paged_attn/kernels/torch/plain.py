"""Sequences that torch's flash attention for CPUs serves, by an operator that also returns log-sum-exps.

Shapes: T queries of each of B sequences, N keys, G KV heads, M query heads of each, D dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import scores, state
from .cache import Span, sources
from .call import Call, Seq, per_head, rows_of
from .visible import Sight, runs_of

FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
# For single queries, keys are gathered in pieces that stay in the processor's cache.  A piece has PIECE_BYTES bytes
# of each sequence's keys, but at least FEWEST_KEYS keys, because each operation has a fixed cost.
PIECE_BYTES, FEWEST_KEYS = 1 << 21, 512
# From this number of queries on, a piece has MOST_KEYS keys instead of a quarter as many.  With many queries, joining
# more pieces takes more time than reading larger pieces from memory.
MANY_QUERIES = 32
MOST_KEYS = 16384  # maximum keys of a piece; a causal sequence's own keys in the call are one piece of any size
# Largest magnitude of log-sum-exps by which pieces are joined.  The last bit of larger ones changes results too much.
FAR = {torch.float32: 32.0, torch.bfloat16: 2048.0}
State = tuple[Tensor, Tensor]  # results, log-sum-exps


# Conditions under which flash attention cannot serve a call, and their reasons in words.
REASONS: tuple[tuple[Callable[[Call, Sight], bool], str], ...] = (
    (lambda call, sight: FLASH is None, "this torch has no flash attention for CPUs"),
    (lambda call, sight: call.device.type != "cpu", "flash attention for CPUs takes no other tensors"),
    (lambda call, sight: call.options.batch_invariant, "products of one shape keep results invariant"),
    (lambda call, sight: call.by_token, "scores are scaled by token"),
    (lambda call, sight: not sight.simple, "keys are hidden one by one, or by head"),
    (lambda call, sight: scores.modifies(call), "scores are modified"),
    (
        lambda call, sight: not (call.latent or call.sizes.head_dim == call.sizes.value_dim),
        "values have another width than keys",
    ),
    (lambda call, sight: any(x is not None for x in call.slot_scales), "each cached token has a scale of its own"),
    (lambda call, sight: _numbers(call) is None, "heads, or keys of the call's own, have scales of their own"),
)


class Scaled(NamedTuple):
    """Scales that are the same for all rows and heads."""

    score: float  # product of softmax scale, q_scale and k_scale
    value: float  # v_scale


def why_not(call: Call, sight: Sight) -> str | None:
    """Why flash attention serves no sequence of a call; None: it serves the sequences that `takes` accepts."""
    return next((why for holds, why in REASONS if holds(call, sight)), None)


def scaled(call: Call, sight: Sight) -> Scaled | None:
    """The scales of a call that flash attention serves; None if it serves no sequence of the call."""
    return None if why_not(call, sight) else _numbers(call)


def _numbers(call: Call) -> Scaled | None:
    """The scales of a call; None if flash attention cannot apply them.

    Each scale must be one number, and the scale of scores must lie between 2^-60 and 2^60.  New keys and values have no
    scale.  So beside them, the scales of keys and values must be 1.
    """
    given = call.given
    found = [per_head(x, call.sizes.kv_heads) for x in (given.q_scale, given.k_scale, call.v_scale)]
    numbers = [x for x in found if isinstance(x, float)]
    if len(numbers) < 3 or (given.k_new is not None and numbers[1:] != [1.0, 1.0]):
        return None
    score = call.scale * numbers[0] * numbers[1]
    return Scaled(score, numbers[2]) if 2.0**-60 < score < 2.0**60 else None


def takes(sight: Sight, seq: Seq) -> bool:
    """Whether flash attention serves a sequence.

    True for one query.  A sequence of several queries needs at least as many keys as queries, no window and no chunk.
    If such a sequence is causal, the call must have no shard.
    """
    if seq.query_len == 1:
        return True
    apart = sight.widest.shard is not None and sight.is_causal(seq)  # queries have no places among the rank's own keys
    return not sight.bounded and seq.context_len >= 0 and not apart


def attend(call: Call, sight: Sight, scales: Scaled, group: Sequence[Seq]) -> State | None:
    """(results [B, G, M, T, D], log-sum-exps [B, G, M, T]) of the sequences of `group`.

    None: pieces must not be joined, because log-sum-exps are too large (FAR).
    """
    queries = group[0].query_len
    if queries > 1 and len(group) > 1:
        found = [attend(call, sight, scales, [seq]) for seq in group]
        kept = [x for x in found if x is not None]
        return (torch.cat([x for x, _ in kept]), torch.cat([x for _, x in kept])) if len(kept) == len(found) else None
    rows = rows_of(call, call.given.q, group, 0, queries).to(call.compute)  # [B, T, G, M, D]
    spans = [Span(x.first, x.end) for x in (runs_of(sight, seq, 0, queries) for seq in group)]
    if queries == 1:
        parts = list(_few(call, scales, rows[:, 0], group, spans))
    else:
        parts = list(_many(call, sight, scales, rows[0], group[0], spans[0]))
    out, lse = parts[0]
    if len(parts) > 1 or call.given.sinks is not None:
        if not all(_near(lse, FAR[call.compute]) for _, lse in parts):
            return None
        if len(parts) > 1:
            out, lse = state.join(torch.stack([x.float() for x, _ in parts]), torch.stack([x for _, x in parts]))
    shape = (len(group), call.sizes.kv_heads, call.sizes.group, queries)
    out, lse = out[..., : call.sizes.value_dim].reshape(*shape, -1), lse.reshape(shape)
    if scales.value != 1.0:
        out = out.float() * scales.value
    return (out, lse) if call.given.sinks is None else _beside_sinks(call, out, lse)


def _few(call: Call, scales: Scaled, query: Tensor, group: Sequence[Seq], spans: Sequence[Span]) -> Iterator[State]:
    """States of one query of each sequence over pieces of the keys; query: [B, G, M, D].

    The heads of a group are rows of one product.
    """
    size = call.sizes.kv_heads * call.sizes.head_dim * call.compute.itemsize
    step = max(FEWEST_KEYS, min(MOST_KEYS, PIECE_BYTES // size))
    count, rows = max(x.end - x.first for x in spans), call.sizes.group
    if rows == 1 and call.compute == torch.bfloat16:  # two rows take a quarter of the time of one
        query = query.expand(-1, -1, 2, -1)
    for begin in range(0, count, step):
        piece = [Span(x.first + begin, min(x.first + begin + step, x.end)) for x in spans]
        for source, part in sources(call, group, piece):
            keys, values = _both(call, *source(call, group, part))
            mask = _padding(part, keys) if len({*part}) > 1 else None
            out, lse = FLASH(query, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scales.score)
            empty = [i for i, x in enumerate(part) if x.end <= x.first]
            if empty:
                lse[empty] = float("-inf")
            yield out[:, :, :rows], lse[:, :, :rows]


def _padding(spans: Sequence[Span], keys: Tensor) -> Tensor:
    """Mask float32 [B, 1, 1, N]: minus infinity after the end of each span, else 0."""
    ends = torch.tensor([max(x.end - x.first, 0) for x in spans], device=keys.device)[:, None, None, None]
    hidden = torch.arange(keys.shape[1], device=keys.device) >= ends
    return torch.zeros(hidden.shape, dtype=torch.float32, device=keys.device).masked_fill_(hidden, float("-inf"))


def _many(call: Call, sight: Sight, scales: Scaled, query: Tensor, seq: Seq, span: Span) -> Iterator[State]:
    """States of the queries of one sequence over pieces of the keys; query: [T, G, M, D].

    In a causal sequence, the context is cut into pieces, and the call's own keys are one more piece.
    """
    query = query.permute(1, 2, 0, 3)
    causal = sight.is_causal(seq)
    border = seq.context_len if causal else span.end
    step = MOST_KEYS if seq.query_len >= MANY_QUERIES else MOST_KEYS // 4
    for begin in range(span.first, border, step):
        yield from _shared(call, scales, query, seq, Span(begin, min(begin + step, border)), False)
    if causal:
        yield from _shared(call, scales, query, seq, Span(border, span.end), True)


def _shared(call: Call, scales: Scaled, query: Tensor, seq: Seq, span: Span, causal: bool) -> Iterator[State]:
    """States of queries [G, M, T, D] over the keys of a span; the query heads of a group share these keys."""
    for source, part in sources(call, [seq], [span]):
        keys, values = (
            x[0].transpose(0, 1)[:, None].expand(-1, call.sizes.group, -1, -1)
            for x in _both(call, *source(call, [seq], part))
        )
        yield FLASH(query, keys, values, is_causal=causal, scale=scales.score)


def _both(call: Call, keys: Tensor, values: Tensor) -> State:
    """Keys and values of one width; latent keys are their own values, and `attend` drops the rest from results."""
    return (keys, keys) if call.latent else (keys, values)


def _near(lse: Tensor, limit: float) -> bool:
    return bool(((lse.abs() <= limit) | (lse == float("-inf"))).all())


def _beside_sinks(call: Call, out: Tensor, lse: Tensor) -> State:
    """Results [B, G, M, T, D] and log-sum-exps with the sinks, each of which is a score of a key of value 0."""
    sinks = call.given.sinks.float().view(call.sizes.kv_heads, call.sizes.group, 1)
    total = torch.logaddexp(lse, sinks)
    weight = torch.where(lse == float("-inf"), 0.0, (lse - total).exp())
    return out.float() * weight[..., None], total
