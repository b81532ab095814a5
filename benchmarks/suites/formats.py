"""Cache formats: the same batches over bfloat16, over e4m3 and int8 (one scale, and scales by token), over int4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.suites.batches import uniform
from benchmarks.suites.phases import MIXED
from tests.support.cases import E4M3, INT4

BATCHES = (
    uniform("decode b1 x 131072", 1, 1, 131072),
    uniform("decode b64 x 4096", 64, 1, 4096),
    uniform("decode b256 x 4096", 256, 1, 4096),
    uniform("speculate b16 x 8192, q_len 8", 16, 8, 8192),
    uniform("prefill b4 x 4096", 4, 4096, 4096),
    uniform("chunk of 2048 at 16384", 1, 2048, 16384),
    *MIXED[:2],
)
# Suffix of the case's name -> fields of the case.  Scales by token are to be compared with one scale.
CACHES: dict[str, dict[str, Any]] = {
    "": {},
    ", e4m3, one scale": dict(cache_dtype=E4M3, scales="float"),
    ", e4m3, scales by token": dict(cache_dtype=E4M3, scales="per_token"),
    ", int8, one scale": dict(cache_dtype=torch.int8, scales="float"),
    ", int8, scales by token": dict(cache_dtype=torch.int8, scales="per_token"),
    ", int4": dict(cache_dtype=INT4, scales="per_token"),
}
FORMATS = tuple(
    [replace(batch, name=batch.name + name, **cache) for batch in BATCHES for name, cache in CACHES.items()]
)
