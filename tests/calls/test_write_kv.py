"""write_kv: every layout and dtype, skipped tokens, and fp8 rounding for every number of a 16-bit format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_attn import write_kv
from tests.support.cases import E4M3, E5M2, Case
from tests.support.other_calls import run_write
from tests.support.ties import beside_ties, divided

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LAYOUTS = ["NHD", "HND", "x"]


def empty_caches(
    layout: str, dtype: torch.dtype, pages: int, page_size: int, heads: int, dim: int, device: str, x: int = 8
) -> tuple[Tensor, Tensor]:
    """A K and a V cache full of random bytes."""
    shapes = {
        "NHD": [(pages, page_size, heads, dim)] * 2,
        "HND": [(pages, heads, page_size, dim)] * 2,
        "x": [(pages, heads, dim // x, page_size, x), (pages, heads, dim, page_size)],
    }[layout]
    k, v = (torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, device=device) for shape in shapes)
    return k.view(dtype)[..., 0], v.view(dtype)[..., 0]


def slots(cache: Tensor, layout: str) -> Tensor:
    """A copy of a cache as bytes of its slots: [pages * page_size, heads, head_dim * bytes of an element]."""
    if cache.dim() == 5:
        ordered = cache.permute(0, 3, 1, 2, 4).flatten(3)
    else:
        ordered = cache.permute({"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "x": (0, 3, 1, 2)}[layout])
    return ordered.contiguous().view(torch.uint8).flatten(0, 1)


def as_bytes(tokens: Tensor) -> Tensor:
    """[tokens, heads, head_dim * bytes of an element]."""
    return tokens.contiguous().view(torch.uint8)


def check_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, mapping: list[int], layout: str, **scales: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Write; assert that no other slot has changed, and return the bytes of the slots written, in the tokens' order."""
    before = slots(k_cache, layout), slots(v_cache, layout)
    slot_mapping = torch.tensor(mapping, dtype=torch.int64, device=k.device)
    write_kv(k, v, k_cache, v_cache, slot_mapping, kv_layout="HND" if layout == "HND" else "NHD", **scales)
    after = slots(k_cache, layout), slots(v_cache, layout)
    written = slot_mapping[slot_mapping >= 0]
    others = torch.ones(len(before[0]), dtype=torch.bool, device=k.device)
    others[written] = False
    for was, now in zip(before, after, strict=True):
        assert torch.equal(now[others], was[others])
    return after[0][written], after[1][written]


