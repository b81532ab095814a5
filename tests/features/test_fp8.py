"""fp8 caches read two dims at a time: every code, queries of any magnitude, and tensors that cannot be read so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import paged_attn
from paged_attn.calls import call_cache
from paged_attn.kernels.common.numerics import in_parts, normalize, together
from paged_attn.kernels.portable.attention_kernel import attention_kernel
from paged_attn.launching import launch
from paged_attn.records import layout
from tests.support.cases import E4M3, E5M2, Case, build, compare, run
from tests.support.small_weights import check_small_weight
from tests.support.ties import check_results_beside_ties

FP16, BF16 = torch.float16, torch.bfloat16
# numpy's, about infinities and rows that are NaN from end to end
NOT_FINITE = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FP8 = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
DECODE: dict[str, Any] = dict(query_lens=(1, 1, 1), seq_lens=(67, 40, 5), heads=4, kv_heads=2, decode_form=True)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(dims of an element of K, of V) in every launch of the attention kernel, as they happen."""
    seen: list[tuple[int, int]] = []
    plain = launch.run

    call_cache.clear()

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        if kernel is attention_kernel:
            cache = args[4]
            seen.append((int(cache.key.PARTS), int(cache.value.PARTS)))
        return plain(kernel, grid, *args, **options)

    monkeypatch.setattr(launch, "run", run)
    return seen


# --- every code ------------------------------------------------------------------------------------------------------


def codes(fp8: torch.dtype, device: str) -> torch.Tensor:
    """All 256 numbers of a type, [8 sequences, 1 slot, 1 head, 32 dims]."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(fp8).view(8, 1, 1, 32)


def one_key_each(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [8, 32, 32] in float32 and log-sum-exps [8, 32]: of 32 queries each, the i-th of which sees only dim i.

    Two tokens of 16 heads: the few rows that make it a decode.
    """
    unit = torch.eye(32, dtype=torch.float32, device=k.device).to(dtype).view(2, 16, 32).repeat(8, 1, 1)
    lens = torch.ones(8, dtype=torch.int32, device=k.device)
    out, lse = paged_attn.paged_attention(
        unit, k, v, torch.arange(8, dtype=torch.int32, device=k.device)[:, None], lens, 2 * torch.arange(9).to(lens),
        max_seqlen_q=2, causal=False, softmax_scale=1.0, k_scale=1.0, v_scale=1.0,
        out=torch.empty_like(unit, dtype=torch.float32), return_lse=True,
    )  # fmt: skip
    return out.view(8, 32, 32), lse.view(8, 32)


@NOT_FINITE
@FP8
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_every_code_of_a_value_comes_out_as_its_number(
    fp8: torch.dtype, dtype: torch.dtype, device: str, parts: list[tuple[int, int]]
) -> None:
    """NaN, infinities, subnormals and both zeros included: one key has weight 1."""
    v = codes(fp8, device)
    out, _ = one_key_each(torch.zeros_like(v.view(torch.uint8)).view(fp8), v, dtype)
    want = v.float().view(8, 1, 32).expand_as(out)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
    assert parts == [(2, 2)]


@FP8
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_every_code_of_a_key_scores_as_its_number(
    fp8: torch.dtype, dtype: torch.dtype, device: str, parts: list[tuple[int, int]]
) -> None:
    """A score is a key's dim; the others have weight 0, so that what is not finite must be left out."""
    numbers = codes(fp8, device).float()
    k = numbers.where(numbers.isfinite(), 0.0).to(fp8)
    _, lse = one_key_each(k, torch.zeros_like(k.view(torch.uint8)).view(fp8), dtype)
    # natural to base 2 and back: two roundings
    torch.testing.assert_close(lse, k.float().view(8, 32), rtol=3e-7, atol=0)
    assert parts == [(2, 2)]


# --- queries of any magnitude ----------------------------------------------------------------------------------------


@triton.jit
def normalize_kernel(x, rows, powers, R: tl.constexpr, D: tl.constexpr):
    at = tl.arange(0, R)[:, None] * D + tl.arange(0, D)[None, :]
    scaled, power = normalize(tl.load(x + at))
    tl.store(rows + at, scaled)
    tl.store(powers + tl.arange(0, R), power)


