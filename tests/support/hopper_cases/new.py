"""New keys: keys and values of the call itself, which the cache does not hold."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.hopper_cases.parts import (
    DECODE,
    DECODES,
    MIXED,
    NEW,
    SEAMS,
    ragged,
)

NEW_CASES: dict[str, dict[str, Any]] = {
    "new prefill of one tile": ragged((64, 64)) | NEW,
    "new prefill": ragged((200, 200)) | NEW,
    "new chunk": ragged((700, 3000)) | NEW,
    "new even prefills": ragged(*[(512, 512)] * 4) | NEW,
    "many new even prefills": ragged(*[(1024, 1024)] * 24) | NEW,
    "new": MIXED | NEW,
    "new, hnd": MIXED | NEW | dict(layout="HND"),
    "new, bounds, padding": MIXED | NEW | dict(bounds=True, padding=5),
    "new, prefills only": MIXED | NEW | dict(only="prefill"),
    "new, decodes only": MIXED | NEW | dict(only="decode"),
    "new, window, sinks": MIXED | NEW | dict(window_size=(255, -1), sinks=True),
    "new, window of the own key": MIXED | NEW | dict(window_size=(0, -1)),
    "new, window to both sides": MIXED | NEW | dict(window_size=(100, 50), causal=False),
    "new, not causal": MIXED | NEW | dict(causal=False),
    "new, softcap, alibi, sinks": MIXED | NEW | dict(softcap=20.0, alibi=True, sinks=True),
    "new, float16, page 8": MIXED | NEW | dict(dtype=torch.float16, page_size=8),
    "new, page 24": MIXED | NEW | dict(page_size=24),
    "new, page 128": MIXED | NEW | dict(page_size=128),
    "new, page 544": MIXED | NEW | dict(page_size=544),
    "new, head_dim 64": MIXED | NEW | dict(head_dim=64),
    "new, head_dim 80": MIXED | NEW | dict(head_dim=80),
    "new, head_dim 256": MIXED | NEW | dict(head_dim=256),
    "new, head_dim 256, window": MIXED | NEW | dict(head_dim=256, window_size=(100, -1)),
    "new, group 1": MIXED | NEW | dict(kv_heads=32),
    "new, group 3": MIXED | NEW | dict(heads=24),
    "new, group 32": MIXED | NEW | dict(kv_heads=1),
    "new, shared buffer": MIXED | NEW | dict(shared_buffer=True),
    "new, strided": MIXED | NEW | dict(strided=True),
    "200 new": ragged(*[(1 + 99 * (i % 9 == 0), 100 + 37 * i) for i in range(200)]) | NEW,
    "new, seams": SEAMS | NEW,
    "new, seams, window": SEAMS | NEW | dict(window_size=(70, -1)),
    "new, seams, not causal": SEAMS | NEW | dict(causal=False),
    "new, seams, head_dim 256": SEAMS | NEW | dict(head_dim=256),
    "new, seams of 40": ragged(*[(40, c + 40) for c in (0, 1, 63, 64, 65, 127, 128, 129, 256, 1000)])
    | NEW
    | dict(bounds=True),
    "new, seams of 16, window": ragged(*[(16, c + 16) for c in (0, 1, 63, 64, 65, 127, 128, 129, 256, 1000)])
    | NEW
    | dict(bounds=True, window_size=(70, -1)),
    "new decode of one tile": ragged((1, 64)) | NEW | dict(decode_form=True),
    "new long decode": ragged((1, 40000)) | NEW | dict(decode_form=True),
    "new decodes": DECODE | NEW,
    "new decodes, ragged, padding": DECODES | NEW | dict(bounds=True, padding=3),
    "new decodes, seams": ragged(*[(1, c + 1) for c in (0, 1, 63, 64, 65, 127, 128, 129, 256, 1000)])
    | NEW
    | dict(bounds=True),
    "new decodes, window": DECODE | NEW | dict(window_size=(100, -1), sinks=True),
    "new decodes, all features": DECODE | NEW | dict(window_size=(1000, -1), sinks=True, softcap=20.0, alibi=True),
    "new decodes, head_dim 64": DECODE | NEW | dict(head_dim=64),
    "new decodes, head_dim 256": DECODE | NEW | dict(head_dim=256),
    "new decodes, group 1": DECODE | NEW | dict(kv_heads=32),
    "new decodes, group 3": DECODE | NEW | dict(heads=24),
    "new decodes, group 64": DECODE | NEW | dict(heads=64, kv_heads=1),
    "new decodes, page 544": DECODE | NEW | dict(page_size=544),
    "200 new decodes": ragged(*[(1, 37 * i) for i in range(200)]) | NEW | dict(decode_form=True),
    "64 long new decodes": ragged(*[(1, 4096)] * 64) | NEW | dict(decode_form=True),
    "new speculation": ragged((8, 512), (5, 5000), (0, 77), (16, 16), (1, 1), (3, 4096)) | NEW | dict(bounds=True),
    "even new speculation": ragged(*[(8, 4096)] * 16) | NEW | dict(bounds=True),
    "even new speculation of 2": ragged(*[(2, 130 + i) for i in range(16)]) | NEW | dict(bounds=True),
    "even new speculation of 32": ragged(*[(32, 2048)] * 16) | NEW | dict(bounds=True),
    "even new speculation of 64": ragged(*[(64, 1000)] * 3)
    | NEW
    | dict(bounds=True, sinks=True, window_size=(300, -1)),
}
