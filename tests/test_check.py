"""Bad input: each argument, the exact text it gets, and that nothing is launched or written; then the checked mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

import paged_attn
from paged_attn import check
from tests.cases import BAD_PAGE, E4M3, E5M2, Case, build, is_fp8

Inputs = dict[str, Any]
Change = Callable[[Inputs], Inputs]
NAN, INF = float("nan"), float("inf")

# Every axis has its own size: tokens 5, seqs 3, heads 6, kv_heads 2, head_dim 32, pages 12, page_size 8, max_pages 7.
PLAIN = Case(
    "plain", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=torch.bfloat16, sinks=True, alibi=True
)
CALLS: dict[str, Case] = {
    "plain": PLAIN,
    "hnd": Case("hnd", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=torch.bfloat16, layout="HND"),
    "packed": Case("packed", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=torch.float16, layout="x"),
    "new": Case("new", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=torch.float16, new=True),
    "fp8 cache": Case(
        "fp8 cache", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, cache_dtype=E4M3, scales="float"
    ),
    "fp8": Case(
        "fp8", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=E4M3, out_dtype=E5M2, scales="float"
    ),
    "fp8 new": Case(
        "fp8 new", (1, 3), (20, 3), heads=6, kv_heads=2, dtype=E5M2, cache_dtype=E4M3, scales="float", new=True
    ),
    "decode": Case("decode", (1, 1, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, decode_form=True),
}


def call_of(name: str, device: str) -> Inputs:
    return build(CALLS[name], device)


def strided(tensor: Tensor) -> Tensor:
    """The same shape, with a gap after each element of the last axis."""
    return torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)[..., 0]


def like(tensor: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(shape, dtype=dtype or tensor.dtype, device=tensor.device)


def to(name: str, dtype: torch.dtype) -> Change:
    return lambda c: {name: like(c[name], *c[name].shape, dtype=dtype)}


def shaped(name: str, *shape: int) -> Change:
    return lambda c: {name: like(c[name], *shape)}


def gapped(name: str) -> Change:
    return lambda c: {name: strided(c[name])}


def value(**changes: Any) -> Change:
    return lambda c: changes


def tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Change:
    return lambda c: {name: like(c["q"], *shape, dtype=dtype)}


QUERY = "float16 | bfloat16 | float32 | float8_e4m3fn | float8_e5m2"
NHD = "[pages, page_size, kv_heads, head_dim]"
HND = "[pages, kv_heads, page_size, head_dim]"
PACKED_K = "[pages, kv_heads, head_dim // x, page_size, x]"
PACKED_V = "[pages, kv_heads, head_dim, page_size]"
SCALE = "a finite number > 0, or a float32 tensor"

# (call, change, error, text)
ATTENTION: list[tuple[str, Change, type[Exception], str]] = [
    # q
    ("plain", value(q=None), TypeError, f"q must be a tensor of {QUERY}, got None"),
    ("plain", value(q=[1.0]), TypeError, f"q must be a tensor of {QUERY}, got list"),
    ("plain", to("q", torch.int32), TypeError, f"q must be {QUERY}, got int32"),
    ("plain", to("q", torch.float64), TypeError, f"q must be {QUERY}, got float64"),
    ("plain", shaped("q", 5, 192), ValueError, "q must be [tokens, heads, head_dim], got [5, 192]"),
    ("plain", gapped("q"), ValueError, "q must be contiguous along head_dim, got strides [384, 64, 2]"),
    (
        "plain",
        shaped("q", 5, 7, 32),
        ValueError,
        "q must have heads a positive multiple of kv_heads = 2, got heads = 7",
    ),
    (
        "plain",
        shaped("q", 5, 0, 32),
        ValueError,
        "q must have heads a positive multiple of kv_heads = 2, got heads = 0",
    ),
    (
        "plain",
        lambda c: {"q": c["q"].detach().requires_grad_()},
        ValueError,
        "q requires grad, but paged attention has no backward pass: call it under torch.no_grad()",
    ),
    (
        "plain",
        lambda c: {
            "q": like(c["q"], 5, 6, 257),
            "k_cache": like(c["q"], 12, 8, 2, 257),
            "v_cache": like(c["q"], 12, 8, 2, 257),
        },
        ValueError,
        "head_dim must be between 1 and 256, got 257",
    ),
    (
        "plain",
        lambda c: {name: like(c[name], *c[name].shape[:-1], 0) for name in ("q", "k_cache", "v_cache")},
        ValueError,
        "head_dim must be between 1 and 256, got 0",
    ),
    # k_cache, v_cache
    (
        "plain",
        value(k_cache=None),
        TypeError,
        "k_cache must be a tensor of bfloat16 | float8_e4m3fn | float8_e5m2, got None",
    ),
    (
        "plain",
        to("k_cache", torch.float16),
        TypeError,
        "k_cache must be bfloat16 | float8_e4m3fn | float8_e5m2, got float16",
    ),
    (
        "plain",
        to("k_cache", torch.float32),
        TypeError,
        "k_cache must be bfloat16 | float8_e4m3fn | float8_e5m2, got float32",
    ),
    (
        "fp8",
        to("k_cache", torch.float32),
        TypeError,
        "k_cache must be float16 | bfloat16 | float8_e4m3fn | float8_e5m2, got float32",
    ),
    ("plain", shaped("k_cache", 12, 8, 2), ValueError, f"k_cache must be {NHD} with head_dim = 32, got [12, 8, 2]"),
    (
        "plain",
        shaped("k_cache", 12, 8, 2, 64),
        ValueError,
        f"k_cache must be {NHD} with head_dim = 32, got [12, 8, 2, 64]",
    ),
    (
        "hnd",
        shaped("k_cache", 12, 2, 8, 64),
        ValueError,
        f"k_cache must be {HND} with head_dim = 32, got [12, 2, 8, 64]",
    ),
    (
        "plain",
        gapped("k_cache"),
        ValueError,
        "k_cache must be contiguous along head_dim, got strides [1024, 128, 64, 2]",
    ),
    ("plain", value(v_cache=None), TypeError, "v_cache must be a tensor of bfloat16, got None"),
    ("plain", to("v_cache", torch.float16), TypeError, "v_cache must be bfloat16, got float16"),
    ("fp8 cache", to("v_cache", E5M2), TypeError, "v_cache must be float8_e4m3fn, got float8_e5m2"),
    (
        "plain",
        shaped("v_cache", 12, 8, 3, 32),
        ValueError,
        f"v_cache must be {NHD} with kv_heads = 2, got [12, 8, 3, 32]",
    ),
    (
        "plain",
        shaped("v_cache", 8, 4, 2, 32),
        ValueError,
        f"v_cache must be {NHD} with pages = 12, page_size = 8, got [8, 4, 2, 32]",
    ),
    (
        "plain",
        gapped("v_cache"),
        ValueError,
        "v_cache must be contiguous along head_dim, got strides [1024, 128, 64, 2]",
    ),
    (
        "packed",
        shaped("k_cache", 12, 2, 3, 8, 8),
        ValueError,
        f"k_cache must be {PACKED_K} with head_dim = 32, got [12, 2, 3, 8, 8]",
    ),
    (
        "packed",
        gapped("k_cache"),
        ValueError,
        "k_cache must be contiguous along x, got strides [1024, 512, 128, 16, 2]",
    ),
    (
        "packed",
        shaped("v_cache", 12, 2, 32, 4),
        ValueError,
        f"v_cache must be {PACKED_V} with page_size = 8, got [12, 2, 32, 4]",
    ),
    (
        "packed",
        gapped("v_cache"),
        ValueError,
        "v_cache must be contiguous along page_size, got strides [1024, 512, 16, 2]",
    ),
    (
        "plain",
        lambda c: {"k_cache": like(c["q"], 12, 0, 2, 32), "v_cache": like(c["q"], 12, 0, 2, 32)},
        ValueError,
        "k_cache must have page_size >= 1, got [12, 0, 2, 32]",
    ),
    (
        "plain",
        lambda c: {"k_cache": like(c["q"], 12, 8, 0, 32), "v_cache": like(c["q"], 12, 8, 0, 32)},
        ValueError,
        "k_cache must have kv_heads >= 1, got [12, 8, 0, 32]",
    ),
    # kv_layout
    ("plain", value(kv_layout="NDH"), ValueError, "kv_layout must be 'NHD' or 'HND', got 'NDH'"),
    ("plain", value(kv_layout=None), TypeError, "kv_layout must be 'NHD' or 'HND', got None"),
    # page_table
    ("plain", value(page_table=None), TypeError, "page_table must be a tensor of int32, got None"),
    ("plain", to("page_table", torch.int64), TypeError, "page_table must be int32, got int64"),
    ("plain", shaped("page_table", 21), ValueError, "page_table must be [seqs, max_pages], got [21]"),
    ("plain", gapped("page_table"), ValueError, "page_table must be contiguous along max_pages, got strides [14, 2]"),
    # seq_lens
    ("plain", value(seq_lens=[1, 2, 3]), TypeError, "seq_lens must be a tensor of int32, got list"),
    ("plain", to("seq_lens", torch.int64), TypeError, "seq_lens must be int32, got int64"),
    ("plain", shaped("seq_lens", 4), ValueError, "seq_lens must be [seqs] with seqs = 3, got [4]"),
    ("plain", shaped("seq_lens", 3, 1), ValueError, "seq_lens must be [seqs] with seqs = 3, got [3, 1]"),
    ("plain", gapped("seq_lens"), ValueError, "seq_lens must be contiguous along seqs, got strides [2]"),
    # cu_seqlens_q
    ("plain", value(cu_seqlens_q=[0, 1]), TypeError, "cu_seqlens_q must be a tensor of int32, got list"),
    ("plain", to("cu_seqlens_q", torch.int64), TypeError, "cu_seqlens_q must be int32, got int64"),
    ("plain", shaped("cu_seqlens_q", 3), ValueError, "cu_seqlens_q must be [seqs + 1] with seqs + 1 = 4, got [3]"),
    ("plain", gapped("cu_seqlens_q"), ValueError, "cu_seqlens_q must be contiguous along seqs + 1, got strides [2]"),
    (
        "plain",
        value(cu_seqlens_q=None),
        ValueError,
        "cu_seqlens_q = None needs tokens = seqs, got q with tokens = 5 and seqs = 3",
    ),
    # max_seqlen_q, max_seqlen_k
    ("plain", value(max_seqlen_q=-1), ValueError, "max_seqlen_q must be None or an int >= 0 and < 2^31, got -1"),
    ("plain", value(max_seqlen_q=2.0), TypeError, "max_seqlen_q must be None or an int >= 0, got float"),
    ("plain", value(max_seqlen_q=True), TypeError, "max_seqlen_q must be None or an int >= 0, got bool"),
    ("plain", tensor("max_seqlen_q", ()), TypeError, "max_seqlen_q must be None or an int >= 0, got Tensor"),
    ("plain", value(max_seqlen_k=-1), ValueError, "max_seqlen_k must be None or an int >= 0 and < 2^31, got -1"),
    (
        "plain",
        value(max_seqlen_k=2**31),
        ValueError,
        "max_seqlen_k must be None or an int >= 0 and < 2^31, got 2147483648",
    ),
    ("plain", tensor("max_seqlen_k", ()), TypeError, "max_seqlen_k must be None or an int >= 0, got Tensor"),
    # k_new, v_new
    ("new", value(v_new=None), ValueError, "k_new and v_new must be given together, got k_new without v_new"),
    ("new", value(k_new=None), ValueError, "k_new and v_new must be given together, got v_new without k_new"),
    ("new", to("k_new", torch.float32), TypeError, "k_new must be float16, got float32"),
    ("new", to("v_new", torch.bfloat16), TypeError, "v_new must be float16, got bfloat16"),
    ("fp8 new", to("k_new", torch.float32), TypeError, "k_new must be float16 | bfloat16, got float32"),
    ("fp8 new", to("v_new", torch.float16), TypeError, "v_new must be bfloat16, got float16"),
    (
        "fp8 new",
        lambda c: {
            "k_cache": c["k_cache"].half(),
            "v_cache": c["v_cache"].half(),
            "k_scale": None,
            "v_scale": None,
        },
        TypeError,
        "k_new must be float16, got bfloat16",
    ),
    (
        "new",
        shaped("k_new", 4, 2, 32),
        ValueError,
        "k_new must be [tokens, kv_heads, head_dim] with tokens = 5, got [4, 2, 32]",
    ),
    (
        "new",
        shaped("v_new", 5, 6, 32),
        ValueError,
        "v_new must be [tokens, kv_heads, head_dim] with kv_heads = 2, got [5, 6, 32]",
    ),
    ("new", gapped("k_new"), ValueError, "k_new must be contiguous along head_dim, got strides [128, 64, 2]"),
    ("new", gapped("v_new"), ValueError, "v_new must be contiguous along head_dim, got strides [128, 64, 2]"),
    # softmax_scale, causal, window_size, softcap
    ("plain", value(softmax_scale=NAN), ValueError, "softmax_scale must be a finite number or None, got nan"),
    ("plain", value(softmax_scale="0.1"), TypeError, "softmax_scale must be a finite number or None, got str"),
    ("plain", value(causal=None), TypeError, "causal must be True or False, got None"),
    ("plain", value(causal=1), TypeError, "causal must be True or False, got int"),
    ("plain", value(window_size=4), TypeError, "window_size must be (left, right), two ints >= -1, got int"),
    ("plain", value(window_size=(4,)), ValueError, "window_size must be (left, right), two ints >= -1, got (4,)"),
    ("plain", value(window_size=(-2, 0)), ValueError, "window_size[0] must be an int >= -1 and < 2^31, got -2"),
    ("plain", value(window_size=(4, None)), TypeError, "window_size[1] must be an int >= -1, got None"),
    ("plain", value(window_size=(4, 0.0)), TypeError, "window_size[1] must be an int >= -1, got float"),
    ("plain", value(softcap=-1.0), ValueError, "softcap must be a finite number >= 0, got -1.0"),
    ("plain", value(softcap=INF), ValueError, "softcap must be a finite number >= 0, got inf"),
    ("plain", value(softcap=None), TypeError, "softcap must be a finite number >= 0, got None"),
    ("plain", value(softcap=True), TypeError, "softcap must be a finite number >= 0, got bool"),
    # alibi_slopes, sinks, qq_bias
    ("plain", to("alibi_slopes", torch.bfloat16), TypeError, "alibi_slopes must be float32, got bfloat16"),
    ("plain", shaped("alibi_slopes", 4), ValueError, "alibi_slopes must be [heads] with heads = 6, got [4]"),
    ("plain", gapped("alibi_slopes"), ValueError, "alibi_slopes must be contiguous along heads, got strides [2]"),
    ("plain", to("sinks", torch.float16), TypeError, "sinks must be float32 | bfloat16, got float16"),
    ("fp8", tensor("sinks", (6,), E4M3), TypeError, "sinks must be float16 | bfloat16 | float32, got float8_e4m3fn"),
    ("plain", shaped("sinks", 2), ValueError, "sinks must be [heads] with heads = 6, got [2]"),
    ("plain", gapped("sinks"), ValueError, "sinks must be contiguous along heads, got strides [2]"),
    ("plain", tensor("qq_bias", (3, 3), torch.float16), TypeError, "qq_bias must be float32 | bfloat16, got float16"),
    ("plain", tensor("qq_bias", (3, 4)), ValueError, "qq_bias must be [n, n] with n = 3, got [3, 4]"),
    ("plain", tensor("qq_bias", (3,)), ValueError, "qq_bias must be [n, n], got [3]"),
    (
        "plain",
        lambda c: {"qq_bias": like(c["q"], 4, 3).T[:, :3].float().T.contiguous().T},
        ValueError,
        "qq_bias must be contiguous along n, got strides [1, 3]",
    ),
    # q_scale, k_scale, v_scale
    ("fp8", value(q_scale=None), ValueError, "q_scale is required, for q is float8_e4m3fn"),
    ("fp8 cache", value(k_scale=None), ValueError, "k_scale is required, for k_cache is float8_e4m3fn"),
    ("fp8 cache", value(v_scale=None), ValueError, "v_scale is required, for v_cache is float8_e4m3fn"),
    ("plain", value(q_scale=1.0), ValueError, "q_scale must be None, for q is bfloat16 and not fp8"),
    ("plain", value(k_scale=1.0), ValueError, "k_scale must be None, for k_cache is bfloat16 and not fp8"),
    ("plain", value(v_scale=1.0), ValueError, "v_scale must be None, for v_cache is bfloat16 and not fp8"),
    ("fp8", value(q_scale=0.0), ValueError, f"q_scale must be {SCALE}, got 0.0"),
    ("fp8", value(k_scale=-1.0), ValueError, f"k_scale must be {SCALE}, got -1.0"),
    ("fp8", value(v_scale=NAN), ValueError, f"v_scale must be {SCALE}, got nan"),
    ("fp8", value(v_scale=1e39), ValueError, f"v_scale must be {SCALE}, got 1e+39"),
    ("fp8", value(q_scale="1"), TypeError, f"q_scale must be {SCALE}, got str"),
    ("fp8", value(k_scale=True), TypeError, f"k_scale must be {SCALE}, got bool"),
    ("fp8", tensor("q_scale", (6,)), ValueError, "q_scale must be [1] or [kv_heads] with kv_heads = 2, got [6]"),
    ("fp8", tensor("k_scale", ()), ValueError, "k_scale must be [1] or [kv_heads] with kv_heads = 2, got []"),
    ("fp8", tensor("v_scale", (1, 2)), ValueError, "v_scale must be [1] or [kv_heads] with kv_heads = 2, got [1, 2]"),
    ("fp8", tensor("q_scale", (2,), torch.float64), TypeError, "q_scale must be float32, got float64"),
    ("fp8", tensor("k_scale", (2,), torch.float16), TypeError, "k_scale must be float32, got float16"),
    ("fp8", tensor("v_scale", (1,), torch.bfloat16), TypeError, "v_scale must be float32, got bfloat16"),
    # out, out_scale, return_lse, only, batch_invariant, check
    ("plain", value(out=[]), TypeError, f"out must be a tensor of {QUERY}, got list"),
    ("plain", to("out", torch.float64), TypeError, f"out must be {QUERY}, got float64"),
    (
        "plain",
        shaped("out", 5, 192),
        ValueError,
        "out must be [tokens, heads, head_dim] with tokens = 5, heads = 6, head_dim = 32, got [5, 192]",
    ),
    (
        "plain",
        shaped("out", 5, 2, 32),
        ValueError,
        "out must be [tokens, heads, head_dim] with heads = 6, got [5, 2, 32]",
    ),
    ("plain", gapped("out"), ValueError, "out must be contiguous along head_dim, got strides [384, 64, 2]"),
    (
        "plain",
        lambda c: {"out": like(c["q"], 1, 6, 32).expand(5, 6, 32)},
        ValueError,
        "out must not overlap itself, got [5, 6, 32] strides [0, 32, 1]",
    ),
    ("plain", value(out_scale=1.0), ValueError, "out_scale must be None, for out is bfloat16 and not fp8"),
    ("plain", value(out=None, out_scale=1.0), ValueError, "out_scale must be None, for out is bfloat16 and not fp8"),
    ("plain", to("out", E4M3), ValueError, "out_scale is required, for out is float8_e4m3fn"),
    ("fp8", value(out_scale=None), ValueError, "out_scale is required, for out is float8_e5m2"),
    ("fp8", value(out=None, out_scale=None), ValueError, "out_scale is required, for out is float8_e4m3fn"),
    ("fp8", value(out_scale=0), ValueError, f"out_scale must be {SCALE}, got 0"),
    ("fp8", value(out_scale=False), TypeError, f"out_scale must be {SCALE}, got bool"),
    ("fp8", tensor("out_scale", (2,)), ValueError, "out_scale must be [1], got [2]"),
    ("fp8", tensor("out_scale", (1,), torch.float16), TypeError, "out_scale must be float32, got float16"),
    ("plain", value(return_lse=1), TypeError, "return_lse must be True or False, got int"),
    ("plain", value(only="both"), ValueError, "only must be 'decode' or 'prefill', got 'both'"),
    ("plain", value(only=True), TypeError, "only must be 'decode' or 'prefill', got bool"),
    ("plain", value(batch_invariant=1), TypeError, "batch_invariant must be True or False, got int"),
    ("plain", value(batch_invariant=None), TypeError, "batch_invariant must be True or False, got None"),
    (
        "new",
        value(batch_invariant=True),
        ValueError,
        "k_new must be None with batch_invariant = True, for results would depend on where the cache ends",
    ),
    ("plain", value(check=1), TypeError, "check must be True, False or None, got int"),
]


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any kernel launch of the test fails it."""

    def launched(kernel: Any, grid: Any) -> None:
        pytest.fail(f"{kernel} was launched")

    monkeypatch.setattr(KernelInterface, "__getitem__", launched)