# 24 is no power of two; 12 neither, and tokens cross pages, out of order; one token of each page edge
@pytest.mark.parametrize("heads, dim, page_size", [(1, 16, 1), (3, 24, 12), (2, 128, 16)])
@pytest.mark.parametrize("dtype", [F32, HALF, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_copied_bit_by_bit(
    layout: str, dtype: torch.dtype, heads: int, dim: int, page_size: int, device: str
) -> None:
    caches = empty_caches(layout, dtype, 5, page_size, heads, dim, device)
    mapping = [4 * page_size, -1, 0, page_size - 1 if page_size > 1 else 1, -(2**40), 3 * page_size + page_size // 2]
    k, v = torch.randn(2, len(mapping), heads, dim, device=device).to(dtype).unbind()
    kept = [slot >= 0 for slot in mapping]
    got_k, got_v = check_write(k, v, *caches, mapping, layout)
    assert torch.equal(got_k, as_bytes(k[kept]))
    assert torch.equal(got_v, as_bytes(v[kept]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_negative_slot_skips_the_token(layout: str, device: str) -> None:
    caches = empty_caches(layout, BF16, 2, 4, 2, 16, device)
    k = torch.full((3, 2, 16), torch.nan, dtype=BF16, device=device)
    check_write(k, k, *caches, [-1, -2, -(2**63)], layout)


def test_no_tokens_write_nothing(device: str) -> None:
    caches = empty_caches("NHD", BF16, 2, 4, 2, 16, device)
    k = torch.empty(0, 2, 16, dtype=BF16, device=device)
    check_write(k, k, *caches, [], "NHD")


def test_nan_and_infinity_are_copied_like_any_number(device: str) -> None:
    caches = empty_caches("NHD", F32, 2, 4, 1, 16, device)
    k = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0] * 4, device=device).view(1, 1, 16)
    got_k, got_v = check_write(k, -k, *caches, [5], "NHD")
    assert torch.equal(got_k, as_bytes(k))
    assert torch.equal(got_v.view(F32).isnan(), k.isnan())


def test_keys_and_values_may_be_slices_of_one_projection(device: str) -> None:
    qkv = torch.randn(3, 8, 32, device=device).to(BF16)
    k, v = qkv[:, 4:6], qkv[:, 6:8]
    caches = empty_caches("NHD", BF16, 2, 4, 2, 32, device)
    got_k, got_v = check_write(k, v, *caches, [7, 0, 3], "NHD")
    assert torch.equal(got_k, as_bytes(k))
    assert torch.equal(got_v, as_bytes(v))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_caches_may_be_views_of_one_buffer(layout: str, device: str) -> None:
    k_cache, v_cache = empty_caches(layout, BF16, 3, 4, 2, 32, device)
    buffer = torch.stack([k_cache.flatten(1), v_cache.flatten(1)], dim=1)  # each page holds its keys, then its values
    k_view, v_view = buffer[:, 0].unflatten(1, k_cache.shape[1:]), buffer[:, 1].unflatten(1, v_cache.shape[1:])
    k, v = torch.randn(2, 2, 2, 32, device=device).to(BF16).unbind()
    got_k, got_v = check_write(k, v, k_view, v_view, [9, 2], layout)
    assert torch.equal(got_k, as_bytes(k))
    assert torch.equal(got_v, as_bytes(v))


# ---- fp8: stored = clamp(x / scale), to nearest, ties to even


def encoded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of the fp8 numbers nearest to x, ties to the even code, the largest for all beyond; NaN is not decided.

    From the table of the format's values alone: the codes of one sign are in the order of their values.
    """
    codes = torch.arange(128, dtype=torch.uint8, device=x.device)
    values = codes.view(dtype).double()
    values = values[values.isfinite()]
    middles = (values[1:] + values[:-1]) / 2
    size = x.double().abs().nan_to_num(nan=0.0)
    code = torch.searchsorted(middles, size)  # a tie counts as the lower code
    tie = (code < len(middles)) & (size == middles[code.clamp(max=len(middles) - 1)])
    code += tie & (code % 2 == 1)
    return (code + 128 * x.signbit()).to(torch.uint8)


def check_encoding(x: Tensor, dtype: torch.dtype, layout: str = "NHD", scale: float | Tensor = 1.0) -> None:
    """Write x [tokens, heads, head_dim] as keys and -x as values."""
    caches = empty_caches(layout, dtype, len(x), 1, x.shape[1], x.shape[2], str(x.device), x=16)
    stored = check_write(x, -x, *caches, list(range(len(x))), layout, k_scale=scale, v_scale=scale)
    divisor = scale[:, None] if isinstance(scale, Tensor) else scale
    for got, given in zip(stored, (x, -x), strict=True):
        assert torch.equal(got.view(dtype).isnan(), given.isnan())
        wrong = (got != encoded(given.double() / divisor, dtype)) & ~given.isnan()
        assert not wrong.any(), f"{given[wrong][:5].tolist()} became {got[wrong].view(dtype).double()[:5].tolist()}"


# float16 holds every fp8 number, every middle of two and numbers on both sides of each
@pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning"
)  # numpy's, when the interpreter meets a signalling NaN
@pytest.mark.parametrize("source", [HALF, BF16], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_number_of_16_bits_is_rounded_to_the_nearest_fp8(
    dtype: torch.dtype, source: torch.dtype, device: str
) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(source)
    check_encoding(every.view(64, 4, 256), dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_no_float32_beside_a_tie_is_rounded_twice(dtype: torch.dtype, device: str) -> None:
    values = torch.arange(128, dtype=torch.uint8, device=device).view(dtype).float()
    values = values[values.isfinite()]
    middles = (values[1:] + values[:-1]) / 2
    edges = torch.cat([values, middles, values[-1:] * 1.5, torch.tensor([1e-38, 1e38, torch.inf], device=device)])
    up, down = edges.nextafter(edges.new_tensor(torch.inf)), edges.nextafter(edges.new_tensor(-torch.inf))
    x = torch.cat([edges, up, down])
    x = torch.cat([x, x.new_zeros(-len(x) % 16)])
    check_encoding(x.view(-1, 1, 16), dtype)


@pytest.mark.parametrize("source", [HALF, BF16, F32], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_quotient_beside_a_tie_does_not_cross_it(dtype: torch.dtype, source: torch.dtype, device: str) -> None:
    """A GPU's ordinary division is two units off."""
    x, scales = (tensor.to(device) for tensor in beside_ties(dtype, source, heads=64))
    caches = empty_caches("NHD", dtype, 16, 1, 64, 32, device)
    stored = check_write(x, -x, *caches, list(range(16)), "NHD", k_scale=scales, v_scale=scales)
    for got, given in zip(stored, (x, -x), strict=True):
        assert torch.equal(got, divided(given, scales[:, None], dtype).view(torch.uint8))


def test_a_drawn_write_beside_a_tie(device: str) -> None:
    """Fuzzing found this case on an H200, where 0.75 was stored for 0.687499947."""
    lengths = dict(query_lens=(4, 130, 130, 130, 130), seq_lens=(4, 547, 130, 131, 147))
    sizes = dict(heads=28, kv_heads=4, head_dim=192, cache_dtype=E5M2)
    run_write(Case("found", **lengths, **sizes, new=True, scales="per_head", seed=413), device)


@pytest.mark.parametrize("scale", [0.25, 8.0])  # powers of two: x / scale is exact, so that the rounding is fixed
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_fp8_is_scaled_before_it_is_clamped(dtype: torch.dtype, layout: str, scale: float, device: str) -> None:
    x = 300 * torch.randn(5, 2, 48, device=device).to(BF16)
    check_encoding(x, dtype, layout, scale)
    check_encoding(x, dtype, layout, torch.tensor([scale], device=device))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_each_head_may_have_its_scale(dtype: torch.dtype, device: str) -> None:
    x = 300 * torch.randn(5, 3, 32, device=device)
    check_encoding(x, dtype, scale=torch.tensor([0.5, 4.0, 1.0], device=device))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_keys_and_values_have_scales_of_their_own(dtype: torch.dtype, device: str) -> None:
    caches = empty_caches("NHD", dtype, 2, 4, 2, 16, device)
    x = torch.randn(1, 2, 16, device=device)
    got_k, got_v = check_write(x, x, *caches, [6], "NHD", k_scale=0.5, v_scale=torch.tensor([0.25], device=device))
    assert torch.equal(got_k, encoded(x / 0.5, dtype))
    assert torch.equal(got_v, encoded(x / 0.25, dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_what_is_read_back_is_within_half_a_step(dtype: torch.dtype, device: str) -> None:
    """With a scale that is no power of two: 2^-4 of the value for 3 bits after the point, 2^-3 for 2."""
    scale = 0.37
    caches = empty_caches("NHD", dtype, 4, 16, 2, 64, device)
    x = 0.1 + torch.rand(64, 2, 64, device=device)
    got, _ = check_write(x, x, *caches, list(range(64)), "NHD", k_scale=scale, v_scale=scale)
    back = got.view(dtype).float() * scale
    assert ((back - x).abs() / x).max() <= {E4M3: 2.0**-4, E5M2: 2.0**-3}[dtype] * 1.0001