@triton.jit
def apart_kernel(x, halves, whole, R: tl.constexpr, D: tl.constexpr):
    row = tl.arange(0, R)[:, None]
    at = row * D + tl.arange(0, D)[None, :]
    parts = in_parts(tl.load(x + at), 2)
    half = row * (D // 2) + tl.arange(0, D // 2)[None, :]
    for i in tl.static_range(2):
        tl.store(halves + i * R * D // 2 + half, parts[i])
    tl.store(whole + at, together(parts))


def test_rows_of_any_magnitude_fit_float16_and_lose_nothing(device: str) -> None:
    exponents = torch.tensor([-126, -112, -60, -1, 0, 14, 15, 16, 17, 60, 126, 127], dtype=torch.float64)
    x = torch.zeros(16, 32, device=device)
    x[:12] = (2.0 ** exponents[:, None]).float() * torch.linspace(-1.99, 1.0, 32).to(BF16).float()
    x[13, 5], x[14, 5] = torch.inf, torch.nan
    rows, powers = torch.empty_like(x), torch.empty(16, device=device)
    with paged_attn.launching.platform.current(x.device):
        launch.run(normalize_kernel, (1,), x, rows, powers, 16, 32)
    largest = rows.abs().amax(1)
    assert (largest[1:12] >= 2**14).all()
    assert (largest[:12] < 2**15).all()
    assert torch.equal(rows[:13].half().float() * powers[:13, None], x[:13])
    assert (rows[12] == 0).all()
    assert not rows[13:15].isfinite().all(1).any()
    assert (powers.log2() == powers.log2().round()).all()


def test_apart_and_together_are_inverse(device: str) -> None:
    x = torch.arange(4 * 32, dtype=torch.float32, device=device).view(4, 32)
    halves, whole = torch.empty(2, 4, 16, device=device), torch.empty_like(x)
    with paged_attn.launching.platform.current(x.device):
        launch.run(apart_kernel, (1,), x, halves, whole, 4, 32)
    assert torch.equal(halves[0], x[:, ::2])
    assert torch.equal(halves[1], x[:, 1::2])
    assert torch.equal(whole, x)


@FP8
@pytest.mark.parametrize("features", [{}, {"alibi": True, "sinks": True}], ids=["plain", "scale_first"])
@pytest.mark.parametrize("query_len", [1, 40], ids=["decode", "prefill"])
def test_bfloat16_queries_beyond_float16(
    query_len: int, features: dict[str, Any], fp8: torch.dtype, device: str
) -> None:
    """Heads of one block that differ by 2^100: each row has a power of its own."""
    case = Case("magnitudes", (query_len, query_len), (67, 45), heads=8, kv_heads=1, dtype=BF16, cache_dtype=fp8)
    case = replace(case, **features)
    inputs = build(case, device)
    exponents = torch.tensor([40, 17, 15, 3, 0, -14, -30, -60], device=device)
    inputs["q"] *= (2.0**exponents).to(BF16)[:, None]
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)


@NOT_FINITE
def test_a_row_does_not_see_its_neighbours_magnitude(device: str) -> None:
    """NaN in another head's query, or 2^100 in it, leaves a head's bits alone."""
    case = Case("neighbours", **{**DECODE, "heads": 4, "kv_heads": 1}, dtype=BF16, cache_dtype=E4M3)
    want, _ = paged_attn.paged_attention(**build(case, device))
    for poison in (torch.nan, torch.inf, 2.0**100):
        inputs = build(case, device)
        inputs["q"][:, 1] = poison
        out, _ = paged_attn.paged_attention(**inputs)
        assert torch.equal(out[:, [0, 2, 3]], want[:, [0, 2, 3]])


# --- what can be read in pairs, and what cannot ----------------------------------------------------------------------

LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "nhd": ({}, (2, 2)),
    "hnd": ({"layout": "HND"}, (2, 2)),
    "packed": ({"layout": "x"}, (2, 1)),  # values lie along the slots
    "packed by 2": ({"layout": "x", "x": 2}, (2, 1)),
    "packed by 1": ({"layout": "x", "x": 1}, (1, 1)),
    "packed by 3": ({"layout": "x", "x": 3, "head_dim": 24}, (1, 1)),
    "shared": ({"shared_buffer": True}, (2, 2)),
    "head_dim 24": ({"head_dim": 24}, (2, 2)),
    "head_dim 33": ({"head_dim": 33}, (1, 1)),
    "head_dim 16": ({"head_dim": 16}, (1, 1)),  # a dot takes 16 dims or more
    "fp8 query": ({"dtype": E5M2}, (2, 2)),
    "float32 query": ({"dtype": torch.float32}, (1, 1)),
    "new keys": ({"new": True}, (1, 1)),
    "16 bits": ({"cache_dtype": None}, (1, 1)),
}


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_are_read_where_they_can_be(
    name: str, segments: int, device: str, cut: Callable[..., None], parts: list[tuple[int, int]]
) -> None:
    cut(segments)
    changes, want = LAYOUTS[name]
    case = Case(name, **{**DECODE, "dtype": FP16, "cache_dtype": E4M3, "scales": "per_head", **changes})
    run(case, device)
    assert parts == [want]


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_a_cache_at_an_odd_address_is_read_byte_by_byte(which: str, device: str, parts: list[tuple[int, int]]) -> None:
    case = Case("odd address", **DECODE, dtype=FP16, cache_dtype=E4M3)
    inputs = build(case, device)
    cache = inputs[which].view(torch.uint8)
    moved = torch.empty(cache.numel() + 1, dtype=torch.uint8, device=device)[1:].view(cache.shape)
    inputs[which] = moved.copy_(cache).view(E4M3)
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)
    assert parts == [(1, 1) if which == "k_cache" else (2, 1)]


