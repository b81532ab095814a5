"""gather_pages: rows of any layout, as they lie or times their scales, by kernels and in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from tests.support.bad_input import refuses
from tests.support.cases import E4M3, E5M2, INT4
from tests.support.formats import with_zero
from tests.support.whole_pages import CACHE, ID, PAGES, RARE, as_bytes, batch, ids, noise

HALF, BF16, F32, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
SHAPES = {
    "NHD": lambda device, dtype: noise(device, dtype, PAGES, 5, 3, 24),
    "HND": lambda device, dtype: noise(device, dtype, PAGES, 3, 5, 24),
    "HDN": lambda device, dtype: noise(device, dtype, PAGES, 3, 24, 5),
    "x": lambda device, dtype: noise(device, dtype, PAGES, 3, 3, 5, 8),
    "latents": lambda device, dtype: noise(device, dtype, PAGES, 5, 2, 600)[:, :, :1, :576],
}


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
@pytest.mark.parametrize("layout, dtype", [("NHD", E4M3), ("HND", BF16), ("HDN", HALF), ("x", INT8), ("latents", F32)])
def test_rows_keep_their_bits(layout: str, dtype: torch.dtype, ragged: bool, way: str, device: str) -> None:
    cache, (table, lengths) = SHAPES[layout](device, dtype), batch(device, ragged, (torch.int32, torch.int64)[ragged])
    options = dict(kv_layout=layout if layout in ("HND", "HDN") else "NHD")
    want = reference.gather_pages(cache, table, lengths, tokens=20, **options)
    got = paged_attn.gather_pages(cache, table, lengths, tokens=20, **options)
    assert as_bytes([got]) == as_bytes([want])
    assert not got[16:].view(torch.uint8).any()  # of page -1, and behind the last row
    out = noise(device, dtype, 20, 4, *got.shape[2:])[:, 1 : 1 + got.shape[1]]  # strided
    for _ in range(2):
        assert paged_attn.gather_pages(cache, table, lengths, out=out, **options) is out
        assert as_bytes([out]) == as_bytes([want])
    few = paged_attn.gather_pages(cache, table, lengths, tokens=9, **options, check=False)
    assert as_bytes([few]) == as_bytes([want[:9]])


@pytest.mark.parametrize("dtype", RARE, ids=str)
def test_rows_of_rare_dtypes_are_bytes_too(dtype: torch.dtype, way: str, device: str) -> None:
    memory, (table, lengths) = noise(device, torch.uint8, PAGES, 5, 3, 24 * dtype.itemsize), batch(device, False)
    cache, want = memory.view(dtype), reference.gather_pages(memory, table, lengths, tokens=20)
    for _ in range(2):
        got = paged_attn.gather_pages(cache, table, lengths, tokens=20)
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), want)


def finite(device: str, layout: str, dtype: torch.dtype) -> Tensor:
    """A cache whose last slot of each live page is NaN where its dtype has NaN, and no other."""
    like = SHAPES[layout](device, torch.uint8)
    if dtype == INT8:
        return torch.randint(-128, 128, like.shape, dtype=INT8, device=device)
    if dtype == INT4:
        return like
    return (torch.randn(like.shape, device=device) * 3).to(dtype)


def by_token(device: str, layout: str, dtype: torch.dtype) -> Tensor:
    """Scales of tokens, every second element of a tensor."""
    shape = (PAGES, 5, 3, 2) if layout == "NHD" else (PAGES, 3, 5, 2)
    return torch.rand(shape, device=device).to(dtype)[..., 0]


def zeros_and_scales(device: str, layout: str) -> Tensor:
    """Scales of an int4 cache, every second element of a tensor."""
    scale = by_token(device, layout, F32)
    zeros = torch.randint(0, 16, scale.shape, device=device)
    return torch.stack([with_zero(scale, zeros)] * 2, -1)[..., 0]


@pytest.mark.parametrize(
    "layout, dtype, scale",
    [
        ("NHD", E4M3, lambda device: by_token(device, "NHD", F32)),
        ("HND", INT8, lambda device: by_token(device, "HND", HALF)),
        ("x", E5M2, lambda device: by_token(device, "x", F32)),
        ("NHD", INT4, lambda device: zeros_and_scales(device, "NHD")),
        ("HND", INT4, lambda device: zeros_and_scales(device, "HND")),
        ("NHD", INT8, lambda device: 0.25),
        ("HDN", BF16, lambda device: torch.tensor([0.5, 3.0, 1.5], device=device)),
        ("NHD", E5M2, lambda device: torch.full((), 0.37, device=device)),
        ("HND", HALF, lambda device: None),
    ],
)
@pytest.mark.parametrize("to", [BF16, F32])
def test_rows_are_products_with_their_scales(
    layout: str, dtype: torch.dtype, scale: Any, to: torch.dtype, way: str, device: str
) -> None:
    cache, by, (table, lengths) = finite(device, layout, dtype), scale(device), batch(device, False)
    options = dict(kv_layout=layout if layout in ("HND", "HDN") else "NHD", scale=by, dtype=to, tokens=19)
    want = reference.gather_pages(cache, table, lengths, **options)
    got = paged_attn.gather_pages(cache, table, lengths, **options)
    assert got.dtype == to
    # a product is rounded to float32, then to the result's dtype: beside float64's rounding once, half a unit more
    unit = {F32: 2.0**-24, BF16: 2.0**-8}[to]
    torch.testing.assert_close(got, want, rtol=1.01 * unit, atol=0)


def test_dead_slots_and_other_pages_reach_no_row(way: str, device: str) -> None:
    cache, (table, lengths) = finite(device, "NHD", F32), batch(device, False)
    want = paged_attn.gather_pages(cache, table, lengths, tokens=17)
    cache[[1, 3, 4]] = torch.nan
    cache[0, 1:] = torch.nan  # behind the eleventh key
    scale = torch.ones(PAGES, 5, 3, device=device)
    scale[[1, 3, 4]], scale[0, 1:] = torch.nan, torch.nan
    assert torch.equal(paged_attn.gather_pages(cache, table, lengths, tokens=17), want)
    assert torch.equal(paged_attn.gather_pages(cache, table, lengths, tokens=17, scale=scale), want)
    int4, scale = finite(device, "NHD", INT4), zeros_and_scales(device, "NHD")
    want = paged_attn.gather_pages(int4, table, lengths, tokens=17, scale=scale, dtype=F32)
    scale[[1, 3, 4]], scale[0, 1:] = torch.nan, torch.nan
    assert torch.equal(paged_attn.gather_pages(int4, table, lengths, tokens=17, scale=scale, dtype=F32), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [INT4, INT8, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("heads, dims", [(40, 144), (3, 6), (1, 576), (2, 4098)])
def test_wide_and_odd_rows_at_odd_addresses_times_scales_by_token(
    heads: int, dims: int, dtype: torch.dtype, layout: str, way: str, device: str
) -> None:
    """40 heads are more than a program has, and 4098 dims more than a block; an int4 head of 6 dims has three bytes."""
    slots = (5, heads) if layout == "NHD" else (heads, 5)
    numbers = torch.randn(PAGES, *slots, dims + 2, device=device) * 3
    stored = (numbers.abs() * 9).to(INT4)[..., : dims // 2 + 1] if dtype == INT4 else numbers.to(dtype)[..., : dims + 1]
    cache, (table, lengths) = stored[..., 1:], batch(device, False)
    scale = torch.rand(PAGES, *slots, device=device)
    scale = with_zero(scale, torch.full_like(scale, 9)) if dtype == INT4 else scale.half()
    options: dict[str, Any] = dict(kv_layout=layout, scale=scale)
    want = reference.gather_pages(cache, table, lengths, tokens=18, dtype=F32, **options)
    out = torch.full((18, 2 * heads, dims + 3), torch.nan, device=device)
    for _ in range(2):
        got = paged_attn.gather_pages(cache, table, lengths, out=out[:, ::2, :dims], **options)
        assert torch.equal(got, want)
    assert out[:, 1::2].isnan().all()
    assert out[..., dims:].isnan().all()


def test_a_graph_gathers_int4(way: str, device: str) -> None:
    cache, (table, lengths) = finite(device, "HND", INT4), batch(device, False)
    options: dict[str, Any] = dict(kv_layout="HND", scale=zeros_and_scales(device, "HND"), dtype=BF16, tokens=18)
    torch._dynamo.reset()
    compiled = torch.compile(paged_attn.gather_pages, backend="aot_eager", fullgraph=True)
    want = paged_attn.gather_pages(cache, table, lengths, **options)
    assert want.any()
    assert torch.equal(compiled(cache, table, lengths, **options), want)


def test_tokens_are_counted_where_lengths_are_on_the_host(way: str) -> None:
    table, lengths = batch("cpu", False)
    cache = SHAPES["NHD"]("cpu", HALF)
    assert paged_attn.gather_pages(cache, table, lengths).shape == (17, 3, 24)
    assert paged_attn.gather_pages(cache, table[:0], lengths[:0]).shape == (0, 3, 24)
    assert not paged_attn.gather_pages(cache, table[:0], lengths[:0], tokens=2).any()
    assert not paged_attn.gather_pages(cache[:0], torch.full_like(table, -1), lengths).any()  # without pages


# ---- what is refused ---------------------------------------------------------------------------------------------

BYTES = CACHE.to(torch.uint8)
GATHER: dict[str, Any] = dict(cache=CACHE, page_table=ID[:, None], seq_lens=ID)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(cache=CACHE.to(torch.complex128)), TypeError,
     "cache must be a tensor of elements of up to 8 bytes, got complex128"),
    (dict(cache=None), TypeError, "cache must be a tensor, got None"),
    (dict(cache=CACHE[0]), ValueError,
     "cache must be [pages, page_size, kv_heads, head_dim], got [8, 2, 16]: cache.unsqueeze(2), if these are latents"),
    (dict(cache=CACHE[:, :0]), ValueError,
     "cache must be [pages, page_size, kv_heads, head_dim], none but pages 0, got [4, 0, 2, 16]"),
    (dict(kv_layout="NDH"), ValueError, "kv_layout must be 'NHD', 'HND' or 'HDN', got 'NDH': 'NHD'?"),
    (dict(tokens=-1), ValueError, "tokens must be None or an int >= 0 and < 2^31, got -1"),
    (dict(dtype="float32"), TypeError, "dtype must be None or a torch.dtype, got str"),
    (dict(dtype=torch.float64), TypeError,
     "dtype must be float16 | bfloat16 | float32, or that of cache, got float64"),
    (dict(cache=CACHE.to(E4M3), scale=2.0), TypeError,
     "dtype must be float16 | bfloat16 | float32 with a scale, got None, that of cache, float8_e4m3fn"),
    (dict(cache=CACHE.to(INT8), scale=2.0, dtype=INT8), TypeError,
     "dtype must be float16 | bfloat16 | float32 with a scale, got int8"),
    (dict(seq_lens=torch.full((3,), torch.nan)), TypeError,
     "seq_lens must be int32 | int64, got float32: seq_lens.to(torch.int32)"),
    (dict(seq_lens=ID.to(torch.complex64)), TypeError,
     "seq_lens must be int32 | int64, got complex64: seq_lens.to(torch.int32)"),
    (dict(seq_lens=ID + 2**40), ValueError,
     f"the sum of seq_lens must be an int >= 0 and < 2^31, got {3 * 2**40}"),
    (dict(out=torch.zeros(3, 2, 16), tokens=4), ValueError, "tokens must be 3, which out has, got 4"),
    (dict(out=torch.zeros(3, 2, 16), dtype=HALF), ValueError,
     "dtype must be float32, which out has, got float16"),
    (dict(out=torch.zeros(3, 2, 24)), ValueError,
     "out must be [tokens, kv_heads, head_dim] with head_dim = 16 from cache, got [3, 2, 24]"),
    (dict(out=CACHE[0]), ValueError, "out must share no memory with cache"),
    (dict(seq_lens=ID[:2]), ValueError,
     "seq_lens must be [seqs] with seqs = 3 from page_table, got [2]"),
    (dict(scale=torch.ones(3)), ValueError,
     "scale must be [], [1], [kv_heads], [1, kv_heads] or [pages, page_size, kv_heads] with kv_heads = 2, got [3]"),
    (dict(scale=torch.ones(4, 2, 8)), ValueError,
     "scale must be [pages, page_size, kv_heads] with page_size = 8, kv_heads = 2 from cache, got [4, 2, 8]: "
     "scale.transpose(1, 2)"),
    (dict(scale=torch.ones(2, dtype=BF16)), TypeError,
     "scale must be float32 | float16, got bfloat16: scale.to(torch.float32)"),
    (dict(cache=BYTES, scale=torch.ones(4, 8, 2), dtype=INT4), TypeError,
     "dtype must be float16 | bfloat16 | float32 with a scale, got uint8"),
    (dict(cache=BYTES, scale=2.0, dtype=HALF), TypeError,
     "scale must be float32 [pages, page_size, kv_heads], for cache is int4 (uint8), got float"),
    (dict(cache=BYTES, dtype=HALF), TypeError,
     "scale must be float32 [pages, page_size, kv_heads], for cache is int4 (uint8), got None"),
    (dict(cache=BYTES, kv_layout="HND", scale=torch.ones(2), dtype=HALF), ValueError,
     "scale must be float32 [pages, kv_heads, page_size], for cache is int4 (uint8), got [2]"),
    (dict(cache=BYTES, scale=torch.ones(4, 2, 8), dtype=HALF), ValueError,
     "scale must be [pages, page_size, kv_heads] with page_size = 8, kv_heads = 2 from cache, got [4, 2, 8]: "
     "scale.transpose(1, 2)"),
    (dict(cache=BYTES, scale=torch.ones(4, 8, 2, dtype=HALF), dtype=HALF), TypeError,
     "scale must be float32, for cache is uint8, got float16: scale.to(torch.float32)"),
    (dict(cache=BYTES, kv_layout="HDN", scale=torch.ones(4, 8, 2), dtype=HALF), ValueError,
     "cache must be [pages, kv_heads, page_size, head_dim / 2] over int4, which is not x-packed, got [4, 8, 2, 16]"),
    (dict(cache=BYTES, scale=torch.ones(4, 8, 2), out=torch.zeros(3, 2, 16)), ValueError,
     "out must be [tokens, kv_heads, head_dim] with head_dim = 32 from cache, got [3, 2, 16]"),
    (dict(scale=0), ValueError, "scale must be a finite number > 0, or a float32 tensor, got 0"),
]  # fmt: skip


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("change, error, text", REFUSED, ids=[text for *_, text in REFUSED])
def test_a_wrong_call_is_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refuses(paged_attn.gather_pages, GATHER | change, error, text)


def test_lazily_conjugated_views_are_refused(way: str) -> None:
    cache = CACHE.to(torch.complex64).conj()
    with pytest.raises(ValueError, match=r"got a lazily conjugated view: pass cache\.resolve_conj\(\)"):
        paged_attn.gather_pages(**GATHER | {"cache": cache})


CONVERTED: list[tuple[dict[str, Any], str]] = [
    (dict(check=1), "check must be True, False or None, got int"),
    (dict(scale=True), "scale must be a finite number > 0, or a float32 tensor, got bool"),
    (dict(scale=float("nan")), "scale must be a finite number > 0, or a float32 tensor, got nan"),
    (dict(scale=-1.0), "scale must be a finite number > 0, or a float32 tensor, got -1.0"),
]


@pytest.mark.parametrize("change, text", CONVERTED, ids=[text for _, text in CONVERTED])
def test_a_trace_refuses_what_a_schema_would_convert(change: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        torch.compile(paged_attn.gather_pages, backend="eager")(**GATHER | change)


CHECKED: list[tuple[dict[str, Any], str]] = [
    (dict(seq_lens=ids("cpu", 0, 9, 0), tokens=9),
     "seq_lens[1] = 9 needs 9 keys in the cache, but row 1 of page_table holds 1 pages of 8"),
    (dict(seq_lens=ids("cpu", 4, 4, 0), tokens=7), "seq_lens need 8 rows, but out has 7"),
    (dict(seq_lens=ids("cpu", 1, 1, 1), page_table=ids("cpu", -1, 9, 4)[:, None]),
     "page_table[1, 0] = 9, but the cache has 4 pages"),
]  # fmt: skip


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("change, text", CHECKED, ids=[text for *_, text in CHECKED])
def test_the_checked_call_refuses(change: dict[str, Any], text: str) -> None:
    refuses(paged_attn.gather_pages, GATHER | change | dict(check=True), ValueError, text)


def test_the_checked_call_takes_what_is_right(way: str, device: str) -> None:
    table, lengths = batch(device, True)
    paged_attn.gather_pages(SHAPES["NHD"](device, HALF), table, lengths, tokens=17, check=True)


def test_opcheck_finds_nothing_of_gathered_pages(device: str) -> None:
    cache, out = torch.randn(4, 8, 2, 16, device=device), torch.zeros(11, 2, 16, device=device)
    given = (cache, ids(device, 1, 2)[:, None], None, ids(device, 3, 8), out)
    torch.library.opcheck(torch.ops.paged_attn.gather_pages.default, given, {"scale": torch.ones(2, device=device)})
