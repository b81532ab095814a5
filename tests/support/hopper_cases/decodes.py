"""Decodes, and speculation of a few tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cases import E4M3
from tests.support.hopper_cases.parts import (
    CAPPED,
    DECODE,
    DECODES,
    FEATURES,
    NEW,
    SPECULATION_OF_4,
    ragged,
)

DECODE_CASES: dict[str, dict[str, Any]] = {
    "decode of one tile": ragged((1, 64)) | dict(decode_form=True),
    "decode": ragged((1, 512)) | dict(decode_form=True),
    "long decode": ragged((1, 40000)) | dict(decode_form=True),
    "decodes": DECODE,
    "decodes, ragged, padding": DECODES | dict(bounds=True, padding=3),
    "decodes, window": DECODE | dict(window_size=(100, -1), sinks=True),
    "decodes, all features": DECODE | dict(window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "200 decodes": ragged(*[(1, 37 * i) for i in range(200)]) | dict(decode_form=True),
    "64 long decodes": ragged(*[(1, 4096)] * 64) | dict(decode_form=True),
    "decodes, head_dim 64": DECODE | dict(head_dim=64),
    "decodes, head_dim 64, features": DECODE
    | dict(head_dim=64, window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "decodes, head_dim 64, ragged, padding, fp8 out": DECODES
    | dict(bounds=True, padding=3, head_dim=64, out_dtype=E4M3),
    "decodes, head_dim 64, group 3, page 8, float16": DECODE
    | dict(head_dim=64, heads=24, page_size=8, dtype=torch.float16),
    "decodes, head_dim 64, hnd": DECODE | dict(head_dim=64, layout="HND"),
    "decodes, head_dim 64, shared buffer, strided": DECODE | dict(head_dim=64, shared_buffer=True, strided=True),
    "speculation of 4, head_dim 64, group 1": SPECULATION_OF_4 | dict(head_dim=64, heads=8),
    "decodes, head_dim 96": DECODE | dict(head_dim=96),
    "decodes, head_dim 256": DECODE | dict(head_dim=256),
    "decodes, head_dim 256, page 32": DECODE | dict(head_dim=256, page_size=32),
    "decodes, head_dim 192, page 64": DECODE | dict(head_dim=192, page_size=64),
    "decodes, group 1": DECODE | dict(kv_heads=32),
    "decodes, group 3": DECODE | dict(heads=24),
    "decodes, group 8, float16": DECODE | dict(heads=64, dtype=torch.float16),
    "decodes, group 64": DECODE | dict(heads=64, kv_heads=1),
    "decodes, page 8": DECODE | dict(page_size=8),
    "decodes, page 256": DECODE | dict(page_size=256),
    "decodes, page 544": DECODE | dict(page_size=544),
    "speculation": ragged((8, 512), (5, 5000), (0, 77), (16, 16), (1, 1), (3, 4096)) | dict(bounds=True),
    "speculation of 4": SPECULATION_OF_4,
    "speculation of 4, features": SPECULATION_OF_4 | FEATURES,
    "speculation of 4, softcap, no lse": SPECULATION_OF_4 | CAPPED,
    "speculation of 4, trees": SPECULATION_OF_4 | dict(qq_bias=4, tree=True),
    "speculation of 4, not causal": SPECULATION_OF_4 | dict(causal=False, window_size=(100, 50)),
    "speculation of 4, float16, page 8": SPECULATION_OF_4 | dict(dtype=torch.float16, page_size=8),
    "speculation of 4, group 3, hnd": SPECULATION_OF_4 | dict(heads=24, layout="HND"),
    "speculation of 4, head_dim 64": SPECULATION_OF_4 | dict(head_dim=64),
    "speculation of 4, head_dim 96": SPECULATION_OF_4 | dict(head_dim=96),
    "speculation of 4, head_dim 256, page 544": SPECULATION_OF_4 | dict(head_dim=256, page_size=544),
    "speculation of 4, new": SPECULATION_OF_4 | NEW,
    "speculation of 4, fp8 out, padding": SPECULATION_OF_4 | dict(out_dtype=E4M3, padding=5),
    "even speculation of 2, group 8": ragged(*[(2, 3000)] * 9) | dict(heads=64, bounds=True),
    "even speculation": ragged(*[(8, 4096)] * 16) | dict(bounds=True),
    "even speculation of 32": ragged(*[(32, 2048)] * 16) | dict(bounds=True),
    "even speculation of 64": ragged(*[(64, 1000)] * 3) | dict(bounds=True, sinks=True, window_size=(300, -1)),
}
