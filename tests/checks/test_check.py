"""Bad options of paged_attention, word for word; every argument, and every tensor on another device."""

from __future__ import annotations

import pytest
import torch

import paged_attn
from paged_attn.arguments import ARGUMENTS
from tests.checks.test_check_batch import BATCH
from tests.support.bad_input import (
    PLAIN,
    QUERY,
    SCALE,
    Change,
    call_of,
    gapped,
    like,
    refuses,
    shaped,
    tensor,
    to,
    value,
)
from tests.support.cases import E4M3, Case, build

NAN, INF = float("nan"), float("inf")
BY_SLOT = "[pages, page_size, kv_heads]"
HEADS = "[], [1], [kv_heads], [1, kv_heads] or [seqs, kv_heads]"
SCALES = f"{HEADS}, or by token {BY_SLOT} with kv_heads = 2, seqs = 3"
SLOTS = "pages = 12, page_size = 8, kv_heads = 2 from k_cache"
BY_TOKEN = f"{HEADS}, by token [tokens, 1] or [tokens, kv_heads] with kv_heads = 2, seqs = 3"
OF_TOKENS = "None, [tokens] or [tokens, 1] with tokens = 5 beside bfloat16 queries"

WINDOW = "(left, right), two ints >= -1, or a tensor [heads, 2]"

