"""A scale for each cached token and KV head, beside fp8 and int8 caches; int8 caches with every scale; their writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from paged_attn.arguments import bound
from paged_attn.checks import kernel_tensors
from paged_attn.checks.argument_rows import check_attention
from paged_attn.explain import explain
from paged_attn.preparation.model import Lengths, Model, call_of
from paged_attn.records import formats
from paged_attn.reference.scales import LARGEST
from tests.explain.asked import ask
from tests.support.bad_input import refuses
from tests.support.cases import E4M3, E5M2, INT8, Case, bits, build, compare, run
from tests.support.other_calls import run_write

FP16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Cut = Callable[..., None]
# decodes, drafts and prefills; sequences that are empty or shorter than their queries
LENGTHS: dict[str, Any] = dict(query_lens=(1, 5, 0, 20, 3, 1), seq_lens=(70, 33, 9, 90, -2, 1), heads=4, kv_heads=2)

# Masks, modifiers and layouts, each beside one of the formats.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"cache_dtype": INT8},
    "padding, strided, float16": {"cache_dtype": INT8, "padding": 3, "strided": True, "scales": "per_token, float16"},
    "HND, window, sinks, softcap, alibi": {
        "cache_dtype": E4M3, "layout": "HND", "window_size": (9, -1), "sinks": True, "softcap": 3.0, "alibi": True,
    },
    "x, page 24, chunk": {"cache_dtype": INT8, "layout": "x", "page_size": 24, "chunk": 16, "dtype": FP16},
    "x, e5m2, strided": {"cache_dtype": E5M2, "layout": "x", "strided": True, "dtype": FP16},
    "tree": {"cache_dtype": INT8, "qq_bias": 16, "tree": True, "positions": "tree", "window_size": (9, -1)},
    "a user's function, shared": {"cache_dtype": E4M3, "score_mod": "relative", "shared_buffer": True, "dtype": FP16},
    "a scale below zero": {"cache_dtype": INT8, "softmax_scale": -0.2},
    "spans, a prefix, by head": {
        "cache_dtype": INT8, "spans": 2, "prefix": 6, "head_windows": ((-1, -1), (20, -1)), "layout": "HND",
    },
    "prefix behind a window": {"cache_dtype": E4M3, "prefix": 6, "window_size": (9, -1), "dtype": BF16},
    "new": {"cache_dtype": INT8, "new": True, "dtype": BF16, "scales": "per_token, float16"},
    "fp8 queries": {"dtype": E4M3, "cache_dtype": E4M3, "token_scales": True, "gate": True},
    "fp8 queries over int8": {"dtype": E5M2, "cache_dtype": INT8, "out_dtype": E4M3},
    "invariant": {"cache_dtype": INT8, "batch_invariant": True, "sinks": True},
    "latents": {"cache_dtype": INT8, "latent": True, "value_dim": 16, "kv_heads": 1, "strided": True},
    "latents, new": {"cache_dtype": E4M3, "latent": True, "kv_heads": 1, "new": True, "dtype": BF16},
    "a shard": {"cache_dtype": INT8, "shard": (1, 3, 4)},
    "ragged, decodes only": {"cache_dtype": E5M2, "table": "gaps", "only": "decode"},
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, device: str, cut: Cut) -> None:
    for segments in (1, 3):
        cut(segments)
        run(Case(name, **LENGTHS | {"scales": "per_token"} | FEATURES[name]), device)


@pytest.mark.parametrize("scales", ["float", "tensor", "per_head", "per_seq, turned"])
def test_int8_takes_the_scales_that_fp8_takes(scales: str, device: str) -> None:
    run(Case(scales, **LENGTHS, dtype=BF16, cache_dtype=INT8, scales=scales, check=True), device)


@pytest.mark.parametrize("name", ["plain", "new", "latents"])
def test_plans_as_they_are(name: str, device: str) -> None:
    run(Case(name, **LENGTHS | {"scales": "per_token"} | FEATURES[name]), device)


def test_the_reference_multiplies_keys_and_values_of_a_slot() -> None:
    """Keys 0 and 2 * 0.5, values 1 * 3 and 2 * 5, in HND order; the slot behind them is NaN."""
    k = torch.tensor([0, 2, 99], dtype=INT8).view(1, 1, 3, 1)
    v = torch.tensor([1, 2, 99], dtype=INT8).view(1, 1, 3, 1)
    out, lse = reference.paged_attention(
        torch.ones(1, 1, 1), k, v, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]), kv_layout="HND",
        softmax_scale=1.0, k_scale=torch.tensor([[[7.0, 0.5, torch.nan]]]), return_lse=True,
        v_scale=torch.tensor([[[3.0, 5.0, torch.nan]]]),
    )  # fmt: skip
    e = torch.tensor(1.0, dtype=torch.float64).exp()
    torch.testing.assert_close(out.squeeze(), (3 + 10 * e) / (1 + e))
    torch.testing.assert_close(lse.squeeze(), (1 + e).log())


def with_tails(rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Views of one buffer [pages, page_size, kv_heads, dim + 4 bytes]: a row, and its scale behind it."""
    buffer = torch.cat([bits(rows), scales[..., None].contiguous().view(torch.uint8)], -1)
    dim = rows.shape[-1]
    return buffer[..., :dim].view(rows.dtype), buffer[..., dim:].view(F32)[..., 0]


