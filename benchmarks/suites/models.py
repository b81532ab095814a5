"""Layers of well-known models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.suites.batches import ragged, uniform
from benchmarks.suites.masks import CHUNK, GEMMA_3, LOCAL, SMALL_HEADS
from benchmarks.suites.widths import GEMMA, LATENT, MIMO, UNABSORBED

# Head sizes of models, for the batches below.  "/ 8": one GPU's heads, if eight GPUs share them.
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 70B / 8": dict(heads=8, kv_heads=1),
    "Qwen2.5 7B": dict(heads=28, kv_heads=4),
    "Qwen3 30B-A3B": dict(heads=32, kv_heads=4),
    "Llama 4 Scout": dict(heads=40, kv_heads=8),
    "GLM-4.5": dict(heads=96, kv_heads=8),
    "StarCoder": dict(heads=48, kv_heads=1),
    "Llama 2 7B": dict(heads=32, kv_heads=32),
    "Gemma 3 27B": dict(heads=32, kv_heads=16),
    "Llama 3.2 1B": dict(head_dim=64),
    "gpt-oss": SMALL_HEADS,
    "gpt-oss / 8": SMALL_HEADS | dict(heads=8, kv_heads=1),
    "Falcon 7B": dict(heads=71, kv_heads=1, head_dim=64),
    "Phi-3 mini": dict(heads=32, kv_heads=32, head_dim=96),
    "Gemma 3 4B": dict(heads=8, kv_heads=4, head_dim=256),
    "Qwen3-Next": dict(heads=16, kv_heads=2, head_dim=256),
    "Gemma 2 9B": dict(heads=16, kv_heads=8, head_dim=256, softcap=50.0),
}
MODEL_LAYERS = tuple(
    replace(case, name=f"{model}: {case.name}", **sizes)
    for model, sizes in MODELS.items()
    for case in (
        uniform("b1 x 32768", 1, 1, 32768),
        uniform("b16 x 2048", 16, 1, 2048),
        uniform("b128 x 1024", 128, 1, 1024),
        uniform("b32 x 4096 of 4", 32, 4, 4096),
        uniform("2 x 4096", 2, 4096, 4096),
        uniform("1024 at 8192", 1, 1024, 8192),
        ragged("1024 at 4096 + 31 at 2048", (1024,) + (1,) * 31, (4096,) + (2048,) * 31),
    )
)
# Layers that need more than head sizes: windows, latents, gates.  Each decodes, prefills, and does both in one batch.
# Expanded latents only prefill.  "/ 8": one GPU's heads, if eight GPUs share them.
OF_MODELS: dict[str, dict[str, Any]] = {
    "Gemma 3 27B, local": GEMMA_3 | LOCAL,
    "Gemma 4, global": GEMMA,
    "Llama 4 Scout, local": CHUNK,
    "MiMo-V2, global": MIMO,
    "MiMo-V2, local": MIMO | dict(kv_heads=8, window_size=(127, -1), sinks=True),
    "DeepSeek-V3 / 8, absorbed": LATENT | dict(heads=16),
    "Kimi K2, absorbed": LATENT | dict(heads=64),
    "DeepSeek-V3, absorbed": LATENT | dict(heads=128),
    "DeepSeek-V3, expanded": UNABSORBED,
    "Qwen3-Next, gated": dict(heads=16, kv_heads=2, head_dim=256, gate=True),
}
LAYERS = tuple(
    replace(case, name=f"{model}: {case.name}", **sizes)
    for model, sizes in OF_MODELS.items()
    for case in (
        uniform("b64 x 8192", 64, 1, 8192),
        uniform("2 x 4096", 2, 4096, 4096),
        ragged("1024 at 16384 + 31 at 8192", (1024,) + (1,) * 31, (16384,) + (8192,) * 31),
    )
    if "expanded" not in model or case.query_lens[-1] > 1
)
