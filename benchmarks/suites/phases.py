"""Decodes, prefills, and both in one batch, of equal and of ragged lengths."""

from __future__ import annotations

from benchmarks.suites.batches import log_uniform, ragged, uniform

DECODE = (
    uniform("decode b1 x 512", 1, 1, 512),
    uniform("decode b1 x 8192", 1, 1, 8192),
    uniform("decode b1 x 131072", 1, 1, 131072),
    uniform("decode b4 x 2048", 4, 1, 2048),
    uniform("decode b8 x 4096", 8, 1, 4096),
    uniform("decode b32 x 1024", 32, 1, 1024),
    uniform("decode b64 x 4096", 64, 1, 4096),
    uniform("decode b256 x 4096", 256, 1, 4096),
    uniform("decode b64 x 8192, heads 64/8", 64, 1, 8192, heads=64),
    uniform("decode b256 x 1024, heads 32/32", 256, 1, 1024, kv_heads=32),
)
PREFILL = (
    uniform("prefill b1 x 1024", 1, 1024, 1024),
    uniform("prefill b8 x 1024", 8, 1024, 1024),
    uniform("prefill b1 x 4096", 1, 4096, 4096),
    uniform("prefill b4 x 4096", 4, 4096, 4096),
    uniform("prefill b4 x 4096, page 64", 4, 4096, 4096, page_size=64),
    uniform("prefill b4 x 4096, page 128", 4, 4096, 4096, page_size=128),
    uniform("prefill b4 x 4096, page 544", 4, 4096, 4096, page_size=544),
    uniform("prefill b4 x 4096, page 4096", 4, 4096, 4096, page_size=4096),  # contiguous
    uniform("prefill b4 x 4096, new", 4, 4096, 4096, new=True),
    uniform("prefill b4 x 4096, head_dim 64", 4, 4096, 4096, head_dim=64),
    uniform("prefill b4 x 4096, head_dim 256", 4, 4096, 4096, heads=16, kv_heads=4, head_dim=256),
    uniform("prefill b8 x 8192", 8, 8192, 8192),
    uniform("prefill b2 x 8192, heads 32/32", 2, 8192, 8192, kv_heads=32),
    uniform("prefill b2 x 8192, heads 64/8", 2, 8192, 8192, heads=64),
    uniform("prefill b1 x 16384", 1, 16384, 16384),
    uniform("prefill b1 x 16384, window 1023", 1, 16384, 16384, window_size=(1023, -1)),
    uniform("chunk of 2048 at 4096", 1, 2048, 4096),
    uniform("chunk of 2048 at 8192", 1, 2048, 8192),
    uniform("chunk of 2048 at 16384", 1, 2048, 16384),
    uniform("chunk of 512 at 16384", 1, 512, 16384),
    uniform("chunk of 256 at 16384", 1, 256, 16384),
    ragged("16 prefills, 16..4096", log_uniform(16, 4096, 16), log_uniform(16, 4096, 16)),
    ragged("16 prefills, 16..4096, head_dim 64", log_uniform(16, 4096, 16), log_uniform(16, 4096, 16), head_dim=64),
)
MIXED = (
    ragged("1 x 2048 + 63 decodes at 4096", (2048,) + (1,) * 63, (2048,) + (4096,) * 63),
    ragged("4 x 512 at 8k + 124 decodes at 2048", (512,) * 4 + (1,) * 124, (8192,) * 4 + (2048,) * 124),
    ragged("chunk of 216 at 1024 + 40 decodes at 1500", (216,) + (1,) * 40, (1024,) + (1500,) * 40),
    ragged("1 x 64 at 4096 + 63 decodes at 4096", (64,) + (1,) * 63, (4096,) * 64),
    ragged(
        "1 x 2048 + 63 decodes at 4096, heads 64/8 of 64, sinks", (2048,) + (1,) * 63, (2048,) + (4096,) * 63,
        heads=64, head_dim=64, sinks=True,
    ),
    ragged("1 x 2048 + 63 decodes at 4096, heads 128/8", (2048,) + (1,) * 63, (2048,) + (4096,) * 63, heads=128),
    ragged("1 x 2048 + 63 decodes at 4096, softcap", (2048,) + (1,) * 63, (2048,) + (4096,) * 63, softcap=30.0),
    ragged("1 x 512 at 2048 + 7 decodes at 1000", (512,) + (1,) * 7, (2048,) + (1000,) * 7),
)  # fmt: skip
RAGGED = (
    ragged("decode b64, 256..32768", (1,) * 64, log_uniform(256, 32768, 64)),
    ragged("decode 1 x 131072 + 63 x 512", (1,) * 64, (131072,) + (512,) * 63),
    ragged("decode b256, 16..4096", (1,) * 256, log_uniform(16, 4096, 256)),
    ragged("decode b8, 1..65536", (1,) * 8, log_uniform(1, 65536, 8)),
    ragged("32 chunks of 1..512 at 512..16384", log_uniform(1, 512, 32), log_uniform(512, 16384, 32)),
)