def test_a_cache_of_odd_strides_is_read_byte_by_byte(device: str, parts: list[tuple[int, int]]) -> None:
    case = Case("odd strides", **DECODE, dtype=FP16, cache_dtype=E4M3)
    inputs = build(case, device)
    for name in ("k_cache", "v_cache"):
        cache = inputs[name].view(torch.uint8)
        wide = torch.zeros(*cache.shape[:3], cache.shape[3] + 1, dtype=torch.uint8, device=device)
        inputs[name] = wide[..., :-1].copy_(cache).view(E4M3)
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)
    assert parts == [(1, 1)]


def test_many_rows_are_read_whole_beside_few_in_pairs(device: str, parts: list[tuple[int, int]]) -> None:
    """Prefill wants operands in shared memory, where halves of a head cost more than they save."""
    case = Case("mixed", (1, 70, 1), (40, 90, 33), heads=8, kv_heads=1, dtype=BF16, cache_dtype=E4M3, bounds=True)
    run(case, device)
    assert sorted(parts) == [(1, 1), (2, 2)]


def test_pairs_halve_every_stride() -> None:
    cache = torch.zeros(5, 8, 3, 64, dtype=torch.uint8).view(E4M3)
    pair = layout.pairs(layout.cache(cache, cache, "HND"), 64, 64).key
    assert pair.ptr.dtype == torch.int16
    assert (pair.stride_page, pair.stride_head, pair.stride_slot, int(pair.RUN)) == (768, 96, 32, 32)
    assert int(pair.ALIGN) == 16


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@FP8
@pytest.mark.parametrize("dtype", [FP16, BF16, E4M3], ids=["fp16", "bf16", "e4m3"])
@pytest.mark.parametrize("page_size", [1, 16, 24, 128])
@pytest.mark.parametrize("query_len", [1, 4, 8, 16], ids=["q1", "q4", "q8", "q16"])
def test_pairs_of_long_batches(
    query_len: int, page_size: int, dtype: torch.dtype, fp8: torch.dtype, device: str
) -> None:
    """Rows of 16, 32 and 64, in even shares of ragged lengths, with heads of 128 dims."""
    lens = tuple(max(n, query_len) for n in (1, 17, 2048, 3000, 544, 8000))
    sizes: dict[str, Any] = dict(heads=16, kv_heads=4, head_dim=128, page_size=page_size, scales="per_head")
    run(Case("long", (query_len,) * 6, lens, dtype=dtype, cache_dtype=fp8, bounds=True, **sizes), device)


# --- results ---------------------------------------------------------------------------------------------------------


@FP8
@pytest.mark.parametrize("source", [FP16, BF16, torch.float32], ids=str)
def test_a_result_beside_a_tie_does_not_cross_it(source: torch.dtype, fp8: torch.dtype, device: str) -> None:
    """Of one key the result is its value, to the bit, which a GPU's ordinary division takes two units away."""
    check_results_beside_ties(source, fp8, device, heads=12)


@pytest.mark.parametrize(
    "fields",
    [dict(dtype=E5M2, out_dtype=torch.float32), dict(dtype=FP16, cache_dtype=FP16, out_dtype=torch.float32)],
    ids=str,
)
def test_a_weight_below_the_normal_numbers_of_float16_is_as_near_as_float16_has_it(
    fields: dict[str, Any], device: str
) -> None:
    """Fuzzing on an H200 found -4.61005e-08 for -4.43611e-08: a value of 0.0859375 times 9, not 8.66, of 2^-24."""
    sizes = dict(heads=4, kv_heads=2, head_dim=128, cache_dtype=E4M3)
    check_small_weight(Case("small weight", (1,), (2,), **{**sizes, **fields}), device)


def test_a_drawn_call_of_small_weights(device: str) -> None:
    sizes = dict(heads=32, head_dim=256, dtype=E5M2, cache_dtype=E4M3, new_dtype=FP16, out_dtype=torch.float32)
    asked = dict(layout="HND", softmax_scale=0.3, bounds=True, lse=False, seed=4)
    run(Case("found", query_lens=(1, 66), seq_lens=(1, 2), **sizes, **asked), device)
