"""Batches of any lengths for the Hopper kernels."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.support.hopper_cases import ALL_E4M3, E4M3_CACHE, FEATURES, NEW, PACKED, ragged

EVEN: dict[str, Any] = dict(even=True)  # blocks of many queries, no mixed batches
KINDS = {"even", "drafts"}  # fields below that choose lengths, and are not of a Case
# Fields of cases whose lengths `random_lengths` draws.
RANDOM: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16, head_dim 64": dict(dtype=torch.float16, head_dim=64),
    "head_dim 256, page 8": dict(head_dim=256, page_size=8),
    "features": FEATURES,
    "features, no lse": FEATURES | dict(lse=False),
    "softcap": EVEN | dict(softcap=30.0),
    "softcap, no lse, window, sinks": EVEN | dict(softcap=30.0, lse=False, window_size=(200, -1), sinks=True),
    "softcap, no lse, new": EVEN | NEW | dict(softcap=50.0, lse=False),
    "softcap, no lse, head_dim 64": EVEN | dict(softcap=20.0, lse=False, head_dim=64),
    "window to both sides": dict(window_size=(100, 50), causal=False),
    "positions, window": dict(positions="tree", window_size=(30, -1)),
    "positions, tree, alibi": dict(positions="tree", window_size=(100, -1), alibi=True, qq_bias=64, tree=True),
    "one KV head": dict(heads=8, kv_heads=1),
    "group 3": dict(heads=24),
    "group 48": dict(heads=48, kv_heads=1),
    "group 48, e4m3 cache": E4M3_CACHE | dict(heads=48, kv_heads=1),
    "new": NEW,
    "e4m3 cache": E4M3_CACHE,
    "e4m3 cache, no lse": E4M3_CACHE | dict(lse=False),
    "all e4m3": ALL_E4M3,
    "all e4m3, no lse": ALL_E4M3 | dict(lse=False),
    "invariant": dict(batch_invariant=True),
    "x-packed": PACKED,
    "x-packed, features": PACKED | FEATURES,
    "x-packed, group 48": PACKED | dict(heads=48, kv_heads=1),
    "x-packed, new, page 32": PACKED | NEW | dict(page_size=32),
    "x-packed, head_dim 64, new, window": PACKED | NEW | dict(head_dim=64, window_size=(200, -1)),
}

DECODES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "features": FEATURES,
    "one KV head, no lse": dict(heads=8, kv_heads=1, lse=False),
    "head_dim 64": dict(head_dim=64),
    "e4m3 cache": E4M3_CACHE,
    "new": NEW,
    "drafts": dict(drafts=True),
    "e4m3 cache, drafts, window": E4M3_CACHE | dict(drafts=True, window_size=(200, -1)),
    "head_dim 256, drafts": dict(drafts=True, head_dim=256),
    "positions, drafts, window": dict(positions="tree", drafts=True, window_size=(5, -1), alibi=True),
    "group 1, page 32": dict(kv_heads=32, page_size=32),
    "x-packed": PACKED,
    "x-packed, float16, head_dim 64, page 32": PACKED | dict(dtype=torch.float16, head_dim=64, page_size=32),
    "x-packed, head_dim 256, page 8": PACKED | dict(head_dim=256, page_size=8),
    "x-packed, e4m3": PACKED | E4M3_CACHE,
    "x-packed, all e4m3, drafts": PACKED | ALL_E4M3 | dict(drafts=True),
    "x-packed, drafts": PACKED | dict(drafts=True),
}


def random_decodes(rng: random.Random, drafts: bool = False, most: float = 11.5) -> dict[str, Any]:
    """Draw up to 9 sequences of similar or different numbers of keys, some without keys, with one query each.

    drafts: up to 8 queries each.  most: log2 of the largest number of keys.
    """
    longest, ratio = 2 ** rng.uniform(5, max(5, most)), rng.choice([1.0, 1.5, 4.0, 1000.0])
    keys = [int(longest * ratio ** -rng.random()) for _ in range(rng.randint(1, 9))]
    lengths = [(rng.randint(1, 8) if drafts else 1, 0 if rng.random() < 0.1 else n) for n in keys]
    return ragged(*lengths) | (dict(bounds=True) if drafts else dict(decode_form=True))


def random_lengths(rng: random.Random, even: bool = False, most: float = 11.5) -> dict[str, Any]:
    """Draw up to 12 sequences: decodes, drafts, chunks, whole prefills, empty ones, or all of one kind.

    even: up to 5 sequences with equal numbers of queries, too many for even shares, over different numbers of keys.
    most: log2 of the largest number of keys before the queries.
    """
    if even:
        queries = rng.randint(130, 300)
        keys = [rng.choice([0, int(2 ** rng.uniform(0, most - 1))]) for _ in range(rng.randint(1, 5))]
        return ragged(*[(queries, queries + n) for n in keys]) | dict(bounds=True)

    def sequence(kind: str) -> tuple[int, int]:
        keys = int(2 ** rng.uniform(0, most))
        few, some = rng.randint(2, 16), rng.randint(17, 200 if most > 9 else 70)
        lengths = {"decode": (1, keys), "draft": (few, few + keys), "chunk": (some, some + keys)}
        lengths |= {"prefill": (some, some), "nothing": (0, keys), "no keys": (few, 0), "few keys": (some, few)}
        return lengths[kind]

    usual = ["decode"] * 4 + ["draft", "draft", "chunk", "chunk", "prefill"]
    kinds = [*usual, "nothing", "no keys", "few keys"]
    if rng.random() < 0.3:
        usual = kinds = [rng.choice(usual)] * 9
    # at least one sequence has a query; without queries the portable kernels run
    lengths = ragged(sequence(rng.choice(usual)), *[sequence(rng.choice(kinds)) for _ in range(rng.randint(0, 11))])
    return lengths | dict(bounds=rng.random() < 0.5, padding=rng.choice([0, 0, 3, 150]))