def refuses(function: Callable[..., Any], inputs: Inputs, error: type[Exception], text: str) -> None:
    """The call raises exactly this, and no tensor of it changes."""
    tensors = {
        name: given for name, given in inputs.items() if isinstance(given, Tensor) and given.device.type != "meta"
    }
    before = {name: given.detach().clone() for name, given in tensors.items()}
    with pytest.raises(error) as raised:
        function(**inputs)
    assert type(raised.value) is error
    assert str(raised.value) == text
    for name, given in tensors.items():
        assert torch.equal(as_bytes(given), as_bytes(before[name])), f"{name} was written"


def as_bytes(given: Tensor) -> Tensor:
    return given.detach().contiguous().flatten().view(torch.uint8)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("call, change, error, text", ATTENTION, ids=[text for *_, text in ATTENTION])
def test_attention_refuses(call: str, change: Change, error: type[Exception], text: str, device: str) -> None:
    inputs = call_of(call, device)
    refuses(paged_attn.paged_attention, inputs | change(inputs), error, text)


def test_every_argument_of_attention_is_refused_somewhere() -> None:
    arguments = build(PLAIN).keys() | {"k_new", "v_new", "qq_bias", "q_scale", "max_seqlen_q", "max_seqlen_k", "check"}
    named = " ".join(text for *_, text in ATTENTION)
    assert [name for name in arguments if name not in named] == []


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "name",
    [
        *("k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q", "k_new", "v_new", "alibi_slopes", "sinks"),
        *("qq_bias", "q_scale", "k_scale", "v_scale", "out", "out_scale"),
    ],
)
def test_every_tensor_must_be_on_the_device_of_q(name: str, device: str) -> None:
    case = Case("all", (1, 3), (20, 3), 6, 2, dtype=E4M3, scales="tensor", new=True, sinks=True, alibi=True, qq_bias=4)
    inputs = build(case, device)
    inputs |= {"out": inputs["out"].to(E4M3), "out_scale": inputs["k_scale"].clone()}
    inputs[name] = torch.empty_like(inputs[name], device="meta")
    refuses(paged_attn.paged_attention, inputs, ValueError, f"{name} must be on {inputs['q'].device} like q, got meta")


