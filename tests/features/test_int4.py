"""int4 caches: a scale and a zero point of each cached token and KV head, read, written, and refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from paged_attn.arguments import bound
from paged_attn.checks.argument_rows import check_attention
from paged_attn.explain import explain
from paged_attn.preparation.model import Lengths, Model, call_of
from paged_attn.reference.scales import scale_and_zero
from tests.explain.asked import ask
from tests.simulator import COMPILER, assembly
from tests.support.bad_input import refuses
from tests.support.cases import E4M3, E5M2, INT4, Case, build, compare, run
from tests.support.formats import int4_numbers, with_zero
from tests.support.other_calls import run_write

FP16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Cut = Callable[..., None]
# decodes, drafts and prefills; sequences that are empty or shorter than their queries
LENGTHS: dict[str, Any] = dict(
    query_lens=(1, 5, 0, 20, 3, 1), seq_lens=(70, 33, 9, 90, -2, 1), heads=4, kv_heads=2, cache_dtype=INT4,
    scales="per_token",
)  # fmt: skip

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding, strided, bfloat16": {"padding": 3, "strided": True, "dtype": BF16},
    "HND, window, sinks, softcap, alibi": {
        "layout": "HND", "window_size": (9, -1), "sinks": True, "softcap": 3.0, "alibi": True,
    },
    "page 24, chunk": {"page_size": 24, "chunk": 16, "dtype": FP16},
    "two widths, neither a power of two": {"head_dim": 80, "value_dim": 20},
    "narrow heads": {"head_dim": 4, "value_dim": 8, "dtype": FP16},
    "wide heads": {"head_dim": 264, "value_dim": 64},
    "tree": {"qq_bias": 16, "tree": True, "positions": "tree", "window_size": (9, -1)},
    "mask, gate": {"qq_mask": 1, "gate": True},
    "a user's function, shared": {"score_mod": "relative", "shared_buffer": True, "dtype": FP16},
    "a scale below zero": {"softmax_scale": -0.2},
    "spans, a prefix, by head": {
        "spans": 2, "prefix": 6, "head_windows": ((-1, -1), (20, -1)), "layout": "HND",
    },
    "prefix behind a window": {"prefix": 6, "window_size": (9, -1), "dtype": BF16},
    "new": {"new": True, "dtype": BF16},
    "new, float32": {"new": True, "value_dim": 16, "sinks": True},
    "fp8 queries": {"dtype": E4M3, "token_scales": True, "out_dtype": E4M3},
    "fp8 queries, new": {"dtype": E5M2, "new": True, "new_dtype": FP16},
    "invariant": {"batch_invariant": True, "sinks": True},
    "a shard": {"shard": (1, 3, 4)},
    "ragged, decodes only": {"table": "gaps", "only": "decode"},
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, device: str, cut: Cut) -> None:
    for segments in (1, 3):
        cut(segments)
        run(Case(name, **LENGTHS | FEATURES[name]), device)


@pytest.mark.parametrize("name", ["plain", "new", "invariant"])
def test_plans_as_they_are(name: str, device: str) -> None:
    run(Case(name, **LENGTHS | FEATURES[name], check=True), device)


def test_the_reference_takes_a_zero_point_off_and_multiplies() -> None:
    """Bytes 0x32 and 0xF0 are 2, 3 and 0, 15; the slot behind them has a scale of NaN."""
    k = torch.tensor([[0x32, 0x32], [0xF0, 0x32], [0xFF, 0xFF]], dtype=INT4).view(1, 1, 3, 2)
    k_scale = with_zero(torch.tensor([[[7.0, 0.5, torch.nan]]]), torch.tensor([[[3, 8, 1]]]))
    v_scale = with_zero(torch.tensor([[[3.0, 0.25, torch.nan]]]), torch.tensor([[[0, 15, 1]]]))
    out, lse = reference.paged_attention(
        torch.tensor([[[0.0, 1.0, 0.0, 0.0]]]), k, k, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]),
        kv_layout="HND", softmax_scale=1.0, k_scale=k_scale, v_scale=v_scale, return_lse=True,
    )  # fmt: skip
    values = torch.tensor([[6.0, 9.0, 6.0, 9.0], [-3.75, 0.0, -3.25, -3.0]], dtype=torch.float64)
    weights = torch.tensor([0.0, 3.5], dtype=torch.float64).softmax(0)  # key 1 is (15 - 8) / 2 there, key 0 is 0
    torch.testing.assert_close(out.squeeze(), weights @ values)
    torch.testing.assert_close(lse.squeeze(), torch.tensor([0.0, 3.5], dtype=torch.float64).logsumexp(0))


def test_a_call_again_takes_other_scales(device: str) -> None:
    case = Case("again", **LENGTHS, lse=False)
    for seed in (0, 1, 1):
        inputs = build(replace(case, seed=seed), device)
        compare(case, paged_attn.paged_attention(**inputs), None, inputs)


def test_zero_points_are_not_a_part_of_scales(device: str) -> None:
    """Numbers and zero points that all rise by the same amount are the same keys and values."""
    case = Case("raised", **LENGTHS, lse=False)
    inputs = build(case, device)
    low = torch.randint(10, inputs["k_cache"].shape, device=device).to(INT4) * 17  # both numbers of a byte
    found = []
    for by in (0, 6):
        given = dict(inputs, k_cache=low + by * 17, v_cache=low + by * 17, out=None)
        for name in ("k_scale", "v_scale"):
            given[name] = with_zero(inputs[name], torch.full(inputs[name].shape, by, device=device))
        found.append(paged_attn.paged_attention(**given).nan_to_num(nan=-1.0))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert found[0].abs().max() > 0.1


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_the_instructions_decode_every_word() -> None:
    pytest.importorskip("triton")
    from paged_attn.kernels.common.decoding import INT4_WORDS

    for first in range(0, 1 << 16, 1 << 12):
        words = np.arange(first, first + 64, dtype=np.uint32)
        pairs = words[:32] | words[32:] << 16
        parts = np.stack(assembly.run(INT4_WORDS.value, [None, None, None, None, pairs])[:4])
        found = parts.view(np.float16).reshape(4, 32, 2)
        for part in range(4):
            shift = 4 * part
            want = 64 + np.stack([words[:32] >> shift & 15, words[32:] >> shift & 15], -1)
            np.testing.assert_array_equal(found[part], want)


# ---- writes ------------------------------------------------------------------------------------------------------

WRITES: dict[str, dict[str, Any]] = {
    "NHD": {"seed": 0},  # seeds choose the type of what is written
    "HND, strided": {"layout": "HND", "seed": 1, "strided": True},
    "shared, three heads, two widths": {"shared_buffer": True, "kv_heads": 3, "heads": 3, "value_dim": 80, "seed": 2},
    "head_dim 20, checked": {"head_dim": 20, "integers": torch.int32, "check": True, "seed": 3},
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_has_the_bits_of_the_reference(name: str, device: str) -> None:
    """Rows with NaN are among them, and tokens that are skipped."""
    run_write(Case(name, **LENGTHS | WRITES[name]), device)


def written(rows: list[list[float]], device: str) -> tuple[Tensor, Tensor]:
    """(real numbers [rows, 16] float64, scales with zero points [rows]) of rows that begin so; the reference agrees."""
    k = torch.zeros(len(rows), 1, 16, device=device)
    for row, numbers in zip(k, rows):
        row[0, : len(numbers)] = torch.tensor(numbers)
    found = []
    for write in (reference.write_kv, paged_attn.write_kv):
        caches = torch.full((2, len(rows), 1, 1, 8), 7, dtype=INT4, device=device)
        scales = torch.full((2, len(rows), 1, 1), 7.0, device=device)
        write(k, -k, *caches, torch.arange(len(rows), device=device), k_scale=scales[0], v_scale=scales[1])
        found.append((caches[0].view(len(rows), 8), scales[0].flatten()))
    (want, want_scales), (got, got_scales) = found
    assert torch.equal(got, want)
    torch.testing.assert_close(got_scales, want_scales, rtol=0, atol=0, equal_nan=True)
    numbers, scale = int4_numbers(got, got_scales)
    return numbers * scale, got_scales


def test_sixteen_steps_reach_from_the_least_to_the_largest(device: str) -> None:
    got, scales = written([[-7.0, 8.0, 0.5, 1.5, -0.5, -1.5, 0.4], [-2.0, 1.0], [30.0, 2.0, 15.1]], device)
    steps, zeros = scale_and_zero(scales)
    torch.testing.assert_close(
        steps, torch.tensor([1.0, 0.2, 2.0], dtype=torch.float64, device=device), rtol=2e-6, atol=0
    )
    assert zeros.tolist() == [7, 10, 0]
    assert got[0, :7].tolist() == [-7, 8, 0, 2, 0, -2, 0]  # to the nearest, to even where two are as near
    assert got[2, :3].tolist() == [30, 2, 16]


def test_rows_of_one_number_read_back(device: str) -> None:
    rows = [[3.25] * 16, [-3.25] * 16, [0.0] * 16, [-0.0] * 16, [1e-30] * 16, [3e38] * 16, [-3e38, 3e38]]
    got, scales = written(rows, device)
    for row, number in zip(got[:4], (3.25, -3.25, 0.0, 0.0)):
        torch.testing.assert_close(row, torch.full_like(row, number), rtol=2e-6, atol=0)
    torch.testing.assert_close(got[4:6, 0].cpu(), torch.tensor([1e-30, 3e38], dtype=torch.float64), rtol=2e-6, atol=0)
    assert scales[2:4].tolist() == [0.0, 0.0]
    torch.testing.assert_close(got[6, :3].cpu() / 3e38, torch.tensor([-1.0, 1.0, 0.0]).double(), rtol=0, atol=1 / 14)


def test_poison_poisons_its_token_alone(device: str) -> None:
    got, scales = written([[1.0, torch.nan], [1.0, -torch.inf], [torch.inf], [1.0, -2.0]], device)
    assert scales.isnan().tolist() == [True, True, True, False]
    assert got[:3].isnan().all()
    assert got[3].isfinite().all()


def test_any_row_is_read_within_half_a_step(device: str) -> None:
    rng = torch.Generator().manual_seed(0)
    v = torch.randn(64, 2, 32, generator=rng) + 2 * torch.randn(64, 2, 1, generator=rng)
    v *= 10 ** torch.empty(64, 2, 1).uniform_(-6, 6, generator=rng)
    v = v.to(device)
    cache = torch.zeros(2, 1, 64, 2, 16, dtype=INT4, device=device)
    scale = torch.zeros(2, 1, 64, 2, device=device)
    paged_attn.write_kv(v, v, *cache, torch.arange(64, device=device), k_scale=scale[0], v_scale=scale[1])
    # a page of one slot each: one key, whose value is the result
    out = paged_attn.paged_attention(
        torch.zeros_like(v), *cache.view(2, 64, 1, 2, 16), torch.arange(64, dtype=torch.int32, device=device)[:, None],
        torch.ones(64, dtype=torch.int32, device=device), k_scale=scale[0].view(64, 1, 2),
        v_scale=scale[1].view(64, 1, 2),
    )  # fmt: skip
    step = (v.amax(-1).clamp(min=0) - v.amin(-1).clamp(max=0))[..., None] / 15
    assert isinstance(out, Tensor)
    assert ((out - v).abs() <= step * 0.501).all()


def test_skipped_slots_stay(device: str) -> None:
    k = torch.randn(3, 2, 32, device=device)
    cache = torch.full((2, 2, 4, 2, 16), 0x5A, dtype=INT4, device=device)
    scale = torch.full((2, 2, 4, 2), 7.0, device=device)
    paged_attn.write_kv(k, k, *cache, torch.tensor([-1, 5, -3], device=device), k_scale=scale[0], v_scale=scale[1])
    untouched = torch.ones(8, dtype=torch.bool, device=device)
    untouched[5] = False
    assert (cache.view(2, 8, -1)[:, untouched] == 0x5A).all()
    assert (scale.view(2, 8, -1)[:, untouched] == 7.0).all()
    assert (scale.view(2, 8, -1)[:, 5] != 7.0).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_may_be_tails_of_their_rows(layout: str, device: str) -> None:
    """In one buffer, as vLLM keeps them: bytes of keys, their scale, bytes of values, theirs."""
    case = Case("tails", **LENGTHS, dtype=BF16, layout=layout)
    inputs = build(case, device)
    tails = [inputs[name][..., None].contiguous().view(torch.uint8) for name in ("k_scale", "v_scale")]
    buffer = torch.cat([inputs["k_cache"], tails[0], inputs["v_cache"], tails[1]], -1)
    k, k_tail, v, v_tail = buffer.split([16, 4, 16, 4], -1)
    given = inputs | dict(k_cache=k, v_cache=v, k_scale=k_tail.view(F32)[..., 0], v_scale=v_tail.view(F32)[..., 0])
    compare(case, *paged_attn.paged_attention(**given), given)


# ---- errors ------------------------------------------------------------------------------------------------------


def _given(device: str, **changes: Any) -> dict[str, Any]:
    return build(Case("plain", **LENGTHS | changes), device)


BY_TOKEN = "float32 [pages, page_size, kv_heads], for {} is int4 (uint8), got "
EVEN = "k_cache must be at an even address and of even strides over int4"
BYTES = "k_cache must be [pages, page_size, kv_heads, head_dim / 2] "
REFUSALS: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = [
    (lambda c: {"k_scale": 1.0}, TypeError, f"k_scale must be {BY_TOKEN.format('k_cache')}float"),
    (lambda c: {"v_scale": None}, TypeError, f"v_scale must be {BY_TOKEN.format('v_cache')}None"),
    (lambda c: {"k_scale": c["k_scale"][0, 0]}, ValueError, f"k_scale must be {BY_TOKEN.format('k_cache')}[2]"),
    (
        lambda c: {"k_scale": c["k_scale"].half()},
        TypeError,
        "k_scale must be float32, for k_cache is uint8, got float16: k_scale.to(torch.float32)",
    ),
    (
        lambda c: {"k_cache": c["k_cache"].repeat(1, 1, 1, 2)},
        ValueError,
        f"{BYTES}with head_dim / 2 = 16 from q, for uint8 is int4, got [18, 16, 2, 32]: "
        "k_cache.view(torch.float8_e4m3fn) if its bytes are fp8",
    ),
    (
        lambda c: {"k_cache": c["k_cache"][..., :12]},
        ValueError,
        f"{BYTES}with head_dim / 2 = 16 from q, got [18, 16, 2, 12]",
    ),
    (
        lambda c: {"v_cache": c["v_cache"][..., :15]},
        ValueError,
        "value_dim must be a multiple of 4 over int4, got 30",
    ),
    (
        lambda c: {"v_cache": c["k_cache"]},
        ValueError,
        "v_cache must be apart from k_cache over int4, for such keys hold no values, got k_cache[..., :value_dim / 2]",
    ),
    (
        lambda c: {"v_cache": c["v_cache"].view(torch.int8)},
        TypeError,
        "v_cache must be uint8, for k_cache is uint8, got int8: v_cache.view(torch.uint8) if its bytes are int4",
    ),
    (
        lambda c: {"k_cache": c["k_cache"].view(18, 2, 4, 16, 4)},
        ValueError,
        f"{BYTES}over int4, which is not x-packed, got [18, 2, 4, 16, 4]",
    ),
    (
        lambda c: {"k_cache": torch.nn.functional.pad(c["k_cache"], (0, 1))[..., :16]},
        ValueError,
        f"{EVEN}, got strides [544, 34, 17, 1] at an even address",
    ),
    (
        lambda c: {"k_cache": torch.nn.functional.pad(c["k_cache"], (0, 2))[..., 1:17]},
        ValueError,
        f"{EVEN}, got strides [576, 36, 18, 1] at an odd address",
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("change, kind, text", REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(change: Callable[..., Any], kind: type[Exception], text: str, device: str) -> None:
    inputs = _given(device)
    refuses(paged_attn.paged_attention, inputs | change(inputs), kind, text)


@pytest.mark.usefixtures("no_launch")
def test_heads_have_four_dims_each(device: str) -> None:
    inputs = _given(device)
    q = torch.zeros(inputs["q"].shape[0], 4, 30, device=device)
    refuses(
        paged_attn.paged_attention, inputs | {"q": q}, ValueError, "head_dim must be a multiple of 4 over int4, got 30"
    )


@pytest.mark.usefixtures("no_launch")
def test_other_calls_refuse_int4(device: str) -> None:
    cache = torch.zeros(2, 3, 8, 2, 16, dtype=INT4, device=device)
    scale = torch.zeros(3, 8, 2, device=device)
    k, slots = torch.zeros(2, 2, 32, device=device), torch.tensor([0, 3], device=device)
    text = "v must be given over int4, for such keys hold no values, got None"
    refuses(
        paged_attn.write_kv, dict(k=k, v=None, k_cache=cache[0], v_cache=None, slot_mapping=slots, k_scale=scale),
        ValueError, text,
    )  # fmt: skip
    given: dict[str, Any] = dict(k_cache=cache[0], v_cache=cache[1], slot_mapping=slots, k_scale=scale, v_scale=scale)
    text = "v_cache must be given over int4, for such keys hold no values, got None"
    latents = dict(qkv=(k[..., :8], k[..., :24], k[..., :8]), v_cache=None, v_scale=None)
    refuses(paged_attn.write_qkv, given | latents, ValueError, text)
    text = "k_scale must be float32 [pages, page_size, kv_heads], for k_cache is int4 (uint8), got None"
    refuses(paged_attn.write_qkv, given | dict(qkv=(k, k, k), k_scale=None), TypeError, text)
    half = dict(qkv=(k, k, k), v_scale=scale.half())
    text = "v_scale must be float32, for v_cache is uint8, got float16: v_scale.to(torch.float32)"
    refuses(paged_attn.write_qkv, given | half, TypeError, text)
    wanted = "[max_positions, rotary_dim] with rotary_dim a multiple of 4 over int4, unless interleaved"
    turned = dict(qkv=(k, k, k), cos_sin=torch.zeros(2, 6, device=device))
    refuses(paged_attn.write_qkv, given | turned, ValueError, f"cos_sin must be {wanted}, got [2, 6]")


# ---- operators, plans, words ---------------------------------------------------------------------------------------


def test_explain_says_which_kernels_serve_them() -> None:
    pytest.importorskip("triton")
    from paged_attn.planning import planner

    for device, dialect in (("sm90", "hopper"), ("sm80", "portable")):
        for queries in ("1", "2048"):
            asked = ask(kv_dtype=INT4, scales="per_token", queries=queries, device=device)
            made = planner.plan(asked.problem)
            assert {launch.dialect for launch in made.launches} == {dialect}
            assert (made.copies is not None) == (dialect == "hopper" and queries == "2048")
            assert "over int4 with scales by token" in str(list(explain.explain(asked)))
    memory = dict(explain.memory(ask(kv_dtype=INT4, scales="per_token")))
    assert memory["keys and values"] == 4096 * 8 * 2 * 128 // 2
    assert memory["scales"] == 4 * 2 * 8 * 4096


@pytest.mark.parametrize(
    "changes, text",
    [
        (dict(scales="number"), "scales must be per_token over int4, got number"),
        (dict(scales="per_token_float16"), "scales must be per_token over int4, got per_token_float16"),
        (dict(layout="x-packed"), "int4 caches are neither x-packed nor latent, got x-packed"),
        (dict(latent=True), "int4 caches are neither x-packed nor latent, got latent"),
        (dict(head_dim=126), "head_dim must be a multiple of 4 over int4, got 126"),
    ],
    ids=str,
)
def test_explain_and_prepare_refuse_what_calls_refuse(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ask(**dict(kv_dtype=INT4, scales="per_token") | changes)
    names = {"layout": "kv_layout"}
    sizes: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=32, page_size=8, max_seqs=1, max_tokens=1, max_seqlen=8)
    model = dict(dtype=BF16, cache_dtype=INT4, scales="per_token")
    told = {names.get(name, name): "x" if value == "x-packed" else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=text):
        paged_attn.prepare(**sizes | model | told)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_calls_of_a_model_are_calls(side_by_side: bool) -> None:
    sizes: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=32, value_dim=16, page_size=8)
    formats: dict[str, Any] = dict(dtype=BF16, cache_dtype=INT4, out_dtype=BF16, scales="per_token")
    call = call_of(Model(**sizes, **formats, side_by_side=side_by_side), Lengths(True, 2, 6, 3, 40))
    check_attention(*bound(call))
    assert call["k_cache"].shape[-1] == 16


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3, F32], ids=str)
def test_batches_of_a_server(dtype: torch.dtype, head_dim: int, device: str) -> None:
    sizes: dict[str, Any] = dict(heads=16, kv_heads=4, head_dim=head_dim, scales="per_token", cache_dtype=INT4)
    run(Case("decodes", (1,) * 6, (1, 17, 2048, 3000, 544, 8000), **sizes, dtype=dtype, decode_form=True), device)
    run(Case("drafts", (8,) * 4, (900, 700, 2000, 64), **sizes, dtype=dtype, bounds=True), device)
    run(Case("mixed", (1, 300, 8, 64), (900, 700, 2000, 64), **sizes, dtype=dtype, sinks=True), device)
    run(Case("new", (1, 40, 8), (900, 300, 64), **sizes, dtype=dtype, new=True), device)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-3, 1e4])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_values_of_any_size_keep_their_digits(dtype: torch.dtype, scale: float, device: str) -> None:
    case = Case("sizes", (1, 40), (300, 90), heads=4, kv_heads=2, head_dim=64, dtype=dtype, cache_dtype=INT4)
    inputs = build(replace(case, scales="per_token", out_dtype=F32), device)
    words = inputs["v_scale"].view(torch.int32)
    inputs["v_scale"] = with_zero((words & -16).view(F32) * scale, words & 15)
    compare(case, *paged_attn.paged_attention(**inputs), inputs)


@pytest.mark.gpu
def test_a_graph_writes_and_reads(device: str) -> None:
    case = Case("graph", (1,) * 4, (300, 17, 90, 1), heads=8, kv_heads=2, head_dim=128, dtype=BF16, cache_dtype=INT4)
    inputs = build(replace(case, scales="per_token", decode_form=True), device)
    k, v = torch.randn(2, 4, 2, 128, device=device, dtype=BF16)
    last = inputs["seq_lens"].long() - 1
    pages = inputs["page_table"].gather(1, (last // 16)[:, None])[:, 0].long()
    caches = [inputs[name] for name in ("k_cache", "v_cache")]
    scales = {name: inputs[name] for name in ("k_scale", "v_scale")}

    def step() -> Any:
        paged_attn.write_kv(k, v, *caches, pages * 16 + last % 16, **scales)
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
