"""The Hopper kernels and numbers: maxima that rise, sinks, scores near a cap, of any magnitude, and none at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn import reference
from paged_attn.planning import planner
from tests.support import hopper_plans, small_weights
from tests.support.cases import E4M3, E5M2, FP8_NORM, LINE_NORM, Case, bits, build, compare, problem_of
from tests.support.hopper_cases import ALL_E4M3, DEVICE, E4M3_CACHE, RISING, ragged, sized
from tests.support.small_weights import check_small_weight
from tests.support.ties import check_results_beside_ties

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]


def _no_small_values(inputs: dict[str, torch.Tensor]) -> None:
    """Replace small values of fp8 caches: where one key has a weight of 1, float16 ends other weights at 2^-24."""
    if inputs["v_cache"].dtype == E4M3:
        v = inputs["v_cache"].float()
        inputs["v_cache"] = torch.where(v.abs() < 0.1, 0.1, v).to(E4M3)


@pytest.mark.parametrize("name", RISING)
@hopper_plans.mixed()
def test_maxima_may_rise_from_tile_to_tile(name: str) -> None:
    case = sized(name, **RISING[name])
    columns = {"decodes": 8, "drafts of 2": 8, "drafts of 4": 16, "drafts of 8": 32}
    for launch in planner.plan(problem_of(build(case, DEVICE))).launches:
        if name.startswith(("decodes", "drafts")):
            assert next(n for word, n in columns.items() if name.startswith(word)) == launch.pipe.COLUMNS
        else:
            lacks_registers = name.startswith("invariant") or name.endswith("e4m3, head_dim 256")
            assert (not lacks_registers and not launch.pipe.MIXED) == launch.pipe.AT_ONCE
    check_rising(case)


@pytest.mark.parametrize("name", ["prefills", "prefills, float16"])
@hopper_plans.three()
def test_maxima_may_rise_of_three_consumers(name: str) -> None:
    case = sized(name, **RISING[name])
    assert [x.pipe.CONSUMERS for x in planner.plan(problem_of(build(case, DEVICE))).launches] == [3]
    check_rising(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plans", [hopper_plans.four, hopper_plans.four_uncut])
def test_maxima_may_rise_of_four_warpgroups(plans: Any, dtype: torch.dtype) -> None:
    with plans():
        case = sized("four", **RISING["prefills, head_dim 64"] | dict(dtype=dtype))
        assert [x.pipe.ROWS for x in planner.plan(problem_of(build(case, DEVICE))).launches] == [256]
        check_rising(case)


def check_rising(case: Case) -> None:
    inputs = build(case, DEVICE)
    _let_rise(case, inputs)
    result = paged_attn.paged_attention(**inputs)
    out, lse = result if case.lse else (result, None)
    # here scores reach the cap, and the unit for tanh is off by 2^-11 of that
    more = 0 if case.lse else case.softcap * 2.0**-11
    if any(x.pipe.FP8_KEYS for x in planner.plan(problem_of(inputs)).launches):
        more += 100 * 2.0**-12  # of scores up to 100, each of four sums is off by 2^-14: an estimate, docs/hopper.md
    compare(case, out, lse, inputs, more=more)


def _let_rise(case: Case, inputs: dict[str, torch.Tensor]) -> None:
    """The last keys come first, so keys grow towards the first one: scores up to some 30, and some jumps of 100."""
    grown = inputs["k_cache"].float()
    for pages, seq_len in zip(inputs["page_table"].tolist(), case.seq_lens):
        for column, page in enumerate(pages[: -(-seq_len // case.page_size)]):
            if page < len(grown):  # not left of a window
                grown[page] *= 1 + 7 * (1 - column * case.page_size / seq_len) + 30 * (column % 37 == 5)
    inputs["k_cache"] = grown.to(case.dtype_of_cache)
    _no_small_values(inputs)


@pytest.mark.parametrize("features", [{}, dict(alibi=True), dict(softcap=50.0)], ids=["plain", "alibi", "softcap"])
def test_a_sink_of_infinity_leaves_nothing_where_other_maxima_rise(features: dict[str, Any]) -> None:
    """Rows of four heads share a warp, which weighs again for all of them where it does for one."""
    case = sized("sinks", **ragged((700, 3000)), sinks=True, **features)
    inputs = build(case, DEVICE)
    _let_rise(case, inputs)
    inputs["sinks"][1::4] = torch.inf
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)
    assert not out[:, 1::4].any()


INFINITE = {
    "decodes": ragged((1, 3000), (1, 40), (1, 0)) | dict(decode_form=True),
    "decodes, e4m3 cache": ragged((1, 3000), (1, 40)) | E4M3_CACHE | dict(decode_form=True),
    "mixed": ragged((300, 3000), (1, 2000), (1, 0), (40, 40)),
    "mixed, all e4m3": ragged((300, 3000), (1, 2000), (40, 40)) | ALL_E4M3,
    "chunks, the last are cut": ragged(*[(64, 4096)] * 12) | dict(bounds=True),
    "chunks over an e4m3 cache": ragged(*[(100, 1500)] * 3) | E4M3_CACHE | dict(bounds=True),
    "drafts": ragged(*[(16, 1500)] * 3) | dict(bounds=True),
    "prompts": ragged((200, 200), (150, 150)) | dict(bounds=True),
    "batch-invariant": ragged((200, 1500), (1, 1100), (3, 40)) | dict(batch_invariant=True),
}


@pytest.mark.parametrize("name", INFINITE)
@hopper_plans.mixed()
def test_a_sink_of_infinity_takes_all_weight(name: str) -> None:
    """Also of blocks that are cut, whose pieces are joined by their maxima."""
    case = sized("infinite sinks", **INFINITE[name], sinks=True)
    inputs = build(case, DEVICE)
    inputs["sinks"][1::4] = torch.inf
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)
    assert not out[:, 1::4].float().any()
    assert (lse[: sum(case.query_lens), 1::4] == torch.inf).all()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_a_row_whose_maximum_rises_leaves_the_others_alone(cache_dtype: torch.dtype) -> None:
    """Few rows, in columns, are weighed at once; only rows beyond the limit get new weights."""
    case = sized("alone", **ragged(*[(1, 3000)] * 6), cache_dtype=cache_dtype, bounds=True)
    inputs = build(case, DEVICE)
    _no_small_values(inputs)
    before = paged_attn.paged_attention(**inputs)[0].clone()
    inputs["q"][:, 2::4] *= 30
    out, lse = paged_attn.paged_attention(**inputs)
    compare(case, out, lse, inputs)
    kept = [head for head in range(case.heads) if head % 4 != 2]
    assert torch.equal(out[:, kept], before[:, kept])


@pytest.mark.parametrize("softcap", [10.0, 30.0])
@pytest.mark.parametrize("asked", [dict(batch_invariant=True), {}, dict(lse=False)], ids=str)
def test_scores_near_the_cap_leave_other_rows_alone(asked: dict[str, Any], softcap: float) -> None:
    """By special functions, and by polynomials of which a row whose scores are too large for them has no use."""
    case = sized("capped", **ragged((300, 700)), softcap=softcap, **asked)
    inputs = build(case, DEVICE)
    paged_attn.paged_attention(**inputs)
    before = inputs["out"].clone()
    inputs["q"][7::16] *= 30
    result = paged_attn.paged_attention(**inputs)
    out, lse = result if case.lse else (result, None)
    compare(case, out, lse, inputs, more=0 if case.lse else case.softcap * 2.0**-11)
    kept = [token for token in range(300) if token % 16 != 7]
    assert torch.equal(out[kept], before[kept])


@pytest.mark.parametrize("queries", [(70,), (700,), (700, 33)], ids=["shares", "blocks", "mixed"])
@pytest.mark.parametrize("lse", [True, False])
@hopper_plans.mixed()
def test_what_nobody_uses_changes_no_bits_of_capped_scores(queries: tuple[int, ...], lse: bool) -> None:
    """Padding and slots without a key: numbers that are none beside zeros."""
    case = sized("capped", **ragged(*zip(queries, (1500, 40))), softcap=30.0, padding=9, lse=lse)
    inputs = build(case, DEVICE)
    paged_attn.paged_attention(**inputs)
    before = inputs["out"].clone()
    for name in ("q", "k_cache", "v_cache"):
        inputs[name] = inputs[name].nan_to_num(0.0)
    paged_attn.paged_attention(**inputs)
    assert torch.equal(inputs["out"][: sum(queries)], before[: sum(queries)])


# Scores as shares of the cap, before it is met: of four heads each, which share a warp.
AIMS = {
    "all far below": (-3.0, -1.5, -1.1, -0.95),
    "all far above": (3.0, 1.5, 1.1, 0.95),
    "here and there": (-1.2, 0.4, 0.9, -0.5),
    "around what polynomials hold for": (0.86, 0.87, -0.86, 0.71),
    "small": (0.0, 0.01, -0.01, 0.3),
}


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("aims", AIMS)
def test_capped_scores_of_any_size(aims: str, lse: bool) -> None:
    """All keys of a row are about as far from zero, so that weights show what became of it."""
    case = sized("aimed", **ragged((150, 700)), softcap=50.0, lse=lse)
    inputs = build(case, DEVICE)
    assert {x.pipe.TERMS for x in planner.plan(problem_of(inputs)).launches} == {5 if lse else 3}
    keys = inputs["k_cache"].float()
    keys[..., :64] = 2.0 + 0.1 * keys[..., :64]  # what must not be read remains what it is
    inputs["k_cache"] = keys.to(case.dtype)
    shares = torch.tensor(AIMS[aims], device=DEVICE).repeat(case.heads // 4)[:, None]
    one = 50.0 * case.head_dim**0.5 / (64 * 2.0)  # of the cap
    inputs["q"][:150, :, :64] = (shares * one).to(case.dtype)
    result = paged_attn.paged_attention(**inputs)
    out, found = result if lse else (result, None)
    compare(case, out, found, inputs, more=0 if lse else case.softcap * 2.0**-11)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(
    ("softcap", "scale", "larger"),
    [(1e4, None, 1), (1e4, 1e-6, 1), (30.0, 1e-12, 1), (1e4, 1e-4, 30), (30.0, 1e-3, 9), (30.0, 1e-7, 1e3),
     (30.0, 1e7, 3e-5), (30.0, 2e9, 2e-6)],
)  # fmt: skip
def test_capped_scores_of_any_scale(softcap: float, scale: float | None, larger: float, lse: bool) -> None:
    """Powers of a scale may be too small or large for float32; nor do masked scores become numbers, or zeros none.

    larger: queries, and keys, so that scores have an ordinary size, or none.
    """
    window = dict(window_size=(333, 40), causal=False)
    case = sized("scaled", **ragged((150, 700)), softcap=softcap, softmax_scale=scale, lse=lse, **window)
    inputs = build(case, DEVICE)
    for name in ("q", "k_cache"):
        inputs[name] = (inputs[name].float() * larger).to(case.dtype)
    inputs["q"][3:5] = 0.0
    result = paged_attn.paged_attention(**inputs)
    out, found = result if lse else (result, None)
    # of scores up to 5 or so; or what a cap less almost as much keeps of these
    compare(case, out, found, inputs, more=softcap * 2.0**-22 if lse else 2.0**-11 * 5)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    ("keys", "key"), [(700, 0), (700, 5), (700, 200), (700, 699), (2304, 0), (2304, 300), (2304, 2303), (4224, 2200)]
)
def test_a_key_that_is_no_number_shows_in_the_rows_that_see_it(keys: int, key: int, return_lse: bool) -> None:
    """And in no others, of fp8 products, whose weights saturate, through sums of 16 tiles that are put aside."""
    case = sized("nan", **ragged((700, keys)), dtype=E4M3, cache_dtype=E4M3)
    inputs = build(case, DEVICE) | dict(return_lse=return_lse)

    def rows() -> torch.Tensor:
        paged_attn.paged_attention(**inputs)
        return inputs["out"].clone()

    before = rows()
    page = int(inputs["page_table"][0, key // case.page_size])
    inputs["k_cache"].view(torch.uint8)[page, key % case.page_size, 0, 3] = 0x7F
    after, first = rows(), max(0, key - (keys - 700))
    assert after[first:, :4].isnan().all()
    assert torch.equal(after[:first], before[:first])
    assert torch.equal(after[:, 4:], before[:, 4:])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_a_key_that_is_no_number_is_not_lost_where_pieces_are_joined(cache_dtype: torch.dtype) -> None:
    """By few instructions, of a small decode, whatever the piece."""
    case = sized("nan", **ragged((1, 3000), (1, 700)), decode_form=True, cache_dtype=cache_dtype)
    for key in (0, 1500, 2999):
        inputs = build(case, DEVICE)
        assert all(x.pipe.BRIEF for x in planner.plan(problem_of(inputs)).launches)
        page = int(inputs["page_table"][0, key // case.page_size])
        bits(inputs["k_cache"])[page, key % case.page_size, 0, 3] = 0x7F if cache_dtype == E4M3 else torch.nan
        out, lse = paged_attn.paged_attention(**inputs)
        for found in (out, lse):
            assert found[0, :4].isnan().all(), key
            assert not found[0, 4:].isnan().any()
            assert not found[1].isnan().any()


@pytest.mark.parametrize("lse", [False, True])
def test_scores_of_any_magnitude_over_fp8(lse: bool) -> None:
    """Heads of one block that differ by 2^100, over keys that are all alike: each weighs the same."""
    case = sized("magnitudes", **ragged((300, 1000), (100, 100)), cache_dtype=E4M3, lse=lse)
    inputs = build(case, DEVICE)
    keys = inputs["k_cache"].float()
    live = inputs["page_table"][0, 0]
    keys[:] = keys[live, 0]
    inputs["k_cache"] = keys.to(E4M3)
    exponents = torch.tensor([40, 17, 13, 3, 0, -14, -30, -60], device=DEVICE)
    inputs["q"] *= (2.0**exponents).to(torch.bfloat16).repeat(case.heads // 8)[:, None]
    result = paged_attn.paged_attention(**inputs)
    out, found = result if lse else (result, None)
    compare(case, out, found, inputs)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_query_that_is_no_number_gives_none_over_fp8(poison: float, lse: bool) -> None:
    # a small scale, or infinity may come back where scores overflow
    case = sized("poison", **ragged((300, 1000)), cache_dtype=E4M3, lse=lse, softmax_scale=1e-3)
    inputs = build(case, DEVICE)
    paged_attn.paged_attention(**inputs)
    before = inputs["out"].clone()
    inputs["q"][100:200:3, 1, 5] = poison
    paged_attn.paged_attention(**inputs)
    poisoned = torch.zeros(300, case.heads, dtype=torch.bool, device=DEVICE)
    poisoned[100:200:3, 1] = True
    assert inputs["out"][poisoned].isnan().all()
    assert torch.equal(inputs["out"][~poisoned], before[~poisoned])


@pytest.mark.parametrize("return_lse", [False, True])
def test_fp8_maxima_may_rise_from_tile_to_tile(return_lse: bool) -> None:
    """By a few powers of two, past which the first weights would be zero: sums and deposits decay together."""
    # so many heads that no block is cut: of 16 tiles or fewer nothing is put aside
    case = sized("rising", **ragged((700, 6000)), dtype=E4M3, cache_dtype=E4M3)
    case = replace(case, lse=return_lse)
    inputs = build(case, DEVICE)
    grown = inputs["k_cache"].float()
    for column, page in enumerate(inputs["page_table"][0, : 6000 // case.page_size].tolist()):
        grown[page] *= 2.5 - 1.5 * column * case.page_size / 6000
    inputs["k_cache"] = grown.to(E4M3)
    result = paged_attn.paged_attention(**inputs)
    out, lse = result if return_lse else (result, None)
    compare(case, out, lse, inputs)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
def test_errors_do_not_grow_with_the_keys(dtype: torch.dtype, return_lse: bool) -> None:
    """Over fp8, whose products the tensor cores add up with 14 bits."""

    def error(keys: int) -> float:
        case = Case("keys", (128,), (keys,), heads=4, kv_heads=1, head_dim=128, dtype=dtype, cache_dtype=E4M3)
        inputs = build(case, DEVICE) | dict(return_lse=return_lse)
        paged_attn.paged_attention(**inputs)
        want = reference.paged_attention(**inputs | dict(out=None, return_lse=False))
        return float((inputs["out"].double() - want).norm() / want.norm())

    few, many = error(4096), error(131072)
    assert many <= 1.5 * few
    assert max(few, many) <= (0.01 if dtype == torch.bfloat16 else FP8_NORM if return_lse else LINE_NORM)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@hopper_plans.mixed()
def test_a_result_beside_a_tie_of_fp8_does_not_cross_it(fp8: torch.dtype, source: torch.dtype) -> None:
    check_results_beside_ties(source, fp8, DEVICE, heads=4, dim=128)


@pytest.mark.parametrize(
    "fields", [E4M3_CACHE, dict(dtype=torch.float16, out_dtype=torch.float32)], ids=["e4m3", "float16"]
)
@hopper_plans.mixed()
def test_a_weight_below_the_normal_numbers_of_float16_is_as_near_as_float16_has_it(fields: dict[str, Any]) -> None:
    check_small_weight(sized("small weight", query_lens=(1,), seq_lens=(2,), **fields), DEVICE)


@pytest.mark.parametrize("lse", [True, False])
@hopper_plans.mixed()
def test_a_weight_below_the_normal_numbers_of_e4m3_is_as_near_as_e4m3_has_it(lse: bool) -> None:
    case = sized("small weight", query_lens=(128,), seq_lens=(2,), **ALL_E4M3 | dict(lse=lse))
    check_small_weight(case, DEVICE, small_weights.FP8)