@pytest.mark.parametrize("call", CALLS)
def test_good_calls_are_accepted(call: str, device: str) -> None:
    axes = accept(call_of(call, device))
    case = CALLS[call]
    pages = build(case)["k_cache"].shape[0]
    sizes = (case.tokens, len(case.seq_lens), case.heads, case.kv_heads, case.head_dim, pages, case.page_size)
    assert axes[:7] == sizes
    assert axes.x == (8 if call == "packed" else 0)


def accept(inputs: Inputs) -> check.Axes:
    """The host's check alone, with the defaults of the public call."""
    given = dict(
        max_seqlen_q=None, max_seqlen_k=None, k_new=None, v_new=None, alibi_slopes=None, sinks=None, qq_bias=None
    )
    given |= dict(q_scale=None, k_scale=None, v_scale=None, out_scale=None, cu_seqlens_q=None)
    return check.check_attention(**{**given, **inputs})


LEGAL: dict[str, tuple[str, Change]] = {
    "a list as window": ("plain", value(window_size=[3, 0])),
    "a window without end": ("plain", value(window_size=(-1, -1))),
    "ints as numbers": ("fp8", value(softcap=30, softmax_scale=1, k_scale=2, out_scale=3)),
    "a negative softmax_scale": ("plain", value(softmax_scale=-0.5)),
    "bounds of zero": ("plain", value(max_seqlen_q=0, max_seqlen_k=0)),
    "gaps in a scale": ("fp8", lambda c: {"k_scale": strided(like(c["q"], 2, dtype=torch.float32))}),
    "gaps in an axis of one element": ("plain", lambda c: {"qq_bias": strided(like(c["q"], 1, 1))}),
    "an empty page table": ("new", lambda c: {"page_table": c["page_table"][:, :0]}),
    "an empty cache": ("new", lambda c: {"k_cache": c["k_cache"][:0], "v_cache": c["v_cache"][:0]}),
    "one page table for all": ("plain", lambda c: {"page_table": c["page_table"][:1].expand(3, -1)}),
    "padding after the last query": ("plain", lambda c: {"q": like(c["q"], 9, 6, 32), "out": None}),
    "no query at all": ("plain", lambda c: {"q": c["q"][:0], "out": None}),
    "no bias at all": ("plain", tensor("qq_bias", (0, 0))),
    "fp8 out of other queries": ("plain", lambda c: {"out": c["out"].to(E5M2), "out_scale": 0.1}),
    "wide out of fp8 queries": (
        "fp8",
        lambda c: {"out": like(c["q"], 5, 6, 32, dtype=torch.float32), "out_scale": None},
    ),
    "fp8 queries beside a half cache": (
        "fp8",
        lambda c: {"k_cache": c["k_cache"].half(), "v_cache": c["v_cache"].half(), "k_scale": None, "v_scale": None},
    ),
    "fp8 queries beside the other fp8": (
        "fp8",
        lambda c: {"k_cache": c["k_cache"].to(E5M2), "v_cache": c["v_cache"].to(E5M2)},
    ),
    "half sinks beside fp8 queries": ("fp8", tensor("sinks", (6,), torch.float16)),
    "a layout that a packed cache ignores": ("packed", value(kv_layout="HND")),
}


