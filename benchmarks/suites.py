"""What is measured, as data: suites of cases.  The suite `trace` is cut from a trace by traces.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.cases import E4M3, Case

SIZES: dict[str, Any] = dict(
    heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, bounds=True, lse=False
)
FP8: dict[str, Any] = dict(cache_dtype=E4M3)
TREE: dict[str, Any] = dict(qq_bias=32, tree=True)


def uniform(name: str, seqs: int, query_len: int, seq_len: int, **changes: Any) -> Case:
    """Sequences of one shape; query_len 1 is decode."""
    return ragged(name, (query_len,) * seqs, (seq_len,) * seqs, **changes)


def ragged(name: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **changes: Any) -> Case:
    """Sequences of any shapes; one query each is decode."""
    return Case(name, query_lens, seq_lens, **(SIZES | dict(decode_form=set(query_lens) == {1}) | changes))


def log_uniform(low: int, high: int, n: int) -> tuple[int, ...]:
    """n lengths evenly spread on a logarithmic scale, shuffled the same way every time."""
    lengths = [round(low * (high / low) ** (i / (n - 1))) for i in range(n)]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(lengths[i] for i in order)


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
FEATURES = (
    uniform(
        "decode b64 x 4096, window 4095, sinks, softcap", 64, 1, 4096, window_size=(4095, -1), sinks=True, softcap=30.0
    ),
    uniform("decode b64 x 4096, window 1023", 64, 1, 4096, window_size=(1023, -1)),
    uniform("decode b64 x 4096, alibi", 64, 1, 4096, alibi=True),
    uniform("decode b64 x 4096, alibi as a function", 64, 1, 4096, score_mod="alibi"),
    uniform("decode b64 x 4096, scales of tokens", 64, 1, 4096, token_scales=True),
    uniform("speculate b16 x 8192, q_len 8, masks of trees", 16, 8, 8192, qq_mask=1),
    uniform("speculate b16 x 8192, q_len 32, masks of trees", 16, 32, 8192, qq_mask=1),
    uniform("speculate b16 x 8192, q_len 64, masks of trees", 16, 64, 8192, qq_mask=2),
    uniform(
        "speculate b16 x 8192, q_len 64, a bias of each sequence",
        16,
        64,
        8192,
        qq_bias=64,
        tree=True,
        bias_of_seqs=True,
    ),
    uniform("decode b64 x 4096, gate", 64, 1, 4096, gate=True),
    uniform("decode b64 x 4096, page 128", 64, 1, 4096, page_size=128),
    uniform("decode b64 x 4096, page 544", 64, 1, 4096, page_size=544),
    uniform("decode b64 x 4096, x-packed", 64, 1, 4096, layout="x"),
    uniform("decode b8 x 4096, x-packed", 8, 1, 4096, layout="x"),
    uniform("speculate b16 x 8192, q_len 8, x-packed", 16, 8, 8192, layout="x"),
    uniform("decode b64 x 4096, hnd", 64, 1, 4096, layout="HND"),
    uniform("prefill b4 x 4096, window 1023, sinks", 4, 4096, 4096, window_size=(1023, -1), sinks=True),
    uniform("prefill b4 x 4096, sinks", 4, 4096, 4096, sinks=True),
    uniform("prefill b4 x 4096, lse", 4, 4096, 4096, lse=True),
    uniform("prefill b4 x 4096, scales of tokens", 4, 4096, 4096, token_scales=True),
    uniform("prefill b4 x 4096, gate", 4, 4096, 4096, gate=True),
    uniform("prefill b4 x 4096, softcap", 4, 4096, 4096, softcap=30.0),
    uniform("prefill b4 x 4096, softcap, lse", 4, 4096, 4096, softcap=30.0, lse=True),
    uniform("prefill b4 x 4096, softcap, head_dim 64", 4, 4096, 4096, softcap=30.0, head_dim=64),
    uniform("prefill b4 x 4096, softcap, window 1023", 4, 4096, 4096, softcap=50.0, window_size=(1023, -1)),
    uniform("prefill b4 x 4096, softcap, large scores", 4, 4096, 4096, softcap=50.0, softmax_scale=0.6),
    uniform("chunk of 2048 at 16384, softcap", 1, 2048, 16384, softcap=30.0),
    ragged("16 prefills, 16..4096, softcap", log_uniform(16, 4096, 16), log_uniform(16, 4096, 16), softcap=30.0),
    uniform("prefill b4 x 4096, alibi", 4, 4096, 4096, alibi=True),
    uniform("prefill b4 x 4096, alibi as a function", 4, 4096, 4096, score_mod="alibi"),
    uniform("prefill b4 x 4096, softcap as a function", 4, 4096, 4096, score_mod="softcap"),
    uniform("prefill b4 x 4096, table as a function", 4, 4096, 4096, score_mod="relative"),
    uniform("prefill b4 x 4096, x-packed", 4, 4096, 4096, layout="x"),
    uniform("prefill b4 x 4096, x-packed, new", 4, 4096, 4096, layout="x", new=True),
    uniform("chunk of 2048 at 16384, x-packed, new", 1, 2048, 16384, layout="x", new=True),
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
SPEC = (
    *(uniform(f"speculate b16 x 8192, q_len {n}", 16, n, 8192) for n in (1, 2, 4, 8, 16, 32, 64)),
    uniform("speculate b64 x 4096, q_len 4", 64, 4, 4096),
    ragged("speculate b32 x 4096, q_len 1..8", tuple(1 + i % 8 for i in range(32)), (4096,) * 32),
    ragged("speculate b16 x 256..8192, q_len 64", (64,) * 16, log_uniform(256, 8192, 16)),
    uniform("tree of 32, b1 x 8192", 1, 32, 8192, **TREE),
    uniform("tree of 32, b16 x 8192", 16, 32, 8192, **TREE),
    uniform("tree of 32, b1 x 65536, heads 8/1", 1, 32, 65536, heads=8, kv_heads=1, **TREE),
)
# One sequence or few, and few queries: programs share the keys of each block, and what counts is how pieces are joined.
SINGLE = (
    *(uniform(f"{n} of 1 x {keys}", 1, n, keys) for keys in (2048, 8192, 32768) for n in (4, 16, 32, 64)),
    uniform("16 of 2 x 8192", 2, 16, 8192),
    uniform("128 of 1 x 16384", 1, 128, 16384),
    *(uniform(f"{n} of 1 x 32768, heads 8/1", 1, n, 32768, heads=8, kv_heads=1) for n in (1, 8, 64, 256)),
    *(uniform(f"1 x {keys}, heads 48/1", 1, 1, keys, heads=48, kv_heads=1) for keys in (2048, 8192, 32768, 131072)),
    uniform("4 x 8192, heads 48/1", 4, 1, 8192, heads=48, kv_heads=1),
    uniform("1 x 32768, heads 71/1, head_dim 64", 1, 1, 32768, heads=71, kv_heads=1, head_dim=64),
    uniform("16 of 1 x 8192, head_dim 64", 1, 16, 8192, head_dim=64),
    uniform("16 of 1 x 8192, head_dim 256", 1, 16, 8192, head_dim=256),
    uniform("64 of 1 x 16384, head_dim 256", 1, 64, 16384, head_dim=256),
    uniform("16 of 1 x 8192, e4m3 cache", 1, 16, 8192, **FP8),
    uniform("64 of 1 x 16384, e4m3 cache", 1, 64, 16384, **FP8),
    uniform("64 of 1 x 16384, softcap", 1, 64, 16384, softcap=30.0),
)
# Beside each fp8 case its bfloat16 twin, for their ratio is what counts.
FP8_CACHES = tuple(
    twin
    for case in (
        uniform("decode b1 x 131072", 1, 1, 131072),
        uniform("decode b64 x 4096", 64, 1, 4096),
        uniform("decode b256 x 4096", 256, 1, 4096),
        uniform("decode b64 x 4096, x-packed", 64, 1, 4096, layout="x"),
        uniform("decode b64 x 4096, head_dim 64", 64, 1, 4096, head_dim=64),
        uniform("speculate b16 x 8192, q_len 8", 16, 8, 8192),
        uniform("speculate b16 x 8192, q_len 8, head_dim 64", 16, 8, 8192, head_dim=64),
        uniform("speculate b16 x 8192, q_len 16", 16, 16, 8192),
        uniform("speculate b16 x 8192, q_len 8, x-packed", 16, 8, 8192, layout="x"),
        uniform("prefill b4 x 4096", 4, 4096, 4096),
        uniform("chunk of 2048 at 16384", 1, 2048, 16384),
        uniform("prefill b4 x 4096, head_dim 256", 4, 4096, 4096, heads=16, kv_heads=4, head_dim=256),
        PREFILL[-2],
        *MIXED[:2],
    )
    for twin in (case, replace(case, name=f"{case.name}, e4m3 cache", **FP8))
) + (uniform("decode b64 x 4096, e4m3 cache, scale per head", 64, 1, 4096, scales="per_head", **FP8),)
ALL_FP8: dict[str, Any] = dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=torch.bfloat16)
FP8_SUITE = FP8_CACHES + (
    uniform("decode b64 x 4096, all e4m3", 64, 1, 4096, **ALL_FP8),
    uniform("speculate b16 x 8192, q_len 16, all e4m3", 16, 16, 8192, **ALL_FP8),
    uniform("prefill b4 x 4096, all e4m3", 4, 4096, 4096, **ALL_FP8),
    uniform("prefill b1 x 16384, all e4m3", 1, 16384, 16384, **ALL_FP8),
    uniform("chunk of 2048 at 16384, all e4m3", 1, 2048, 16384, **ALL_FP8),
    *(replace(case, name=f"{case.name}, all e4m3", **ALL_FP8) for case in MIXED[:2]),
)
# Local layers: a token sees the last 128 or 1024, in models with heads of 128 dims or, with sinks, of 64.
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
# Layers of models that are served, "/ 8" where eight GPUs share the heads, and states of a server's batch.
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
# How pages lie in memory, for decodes that read nearly all the time; the largest hold a sequence.
LAYOUTS = tuple(
    uniform(f"{name} {layout} {page}", *lengths, layout=layout, page_size=page, **sizes)
    for name, lengths, pages, sizes in (
        ("32/32 256x1024", (256, 1, 1024), (16, 64, 256, 1024), dict(kv_heads=32)),
        ("32/8 256x4096", (256, 1, 4096), (16, 64, 4096), {}),
        ("64/8 64x8192", (64, 1, 8192), (16, 1024), dict(heads=64)),
        ("96/8 128x1024", (128, 1, 1024), (16, 1024), dict(heads=96)),
        ("8x4096", (8, 1, 4096), (16, 4096), {}),
    )
    for layout in ("NHD", "HND")
    for page in pages
)
# Pages of few tokens beside those of 16: tokens anywhere, and in runs of 64.
SMALL_PAGES = tuple(
    uniform(f"{name} NHD {page}{where}", *lengths, page_size=page, run=run // page if run else 1)
    for name, lengths in (("32/8 64x4096", (64, 1, 4096)), ("32/8 2x2048 of 2048", (2, 2048, 2048)))
    for page in (16, 4, 2, 1)
    for where, run in (("", 0), (", in runs of 64", 64))
)
INVARIANT = tuple(
    replace(case, name=f"{case.name}, batch-invariant", batch_invariant=True)
    for case in (
        *(uniform(f"decode b{n} x 32768", n, 1, 32768) for n in (1, 8, 64)),
        uniform("decode b1 x 8192", 1, 1, 8192),
        uniform("decode b1 x 131072", 1, 1, 131072),
        ragged("decode b64, 256..32768", (1,) * 64, log_uniform(256, 32768, 64)),
        ragged("1 x 2048 + 63 decodes at 4096", (2048,) + (1,) * 63, (2048,) + (4096,) * 63),
        uniform("prefill b4 x 4096", 4, 4096, 4096),
        uniform("chunk of 128 at 16384", 1, 128, 16384),
    )
)
# Heads beyond 256 dims (Gemma 4), and values narrower than keys (MiMo; DeepSeek's prefill, unabsorbed).
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
# Latent caches whose keys hold their values, as DeepSeek-V3's layers read them on 8, 4, 2 GPUs and on one.
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
# Layers that see by other rules than causality and a window, each beside one that sees as many keys without.
LLAMA_4: dict[str, Any] = dict(heads=40)
GEMMA_3: dict[str, Any] = dict(heads=32, kv_heads=16)
PALIGEMMA: dict[str, Any] = dict(heads=8, kv_heads=1, head_dim=256)
LOCAL: dict[str, Any] = dict(window_size=(1023, -1))
STREAMING: dict[str, Any] = dict(head_windows=((-1, -1),) * 4 + ((1023, -1),) * 4)  # every other KV head, of 4 heads
CHUNK: dict[str, Any] = LLAMA_4 | dict(chunk=8192)
MASKS = (
    uniform("Llama 4: b64 x 8192", 64, 1, 8192, **LLAMA_4),
    uniform("Llama 4: b64 x 32768, chunk 8192", 64, 1, 32768, **CHUNK),
    uniform("Llama 4: b1 x 32768", 1, 32768, 32768, **LLAMA_4),
    uniform("Llama 4: b4 x 8192", 4, 8192, 8192, **LLAMA_4),
    uniform("Llama 4: b1 x 32768, chunk 8192", 1, 32768, 32768, **CHUNK),
    uniform("Llama 4: 2048 at 31744, chunk 8192", 1, 2048, 31744, **CHUNK),  # across a border
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
    uniform("b4 x 8192", 4, 8192, 8192),
    uniform("b4 x 8192, every other KV head of window 1024", 4, 8192, 8192, **STREAMING),
)  # fmt: skip
# Layers of models that ask for more than sizes, one GPU's part where they run on several: decode, prefill, both.
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
SUITES: dict[str, tuple[Case, ...]] = {
    "decode": DECODE,
    "features": FEATURES,
    "prefill": PREFILL,
    "mixed": MIXED,
    "ragged": RAGGED,
    "spec": SPEC,
    "single": SINGLE,
    "fp8": FP8_SUITE,
    "window": WINDOW,
    "models": MODEL_LAYERS,
    "layouts": LAYOUTS + SMALL_PAGES,
    "invariant": INVARIANT,
    "wide": WIDE,
    "mla": MLA,
    "masks": MASKS,
    "layers": LAYERS,
}


def is_uniform(case: Case) -> bool:
    """Whether a dense [batch, ...] call can do the same work."""
    return len(set(case.query_lens)) == 1 and len(set(case.seq_lens)) == 1
