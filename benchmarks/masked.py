"""Masks of benchmark cases beyond a window (images, prefixes), and how many keys and pairs they leave visible."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paged_attn.records.key_bounds import key_bounds_of
from tests.support.cases import Case

IMAGE = 256  # tokens of an image in Gemma 3 and PaliGemma


def is_masked(case: Case) -> bool:
    """Whether a case's mask depends on sequence, head, prefix or images, which `key_bounds_of` does not describe."""
    return case.causal_by_seq or case.prefix > 0 or case.spans > 0 or case.head_windows != ()


def images(case: Case) -> list[list[list[int]]]:
    """Return [seqs, n, 2]: spans of n images, spaced evenly over a sequence's queries, or over all keys of a decode."""
    found = []
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        room = query_len if query_len > 1 else seq_len
        steps = [seq_len - room + i * room // case.spans for i in range(case.spans)]
        found.append([[at, min(at + IMAGE, at + room // case.spans)] for at in steps])
    return found


def reach(case: Case, seq: int) -> tuple[Tensor, Tensor]:
    """Return ([query_len] first visible key, [query_len] end, exclusive) of a sequence's queries, prefix left out."""
    query_len, seq_len = case.query_lens[seq], case.seq_lens[seq]
    pos = torch.arange(seq_len - query_len, seq_len)
    causal = case.causal == (seq % 2 == 0) if case.causal_by_seq else case.causal
    window = key_bounds_of(replace(case, causal=False))
    begin, end_of_window = window.first_key(pos), window.end_of_keys(pos, seq_len)
    end = end_of_window.minimum(pos + 1) if causal else end_of_window
    for first, past in images(case)[seq] if case.spans else ():
        holds = (first <= pos) & (pos < past)
        if case.clip_spans:
            end = torch.where(holds, end.maximum(end_of_window.clamp(max=past)), end)
        else:
            begin, end = begin.where(~holds, begin.clamp(max=first)), end.where(~holds, end.clamp(min=past))
    return begin, end.clamp(max=seq_len)


def keys_and_pairs(case: Case) -> tuple[int, int]:
    """Return (keys that some query sees, pairs of a query and a visible key), summed over sequences.

    With windows by head, keys are a mean over KV heads, and pairs a mean over heads.
    """
    if case.head_windows:
        each = {x: keys_and_pairs(replace(case, head_windows=(), window_size=x)) for x in {*case.windows}}
        group = case.heads // case.kv_heads
        groups = [case.windows[i : i + group] for i in range(0, case.heads, group)]
        seen = sum(max(each[x][0] for x in windows) for windows in groups)
        return round(seen / case.kv_heads), round(sum(each[x][1] for x in case.windows) / case.heads)
    keys = pairs = 0
    for seq, query_len in enumerate(case.query_lens):
        if query_len == 0 or case.seq_lens[seq] <= 0:
            continue
        begin, end = reach(case, seq)
        prefix = min(case.prefix, case.seq_lens[seq])
        pairs += int((end.clamp(min=prefix) - begin.clamp(min=prefix) + prefix).sum())
        keys += max(int(end.max()), prefix) - max(int(begin.min()), prefix) + prefix
    return keys, pairs
