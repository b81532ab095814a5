"""Cases with masks: windows, chunks, images, prefixes, causality by sequence, windows by head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.suites.batches import ragged, uniform
from benchmarks.suites.phases import MIXED

# Local layers.  With heads of 128 dims a token sees the last 128 or 1024 keys; with heads of 64 dims and sinks, 128.
SMALL_HEADS: dict[str, Any] = dict(heads=64, head_dim=64, sinks=True)
WINDOW = tuple(
    replace(case, name=f"{case.name}, window {left + 1}{name}", window_size=(left, -1), **sizes)
    for left, name, sizes in ((127, "", {}), (1023, "", {}), (127, ", heads 64/8 of 64, sinks", SMALL_HEADS))
    for case in (
        uniform("decode b8 x 8192", 8, 1, 8192),
        uniform("decode b256 x 2048", 256, 1, 2048),
        uniform("speculate b64 x 4096, q_len 4", 64, 4, 4096),
        uniform("prefill b4 x 2048", 4, 2048, 2048),
        uniform("prefill b2 x 8192", 2, 8192, 8192),
        uniform("chunk of 512 at 8192", 1, 512, 8192),
        MIXED[0],
    )
)
# Layers with masks beyond causality and a window.  Layers without such masks, whose tokens see about as many keys, are
# there for comparison.
LLAMA_4: dict[str, Any] = dict(heads=40)
GEMMA_3: dict[str, Any] = dict(heads=32, kv_heads=16)
PALIGEMMA: dict[str, Any] = dict(heads=8, kv_heads=1, head_dim=256)
LOCAL: dict[str, Any] = dict(window_size=(1023, -1))
STREAMING: dict[str, Any] = dict(head_windows=((-1, -1),) * 4 + ((1023, -1),) * 4)  # 4 heads share a KV head
ONE_FULL: dict[str, Any] = dict(head_windows=((-1, -1),) * 4 + ((1023, -1),) * 28)
TWO_FULL: dict[str, Any] = dict(head_windows=((-1, -1),) * 4 + ((1023, -1),) * 12)  # every fourth KV head is full
CHUNK: dict[str, Any] = LLAMA_4 | dict(chunk=8192)
MASKS = (
    uniform("Llama 4: b64 x 8192", 64, 1, 8192, **LLAMA_4),
    uniform("Llama 4: b64 x 32768, chunk 8192", 64, 1, 32768, **CHUNK),
    uniform("Llama 4: b1 x 32768", 1, 32768, 32768, **LLAMA_4),
    uniform("Llama 4: b4 x 8192", 4, 8192, 8192, **LLAMA_4),
    uniform("Llama 4: b1 x 32768, chunk 8192", 1, 32768, 32768, **CHUNK),
    uniform("Llama 4: 2048 at 31744, chunk 8192", 1, 2048, 31744, **CHUNK),  # all queries in one chunk
    ragged(
        "Llama 4: 1024 at 32768 + 31 at 32000, chunk 8192", (1024,) + (1,) * 31, (32768,) + (32000,) * 31, **CHUNK
    ),
    uniform("Gemma 3: b4 x 4096", 4, 4096, 4096, **GEMMA_3),
    uniform("Gemma 3: b4 x 4096, 4 images", 4, 4096, 4096, **GEMMA_3, spans=4),
    uniform("Gemma 3: b4 x 4096, window 1024", 4, 4096, 4096, **GEMMA_3, **LOCAL),
    uniform("Gemma 3: b4 x 4096, window 1024, 4 images", 4, 4096, 4096, **GEMMA_3, **LOCAL, spans=4),
    uniform("Gemma 3: b4 x 4096, window 1024, 4 images clipped", 4, 4096, 4096, **GEMMA_3, **LOCAL, spans=4,
        clip_spans=True,
    ),
    uniform("Gemma 3: b64 x 8192, window 1024", 64, 1, 8192, **GEMMA_3, **LOCAL),
    uniform("Gemma 3: b64 x 8192, window 1024, 4 images", 64, 1, 8192, **GEMMA_3, **LOCAL, spans=4),
    uniform("PaliGemma: b32 x 512", 32, 512, 512, **PALIGEMMA),
    uniform("PaliGemma: b32 x 512, prefix 300", 32, 512, 512, **PALIGEMMA, prefix=300),
    uniform("PaliGemma: b64 x 512 of 1, prefix 300", 64, 1, 512, **PALIGEMMA, prefix=300),
    uniform("prefix 128 behind window 1024, b64 x 32768", 64, 1, 32768, **LOCAL, prefix=128),
    uniform("prefix 128 behind window 1024, b2 x 8192", 2, 8192, 8192, **LOCAL, prefix=128),
    uniform("b16 x 1024, every other causal", 16, 1024, 1024, causal_by_seq=True),
    uniform("b64 x 8192", 64, 1, 8192),
    uniform("b64 x 8192, every other KV head of window 1024", 64, 1, 8192, **STREAMING),
    uniform("b64 x 8192, seven of eight KV heads of window 1024", 64, 1, 8192, **ONE_FULL),
    uniform("b16 x 8192, every other KV head of window 1024", 16, 1, 8192, **STREAMING),
    uniform("b16 x 8192, six of eight KV heads of window 1024", 16, 1, 8192, **TWO_FULL),
    uniform("b4 x 8192", 4, 8192, 8192),
    uniform("b4 x 8192, every other KV head of window 1024", 4, 8192, 8192, **STREAMING),
)  # fmt: skip
