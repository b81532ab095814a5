"""Calls for which all kernels are compiled: one for each variant that a planner can select, on small tensors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import paged_attn
from tests.support.cases import E4M3, E5M2, INT4, INT8, Case, build

LONG, MANY = (8192,), (64,) * 64
DECODE = dict(
    query_lens=(1,) * 64, seq_lens=MANY, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, decode_form=True
)
PREFILL = dict(query_lens=(2048,), seq_lens=(2048,), heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
FEATURES = dict(window_size=(1023, -1), softcap=30.0, alibi=True, sinks=True)
INVARIANT = dict(batch_invariant=True)
BY_HEAD: dict[str, Any] = dict(head_windows=((-1, -1), (1023, -1)))
LATENT: dict[str, Any] = dict(heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True, page_size=64)
ATTENTION = {
    "decode": DECODE,
    "decode split": DECODE | dict(query_lens=(1,), seq_lens=LONG),
    "decode split all fp8": DECODE
    | dict(query_lens=(1,), seq_lens=LONG, dtype=E4M3, out_dtype=E4M3, scales="per_head"),
    "decode split features": DECODE | dict(query_lens=(1,), seq_lens=LONG) | FEATURES,
    "decode split packed new": DECODE | dict(query_lens=(1,), seq_lens=LONG, layout="x", new=True),
    "decode fp16": DECODE | dict(dtype=torch.float16),
    "decode fp32": DECODE | dict(dtype=torch.float32),
    "decode features": DECODE | FEATURES,
    "decode window sinks": DECODE | dict(window_size=(1023, -1), sinks=True),
    "decode e4m3": DECODE | dict(cache_dtype=E4M3, scales="per_head"),
    "decode e4m3 features": DECODE | FEATURES | dict(cache_dtype=E4M3, scales="per_head"),
    "decode e4m3 page 12": DECODE | dict(cache_dtype=E4M3, page_size=12),
    "decode e4m3 head_dim 80": DECODE | dict(cache_dtype=E4M3, head_dim=80),
    "decode e4m3 head_dim 256": DECODE | dict(cache_dtype=E4M3, head_dim=256),
    "decode e4m3 new": DECODE | dict(cache_dtype=E4M3, new=True),
    "decode split e4m3": DECODE | dict(query_lens=(1,), seq_lens=LONG, cache_dtype=E4M3, scales="per_head"),
    "decode split e4m3 features": DECODE | FEATURES | dict(query_lens=(1,), seq_lens=LONG, cache_dtype=E4M3),
    "decode split e4m3 page 12": DECODE
    | dict(query_lens=(1,), seq_lens=LONG, cache_dtype=E4M3, page_size=12, window_size=(1023, -1), sinks=True),
    "decode split e5m2": DECODE | dict(query_lens=(1,), seq_lens=LONG, cache_dtype=E5M2),
    "decode split packed e4m3": DECODE | dict(query_lens=(1,), seq_lens=LONG, layout="x", cache_dtype=E4M3),
    "decode e5m2": DECODE | dict(cache_dtype=E5M2),
    "decode all fp8": DECODE | dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=E4M3),
    "decode hnd": DECODE | dict(layout="HND"),
    "decode packed": DECODE | dict(layout="x"),
    "decode packed 544": DECODE | dict(layout="x", page_size=544, head_dim=256, heads=16, kv_heads=2),
    "decode packed e4m3": DECODE | dict(layout="x", cache_dtype=E4M3),
    "decode page 12": DECODE | dict(page_size=12),
    "decode page 1": DECODE | dict(page_size=1),
    "decode page 128": DECODE | dict(page_size=128),
    "decode head_dim 64": DECODE | dict(head_dim=64),
    "decode head_dim 80": DECODE | dict(head_dim=80),
    "decode head_dim 192": DECODE | dict(head_dim=192),
    "decode head_dim 256": DECODE | dict(head_dim=256),
    "decode group 64": DECODE | dict(heads=64, kv_heads=1),
    "decode new": DECODE | dict(new=True, window_size=(1023, -1), sinks=True),
    "speculate e4m3": DECODE | dict(query_lens=(8,) * 64, decode_form=False, bounds=True, cache_dtype=E4M3),
    "speculate split e4m3": DECODE
    | dict(query_lens=(8,), seq_lens=LONG, decode_form=False, bounds=True, cache_dtype=E4M3),
    "speculate split e4m3 tree": DECODE
    | dict(query_lens=(8,), seq_lens=LONG, decode_form=False, bounds=True, cache_dtype=E4M3, qq_bias=8),
    "speculate split e4m3 small tree": DECODE
    | dict(query_lens=(4,), seq_lens=LONG, decode_form=False, bounds=True, cache_dtype=E4M3, qq_bias=8),
    "decode invariant": DECODE | dict(query_lens=(1,), seq_lens=LONG) | INVARIANT,
    "decode invariant features": DECODE | dict(query_lens=(1,), seq_lens=LONG) | FEATURES | INVARIANT,
    "decode invariant e4m3": DECODE | dict(query_lens=(1,), seq_lens=LONG, cache_dtype=E4M3) | INVARIANT,
    "decode invariant packed": DECODE | dict(query_lens=(1,), seq_lens=LONG, layout="x") | INVARIANT,
    "decode invariant fp32": DECODE | dict(query_lens=(1,), seq_lens=LONG, dtype=torch.float32) | INVARIANT,
    "decode invariant head_dim 256": DECODE | dict(query_lens=(1,), seq_lens=LONG, head_dim=256) | INVARIANT,
    "speculate": DECODE | dict(query_lens=(8,) * 64, decode_form=False, bounds=True, qq_bias=8),
    "prefill": PREFILL,
    "prefill invariant": PREFILL | INVARIANT,
    "prefill invariant split": PREFILL | dict(query_lens=(128,), seq_lens=LONG) | INVARIANT,
    "prefill invariant features": PREFILL | FEATURES | INVARIANT,
    "prefill invariant e4m3": PREFILL | dict(cache_dtype=E4M3) | INVARIANT,
    "prefill invariant packed": PREFILL | dict(layout="x") | INVARIANT,
    "prefill invariant fp32": PREFILL | dict(dtype=torch.float32) | INVARIANT,
    "prefill invariant head_dim 256": PREFILL | dict(head_dim=256) | INVARIANT,
    "prefill split": PREFILL | dict(query_lens=(128,), seq_lens=LONG),
    "prefill fp16": PREFILL | dict(dtype=torch.float16),
    "prefill fp32": PREFILL | dict(dtype=torch.float32),
    "prefill fp32 head_dim 256": PREFILL | dict(dtype=torch.float32, heads=8, kv_heads=1, head_dim=256),
    "prefill features": PREFILL | FEATURES | dict(qq_bias=64),
    "prefill window sinks": PREFILL | dict(window_size=(1023, -1), sinks=True),
    "prefill not causal": PREFILL | dict(causal=False, window_size=(100, 100)),
    "prefill e4m3": PREFILL | dict(cache_dtype=E4M3),
    "prefill e5m2": PREFILL | dict(cache_dtype=E5M2),
    "prefill all fp8": PREFILL | dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=E4M3),
    "prefill hnd": PREFILL | dict(layout="HND"),
    "prefill packed": PREFILL | dict(layout="x"),
    "prefill packed new": PREFILL | dict(layout="x", new=True),
    "prefill e4m3 new": PREFILL | dict(cache_dtype=E4M3, new=True),
    "prefill page 12": PREFILL | dict(page_size=12),
    "prefill page 128": PREFILL | dict(page_size=128),
    "prefill head_dim 64": PREFILL | dict(head_dim=64),
    "prefill head_dim 80": PREFILL | dict(head_dim=80),
    "prefill head_dim 192": PREFILL | dict(head_dim=192),
    "prefill head_dim 256": PREFILL | dict(head_dim=256),
    "decode split group 71": DECODE | dict(query_lens=(1,), seq_lens=LONG, heads=71, kv_heads=1),
    "prefill alibi": PREFILL | dict(alibi=True),
    "prefill user alibi": PREFILL | dict(score_mod="alibi of ints"),
    "prefill user softcap": PREFILL | dict(score_mod="softcap"),
    "decode 192 and 128": DECODE | dict(head_dim=192, value_dim=128),
    "decode head_dim 512": DECODE | dict(head_dim=512, heads=16, kv_heads=4),
    "decode split head_dim 512": DECODE | dict(query_lens=(1,), seq_lens=LONG, head_dim=512, heads=16, kv_heads=4),
    "prefill 192 and 128": PREFILL | dict(head_dim=192, value_dim=128),
    "prefill head_dim 512": PREFILL | dict(head_dim=512, heads=16, kv_heads=4),
    "decode ragged table": DECODE | dict(table="ragged", page_size=12, bounds=True),
    "decode split ragged table": DECODE | dict(query_lens=(1,), seq_lens=LONG, table="ragged"),
    "prefill ragged table": PREFILL | dict(table="ragged"),
    "decode latent": DECODE | LATENT,
    "decode latent 512": DECODE | LATENT | dict(head_dim=512),
    "decode latent 320": DECODE | LATENT | dict(head_dim=320, value_dim=256),
    "decode split latent": DECODE | LATENT | dict(query_lens=(1,), seq_lens=LONG),
    "decode split latent 128 heads": DECODE | LATENT | dict(query_lens=(1,), seq_lens=LONG, heads=128),
    "decode split latent e4m3": DECODE | LATENT | dict(query_lens=(1,), seq_lens=LONG, cache_dtype=E4M3),
    "decode split latent 128 heads e4m3": DECODE
    | LATENT
    | dict(query_lens=(1,), seq_lens=LONG, heads=128, cache_dtype=E4M3),
    "decode latent invariant": DECODE | LATENT | INVARIANT | dict(query_lens=(1,), seq_lens=LONG),
    "prefill latent": PREFILL | LATENT,
    "prefill latent e4m3": PREFILL | LATENT | dict(cache_dtype=E4M3),
    "prefill masks": PREFILL | dict(chunk=1024, causal_by_seq=True),
    "decode split prefix window": DECODE
    | dict(query_lens=(1,), seq_lens=LONG, decode_form=False, prefix=100, window_size=(1023, -1)),
    "prefill prefix window": PREFILL | dict(prefix=100, window_size=(1023, -1)),
    "prefill spans window": PREFILL | dict(spans=3, window_size=(1023, -1)),
    "decode split spans window": DECODE | dict(query_lens=(1,), seq_lens=LONG, spans=3, window_size=(1023, -1)),
    "decode gate": DECODE | dict(gate=True),
    "prefill token scales gate": PREFILL | dict(token_scales=True, gate=True),
    "decode mask positions window": DECODE | dict(qq_mask=2, positions="tree", window_size=(100, -1)),
    "decode mask bias spans chunk": DECODE | dict(qq_bias=8, qq_mask=2, spans=3, chunk=100),
    "decode invariant mask bias positions": DECODE
    | INVARIANT
    | dict(
        heads=18, kv_heads=2, head_dim=96, softcap=25.0, qq_bias=1, qq_mask=1, positions="tree", window_size=(63, -1)
    ),
    "speculate mask": DECODE | dict(query_lens=(8,) * 64, decode_form=False, bounds=True, qq_mask=1),
    "decode split windows by head": DECODE | BY_HEAD | dict(query_lens=(1,) * 8, seq_lens=LONG * 8),
    "prefill windows by head": PREFILL | BY_HEAD,
    "prefill fp32 packed head_dim 256": PREFILL | dict(dtype=torch.float32, layout="x", head_dim=256),
}


LONG_PREFILL = PREFILL | dict(query_lens=(8192,), seq_lens=(8192,))
PROMPTS = PREFILL | dict(query_lens=(1024,) * 8, seq_lens=(1024,) * 8, bounds=True)
SHORT_PROMPTS = PROMPTS | dict(
    query_lens=(128,) * 16, seq_lens=(1024,) * 16
)  # too short for copies of their keys in 16 bits
# most of the work is over keys of long contexts, by the planner's bounds
MIXED: dict[str, Any] = dict(query_lens=(512, *(1,) * 40), seq_lens=(16384, *(64,) * 40))
BESIDE_A_COPY: dict[str, Any] = dict(query_lens=(600, *(1,) * 63), seq_lens=(2000,) * 64)  # all sequences have copies
FEW_LONG: dict[str, Any] = dict(query_lens=(40, *(1,) * 63), seq_lens=(8192, *(64,) * 63))  # few long queries
DRAFT_OF_8 = DECODE | dict(query_lens=(8,) * 16, seq_lens=(8192,) * 16, decode_form=False, bounds=True)
OF_512 = DECODE | dict(seq_lens=(512,) * 64)  # over fewer keys, the portable kernels run
LARGE = OF_512 | dict(head_dim=256, page_size=64)
LONE = DECODE | dict(query_lens=(1,), seq_lens=LONG, heads=8, kv_heads=1)
# Variants that only the Hopper kernels distinguish; compiled only if asked for by name.
HOPPER = {
    "prefills e4m3 head_dim 64": SHORT_PROMPTS | dict(cache_dtype=E4M3, head_dim=64),
    "prefills e4m3 head_dim 64, no lse": SHORT_PROMPTS | dict(cache_dtype=E4M3, head_dim=64, lse=False),
    "prefills e4m3, no lse": SHORT_PROMPTS | dict(cache_dtype=E4M3, lse=False),
    "mixed e4m3, no lse": PREFILL | MIXED | dict(cache_dtype=E4M3, lse=False),
    "decodes beside copies of few": PREFILL | MIXED | dict(cache_dtype=INT8, scales="per_token"),
    "decodes beside a copy": PREFILL | BESIDE_A_COPY | dict(cache_dtype=INT8, scales="per_token"),
    "of 512 features": OF_512 | FEATURES,
    "of 512 head_dim 64": OF_512 | dict(head_dim=64),
    "of 512 head_dim 192": OF_512 | dict(head_dim=192),
    "of 512 e4m3 head_dim 64": OF_512 | dict(cache_dtype=E4M3, head_dim=64),
    "of 512 e4m3 head_dim 256": OF_512 | dict(cache_dtype=E4M3, head_dim=256),
    "x-packed": DECODE | dict(layout="x"),
    "x-packed split": DECODE | dict(query_lens=(1,), seq_lens=LONG, layout="x", page_size=544),
    "x-packed head_dim 256": DECODE | dict(layout="x", head_dim=256),
    "x-packed e4m3": DECODE | dict(layout="x", cache_dtype=E4M3, scales="per_head"),
    "x-packed e4m3 head_dim 64": DECODE | dict(layout="x", cache_dtype=E4M3, head_dim=64),
    "draft of 8 e4m3": DRAFT_OF_8 | dict(cache_dtype=E4M3),
    "draft of 8 e4m3 head_dim 256": DRAFT_OF_8 | dict(cache_dtype=E4M3, head_dim=256),
    "draft of 8 int8 by token": DRAFT_OF_8 | dict(cache_dtype=INT8, scales="per_token"),
    "draft of 8 int4": DRAFT_OF_8 | dict(cache_dtype=INT4, scales="per_token"),
    "columns of int8 by token": LONE | dict(cache_dtype=INT8, scales="per_token"),
    "columns of int4": LONE | dict(cache_dtype=INT4, scales="per_token"),
    "columns of int4 head_dim 64": LONE | dict(cache_dtype=INT4, scales="per_token", head_dim=64),
    "draft of 8 all fp8": DRAFT_OF_8 | dict(dtype=E4M3, cache_dtype=E4M3),
    "draft of 8 x-packed": DRAFT_OF_8 | dict(layout="x"),
    "draft of 8 e4m3 x-packed": DRAFT_OF_8 | dict(cache_dtype=E4M3, layout="x"),
    "x-packed draft": DECODE | dict(layout="x", query_lens=(2,) * 64, decode_form=False, bounds=True),
    "large boxes": LARGE,
    "large boxes e4m3": LARGE | dict(cache_dtype=E4M3),
    "large boxes e4m3 64 columns": LARGE | dict(cache_dtype=E4M3, heads=64, kv_heads=1),
    "lone decode": LONE,
    "lone decode e4m3": LONE | dict(cache_dtype=E4M3),
    "lone draft": LONE | dict(query_lens=(8,), decode_form=False, bounds=True),
    "draft of 4": DECODE | dict(query_lens=(4,) * 64, seq_lens=(4096,) * 64, decode_form=False, bounds=True),
    "draft 16": DECODE | dict(query_lens=(16,) * 4, seq_lens=(2048,) * 4, decode_form=False, bounds=True),
    "speculate 64": DECODE
    | dict(query_lens=(64,) * 16, seq_lens=(8192,) * 16, decode_form=False, bounds=True, lse=False),
    "speculate 32": DECODE | dict(query_lens=(32,) * 16, seq_lens=(8192,) * 16, decode_form=False, bounds=True),
    "speculate 32 head_dim 64": DECODE
    | dict(query_lens=(32,) * 16, seq_lens=(8192,) * 16, decode_form=False, bounds=True, head_dim=64),
    "speculate 32 e4m3, no lse": DECODE
    | dict(query_lens=(32,) * 16, seq_lens=(8192,) * 16, decode_form=False, bounds=True, cache_dtype=E4M3, lse=False),
    "speculate 32 tree": DECODE
    | dict(query_lens=(32,) * 16, seq_lens=(8192,) * 16, decode_form=False, bounds=True, qq_bias=32),
    "prefill softcap": PREFILL | dict(softcap=30.0, lse=False),
    "prefill new": PREFILL | dict(new=True),
    "chunk e4m3 head_dim 256": SHORT_PROMPTS | dict(cache_dtype=E4M3, head_dim=256),
    "mixed softcap": PREFILL | MIXED | dict(softcap=30.0),
    "mixed new": PREFILL | MIXED | dict(new=True),
    "prompts": PROMPTS,
    "prompts of 2048": PROMPTS | dict(query_lens=(2048,) * 8, seq_lens=(2048,) * 8),
    "prompts group 3": PROMPTS | dict(heads=24),
    "prompts group 12": PROMPTS | dict(heads=96),
    "group 3 head_dim 64": PROMPTS | dict(heads=24, head_dim=64, query_lens=(2048,) * 8, seq_lens=(2048,) * 8),
    "group 3 head_dim 256": PROMPTS | dict(heads=24, head_dim=256),
    "group 3 all fp8": PROMPTS | dict(heads=24, dtype=E4M3, cache_dtype=E4M3),
    "prompts 192 and 128": PROMPTS | dict(head_dim=192, value_dim=128, heads=64, kv_heads=64),
    "prompts 192 and 128 e4m3": PROMPTS | dict(head_dim=192, value_dim=128, cache_dtype=E4M3),
    "prompts new 192 and 128": PROMPTS | dict(head_dim=192, value_dim=128, new=True),
    "prompts 128 and 256": PROMPTS | dict(head_dim=128, value_dim=256),
    "prompts window sinks": PROMPTS | dict(window_size=(127, -1), sinks=True),
    "narrow": PREFILL | dict(window_size=(127, -1)),
    "narrow head_dim 64": PREFILL | dict(window_size=(127, -1), heads=8, kv_heads=1, head_dim=64),
    "narrow e4m3": PREFILL | dict(window_size=(127, -1), cache_dtype=E4M3),
    "narrow e4m3 head_dim 64, no lse": PREFILL | dict(window_size=(127, -1), cache_dtype=E4M3, head_dim=64, lse=False),
    "narrow new": PREFILL | dict(window_size=(127, -1), new=True),
    "narrow new head_dim 64": PREFILL | dict(window_size=(127, -1), new=True, heads=8, kv_heads=1, head_dim=64),
    "wide": PREFILL | dict(window_size=(1500, -1), sinks=True),
    "prompts head_dim 64 alibi": PROMPTS | dict(head_dim=64, alibi=True),
    "prompts new softcap": PROMPTS | dict(new=True, softcap=30.0),
    "prompts x-packed": PROMPTS | dict(layout="x"),
    "prompts x-packed head_dim 64": PROMPTS | dict(layout="x", head_dim=64),
    "chunk x-packed head_dim 256": PREFILL | dict(layout="x", head_dim=256),
    "chunk x-packed new": PREFILL | dict(layout="x", new=True),
    "chunk group 7": PREFILL | dict(heads=28, kv_heads=4),
    "mixed group 3": PREFILL | MIXED | dict(heads=24),
    "mixed group 12": PREFILL | MIXED | dict(heads=96),
    "mixed group 16, softcap": PREFILL | MIXED | dict(heads=64, kv_heads=4, softcap=30.0),
    "mixed head_dim 64": PREFILL | MIXED | dict(head_dim=64),
    "two lists": PREFILL | FEW_LONG,
    "two lists new": PREFILL | FEW_LONG | dict(new=True),
    "two lists softcap": PREFILL | FEW_LONG | dict(softcap=30.0),
    "two lists group 3": PREFILL | FEW_LONG | dict(heads=24),
    "mixed features": PREFILL | MIXED | FEATURES | dict(window_size=(8191, -1), qq_bias=64),
    "mixed fp16 page 544": PREFILL | MIXED | dict(dtype=torch.float16, page_size=544),
    "mixed no lse softcap": PREFILL | MIXED | dict(softcap=30.0, lse=False),
    "mixed alibi": PREFILL | MIXED | dict(alibi=True),
    "mixed window sinks": PREFILL | MIXED | dict(window_size=(1023, -1), sinks=True),
    "long group 3": LONG_PREFILL | dict(heads=24),
    "long x-packed": LONG_PREFILL | dict(layout="x"),
    "long": LONG_PREFILL,
    "long head_dim 64": PREFILL
    | dict(query_lens=(16384,), seq_lens=(16384,), head_dim=64, window_size=(127, -1), sinks=True),
    "long head_dim 64, no window": LONG_PREFILL | dict(head_dim=64),
    "long fp16": LONG_PREFILL | dict(page_size=544, dtype=torch.float16),
    "long alibi": LONG_PREFILL | dict(alibi=True),
    "long user alibi": LONG_PREFILL | dict(score_mod="alibi"),
    "long user alibi of ints": LONG_PREFILL | dict(score_mod="alibi of ints"),
    "long user softcap": LONG_PREFILL | dict(score_mod="softcap"),
    "long user of own blocks": LONG_PREFILL | dict(score_mod="own blocks"),
    "long softcap": LONG_PREFILL | dict(softcap=30.0, lse=False),
    "long exact softcap": LONG_PREFILL | dict(softcap=30.0),
    "long softcap of 10": LONG_PREFILL | dict(softcap=10.0, lse=False),
    "long exact softcap of 10": LONG_PREFILL | dict(softcap=10.0),
    "one decode group 48": DECODE | dict(query_lens=(1,), seq_lens=LONG, heads=48, kv_heads=1),
    "one chunk": PREFILL | dict(query_lens=(64,), seq_lens=(16384,), bounds=True),
    "one draft head_dim 256": DECODE
    | dict(query_lens=(16,), seq_lens=LONG, head_dim=256, decode_form=False, bounds=True),
    "decode of 12": DECODE | dict(query_lens=(1,) * 12, seq_lens=(512,) * 12),
    "draft of 12": DECODE | dict(query_lens=(16,) * 12, seq_lens=(512,) * 12, decode_form=False, bounds=True),
    "invariant 1": DECODE | dict(query_lens=(1,), seq_lens=LONG) | INVARIANT,
    "invariant 32": PREFILL | dict(query_lens=(32,), seq_lens=LONG, bounds=True) | INVARIANT,
    "invariant 4096": PREFILL | dict(query_lens=(4096,), seq_lens=(4096,), bounds=True) | INVARIANT,
    "mixed": PREFILL | MIXED,
    "mixed e4m3": PREFILL | MIXED | dict(cache_dtype=E4M3),
    "mixed all fp8": PREFILL | MIXED | dict(dtype=E4M3, cache_dtype=E4M3),
    "mixed all fp8, no lse": PREFILL | MIXED | dict(dtype=E4M3, cache_dtype=E4M3, lse=False),
    "long gate": LONG_PREFILL | dict(gate=True),
    "long token scales": LONG_PREFILL | dict(token_scales=True),
    "long chunks": LONG_PREFILL | dict(chunk=2048),
    "long spans window": LONG_PREFILL | dict(spans=3, window_size=(1023, -1)),
    "long windows by head": LONG_PREFILL | BY_HEAD,
    "lone windows by head": LONE | BY_HEAD | dict(query_lens=(8,), decode_form=False, bounds=True),
    "speculate 32 mask": DECODE
    | dict(query_lens=(32,) * 16, seq_lens=(8192,) * 16, decode_form=False, bounds=True, qq_mask=1),
    "lone mask": LONE | dict(query_lens=(8,), decode_form=False, bounds=True, qq_mask=1),
    "of 512 gate": OF_512 | dict(gate=True),
    "few keys before blocks": PREFILL
    | dict(query_lens=(300, *[1] * 63), seq_lens=(300, *[64] * 63), window_size=(127, -1), bounds=True),
    "many heads before blocks": PREFILL | MIXED | dict(heads=71, kv_heads=1, head_dim=64, bounds=True),
    "parts behind decodes": PREFILL | MIXED | dict(heads=48, kv_heads=1, bounds=True),
    "small pages": PREFILL | dict(page_size=4),
    "small pages e4m3 hnd ragged table": PREFILL
    | dict(page_size=12, cache_dtype=E4M3, layout="HND", table="ragged", window_size=(1023, -1), bounds=True)
    | dict(query_lens=(400,)),
    "copied in 16 bits": PROMPTS | dict(cache_dtype=E4M3),
}


BY_TOKEN: dict[str, Any] = {
    "decode int8 by token": DECODE | dict(cache_dtype=INT8, scales="per_token"),
    "decode e4m3 by token": DECODE | dict(cache_dtype=E4M3, scales="per_token"),
    "decode split int8 by token": DECODE | dict(query_lens=(1,), seq_lens=LONG, cache_dtype=INT8, scales="per_token"),
    "decode fp16 int8 by token, float16": DECODE
    | dict(dtype=torch.float16, cache_dtype=INT8, scales="per_token, float16"),
    "decode packed int8 by token": DECODE | dict(layout="x", cache_dtype=INT8, scales="per_token"),
    "speculate int8 by token": DECODE
    | dict(query_lens=(8,) * 64, decode_form=False, bounds=True, cache_dtype=INT8, scales="per_token"),
    "decode latent int8 by token": DECODE | LATENT | dict(cache_dtype=INT8, scales="per_token"),
    "decode int8": DECODE | dict(cache_dtype=INT8),
    "prefill int8 by token": PREFILL | dict(cache_dtype=INT8, scales="per_token"),
    "prefill e4m3 by token": PREFILL | dict(cache_dtype=E4M3, scales="per_token"),
    "prefill int8": PREFILL | dict(cache_dtype=INT8),
}
OF_INT4: dict[str, Any] = dict(cache_dtype=INT4, scales="per_token")
IN_INT4: dict[str, Any] = {
    "decode int4": DECODE | OF_INT4,
    "decode split int4": DECODE | OF_INT4 | dict(query_lens=(1,), seq_lens=LONG),
    "decode split int4 features": DECODE | FEATURES | OF_INT4 | dict(query_lens=(1,), seq_lens=LONG),
    "decode int4 head_dim 64": DECODE | OF_INT4 | dict(head_dim=64),
    "decode int4 head_dim 256": DECODE | OF_INT4 | dict(head_dim=256),
    "decode int4 new": DECODE | OF_INT4 | dict(new=True),
    "decode invariant int4": DECODE | OF_INT4 | INVARIANT | dict(query_lens=(1,), seq_lens=LONG),
    "decode all fp8 over int4": DECODE | OF_INT4 | dict(dtype=E4M3, out_dtype=E4M3),
    "decode fp8 over int4 new": DECODE | OF_INT4 | dict(dtype=E4M3, out_dtype=torch.float16, new=True),
    "speculate int4": DECODE | OF_INT4 | dict(query_lens=(8,) * 64, decode_form=False, bounds=True),
    "speculate int4 head_dim 64": DECODE
    | OF_INT4
    | dict(query_lens=(8,) * 64, decode_form=False, bounds=True, head_dim=64),
    "speculate split int4 tree": DECODE
    | OF_INT4
    | dict(query_lens=(8,), seq_lens=LONG, decode_form=False, bounds=True, qq_bias=8),
    "prefill int4": PREFILL | OF_INT4,
    "prefill split int4": PREFILL | OF_INT4 | dict(query_lens=(128,), seq_lens=LONG),
    "prefill int4 features": PREFILL | FEATURES | OF_INT4,
    "prefill int4 head_dim 256": PREFILL | OF_INT4 | dict(head_dim=256),
    "prefill int4 fp32": PREFILL | OF_INT4 | dict(dtype=torch.float32),
    "prefill invariant int4": PREFILL | OF_INT4 | INVARIANT,
}


def _attention(name: str, fields: dict[str, Any]) -> None:
    paged_attn.paged_attention(**build(Case(name, **fields), filled=False))


def _write(cache_dtype: torch.dtype, layout: str, scales: str = "none") -> None:
    sizes = dict(query_lens=(4,), seq_lens=(4,), heads=8, kv_heads=8, head_dim=128, scales=scales)
    inputs = build(Case("write", **sizes, dtype=torch.bfloat16, cache_dtype=cache_dtype, layout=layout))
    k = torch.zeros(4, 8, 128, dtype=torch.bfloat16)
    scales = {name: inputs[name] for name in ("k_scale", "v_scale") if name in inputs}
    paged_attn.write_kv(k, k, inputs["k_cache"], inputs["v_cache"], torch.arange(4), **scales)


def _write_qkv(
    cache_dtype: torch.dtype,
    layout: str,
    interleaved: bool,
    scales_of: str = "none",
    tokens: int = 4,
    rotary_dim: int = 128,
) -> None:
    sizes = dict(query_lens=(4,), seq_lens=(4,), heads=32, kv_heads=8, head_dim=128, scales=scales_of)
    inputs = build(Case("write", **sizes, dtype=torch.bfloat16, cache_dtype=cache_dtype, layout=layout))
    qkv, weight = torch.zeros(tokens, 48 * 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    scales = {name: inputs[name] for name in ("k_scale", "v_scale") if name in inputs}
    cos_sin = torch.zeros(64, rotary_dim)
    angles: dict[str, Any] = dict(positions=torch.arange(tokens), cos_sin=cos_sin, interleaved=interleaved)
    slots = torch.arange(tokens)
    paged_attn.write_qkv(
        qkv, inputs["k_cache"], inputs["v_cache"], slots, q_norm=weight, k_norm=weight, **angles, **scales
    )


def _merge() -> None:
    paged_attn.merge_states(torch.zeros(4, 8, 32, 128, dtype=torch.bfloat16), torch.zeros(4, 8, 32))


def _moved(width: int) -> None:
    """Copy pages of caches whose rows have `width` elements; only the first 128 of a row are copied."""
    caches = [torch.zeros(8, 16, 8, width, dtype=torch.bfloat16)[..., :128] for _ in range(2)]
    paged_attn.copy_pages(caches, torch.arange(4), torch.arange(4) + 4)


def _gathered(cache_dtype: torch.dtype, layout: str, *shape: int, **options: Any) -> None:
    table, lens = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    cache = torch.zeros(shape, dtype=cache_dtype)
    paged_attn.gather_pages(cache, table, lens, kv_layout=layout, tokens=256, **options)


def calls(wanted: Sequence[str] = ()) -> list[tuple[str, Callable[[], None]]]:
    """Return (name, call) of each variant whose name contains one of the wanted words; without words all but HOPPER."""
    attention = ATTENTION | HOPPER if wanted else ATTENTION
    found = {name: functools.partial(_attention, name, fields) for name, fields in attention.items()}
    found["write"] = functools.partial(_write, torch.bfloat16, "NHD")
    found["write e4m3"] = functools.partial(_write, E4M3, "NHD")
    found["write packed e5m2"] = functools.partial(_write, E5M2, "x")
    found["write qkv"] = functools.partial(_write_qkv, torch.bfloat16, "NHD", False)
    found["write qkv pairs packed e4m3"] = functools.partial(_write_qkv, E4M3, "x", True)
    found["write qkv e4m3, two dims rotated"] = functools.partial(_write_qkv, E4M3, "NHD", False, rotary_dim=2)
    found["write qkv of many"] = functools.partial(_write_qkv, torch.bfloat16, "NHD", False, tokens=256)
    found["write qkv int8 by token of many"] = functools.partial(
        _write_qkv, INT8, "NHD", False, "per_token", tokens=256
    )
    found["write qkv int8 by token"] = functools.partial(_write_qkv, INT8, "NHD", False, "per_token")
    found["write qkv pairs e4m3 by token"] = functools.partial(_write_qkv, E4M3, "HND", True, "per_token, float16")
    found["merge"] = _merge
    found["moved pages"] = functools.partial(_moved, 128)
    found["moved rows"] = functools.partial(_moved, 136)
    found["gathered"] = functools.partial(_gathered, torch.bfloat16, "HND", 8, 8, 16, 128)
    found["gathered packed"] = functools.partial(_gathered, torch.bfloat16, "NHD", 8, 8, 16, 16, 8)
    by_token = dict(dtype=torch.bfloat16, scale=torch.ones(8, 16, 8))
    by_head_and_token = dict(dtype=torch.bfloat16, scale=torch.ones(8, 8, 16))
    found["gathered e4m3"] = functools.partial(_gathered, E4M3, "NHD", 8, 16, 8, 128, **by_token)
    found |= {name: functools.partial(_attention, name, fields) for name, fields in BY_TOKEN.items()}
    found["write int8 by token"] = functools.partial(_write, INT8, "NHD", "per_token")
    found["write packed e4m3 by token"] = functools.partial(_write, E4M3, "x", "per_token, float16")
    found |= {name: functools.partial(_attention, name, fields) for name, fields in IN_INT4.items()}
    found["write int4"] = functools.partial(_write, INT4, "NHD", "per_token")
    found["write qkv int4"] = functools.partial(_write_qkv, INT4, "NHD", False, "per_token")
    found["gathered int4"] = functools.partial(_gathered, INT4, "HND", 8, 8, 16, 64, **by_head_and_token)
    return [(name, call) for name, call in found.items() if not wanted or any(word in name for word in wanted)]