@pytest.mark.parametrize("latent", [False, True], ids=["apart", "latent"])
def test_scales_may_be_tails_of_their_rows(latent: bool, device: str) -> None:
    """In one buffer, which is written and then read; a tail of one byte more than a row ends elsewhere."""
    case = Case("tails", **LENGTHS | {"kv_heads": 1 if latent else 2}, cache_dtype=INT8, scales="per_token")
    case = replace(case, latent=latent, value_dim=16 if latent else None, dtype=BF16)
    inputs = build(case, device)
    k_cache, k_scale = with_tails(inputs["k_cache"], inputs["k_scale"])
    given = inputs | {"k_cache": k_cache, "k_scale": k_scale}
    if latent:
        given["v_cache"] = k_cache[..., :16]
    else:
        given["v_cache"], given["v_scale"] = with_tails(inputs["v_cache"], inputs["v_scale"])
    compare(case, *paged_attn.paged_attention(**given), given)

    new = torch.randn(3, case.kv_heads, case.head_dim, device=device).to(BF16)
    slots = torch.tensor([5, -1, 17], device=device)
    want_cache, want_scale = k_cache.clone(), k_scale.clone()
    reference.write_kv(new, None, want_cache, None, slots, k_scale=want_scale)
    paged_attn.write_kv(new, None, k_cache, None, slots, k_scale=k_scale)
    assert torch.equal(bits(k_cache), bits(want_cache))
    torch.testing.assert_close(k_scale, want_scale, rtol=0, atol=0, equal_nan=True)


def test_values_within_keys_may_have_a_scale_of_their_own(device: str) -> None:
    case = Case("latents", **LENGTHS | FEATURES["latents"], scales="per_token")
    inputs = build(case, device)
    for given in (inputs | {"v_scale": inputs["k_scale"]}, inputs | {"v_scale": 0.25}):
        compare(case, *paged_attn.paged_attention(**given), given)


def test_values_within_keys_have_the_scale_of_keys(device: str) -> None:
    case = Case("latents", **LENGTHS | FEATURES["latents"], scales="per_head")
    inputs = build(case, device)
    wanted = [x.clone() for x in paged_attn.paged_attention(**inputs | {"v_scale": inputs["k_scale"]})]
    assert all(map(torch.equal, wanted, paged_attn.paged_attention(**inputs | {"v_scale": None})))


def test_a_call_again_takes_other_scales(device: str) -> None:
    case = Case("again", **LENGTHS, cache_dtype=INT8, scales="per_token", lse=False)
    for seed in (0, 1, 1):
        inputs = build(replace(case, seed=seed), device)
        compare(case, paged_attn.paged_attention(**inputs), None, inputs)


# ---- writes ------------------------------------------------------------------------------------------------------

