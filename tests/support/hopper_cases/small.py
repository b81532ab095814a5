"""Small batches, one for each path of a launch."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases import E5M2
from tests.support.hopper_cases.parts import (
    ALL_E4M3,
    CAPPED,
    E4M3_CACHE,
    FEATURES,
    NEW,
    PACKED,
    ragged,
)

SMALL: dict[str, dict[str, Any]] = {
    "decodes": ragged((1, 300), (1, 0), (1, 2000)) | dict(decode_form=True),
    "decodes with room for as many keys": ragged((1, 300), (1, 0), (1, 1000)) | dict(decode_form=True),
    "decodes over e4m3, features": ragged((1, 300), (1, 1000)) | E4M3_CACHE | FEATURES | dict(decode_form=True),
    "decodes, x-packed, features": ragged((1, 300), (1, 0), (1, 1000)) | PACKED | FEATURES | dict(decode_form=True),
    "decodes, x-packed e5m2": ragged((1, 300), (1, 0), (1, 1000)) | PACKED | dict(cache_dtype=E5M2, decode_form=True),
    "drafts, x-packed, page 32": ragged((8, 500), (5, 5), (0, 9)) | PACKED | dict(bounds=True, page_size=32),
    "drafts, trees": ragged((8, 500), (5, 5), (0, 9)) | dict(bounds=True, qq_bias=8, tree=True),
    "even drafts": ragged((32, 700), (32, 40)) | dict(bounds=True),
    "chunk": ragged((100, 700)),
    "chunk, features": ragged((100, 700)) | FEATURES,
    "chunk, softcap": ragged((100, 700)) | CAPPED,
    "prompt, softcap": ragged((150, 300)) | dict(softcap=30.0, lse=False),
    "prompt, softcap, float16": ragged((150, 300)) | dict(softcap=30.0, dtype=torch.float16),
    "chunk, new": ragged((100, 700)) | NEW,
    "chunk, head_dim 256, page 24": ragged((40, 200)) | dict(head_dim=256, page_size=24),
    "chunk over e4m3": ragged((100, 400)) | E4M3_CACHE,
    "chunk of e4m3": ragged((100, 400)) | ALL_E4M3 | dict(lse=False),
    "mixed": ragged((1, 500), (70, 300), (1, 0), (9, 9)) | dict(padding=3),
    "mixed, group 12, features, head_dim 64": ragged((1, 500), (70, 300), (1, 0), (9, 9))
    | FEATURES
    | dict(heads=96, head_dim=64),
    "mixed over e4m3, group 3": ragged((1, 500), (70, 300), (9, 9)) | E4M3_CACHE | dict(heads=24),
    "prefills of any length": ragged(*[(n, n) for n in (112, 107, 165, 25, 64, 154, 57, 138)]),
    "invariant": ragged((1, 600), (70, 700)) | dict(batch_invariant=True),
    "decodes, a user's table": ragged((1, 300), (1, 0), (1, 1000)) | dict(decode_form=True, score_mod="relative"),
    "chunk, a user's alibi": ragged((100, 700)) | dict(score_mod="alibi"),
    "mixed, a user's chunks and all features": ragged((1, 500), (70, 300), (1, 0), (9, 9))
    | FEATURES
    | dict(score_mod="chunks", qq_bias=8, padding=3),
    "chunk, new, a user's table": ragged((100, 400)) | NEW | dict(score_mod="relative"),
    "chunk, softcap, a user's table": ragged((100, 400)) | CAPPED | dict(score_mod="relative"),
    "chunk over e4m3, a user's chunks": ragged((100, 400)) | E4M3_CACHE | dict(score_mod="chunks"),
    "chunk of e4m3, a user's softcap": ragged((100, 400)) | ALL_E4M3 | dict(lse=False, score_mod="softcap"),
    "mixed, head_dim 64, trees, a user's alibi": ragged((1, 500), (70, 300), (9, 9))
    | dict(head_dim=64, positions="tree", window_size=(200, -1), score_mod="alibi"),
    "invariant, a user's table": ragged((1, 600), (70, 700)) | dict(batch_invariant=True, score_mod="relative"),
    "mixed, x-packed, a user's alibi": ragged((1, 500), (70, 300), (9, 9)) | PACKED | dict(score_mod="alibi"),
    "a chunk of 72 heads, a user's table": ragged((130, 300)) | dict(heads=72, kv_heads=1, score_mod="relative"),
}
