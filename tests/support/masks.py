"""Masks of keys: fields of cases for the portable and for the Hopper kernels, and visible keys written by hand.

Tests of masks go through these tables: beside other features, in any batch, in every kind of kernel.  A mask that moves
key bounds is also in BOUNDS or GAPS, by which tests/kernels/common/test_visited_tiles.py counts tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Over tiles of 32 keys, sequences of up to 87: within a tile, across tiles, longer than all.
MASKS: dict[str, dict[str, Any]] = {
    "chunk of a tile": dict(chunk=32),
    "chunk across tiles": dict(chunk=43),
    "chunk within a tile": dict(chunk=5),
    "chunk of one": dict(chunk=1),
    "chunk longer than all": dict(chunk=1000),
    "chunk, not causal": dict(chunk=43, causal=False),
    "chunk, window": dict(chunk=43, window_size=(20, -1)),
    "causal or not": dict(causal_by_seq=True),
    "not causal or causal, chunk": dict(causal_by_seq=True, causal=False, chunk=43),
    "causal or not, window": dict(causal_by_seq=True, window_size=(20, 6)),
    "spans": dict(spans=3),
    "spans beyond a window": dict(spans=2, window_size=(9, -1)),
    "spans in a window": dict(spans=2, window_size=(9, 12), clip_spans=True),
    "spans in chunks": dict(spans=3, chunk=20, clip_spans=True),
    "spans beyond chunks": dict(spans=3, chunk=20),
    "spans, prefix, window": dict(spans=2, prefix=11, window_size=(9, -1)),
    "spans, not causal, window": dict(spans=2, window_size=(9, 3), causal=False),
    "spans, causal or not": dict(spans=2, causal_by_seq=True, window_size=(9, 3)),
    "prefix": dict(prefix=20),
    "prefix, window": dict(prefix=11, window_size=(9, -1)),
    "prefix, window of one": dict(prefix=3, window_size=(0, -1)),
    "prefix, chunk": dict(prefix=11, chunk=20),
    "prefix, window both ways": dict(prefix=11, window_size=(9, 3), causal=False),
    "prefix, to the right": dict(prefix=20, window_size=(-1, 3), causal=False),
    "chunk, window both ways": dict(chunk=43, window_size=(20, 6), causal=False),
    "windows by head": dict(head_windows=((-1, -1), (20, -1))),
    "windows by head, KV heads and groups differ": dict(
        heads=6, kv_heads=2, head_windows=((9, -1), (0, -1), (40, -1), (-1, -1))
    ),
    "windows by head, all stream": dict(heads=4, kv_heads=2, head_windows=((40, -1), (9, -1), (20, -1), (0, -1))),
    "windows by head, both ways": dict(
        heads=4, kv_heads=2, causal=False, head_windows=((9, 3), (20, 0), (-1, 6), (3, -1))
    ),
    "windows by head, causal or not": dict(
        heads=4, kv_heads=2, causal_by_seq=True, head_windows=((20, 6), (9, -1), (5, 0), (5, 2))
    ),
    "windows by head, chunk": dict(chunk=43, head_windows=((-1, -1), (20, -1))),
    "windows by head, prefix": dict(
        heads=4, kv_heads=2, prefix=11, head_windows=((-1, -1), (20, -1), (9, -1), (3, -1))
    ),
    "windows by head, spans beyond them": dict(spans=2, head_windows=((3, -1), (20, -1))),
    "windows by head, spans in them": dict(spans=2, clip_spans=True, head_windows=((9, 12), (3, 0))),
}

# For tiles of 64 and 128 keys and sequences of up to 1500.
LONG_MASKS: dict[str, dict[str, Any]] = {
    "chunk": dict(chunk=192),
    "chunk, window": dict(chunk=150, window_size=(100, -1)),
    "causal or not": dict(causal_by_seq=True),
    "prefix": dict(prefix=70),
    "spans": dict(spans=2),
    "spans beyond a window": dict(spans=2, window_size=(100, -1)),
    "spans in a window": dict(spans=3, window_size=(100, 40), clip_spans=True),
    "prefix, to the right": dict(prefix=70, window_size=(-1, 9), causal=False),
    "chunk, not causal": dict(chunk=150, causal=False),
    "windows by head": dict(head_windows=((-1, -1), (100, -1), (200, -1), (0, -1))),
    "windows by KV head": dict(head_windows=((-1, -1),) * 4 + ((100, -1), (130, -1), (70, -1), (100, -1))),
    "windows by head, not causal": dict(causal=False, head_windows=((100, 40), (-1, 9), (0, 0), (300, -1))),
}

# Cases of tests/kernels/hopper/test_hopper_masks.py that CI simulates: a mask of LONG_MASKS, and a case there.
QUICK = {
    ("chunk", "mixed, all"),
    ("prefix", "mixed"),
    ("spans beyond a window", "mixed, all"),
    ("spans", "long, softcap"),
    ("causal or not", "drafts, all"),
    ("causal or not", "mixed"),
    ("windows by head", "drafts, all"),
    ("windows by KV head", "decodes"),
    ("windows by head, not causal", "mixed"),
    ("chunk", "decodes"),
    ("chunk, not causal", "long, softcap"),
}

# (queries, keys, options, for each query the sum of 2^key over the keys that it sees)
BY_HAND: list[tuple[int, int, dict[str, Any], list[int]]] = [
    # chunks of 3: keys 0 1 2 | 3 4 5 | 6
    (5, 7, dict(chunk=3), [0b100 + 0b11, 0b1000, 0b11000, 0b111000, 0b1000000]),
    (4, 7, dict(chunk=3, causal=False), [0b111000] * 3 + [0b1000000]),
    (2, 7, dict(chunk=3, window_size=(1, -1)), [0b110000, 0b1000000]),
    (4, 7, dict(chunk=3, window_size=(0, 1), causal=False), [0b11000, 0b110000, 0b100000, 0b1000000]),
]


class Mask(NamedTuple):
    """A mask: the arguments of kernels for it, those of a call, and the keys that it shows."""

    mods: dict[str, Any]  # a list is a tensor of one sequence, True a constexpr
    call: dict[str, Any]
    sees: Callable[[int, int], bool]  # (position of a query, position of a key)


# Spans within a tile of 4 and across several, next to each other, across tiles of 64, empty, and behind all keys.
SPANS = [[2, 4], [5, 14], [14, 15], [-1, -1], [20, 37], [50, 140], [1000, 2000]]
COUNT: dict[str, Any] = dict(spans_count=len(SPANS), spans_stride=2 * len(SPANS), spans_step=2)


def together(q: int, k: int) -> bool:
    return any(a <= q < b and a <= k < b for a, b in SPANS)


BOUNDS = {
    "causal": Mask(dict(right=0), {}, lambda q, k: k <= q),
    "all": Mask({}, dict(causal=False), lambda q, k: True),
    "left": Mask(dict(left=5, right=0), dict(window_size=(5, -1)), lambda q, k: q - 5 <= k <= q),
    "left, not causal": Mask(dict(left=5), dict(window_size=(5, -1), causal=False), lambda q, k: q - 5 <= k),
    "right": Mask(dict(right=6), dict(window_size=(-1, 6), causal=False), lambda q, k: k <= q + 6),
    "both": Mask(
        dict(left=9, right=2), dict(window_size=(9, 2), causal=False), lambda q, k: q - 9 <= k <= q + 2
    ),
    "chunk": Mask(dict(left=5, right=0, chunk=6), dict(chunk=6), lambda q, k: q // 6 * 6 <= k <= q),
    "chunk, not causal": Mask(dict(left=5, chunk=6), dict(chunk=6, causal=False), lambda q, k: q // 6 == k // 6),
    "chunk, window": Mask(
        dict(left=3, right=0, chunk=70), dict(chunk=70, window_size=(3, -1)),
        lambda q, k: max(q - 3, q // 70 * 70) <= k <= q,
    ),
    "chunk, window both ways": Mask(
        dict(left=3, right=2, chunk=7), dict(chunk=7, window_size=(3, 2), causal=False),
        lambda q, k: q // 7 == k // 7 and q - 3 <= k <= q + 2,
    ),
    "spans": Mask(
        dict(right=0, spans=[SPANS], **COUNT), dict(spans=[SPANS]), lambda q, k: k <= q or together(q, k)
    ),
    "spans beyond a window": Mask(
        dict(left=3, right=0, spans=[SPANS], **COUNT), dict(spans=[SPANS], window_size=(3, -1)),
        lambda q, k: q - 3 <= k <= q or together(q, k),
    ),
    "spans in a window": Mask(
        dict(left=3, right=0, spans=[SPANS], CLIP_SPANS=True, spans_right=2, **COUNT),
        dict(spans=[SPANS], window_size=(3, 2), clip_spans=True),
        lambda q, k: q - 3 <= k <= q + 2 and (k <= q or together(q, k)),
    ),
    "spans in chunks": Mask(
        dict(left=8, right=0, chunk=9, spans=[SPANS], CLIP_SPANS=True, **COUNT),
        dict(spans=[SPANS], chunk=9, clip_spans=True),
        lambda q, k: q // 9 == k // 9 and (k <= q or together(q, k)),
    ),
    "prefix": Mask(dict(right=0, prefix_lens=[6]), dict(prefix_lens=[6]), lambda q, k: k <= q or k < 6),
    "prefix, right": Mask(
        dict(right=1, prefix_lens=[70]), dict(prefix_lens=[70], window_size=(-1, 1), causal=False),
        lambda q, k: k <= q + 1 or k < 70,
    ),
    "causal by sequence": Mask(dict(right=1 << 30, causal=[True]), dict(causal=[True]), lambda q, k: k <= q),
    "not causal by sequence": Mask(dict(right=3, causal=[False]), dict(causal=[False], window_size=(-1, 3)),
        lambda q, k: k <= q + 3,
    ),
    "itself": Mask(dict(left=0, right=0), dict(window_size=(0, 0)), lambda q, k: k == q),
}  # fmt: skip
# Masks whose bounds may leave a gap: keys that no query sees, between keys that some query sees.
GAPS = {
    "prefix, window": Mask(
        dict(left=5, right=0, prefix_lens=[6]), dict(prefix_lens=[6], window_size=(5, -1)),
        lambda q, k: q - 5 <= k <= q or k < 6,
    ),
    "prefix of a tile, window": Mask(
        dict(left=2, right=0, prefix_lens=[4]), dict(prefix_lens=[4], window_size=(2, -1)),
        lambda q, k: q - 2 <= k <= q or k < 4,
    ),
    "prefix of one, chunk": Mask(
        dict(left=6, right=0, chunk=7, prefix_lens=[1]), dict(prefix_lens=[1], chunk=7),
        lambda q, k: q // 7 * 7 <= k <= q or k < 1,
    ),
    "prefix, spans beyond a window": Mask(
        dict(left=3, right=0, prefix_lens=[3], spans=[SPANS], **COUNT),
        dict(spans=[SPANS], prefix_lens=[3], window_size=(3, -1)),
        lambda q, k: q - 3 <= k <= q or k < 3 or together(q, k),
    ),
    "no prefix, window": Mask(
        dict(left=5, right=0, prefix_lens=[0]), dict(prefix_lens=[0], window_size=(5, -1)), lambda q, k: q - 5 <= k <= q
    ),
    "long prefix, window both ways": Mask(
        dict(left=2, right=2, prefix_lens=[67]), dict(prefix_lens=[67], window_size=(2, 2), causal=False),
        lambda q, k: q - 2 <= k <= q + 2 or k < 67,
    ),
}  # fmt: skip


def blocks_of(launch: Any, queries: tuple[int, ...], keys: tuple[int, ...]) -> Iterator[tuple[range, int]]:
    """Yield (positions of its queries, number of its sequence's keys) of each block that a launch serves."""
    for query_len, seq_len in zip(queries, keys):
        if launch.shortest <= query_len <= launch.longest:
            begin = seq_len - query_len
            for first in range(begin, seq_len, launch.shape.BLOCK_Q):
                yield range(first, min(first + launch.shape.BLOCK_Q, seq_len)), seq_len