@pytest.mark.parametrize("legal", LEGAL)
def test_unusual_but_legal_calls_are_accepted(legal: str, device: str) -> None:
    call, change = LEGAL[legal]
    inputs = call_of(call, device)
    accept(inputs | change(inputs))


def test_queries_that_require_grad_are_legal_without_grad_mode(device: str) -> None:
    inputs = call_of("plain", device)
    inputs["q"] = inputs["q"].detach().requires_grad_()
    with torch.no_grad():
        accept(inputs)


# ---- the checked mode


# The cache has 12 pages of 8 (9 where the window frees some), the table 7 columns (6 beside new keys), q 8 tokens.
CHECKED = Case("checked", (1, 4, 2, 0), (20, 4, 33, 0), page_size=8, padding=1)
CHECKED_NEW = Case("checked new", (1, 4, 2, 0), (20, 4, 33, 0), page_size=8, padding=1, new=True)
CHECKED_WINDOW = Case("checked window", (1, 4, 2, 0), (20, 4, 33, 0), page_size=8, padding=1, window_size=(8, -1))


def put(name: str, index: Any, number: int) -> Change:
    def change(inputs: Inputs) -> Inputs:
        changed = inputs[name].clone()
        changed[index] = number
        return {name: changed}

    return change


CONTENTS: list[tuple[Case, Change, str]] = [
    (CHECKED, put("cu_seqlens_q", 0, 1), "cu_seqlens_q[0] = 1, but it must be 0"),
    (
        CHECKED,
        put("cu_seqlens_q", 2, 0),
        "cu_seqlens_q[2] = 0 is less than cu_seqlens_q[1] = 1 (sequence 1)",
    ),
    (
        CHECKED,
        put("cu_seqlens_q", 3, 4),
        "cu_seqlens_q[3] = 4 is less than cu_seqlens_q[2] = 5 (sequence 2)",
    ),
    (CHECKED, put("cu_seqlens_q", 4, 9), "cu_seqlens_q[4] = 9, but q has tokens = 8"),
    (CHECKED, value(max_seqlen_q=3), "sequence 1 has 4 query tokens, but max_seqlen_q = 3"),
    (CHECKED, value(max_seqlen_k=32), "seq_lens[2] = 33, but max_seqlen_k = 32"),
    (CHECKED, put("seq_lens", 1, 3), "seq_lens[1] = 3, but sequence 1 has 4 query tokens, which count too"),
    (
        CHECKED,
        put("seq_lens", 0, 57),
        "seq_lens[0] = 57 needs 57 keys in the cache, but page_table[0] holds max_pages = 7 pages of 8",
    ),
    (
        CHECKED_NEW,
        put("seq_lens", 0, 50),
        "seq_lens[0] = 50 needs 49 keys in the cache, but page_table[0] holds max_pages = 6 pages of 8",
    ),
    (CHECKED, put("page_table", (2, 4), BAD_PAGE), "page_table[2, 4] = 2147483647, but the cache has 12 pages"),
    (CHECKED, put("page_table", (0, 0), 12), "page_table[0, 0] = 12, but the cache has 12 pages"),
    (CHECKED, put("page_table", (1, 0), -1), "page_table[1, 0] = -1, but the cache has 12 pages"),
    (CHECKED, put("seq_lens", 0, 25), "page_table[0, 3] = 2147483647, but the cache has 12 pages"),
    (CHECKED_WINDOW, put("page_table", (2, 2), BAD_PAGE), "page_table[2, 2] = 2147483647, but the cache has 9 pages"),
]


