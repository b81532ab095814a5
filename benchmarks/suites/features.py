"""Features of layers, one to three in a case, in decodes, drafts and prefills."""

from __future__ import annotations

from benchmarks.suites.batches import log_uniform, ragged, uniform

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
    uniform("encode b4 x 4096", 4, 4096, 4096, causal=False),
    uniform("encode b4 x 4096, alibi", 4, 4096, 4096, causal=False, alibi=True),
    uniform("encode b4 x 4096, alibi on both sides", 4, 4096, 4096, causal=False, alibi=True, alibi_symmetric=True),
    uniform("prefill b4 x 4096, alibi as a function", 4, 4096, 4096, score_mod="alibi"),
    uniform("prefill b4 x 4096, softcap as a function", 4, 4096, 4096, score_mod="softcap"),
    uniform("prefill b4 x 4096, table as a function", 4, 4096, 4096, score_mod="relative"),
    uniform("prefill b4 x 4096, x-packed", 4, 4096, 4096, layout="x"),
    uniform("prefill b4 x 4096, x-packed, new", 4, 4096, 4096, layout="x", new=True),
    uniform("chunk of 2048 at 16384, x-packed, new", 1, 2048, 16384, layout="x", new=True),
)
