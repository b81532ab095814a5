"""One call of paged_attention: each group of sequences is computed by flash attention or in blocks, and stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import blocks, plain
from .call import Call, Seq, narrow, quiet, sequences, tokens_of
from .visible import Sight, runs_of, sight_of

TOGETHER = 4096  # maximum keys of a group of several sequences, if each counts as the longest one
MOST_QUERIES = 128  # maximum queries of a group of several sequences
ALIKE = 1.25, 32  # a group's longest sequence has up to ALIKE[0] * (keys of its shortest one) + ALIKE[1] keys


def attend(call: Call) -> None:
    """Write the results of a call, and its log-sum-exps if they are asked for."""
    with quiet(call.device):
        _clear_padding(call)
        sight = sight_of(call.given, call.options)
        scales = plain.scaled(call, sight)
        served, others = _parted(sight, scales, sequences(call))
        for group in groups_of(call, sight, served):
            found = plain.attend(call, sight, scales, group) if scales is not None else None
            if found is None:
                others += group
            else:
                _store(call, group, 0, group[0].query_len, *found)
        for group in groups_of(call, sight, others):
            for block in blocks.blocks_of(call, group):
                _store(call, group, block.first, block.end, *blocks.attend(call, sight, group, block))


def words(call: Call) -> list[str]:
    """How each group of sequences is computed, and why not by flash attention, in words.

    Log-sum-exps are not known here, so groups that `plain.attend` refuses for large ones count as flash attention's.
    """
    sight = sight_of(call.given, call.options)
    scales, why = plain.scaled(call, sight), plain.why_not(call, sight)
    served, others = _parted(sight, scales, sequences(call))
    found = [(group, "flash attention of torch") for group in groups_of(call, sight, served)]
    for group in groups_of(call, sight, others):
        blocked = f"blocks over tiles of {blocks.tile_of(call)} keys: {why or _why_not(sight, group)}"
        found.append((group, blocked))
    texts = Counter(f"{_count(group)}, {how}" for group, how in found)
    return [f"{count} groups of {text}" if count > 1 else text for text, count in texts.items()]


def _why_not(sight: Sight, group: Sequence[Seq]) -> str:
    """Why flash attention does not take a group, in a call for which `plain.why_not` has no reason."""
    if sight.bounded:
        return "a window or a chunk bounds what its queries see"
    return "it has more queries than keys" if group[0].context_len < 0 else "its keys lie with several ranks"


def _count(group: Sequence[Seq]) -> str:
    """The lengths of a group's sequences, in words."""
    queries, keys = group[0].query_len, sorted({seq.seq_len for seq in group})
    of_keys = f"{keys[0]}" if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
    alike = f"{len(group)} sequences" if len(group) > 1 else "1 sequence"
    return f"{alike} of {queries} {'query' if queries == 1 else 'queries'} at {of_keys} keys"


def _parted(sight: Sight, scales: plain.Scaled | None, found: Iterable[Seq]) -> tuple[list[Seq], list[Seq]]:
    """(sequences that flash attention serves, the other sequences)."""
    served: list[Seq] = []
    others: list[Seq] = []
    for seq in found:
        is_plain = scales is not None and plain.takes(sight, seq) and _keys(sight, seq) > 0
        (served if is_plain else others).append(seq)
    return served, others


def groups_of(call: Call, sight: Sight, found: list[Seq]) -> Iterator[list[Seq]]:
    """Groups of sequences with equal numbers of queries and similar numbers of keys.

    With batch_invariant, every sequence is a group of its own.
    """
    if call.options.batch_invariant:
        yield from ([seq] for seq in found)
        return
    counted = sorted((seq.query_len, _keys(sight, seq), seq) for seq in found)
    group: list[Seq] = []
    queries = least = 0
    for query_len, keys, seq in counted:
        alike = keys <= least * ALIKE[0] + ALIKE[1] and (least > 0) == (keys > 0)
        small = (len(group) + 1) * keys <= TOGETHER and (len(group) + 1) * query_len <= MOST_QUERIES
        if group and not (query_len == queries and alike and small):
            yield sorted(group)
            group = []
        if not group:
            queries, least = query_len, keys
        group.append(seq)
    if group:
        yield sorted(group)


def _keys(sight: Sight, seq: Seq) -> int:
    """Number of a sequence's keys that are read."""
    runs = runs_of(sight, seq, 0, seq.query_len)
    return max(runs.end - runs.first, 0) + runs.prefix


def _clear_padding(call: Call) -> None:
    """Write zeros, and log-sum-exps of -inf, for tokens after the last sequence; with `only`, write nothing."""
    if call.options.only is not None:
        return
    starts = call.given.cu_seqlens_q
    end = len(call.given.seq_lens) if starts is None else int(starts[-1])
    if end < len(call.given.q):
        call.given.out[end:].zero_()
        if call.lse is not None:
            call.lse[end:] = float("-inf")


def _store(call: Call, group: Sequence[Seq], first: int, end: int, out: Tensor, lse: Tensor) -> None:
    """Gate, scale, round and store results of tokens [first, end) of each sequence.

    out: [B, G, M, T, D], for B sequences, G KV heads, M query heads of each, T tokens and D dims.  lse: [B, G, M, T].
    """
    given, tokens = call.given, tokens_of(group, first, end, call.device)
    rows = out.permute(0, 3, 1, 2, 4).reshape(-1, call.sizes.heads, call.sizes.value_dim)
    if given.gate is not None:
        rows = rows.float()
        rows = torch.where(rows == 0, 0.0, rows * torch.sigmoid(given.gate[tokens].float()))
    if given.out_scale is not None:
        rows = rows.float() / given.out_scale
    stored: Any = narrow(rows, given.out.dtype)
    if stored.dtype.itemsize == 1:  # torch cannot store fp8 by index, so bytes are stored
        given.out.view(torch.uint8)[tokens] = stored.view(torch.uint8)
    else:
        given.out[tokens] = stored
    if call.lse is not None:
        call.lse[tokens] = lse.permute(0, 3, 1, 2).reshape(-1, call.sizes.heads)