WRITES: dict[str, dict[str, Any]] = {
    "NHD, int8": {"cache_dtype": INT8, "seed": 0},  # seeds choose the type of what is written
    "HND, e4m3, float16": {"cache_dtype": E4M3, "layout": "HND", "scales": "per_token, float16", "seed": 1},
    "x, e5m2, float32": {"cache_dtype": E5M2, "layout": "x", "page_size": 12, "seed": 2, "strided": True},
    "x, int8, float16": {"cache_dtype": INT8, "layout": "x", "head_dim": 24, "scales": "per_token, float16", "seed": 3},
    "shared, three heads": {"cache_dtype": INT8, "shared_buffer": True, "kv_heads": 3, "heads": 3, "value_dim": 80},
    "latents": {"cache_dtype": E4M3, "latent": True, "kv_heads": 1, "integers": torch.int32, "check": True},
    "int8, one scale": {"cache_dtype": INT8, "scales": "float"},
    "int8, by head": {"cache_dtype": INT8, "scales": "per_head", "layout": "x", "seed": 1},
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_has_the_bits_of_the_reference(name: str, device: str) -> None:
    """Rows with NaN are among them."""
    run_write(Case(name, **LENGTHS | {"scales": "per_token"} | WRITES[name]), device)


def written(
    rows: list[list[float]], dtype: torch.dtype, device: str, scale: torch.dtype = F32
) -> tuple[Tensor, Tensor]:
    """(stored numbers, scales) of rows of 16 dims that begin so, written by the library; the reference agrees."""
    k = torch.zeros(len(rows), 16, device=device)
    for row, numbers in zip(k, rows):
        row[: len(numbers)] = torch.tensor(numbers)
    return rows_written(k, dtype, scale)


def rows_written(k: Tensor, dtype: torch.dtype, scale: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    """(stored numbers, scales) of float32 rows [rows, dims], written by the library; the reference agrees."""
    found = []
    for write in (reference.write_kv, paged_attn.write_kv):
        cache = torch.full((len(k), 1, 1, k.shape[1]), 7, dtype=torch.uint8, device=k.device).view(dtype)
        scales = torch.full((len(k), 1, 1), 7.0, dtype=scale, device=k.device)
        write(k[:, None], None, cache, None, torch.arange(len(k), device=k.device), k_scale=scales)
        found.append((cache.view(k.shape), scales.flatten()))
    (want, want_scales), (got, got_scales) = found
    assert torch.equal(bits(got), bits(want))
    torch.testing.assert_close(got_scales, want_scales, rtol=0, atol=0, equal_nan=True)
    return got, got_scales


def test_a_scale_is_the_largest_magnitude_by_the_range(device: str) -> None:
    for dtype, largest in ((INT8, 127.0), (E4M3, 448.0), (E5M2, 57344.0)):
        got, scales = written([[largest, -1.0], [-2 * largest, largest]], dtype, device)
        assert scales.tolist() == [1.0, 2.0]
        assert got[:, :2].float().tolist() == [[largest, -1.0], [-largest, largest / 2 if dtype != INT8 else 64.0]]


def test_int8_is_rounded_to_the_nearest_even(device: str) -> None:
    got, _ = written([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 63.49]], INT8, device)
    assert got[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -126, 63]


@pytest.mark.parametrize("scale", [F32, FP16], ids=str)
@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2], ids=str)
def test_quotients_beside_ties_do_not_cross_them(dtype: torch.dtype, scale: torch.dtype, device: str) -> None:
    """Rows of subnormal to huge numbers, each with -0; a GPU's ordinary division is two units off."""
    rng = torch.Generator().manual_seed(0)
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    middles = (numbers[1:] + numbers[:-1]) / 2
    sizes = 2.0 ** torch.tensor([-146, -135, -120, -65, -64, -3, 0, 3, 60, 110]).double().repeat_interleave(40)
    largest = (sizes * (1 + torch.rand(len(sizes), generator=rng))).float() * numbers[-1]
    ties = middles[torch.randint(len(middles), (len(sizes), 254), generator=rng)]
    ties *= (largest / numbers[-1]).to(scale).clamp(max=65504.0 if scale == FP16 else None, min=0.0)[:, None].float()
    near = torch.stack([ties, ties.nextafter(ties.new_tensor(0.0)), ties.nextafter(ties.new_tensor(torch.inf))])
    rows = near.gather(0, torch.randint(3, (1, *ties.shape), generator=rng))[0]
    rows *= 1.0 - 2 * torch.randint(2, rows.shape, generator=rng)
    rows = torch.cat([largest[:, None], rows.new_full((len(rows), 1), -0.0), rows], 1)
    got, scales = rows_written(rows.to(device), dtype, scale)
    assert bits(got)[scales > 0, 1].unique().tolist() == [0 if dtype == INT8 else 0x80]


@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2], ids=str)
def test_zeros_have_a_scale_of_zero_and_poison_poisons_its_token_alone(dtype: torch.dtype, device: str) -> None:
    rows = [[0.0], [1.0, torch.nan], [1.0, -torch.inf], [1.0], [-0.0]]
    got, scales = written(rows, dtype, device)
    assert scales.isnan().tolist() == [False, True, True, False, False]
    assert scales[[0, 4]].tolist() == [0.0, 0.0]
    assert (got[[0, 1, 2, 4]].float() == 0).all()
    assert got[3, 0] != 0