@pytest.fixture(params=["check=True", "PAGED_ATTN_CHECK=1"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """The two ways to ask for the checked call: the arguments to add."""
    if request.param == "check=True":
        return {"check": True}
    monkeypatch.setenv("PAGED_ATTN_CHECK", "1")
    monkeypatch.setattr(check, "ALWAYS", check.asked())
    return {}


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("case, change, text", CONTENTS, ids=[text for *_, text in CONTENTS])
def test_the_checked_call_refuses(case: Case, change: Change, text: str, checked: Inputs, device: str) -> None:
    inputs = build(case, device)
    refuses(paged_attn.paged_attention, inputs | change(inputs) | checked, ValueError, text)


# What the checked call must not mind; `build` puts 2^31 - 1 in table tails and in pages left of every query's window.
FINE: list[Case] = [
    CHECKED,
    CHECKED_NEW,
    CHECKED_WINDOW,
    Case("window of one", (1, 3), (40, 30), page_size=8, window_size=(0, 0)),
    Case("window and new", (1, 3), (40, 30), page_size=8, window_size=(4, -1), new=True),
    Case("context out of the window", (1, 3), (40, 30), page_size=8, window_size=(0, 0), new=True),
    Case("look ahead", (2, 3), (40, 30), page_size=8, window_size=(9, 2), causal=False),
    Case("empty", (1, 0, 2), (0, 0, -7), page_size=8),
    Case("decode", (1, 1), (40, 8), page_size=8, decode_form=True),
]


@pytest.mark.parametrize("case", FINE, ids=str)
def test_the_checked_call_changes_nothing(case: Case, checked: Inputs, device: str) -> None:
    plain, plain_lse = paged_attn.paged_attention(**build(case, device), check=False)
    out, lse = paged_attn.paged_attention(**build(case, device), **checked)
    assert torch.equal(as_bytes(out), as_bytes(plain))
    assert torch.equal(as_bytes(lse), as_bytes(plain_lse))


@pytest.mark.parametrize("only, kept", [("decode", 0), ("prefill", 1)])
def test_sequences_that_only_leaves_out_are_not_checked(only: str, kept: int, device: str) -> None:
    case = Case("mixed", (1, 3), (20, 30), page_size=8, only=only)
    inputs = build(case, device)
    inputs["page_table"][1 - kept] = BAD_PAGE
    paged_attn.paged_attention(**inputs, check=True)
    inputs["page_table"][kept] = BAD_PAGE
    with pytest.raises(ValueError, match=rf"page_table\[{kept}, 0\]"):
        paged_attn.paged_attention(**inputs, check=True)


@pytest.mark.parametrize(
    "word, on", [("1", True), ("true", True), ("ON", True), ("0", False), ("", False), (None, False)]
)
def test_the_environment_decides_where_check_is_none(
    word: str | None, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if word is None:
        monkeypatch.delenv("PAGED_ATTN_CHECK", raising=False)
    else:
        monkeypatch.setenv("PAGED_ATTN_CHECK", word)
    monkeypatch.setattr(check, "ALWAYS", check.asked())
    assert check.enabled(None) is on
    assert check.enabled(True) is True
    assert check.enabled(False) is False


# ---- write_kv

KV = "[tokens, kv_heads, head_dim]"


def write_inputs(device: str, cache_dtype: torch.dtype = torch.float16, layout: str = "NHD") -> Inputs:
    """Four tokens, two heads, 32 dims into 3 pages of 8; random bytes in the caches."""
    shapes = {"NHD": [(3, 8, 2, 32)] * 2, "HND": [(3, 2, 8, 32)] * 2, "x": [(3, 2, 4, 8, 8), (3, 2, 32, 8)]}[layout]
    caches = [torch.randint(0, 100, shape, device=device).to(cache_dtype) for shape in shapes]
    inputs: Inputs = {name: torch.randn(4, 2, 32, device=device).half() for name in ("k", "v")}
    inputs |= dict(zip(("k_cache", "v_cache"), caches, strict=True))
    inputs["slot_mapping"] = torch.tensor([3, -1, 23, 0], device=device)
    inputs["kv_layout"] = "HND" if layout == "HND" else "NHD"
    if is_fp8(cache_dtype):
        inputs |= {"k_scale": 0.5, "v_scale": torch.full((2,), 2.0, device=device)}
    return inputs


WRITE: list[tuple[torch.dtype, str, Change, type[Exception], str]] = [
    (torch.float16, "NHD", value(k=None), TypeError, "k must be a tensor of float16 | bfloat16 | float32, got None"),
    (torch.float16, "NHD", to("k", E4M3), TypeError, "k must be float16 | bfloat16 | float32, got float8_e4m3fn"),
    (torch.float16, "NHD", shaped("k", 4, 64), ValueError, f"k must be {KV}, got [4, 64]"),
    (torch.float16, "NHD", gapped("k"), ValueError, "k must be contiguous along head_dim, got strides [128, 64, 2]"),
    (torch.float16, "NHD", to("v", torch.float32), TypeError, "v must be float16, got float32"),
    (torch.float16, "NHD", shaped("v", 5, 2, 32), ValueError, f"v must be {KV} with tokens = 4, got [5, 2, 32]"),
    (torch.float16, "NHD", gapped("v"), ValueError, "v must be contiguous along head_dim, got strides [128, 64, 2]"),
    (
        torch.float16,
        "NHD",
        to("k_cache", torch.bfloat16),
        TypeError,
        "k_cache must be float16 | float8_e4m3fn | float8_e5m2, got bfloat16",
    ),
    (torch.float16, "NHD", to("v_cache", torch.bfloat16), TypeError, "v_cache must be float16, got bfloat16"),
    (
        torch.float16,
        "NHD",
        shaped("k_cache", 3, 8, 4, 32),
        ValueError,
        f"k_cache must be {NHD} with kv_heads = 2, got [3, 8, 4, 32]",
    ),
    (
        torch.float16,
        "HND",
        shaped("v_cache", 3, 2, 4, 32),
        ValueError,
        f"v_cache must be {HND} with page_size = 8, got [3, 2, 4, 32]",
    ),
    (
        torch.float16,
        "x",
        shaped("k_cache", 3, 2, 4, 8, 4),
        ValueError,
        f"k_cache must be {PACKED_K} with head_dim = 32, got [3, 2, 4, 8, 4]",
    ),
    (
        torch.float16,
        "NHD",
        lambda c: {"k_cache": like(c["k"], 1, 8, 2, 32).expand(3, 8, 2, 32)},
        ValueError,
        "k_cache must not overlap itself, got [3, 8, 2, 32] strides [0, 64, 32, 1]",
    ),
    (
        torch.float16,
        "NHD",
        lambda c: {"v_cache": like(c["k"], 3, 8, 1, 32).expand(3, 8, 2, 32)},
        ValueError,
        "v_cache must not overlap itself, got [3, 8, 2, 32] strides [256, 32, 0, 1]",
    ),
    (torch.float16, "NHD", to("slot_mapping", torch.int32), TypeError, "slot_mapping must be int64, got int32"),
    (
        torch.float16,
        "NHD",
        shaped("slot_mapping", 3),
        ValueError,
        "slot_mapping must be [tokens] with tokens = 4, got [3]",
    ),
    (
        torch.float16,
        "NHD",
        gapped("slot_mapping"),
        ValueError,
        "slot_mapping must be contiguous along tokens, got strides [2]",
    ),
    (torch.float16, "NHD", value(kv_layout="HDN"), ValueError, "kv_layout must be 'NHD' or 'HND', got 'HDN'"),
    (E4M3, "NHD", value(k_scale=None), ValueError, "k_scale is required, for k_cache is float8_e4m3fn"),
    (E5M2, "NHD", value(v_scale=None), ValueError, "v_scale is required, for v_cache is float8_e5m2"),
    (torch.float16, "NHD", value(check="yes"), TypeError, "check must be True, False or None, got str"),
    (E4M3, "NHD", value(k_scale=0.0), ValueError, f"k_scale must be {SCALE}, got 0.0"),
    (torch.float16, "NHD", value(k_scale=1.0), ValueError, "k_scale must be None, for k_cache is float16 and not fp8"),
    (torch.float16, "NHD", value(v_scale=1.0), ValueError, "v_scale must be None, for v_cache is float16 and not fp8"),
    (
        E4M3,
        "NHD",
        lambda c: {"v_scale": like(c["k"], 3, dtype=torch.float32)},
        ValueError,
        "v_scale must be [1] or [kv_heads] with kv_heads = 2, got [3]",
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("dtype, layout, change, error, text", WRITE, ids=[text for *_, text in WRITE])
def test_write_kv_refuses(
    dtype: torch.dtype, layout: str, change: Change, error: type[Exception], text: str, device: str
) -> None:
    inputs = write_inputs(device, dtype, layout)
    refuses(paged_attn.write_kv, inputs | change(inputs), error, text)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("name", ["v", "k_cache", "v_cache", "slot_mapping", "v_scale"])
def test_everything_written_must_be_on_the_device_of_k(name: str, device: str) -> None:
    inputs = write_inputs(device, E4M3)
    inputs[name] = torch.empty_like(inputs[name], device="meta")
    refuses(paged_attn.write_kv, inputs, ValueError, f"{name} must be on {inputs['k'].device} like k, got meta")


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "slots, text",
    [
        ([3, -1, 24, 0], "slot_mapping[2] = 24 (token 2), but the cache has 3 pages of 8 slots"),
        ([2**62, -1, 23, 0], f"slot_mapping[0] = {2**62} (token 0), but the cache has 3 pages of 8 slots"),
        ([3, -1, 0, 3], "slot_mapping[3] = 3 (token 3), but token 0 has the same slot"),
    ],
)
def test_the_checked_write_refuses(slots: list[int], text: str, checked: Inputs, device: str) -> None:
    inputs = write_inputs(device) | {"slot_mapping": torch.tensor(slots, device=device)} | checked
    refuses(paged_attn.write_kv, inputs, ValueError, text)


def test_the_checked_write_minds_no_skipped_token(checked: Inputs, device: str) -> None:
    inputs = write_inputs(device) | {"slot_mapping": torch.tensor([-1, -1, -(2**40), 5], device=device)} | checked
    paged_attn.write_kv(**inputs)
    assert torch.equal(inputs["k_cache"][0, 5], inputs["k"][3])


# ---- merge_states

MERGE: list[tuple[Change, type[Exception], str]] = [
    (value(outs=None), TypeError, "outs must be a tensor of float16 | bfloat16 | float32, got None"),
    (to("outs", E4M3), TypeError, "outs must be float16 | bfloat16 | float32, got float8_e4m3fn"),
    (shaped("outs", 4, 5, 32), ValueError, "outs must be [n, tokens, heads, head_dim], got [4, 5, 32]"),
    (
        lambda c: {"outs": c["outs"][:0], "lses": c["lses"][:0]},
        ValueError,
        "outs must be [n, tokens, heads, head_dim] with n >= 1, got [0, 5, 6, 32]",
    ),
    (value(lses=None), TypeError, "lses must be a tensor of float32, got None"),
    (to("lses", torch.bfloat16), TypeError, "lses must be float32, got bfloat16"),
    (shaped("lses", 4, 5), ValueError, "lses must be [n, tokens, heads] with n = 4, tokens = 5, heads = 6, got [4, 5]"),
    (shaped("lses", 3, 5, 6), ValueError, "lses must be [n, tokens, heads] with n = 4, got [3, 5, 6]"),
    (shaped("lses", 4, 6, 5), ValueError, "lses must be [n, tokens, heads] with tokens = 5, heads = 6, got [4, 6, 5]"),
    (
        lambda c: {"lses": torch.empty(4, 5, 6, device="meta")},
        ValueError,
        "lses must be on {device} like outs, got meta",
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("change, error, text", MERGE, ids=[text for *_, text in MERGE])
def test_merge_states_refuses(change: Change, error: type[Exception], text: str, device: str) -> None:
    inputs: Inputs = {"outs": torch.zeros(4, 5, 6, 32, device=device), "lses": torch.zeros(4, 5, 6, device=device)}
    text = text.format(device=inputs["lses"].device)
    refuses(paged_attn.merge_states, inputs | change(inputs), error, text)
