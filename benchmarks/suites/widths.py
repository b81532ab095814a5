"""Heads beyond 256 dims, values of another width than keys, and latent caches."""

from __future__ import annotations

from typing import Any

from benchmarks.suites.batches import FP8, ragged, uniform

# Heads beyond 256 dims (Gemma 4), and values narrower than keys (MiMo; DeepSeek's prefill with expanded latents).
GEMMA: dict[str, Any] = dict(heads=16, kv_heads=4, head_dim=512)
MIMO: dict[str, Any] = dict(heads=64, kv_heads=4, head_dim=192, value_dim=128)
UNABSORBED: dict[str, Any] = dict(heads=128, kv_heads=128, head_dim=192, value_dim=128)
WIDE = (
    uniform("decode b64 x 4096, 512", 64, 1, 4096, **GEMMA),
    uniform("decode b64 x 4096, 512, e4m3", 64, 1, 4096, **GEMMA, **FP8),
    uniform("decode b1 x 32768, 512", 1, 1, 32768, **GEMMA),
    uniform("speculate b16 x 8192, q_len 4, 512", 16, 4, 8192, **GEMMA),
    uniform("prefill b4 x 4096, 512", 4, 4096, 4096, **GEMMA),
    ragged("1 x 2048 + 63 decodes at 4096, 512", (2048,) + (1,) * 63, (2048,) + (4096,) * 63, **GEMMA),
    uniform("decode b64 x 4096, 192/128", 64, 1, 4096, **MIMO),
    uniform("prefill b4 x 4096, 192/128", 4, 4096, 4096, **MIMO),
    uniform("prefill 4096, 192/128, 128 heads", 1, 4096, 4096, **UNABSORBED),
    uniform("prefill 8192, 192/128, 128 heads", 1, 8192, 8192, **UNABSORBED),
)
# Latent caches as in DeepSeek-V3, with the heads of one GPU: 16, 32, 64 or 128 if 8, 4, 2 or 1 GPUs share the heads.
LATENT: dict[str, Any] = dict(kv_heads=1, head_dim=576, value_dim=512, page_size=64, latent=True)
MLA = (
    *(uniform(f"decode b64 x 4096, {n} heads", 64, 1, 4096, heads=n, **LATENT) for n in (16, 32, 64, 128)),
    *(uniform(f"decode b64 x 4096, {n} heads, e4m3", 64, 1, 4096, heads=n, **LATENT, **FP8) for n in (16, 128)),
    uniform("decode b1 x 32768, 16 heads", 1, 1, 32768, heads=16, **LATENT),
    uniform("decode b1 x 32768, 128 heads", 1, 1, 32768, heads=128, **LATENT),
    uniform("decode b8 x 4096, 16 heads", 8, 1, 4096, heads=16, **LATENT),
    uniform("speculate b64 x 4096, q_len 2, 16 heads", 64, 2, 4096, heads=16, **LATENT),
    uniform("speculate b16 x 4096, q_len 8, 16 heads", 16, 8, 4096, heads=16, **LATENT),
    uniform("chunk of 512 at 8192, 16 heads", 1, 512, 8192, heads=16, **LATENT),
    uniform("decode b64 x 4096, 16 heads, 512/512", 64, 1, 4096, heads=16, **LATENT | dict(head_dim=512)),
    uniform(
        "decode b64 x 4096, 16 heads, 320/256", 64, 1, 4096, heads=16, **LATENT | dict(head_dim=320, value_dim=256)
    ),
)