def test_float16_scales_saturate_and_vanish(device: str) -> None:
    """What is stored is divided by the scale as stored, and saturates beside it."""
    got, scales = written([[127 * 2.0**17, 127 * 65504.0, 65504.0], [2.0**-20], [3.0]], INT8, device, FP16)
    assert scales.tolist()[:2] == [65504.0, 0.0]
    assert scales[2] == torch.tensor(3 / 127, dtype=F32).half()
    assert got[0, :3].tolist() == [127, 127, 1]
    assert got[1:, 0].tolist() == [0, 127]


def test_what_is_read_is_what_was_written(device: str) -> None:
    """One key each: the result is its value, to half a step; zeros read as 0, and NaN as NaN."""
    v = torch.randn(4, 2, 32, device=device) * torch.tensor([1e-6, 1.0, 0.0, 3e4], device=device)[:, None, None]
    cache, scale = torch.zeros(2, 1, 4, 2, 32, dtype=INT8, device=device), torch.zeros(2, 1, 4, 2, device=device)
    v[1, 0, 3] = torch.nan
    paged_attn.write_kv(v, v, *cache, torch.arange(4, device=device), k_scale=scale[0], v_scale=scale[1])
    # a page of one slot each, and the whole cache in one view
    pages = cache.view(2, 4, 1, 2, 32)
    out = paged_attn.paged_attention(
        torch.zeros_like(v), *pages, torch.arange(4, dtype=torch.int32, device=device)[:, None],
        torch.ones(4, dtype=torch.int32, device=device), k_scale=scale[0].view(4, 1, 2), v_scale=scale[1].view(4, 1, 2),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    assert out[1, 0].isnan().all()
    v[1, 0], out[1, 0] = 0.0, 0.0
    assert ((out - v).abs() <= v.abs().amax(-1, keepdim=True) * (0.5001 / 127)).all()


OVERLAPS: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    (lambda c: {"k_scale": c["k_scale"][:1].expand(3, -1, -1)}, "k_scale must not overlap itself"),
    (lambda c: {"v_scale": c["k_scale"]}, "k_scale must share no memory with v_scale"),
    (
        lambda c: {"v_scale": c["v_cache"].view(F32)[..., 0]},
        "v_scale must share no memory with v_cache",
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("change, text", OVERLAPS, ids=[text for _, text in OVERLAPS])
def test_scales_that_are_written_lie_apart(change: Callable[..., Any], text: str, device: str) -> None:
    k = torch.randn(2, 2, 32, device=device)
    caches = {name: torch.zeros(3, 8, 2, 32, dtype=INT8, device=device) for name in ("k_cache", "v_cache")}
    scales = {name: torch.zeros(3, 8, 2, device=device) for name in ("k_scale", "v_scale")}
    given = dict(k=k, v=k, slot_mapping=torch.tensor([0, 3], device=device), **caches, **scales)
    with pytest.raises(ValueError, match=text):
        paged_attn.write_kv(**given | change(given))


# ---- operators, plans, words ---------------------------------------------------------------------------------------


def test_every_place_knows_the_same_formats() -> None:
    assert [*formats.LARGEST] == [*formats.MANTISSA] == [*LARGEST] == [*kernel_tensors.SCALED]
    assert formats.LARGEST == LARGEST


def test_the_operator_says_which_scales_it_writes() -> None:
    for name, wanted in (("write_kv", "abcd"), ("write_keys", "ac"), ("write_values", "bd")):
        arguments = getattr(torch.ops.paged_attn, name).default._schema.arguments
        written_to = [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]
        names = dict(zip("abcd", ("k_cache", "v_cache", "k_slot_scale", "v_slot_scale")))
        assert written_to == [names[x] for x in wanted]


def test_explain_says_which_kernels_serve_them() -> None:
    pytest.importorskip("triton")
    from paged_attn.planning import planner

    for options, dialects, words in (
        (dict(kv_dtype=INT8, scales="number"), ["hopper"], "of int8, products of float16"),
        (dict(kv_dtype=E4M3, scales="per_token"), ["hopper"], "of fp8 with scales by token, products of float16"),
        (dict(kv_dtype=INT8, scales="per_token", batch=1, queries="4096"), ["hopper"], "numbers of bfloat16"),
        (dict(kv_dtype=E4M3, scales="per_token", layout="x"), ["portable"], "do not take scales by token of"),
    ):
        asked = ask(**options)
        assert [launch.dialect for launch in planner.plan(asked.problem).launches] == dialects
        assert words in str(list(explain.explain(asked)))
    plain, asked = ask(kv_dtype=E4M3), ask(kv_dtype=E4M3, scales="per_token_float16")
    assert asked.problem == plain.problem._replace(slot_scales=True)
    assert dict(explain.memory(asked))["scales"] == 2 * 2 * 8 * 4096


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_calls_of_a_model_side_by_side_have_scales_behind_their_rows(layout: str) -> None:
    sizes: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=32, value_dim=16, page_size=8, kv_layout=layout)
    formats: dict[str, Any] = dict(dtype=BF16, cache_dtype=INT8, out_dtype=BF16, scales="per_token")
    call = call_of(Model(**sizes, **formats, side_by_side=True), Lengths(True, 2, 6, 3, 40))
    check_attention(*bound(call))
    begin = call["k_cache"].data_ptr()
    offsets = [call[name].data_ptr() - begin for name in ("k_scale", "v_cache", "v_scale")]
    assert offsets == [32, 36, 52]
    for rows, scales in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        assert [4 * n for n in call[scales].stride()] == [*call[rows].stride()[:3]]


def test_one_scale_is_refused_beside_16_bits(device: str) -> None:
    inputs = build(Case("plain", (1,), (20,), dtype=BF16), device)
    text = "k_scale must be None, for k_cache is bfloat16 and not fp8 or int8"
    refuses(paged_attn.paged_attention, inputs | {"k_scale": torch.ones(3, 16, 1, device=device)}, ValueError, text)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["per_token", "per_token, float16", "per_head"])
