"""Masks of keys: lines of each for the portable kernels, for the Hopper kernels, and what queries see by hand.

Every test of masks goes through all of these: beside other features, in any batch, in every kind of kernel.  A mask
that moves bounds has a line in tests/kernels/common/test_visited_tiles.py, too, which counts tiles.
"""

from __future__ import annotations

from typing import Any

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
}

# Over tiles of 64 and 128 keys, sequences of up to 1500.
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
}

# Queries, keys, options, and of each query the sum of 2^key over all keys that it sees.
BY_HAND: list[tuple[int, int, dict[str, Any], list[int]]] = [
    # chunks of 3: keys 0 1 2 | 3 4 5 | 6
    (5, 7, dict(chunk=3), [0b100 + 0b11, 0b1000, 0b11000, 0b111000, 0b1000000]),
    (4, 7, dict(chunk=3, causal=False), [0b111000] * 3 + [0b1000000]),
    (2, 7, dict(chunk=3, window_size=(1, -1)), [0b110000, 0b1000000]),
    (4, 7, dict(chunk=3, window_size=(0, 1), causal=False), [0b11000, 0b110000, 0b100000, 0b1000000]),
]