# (call, change, error, text)
OPTIONS: list[tuple[str, Change, type[Exception], str]] = [
    # softmax_scale, causal, window_size, softcap
    ("plain", value(softmax_scale=NAN), ValueError, "softmax_scale must be a finite number or None, got nan"),
    (
        "plain",
        value(softmax_scale="0.1"),
        TypeError,
        "softmax_scale must be a finite number or None, got str: float(softmax_scale)",
    ),
    ("plain", value(causal=None), TypeError, "causal must be True, False or a bool tensor, got None"),
    ("plain", value(causal=1), TypeError, "causal must be True, False or a bool tensor, got int: bool(causal)"),
    ("plain", tensor("causal", (3,), torch.int32), TypeError, "causal must be bool, got int32: causal.to(torch.bool)"),
    (
        "plain",
        tensor("causal", (5,), torch.bool),
        ValueError,
        "causal must be [seqs] with seqs = 3 from page_table, got [5]",
    ),
    (
        "plain",
        value(window_size=4),
        TypeError,
        f"window_size must be {WINDOW}, got 4: (3, -1) is a sliding window of 4 keys",
    ),
    ("plain", value(window_size=(4,)), ValueError, f"window_size must be {WINDOW}, got (4,)"),
    ("plain", value(window_size=(-2, 0)), ValueError, "window_size[0] must be an int >= -1 and < 2^31, got -2"),
    ("plain", value(window_size=(4, None)), TypeError, "window_size[1] must be an int >= -1, got None: -1 = all"),
    (
        "plain",
        value(window_size=(4, 0.0)),
        TypeError,
        "window_size[1] must be an int >= -1, got float: int(window_size[1])",
    ),
    (
        "plain",
        tensor("window_size", (6, 2)),
        TypeError,
        "window_size must be int32 | int64, got float32: window_size.to(torch.int32)",
    ),
    (
        "plain",
        tensor("window_size", (5, 2), torch.int32),
        ValueError,
        "window_size must be [heads, 2] with heads = 6 from q, got [5, 2]",
    ),
    (
        "plain",
        tensor("window_size", (6, 3), torch.int64),
        ValueError,
        "window_size must be [heads, 2], keys before and after, got [6, 3]",
    ),
    (
        "plain",
        tensor("prefix_lens", (3,)),
        TypeError,
        "prefix_lens must be int32 | int64, got float32: prefix_lens.to(torch.int32)",
    ),
    (
        "plain",
        tensor("prefix_lens", (5,), torch.int32),
        ValueError,
        "prefix_lens must be [seqs] with seqs = 3 from page_table, got [5]",
    ),
    ("plain", tensor("spans", (3, 1, 2)), TypeError, "spans must be int32 | int64, got float32: spans.to(torch.int32)"),
    (
        "plain",
        tensor("spans", (5, 1, 2), torch.int32),
        ValueError,
        "spans must be [seqs, R, 2] with seqs = 3 from page_table, got [5, 1, 2]",
    ),
    (
        "plain",
        tensor("spans", (3, 1, 3), torch.int32),
        ValueError,
        "spans must be [seqs, R, 2], begins and ends, got [3, 1, 3]",
    ),
    ("plain", value(clip_spans=1), TypeError, "clip_spans must be True or False, got int: bool(clip_spans)"),
    ("plain", value(chunk=0), ValueError, "chunk must be None or an int >= 1 and < 2^31, got 0"),
    ("plain", value(chunk=2.0), TypeError, "chunk must be None or an int >= 1, got float: int(chunk)"),
    ("plain", value(chunk=True), TypeError, "chunk must be None or an int >= 1, got bool"),
    ("plain", value(softcap=-1.0), ValueError, "softcap must be a finite number >= 0, got -1.0"),
    ("plain", value(softcap=INF), ValueError, "softcap must be a finite number >= 0, got inf"),
    ("plain", value(softcap=None), TypeError, "softcap must be a finite number >= 0, got None"),
    ("plain", value(softcap=True), TypeError, "softcap must be a finite number >= 0, got bool"),
    # alibi_slopes, sinks, qq_bias
    (
        "plain",
        to("alibi_slopes", torch.bfloat16),
        TypeError,
        "alibi_slopes must be float32, got bfloat16: alibi_slopes.to(torch.float32)",
    ),
    ("plain", shaped("alibi_slopes", 4), ValueError, "alibi_slopes must be [heads] with heads = 6 from q, got [4]"),
    (
        "plain",
        gapped("alibi_slopes"),
        ValueError,
        "alibi_slopes must be contiguous along heads, got strides [2]: alibi_slopes.contiguous()",
    ),
    (
        "plain",
        to("sinks", torch.float16),
        TypeError,
        "sinks must be float32 | bfloat16, for q is bfloat16, got float16: sinks.to(torch.float32)",
    ),
    (
        "fp8",
        tensor("sinks", (6,), E4M3),
        TypeError,
        "sinks must be float16 | bfloat16 | float32, for q is float8_e4m3fn, "
        "got float8_e4m3fn: sinks.to(torch.float16)",
    ),
    (
        "plain",
        shaped("sinks", 2),
        ValueError,
        "sinks must be [heads] with heads = 6 from q, got [2]: sinks.repeat_interleave(3), if these are of KV heads",
    ),
    ("plain", gapped("sinks"), ValueError, "sinks must be contiguous along heads, got strides [2]: sinks.contiguous()"),
    (
        "plain",
        tensor("qq_bias", (3, 3), torch.float16),
        TypeError,
        "qq_bias must be float32 | bfloat16, for q is bfloat16, got float16: qq_bias.to(torch.float32)",
    ),
    (
        "plain",
        tensor("query_positions", (5,), torch.float32),
        TypeError,
        "query_positions must be int32 | int64, got float32: query_positions.to(torch.int32)",
    ),
    (
        "plain",
        tensor("query_positions", (3,), torch.int32),
        ValueError,
        "query_positions must be [tokens] with tokens = 5 from q, got [3]",
    ),
    ("plain", tensor("qq_bias", (3, 4)), ValueError, "qq_bias must be [n, n] with n = 3, got [3, 4]"),
    ("plain", tensor("qq_bias", (3,)), ValueError, "qq_bias must be [n, n], got [3]"),
    (
        "plain",
        lambda c: {"qq_bias": like(c["q"], 4, 3).T[:, :3].float().T.contiguous().T},
        ValueError,
        "qq_bias must be contiguous along n, got strides [1, 3]: qq_bias.contiguous()",
    ),
    (
        "plain",
        tensor("qq_bias", (2, 3, 3)),
        ValueError,
        "qq_bias must be [seqs, n, n] with seqs = 3 from page_table, got [2, 3, 3]",
    ),
    (
        "plain",
        tensor("qq_mask", (5, 1), torch.int64),
        TypeError,
        "qq_mask must be int32, got int64: qq_mask.to(torch.int32)",
    ),
    (
        "plain",
        tensor("qq_mask", (4, 1), torch.int32),
        ValueError,
        "qq_mask must be [tokens, words] with tokens = 5 from q, got [4, 1]",
    ),
    ("plain", tensor("qq_mask", (5, 33), torch.int32), ValueError, "qq_mask must have words <= 32, got [5, 33]"),
    # q_scale, k_scale, v_scale
    (
        "fp8",
        value(q_scale=None),
        ValueError,
        "q_scale is required, for q is float8_e4m3fn: 1.0 if what is stored is not scaled",
    ),
    (
        "fp8 cache",
        value(k_scale=None),
        ValueError,
        "k_scale is required, for k_cache is float8_e4m3fn: 1.0 if what is stored is not scaled",
    ),
    (
        "fp8 cache",
        value(v_scale=None),
        ValueError,
        "v_scale is required, for v_cache is float8_e4m3fn: 1.0 if what is stored is not scaled",
    ),
    ("plain", value(q_scale=1.0), ValueError, "q_scale must be None, for q is bfloat16 and not fp8"),
    ("plain", value(k_scale=1.0), ValueError, "k_scale must be None, for k_cache is bfloat16 and not fp8 or int8"),
    ("plain", value(v_scale=1.0), ValueError, "v_scale must be None, for v_cache is bfloat16 and not fp8 or int8"),
    ("fp8", value(q_scale=0.0), ValueError, f"q_scale must be {SCALE}, got 0.0"),
    ("fp8", value(k_scale=-1.0), ValueError, f"k_scale must be {SCALE}, got -1.0"),
    ("fp8", value(v_scale=NAN), ValueError, f"v_scale must be {SCALE}, got nan"),
    ("fp8", value(v_scale=1e39), ValueError, f"v_scale must be {SCALE}, got 1e+39"),
    ("fp8", value(q_scale="1"), TypeError, f"q_scale must be {SCALE}, got str: float(q_scale)"),
    ("fp8", value(k_scale=True), TypeError, f"k_scale must be {SCALE}, got bool"),
    ("fp8", tensor("q_scale", (6,)), ValueError, f"q_scale must be {BY_TOKEN}, got [6]"),
    ("fp8", tensor("q_scale", (5,)), ValueError, f"q_scale must be {BY_TOKEN}, got [5]"),
    ("fp8", tensor("q_scale", (5, 3)), ValueError, f"q_scale must be {BY_TOKEN}, got [5, 3]"),
    ("plain", tensor("q_scale", (2,)), ValueError, f"q_scale must be {OF_TOKENS}, got [2]"),
    ("plain", tensor("q_scale", (5, 2)), ValueError, f"q_scale must be {OF_TOKENS}, got [5, 2]"),
    (
        "plain",
        tensor("q_scale", (5,), torch.bfloat16),
        TypeError,
        "q_scale must be float32, got bfloat16: q_scale.to(torch.float32)",
    ),
    ("fp8", tensor("k_scale", (2, 1)), ValueError, f"k_scale must be {SCALES}, got [2, 1]"),
    ("fp8", tensor("k_scale", (5, 2)), ValueError, f"k_scale must be {SCALES}, got [5, 2]"),
    ("fp8", tensor("v_scale", (1, 1, 1)), ValueError, f"v_scale must be {BY_SLOT} with {SLOTS}, got [1, 1, 1]"),
    (
        "fp8",
        tensor("q_scale", (2,), torch.float64),
        TypeError,
        "q_scale must be float32, got float64: q_scale.to(torch.float32)",
    ),
    (
        "fp8",
        tensor("k_scale", (2,), torch.float16),
        TypeError,
        "k_scale must be float32, got float16: k_scale.to(torch.float32)",
    ),
    (
        "fp8",
        tensor("v_scale", (1,), torch.bfloat16),
        TypeError,
        "v_scale must be float32, got bfloat16: v_scale.to(torch.float32)",
    ),
    # gate
    (
        "plain",
        value(gate=[]),
        TypeError,
        "gate must be a tensor of float32 | bfloat16, for q is bfloat16, "
        "got list: torch.tensor(gate, dtype=torch.float32, device=...)",
    ),
    (
        "plain",
        tensor("gate", (5, 6, 32), torch.float16),
        TypeError,
        "gate must be float32 | bfloat16, for q is bfloat16, got float16: gate.to(torch.float32)",
    ),
    (
        "fp8",
        tensor("gate", (5, 6, 32), E4M3),
        TypeError,
        "gate must be float16 | bfloat16 | float32, for q is float8_e4m3fn, got float8_e4m3fn: gate.to(torch.float16)",
    ),
    (
        "plain",
        tensor("gate", (5, 192)),
        ValueError,
        "gate must be [tokens, heads, value_dim] with tokens = 5, heads = 6 from q, value_dim = 32 from v_cache, "
        "got [5, 192]: gate.unflatten(-1, (6, 32))",
    ),
    (
        "plain",
        tensor("gate", (5, 1, 32)),
        ValueError,
        "gate must be [tokens, heads, value_dim] with heads = 6 from q, got [5, 1, 32]",
    ),
    (
        "plain",
        lambda c: {"gate": like(c["q"], 5, 6, 64)[..., ::2]},
        ValueError,
        "gate must be contiguous along value_dim, got strides [384, 64, 2]: gate.contiguous()",
    ),
    ("plain", lambda c: {"gate": c["out"]}, ValueError, "out must share no memory with gate"),
    # out, out_scale, return_lse, only, batch_invariant, check
    (
        "plain",
        value(out=[]),
        TypeError,
        f"out must be a tensor of {QUERY}, got list: leave it out, or torch.empty makes it",
    ),
    (
        "plain",
        to("out", torch.float64),
        TypeError,
        f"out must be {QUERY}, got float64: leave it out, or torch.empty makes it",
    ),
    (
        "plain",
        shaped("out", 5, 192),
        ValueError,
        "out must be [tokens, heads, value_dim] with tokens = 5, heads = 6 from q, value_dim = 32 from v_cache, "
        "got [5, 192]: out.unflatten(-1, (6, 32))",
    ),
    (
        "plain",
        shaped("out", 5, 2, 32),
        ValueError,
        "out must be [tokens, heads, value_dim] with heads = 6 from q, got [5, 2, 32]",
    ),
    (
        "plain",
        lambda c: {"v_cache": like(c["q"], *c["v_cache"].shape[:-1], 64)},
        ValueError,
        "out must be [tokens, heads, value_dim] with value_dim = 64 from v_cache, got [5, 6, 32]",
    ),
    (
        "plain",
        gapped("out"),
        ValueError,
        "out must be contiguous along value_dim, got strides [384, 64, 2]: leave it out, or torch.empty makes it",
    ),
    (
        "plain",
        lambda c: {"out": like(c["q"], 1, 6, 32).expand(5, 6, 32)},
        ValueError,
        "out must not overlap itself, got [5, 6, 32] strides [0, 32, 1]",
    ),
    ("plain", value(out_scale=1.0), ValueError, "out_scale must be None, for out is bfloat16 and not fp8"),
    ("plain", value(out=None, out_scale=1.0), ValueError, "out_scale must be None, for out is bfloat16 and not fp8"),
    (
        "plain",
        to("out", E4M3),
        ValueError,
        "out_scale is required, for out is float8_e4m3fn: pass it, or a bfloat16 out",
    ),
    (
        "fp8",
        value(out_scale=None),
        ValueError,
        "out_scale is required, for out is float8_e5m2: pass it, or a bfloat16 out",
    ),
    (
        "fp8",
        value(out=None, out_scale=None),
        ValueError,
        "out_scale is required, for out is float8_e4m3fn: pass it, or a bfloat16 out",
    ),
    ("fp8", value(out_scale=0), ValueError, f"out_scale must be {SCALE}, got 0"),
    ("fp8", value(out_scale=False), TypeError, f"out_scale must be {SCALE}, got bool"),
    ("fp8", tensor("out_scale", (2,)), ValueError, "out_scale must be one number, [] or [1], got [2]"),
    (
        "fp8",
        tensor("out_scale", (1,), torch.float16),
        TypeError,
        "out_scale must be float32, got float16: out_scale.to(torch.float32)",
    ),
    ("plain", value(return_lse=1), TypeError, "return_lse must be True or False, got int: bool(return_lse)"),
    ("plain", value(only="both"), ValueError, "only must be None, 'decode' or 'prefill', got 'both'"),
    ("plain", value(only=True), TypeError, "only must be None, 'decode' or 'prefill', got bool"),
    (
        "plain",
        value(batch_invariant=1),
        TypeError,
        "batch_invariant must be True or False, got int: bool(batch_invariant)",
    ),
    ("plain", value(batch_invariant=None), TypeError, "batch_invariant must be True or False, got None"),
    (
        "new",
        value(batch_invariant=True),
        ValueError,
        "k_new must be None with batch_invariant = True, for results would depend on where the cache ends",
    ),
    ("plain", value(check=1), TypeError, "check must be True, False or None, got int: bool(check)"),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("call, change, error, text", OPTIONS, ids=[text for *_, text in OPTIONS])
def test_attention_refuses(call: str, change: Change, error: type[Exception], text: str, device: str) -> None:
    inputs = call_of(call, device)
    refuses(paged_attn.paged_attention, inputs | change(inputs), error, text)


def test_every_argument_of_attention_is_refused_somewhere() -> None:
    arguments = build(PLAIN).keys() | {"k_new", "v_new", "qq_bias", "q_scale", "max_seqlen_q", "max_seqlen_k", "check"}
    arguments |= {"query_positions", "qq_mask", "gate"}
    # tests/arguments/test_arguments.py has a wrong value of each rule
    arguments -= {x.name for x in ARGUMENTS if x.check}
    named = " ".join(text for *_, text in BATCH + OPTIONS)
    assert [name for name in arguments if name not in named] == []


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "name",
    [
        *("k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q", "k_new", "v_new", "alibi_slopes", "sinks"),
        *(
            "causal",
            "window_size",
            "prefix_lens",
            "spans",
            "qq_bias",
            "qq_mask",
            "query_positions",
            "q_scale",
            "k_scale",
            "v_scale",
            "gate",
            "out",
            "out_scale",
        ),
    ],
)
def test_every_tensor_must_be_on_the_device_of_q(name: str, device: str) -> None:
    case = Case("all", (1, 3), (20, 3), 6, 2, dtype=E4M3, scales="tensor", new=True, sinks=True, alibi=True, qq_bias=4)
    inputs = build(case, device)
    inputs |= {"out": inputs["out"].to(E4M3), "out_scale": inputs["k_scale"].clone()}
    inputs["query_positions"] = torch.arange(4, dtype=torch.int32, device=device)
    inputs["spans"] = torch.ones(2, 1, 2, dtype=torch.int32, device=device)
    inputs["prefix_lens"] = torch.ones(2, dtype=torch.int32, device=device)
    inputs["gate"] = torch.zeros(4, 6, 32, device=device)
    inputs["causal"] = torch.ones(2, dtype=torch.bool, device=device)
    inputs["window_size"] = torch.ones(6, 2, dtype=torch.int32, device=device)
    inputs["qq_mask"] = torch.zeros(4, 1, dtype=torch.int32, device=device)
    inputs[name] = torch.empty_like(inputs[name], device="meta")
    refuses(paged_attn.paged_attention, inputs, ValueError, f"{name} must be on {inputs['q'].device} like q, got meta")