@pytest.mark.parametrize("cache_dtype", [INT8, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3, F32], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "x"])
def test_batches_of_a_server(
    layout: str, dtype: torch.dtype, cache_dtype: torch.dtype, scales: str, device: str
) -> None:
    sizes: dict[str, Any] = dict(heads=16, kv_heads=4, head_dim=128, layout=layout, scales=scales)
    formats = dict(dtype=dtype, cache_dtype=cache_dtype)
    run(Case("decodes", (1,) * 6, (1, 17, 2048, 3000, 544, 8000), **sizes, **formats, decode_form=True), device)
    run(Case("mixed", (1, 300, 8, 64), (900, 700, 2000, 64), **sizes, **formats, sinks=True), device)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [INT8, E4M3], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_latents_of_a_server(dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> None:
    sizes: dict[str, Any] = dict(heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True, page_size=64)
    lens = dict(query_lens=(1, 4, 40), seq_lens=(3000, 600, 90))
    run(Case("latents", **lens, **sizes, dtype=dtype, cache_dtype=cache_dtype, scales="per_token"), device)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-3, 1e4])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_values_of_any_size_keep_their_digits(dtype: torch.dtype, scale: float, device: str) -> None:
    """Weights times scales leave float16's range, values of float16 do not."""
    case = Case("sizes", (1, 40), (300, 90), heads=4, kv_heads=2, head_dim=64, dtype=dtype, cache_dtype=INT8)
    inputs = build(replace(case, scales="per_token", out_dtype=F32), device)
    inputs["v_scale"] *= scale
    compare(case, *paged_attn.paged_attention(**inputs), inputs)


@pytest.mark.gpu
def test_a_graph_writes_and_reads_scales(device: str) -> None:
    case = Case("graph", (1,) * 4, (300, 17, 90, 1), heads=8, kv_heads=2, head_dim=128, dtype=BF16, cache_dtype=INT8)
    inputs = build(replace(case, scales="per_token", decode_form=True), device)
    k, v = torch.randn(2, 4, 2, 128, device=device, dtype=BF16)
    last = inputs["seq_lens"].long() - 1
    pages = inputs["page_table"].gather(1, (last // 16)[:, None])[:, 0].long()
    slots = pages * 16 + last % 16
    caches = [inputs[name] for name in ("k_cache", "v_cache")]
    scales = {name: inputs[name] for name in ("k_scale", "v_scale")}

    def step() -> Any:
        paged_attn.write_kv(k, v, *caches, slots, **scales)
        return paged_attn.paged_attention(**inputs)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    k.copy_(k.flip(0))
    v.copy_(2 * v)
    out.fill_(torch.nan)
    graph.replay()
    compare(case, out, lse, inputs)
