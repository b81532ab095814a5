"""Batches for tests in which each tile's row maxima exceed those of earlier tiles."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases import E4M3
from tests.support.hopper_cases.parts import (
    DECODES,
    NEW,
    PACKED,
    PREFILLS,
    ragged,
)

RISING: dict[str, dict[str, Any]] = {
    "prefills": PREFILLS,
    "prefills, float16": PREFILLS | dict(dtype=torch.float16),
    "prefills, head_dim 64": PREFILLS | dict(head_dim=64),
    "prefills, head_dim 256": PREFILLS | dict(head_dim=256),
    "a chunk, window": ragged((700, 3000)) | dict(window_size=(1000, -1)),
    "a chunk, not causal, window to both sides": ragged((700, 3000)) | dict(causal=False, window_size=(400, 300)),
    "a chunk, softcap, alibi, sinks": ragged((700, 3000)) | dict(softcap=50.0, alibi=True, sinks=True),
    "a chunk, softcap": ragged((700, 3000)) | dict(softcap=50.0, lse=False),
    "a chunk, softcap, float16": ragged((700, 3000)) | dict(softcap=50.0, dtype=torch.float16),
    "a chunk, x-packed": ragged((700, 3000)) | PACKED,
    "a chunk, x-packed, new": ragged((700, 3000), (90, 1900)) | PACKED | NEW,
    "a chunk, x-packed, new, softcap, alibi": ragged((300, 3000)) | PACKED | NEW | dict(softcap=50.0, alibi=True),
    "a chunk over e4m3": ragged((700, 3000)) | dict(cache_dtype=E4M3, lse=False),
    "prefills over e4m3": PREFILLS | dict(cache_dtype=E4M3, lse=False),
    "prefills over e4m3, head_dim 256": PREFILLS | dict(cache_dtype=E4M3, lse=False, head_dim=256),
    "a chunk over e4m3, softcap": ragged((700, 3000)) | dict(softcap=50.0, lse=False, cache_dtype=E4M3),
    "a chunk over e4m3, alibi": ragged((700, 3000)) | dict(alibi=True, lse=False, cache_dtype=E4M3),
    "mixed": ragged((300, 3000), (1, 4000), (90, 90)),
    "chunks of 16": ragged(*[(16, 3000)] * 6) | dict(bounds=True),
    "chunks of 64": ragged(*[(64, 5000)] * 12) | dict(bounds=True),
    "chunks of 64, float16": ragged(*[(64, 5000)] * 12) | dict(bounds=True, dtype=torch.float16),
    "invariant": ragged((300, 3000), (1, 4000)) | dict(batch_invariant=True),
    "decodes": DECODES | dict(bounds=True),
    "decodes, float16": DECODES | dict(bounds=True, dtype=torch.float16),
    "decodes, softcap, alibi, sinks": DECODES | dict(bounds=True, softcap=50.0, alibi=True, sinks=True),
    "decodes over e4m3": DECODES | dict(bounds=True, cache_dtype=E4M3),
    "decodes, x-packed": DECODES | PACKED | dict(bounds=True),
    "drafts of 4, x-packed e4m3": ragged(*[(4, 3000)] * 5, (2, 1000)) | PACKED | dict(bounds=True, cache_dtype=E4M3),
    "drafts of 4, x-packed": ragged(*[(4, 3000)] * 5, (2, 1000)) | PACKED | dict(bounds=True),
    "drafts of 2": ragged(*[(2, 3000)] * 5, (1, 1000)) | dict(bounds=True),
    "drafts of 4": ragged(*[(4, 3000)] * 5, (2, 1000)) | dict(bounds=True),
    "drafts of 4 over e4m3": ragged(*[(4, 3000)] * 5, (2, 1000)) | dict(bounds=True, cache_dtype=E4M3),
    "drafts of 8 over e4m3": ragged(*[(8, 3000)] * 5, (2, 1000)) | dict(bounds=True, cache_dtype=E4M3),
}
