"""The Hopper kernels against the reference, on the cases of `hopper_cases`: on a Hopper GPU, or simulated."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.explain import host_schedule
from paged_attn.explain.host_schedule import cut
from paged_attn.kernels.hopper.planning.block_launches import MIN_TILES_PER_PIECE
from paged_attn.kernels.portable import launches as portable_plan
from paged_attn.planning import planner
from paged_attn.records.key_bounds import key_bounds_of
from paged_attn.records.plan import Launch
from tests.support import hopper_plans
from tests.support.cases import E4M3, Case, bits, build, compare, problem_of, run
from tests.support.hopper_cases import (
    BLOCKS,
    CASES,
    DECODE,
    DECODES,
    DEVICE,
    LINES,
    LONG,
    MIXED,
    PACKED,
    SMALL,
    ragged,
    sized,
)
from tests.support.random_batches import DECODES as RANDOM_DECODES
from tests.support.random_batches import KINDS, RANDOM, random_decodes, random_lengths

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper")]


# Two lists of which blocks are cut, their states those of two consumers.
TWO_LISTS_CUT = "few long ones, head_dim 64"


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x == TWO_LISTS_CUT)) for x in CASES])
@hopper_plans.mixed()
def test_results_are_those_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


UNEVEN = [
    name
    for name, fields in CASES.items()
    if fields["query_lens"] == MIXED["query_lens"] and not {"batch_invariant", "only"} & fields.keys()
]


WAYS = {"as long ones": hopper_plans.long, "two lists": hopper_plans.two_lists, "two launches": hopper_plans.apart}


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("way", WAYS)
def test_uneven_queries_served_in_other_ways_give_the_results_of_the_reference(way: str, name: str) -> None:
    with WAYS[way]():
        case = sized(name, **CASES[name])
        launches = planner.plan(problem_of(build(case, DEVICE))).launches
        assert not any(x.beside or (x.pipe.MIXED and way != "two lists") for x in launches)
        assert len(launches) == 1 or way != "as long ones" or launches[-1].copied
        run(case, DEVICE)
        run(case, DEVICE)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("few long ones") and "192" not in name])
@hopper_plans.two_lists()
def test_few_long_queries_among_many_decodes_are_two_lists_but_over_fp8(name: str) -> None:
    launches = planner.plan(problem_of(build(sized(name, **CASES[name]), DEVICE))).launches
    assert [x.pipe.MIXED for x in launches] == ([False, False] if "e4m3" in name else [True])


WINDOWS = [
    name
    for name, fields in CASES.items()
    if 0 <= fields.get("window_size", (-1, -1))[0] < 1024 and not {"batch_invariant", "decode_form"} & fields.keys()
]


@pytest.mark.parametrize("name", WINDOWS)
@hopper_plans.wide()
def test_narrow_windows_served_as_wide_ones_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    run(case, DEVICE)
    run(case, DEVICE)


@pytest.mark.quick
@pytest.mark.parametrize("name", SMALL)
@hopper_plans.mixed()
def test_small_batches_give_the_results_of_the_reference(name: str) -> None:
    run(sized(name, **SMALL[name]), DEVICE)


@pytest.mark.quick
@pytest.mark.parametrize("way", ["two lists", "two launches"])
def test_a_small_batch_served_in_other_ways_gives_the_results_of_the_reference(way: str) -> None:
    with WAYS[way]():
        run(sized("mixed", **SMALL["mixed"]), DEVICE)


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in SMALL if "mixed" in name])
@hopper_plans.long()
def test_small_batches_of_uneven_queries_give_the_results_of_the_reference(name: str) -> None:
    run(sized(name, **SMALL[name]), DEVICE)


@pytest.mark.parametrize("seed", range(4))  # one of each way; `make fuzz` draws more
@pytest.mark.parametrize("name", RANDOM)
def test_random_batches_give_the_results_of_the_reference(name: str, seed: int) -> None:
    with (hopper_plans.mixed, *WAYS.values())[seed % 4]():
        run_random(name, seed, RANDOM[name], random_lengths, 4)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.quick), 1, 2])
@pytest.mark.parametrize("name", RANDOM_DECODES)
def test_random_decodes_give_the_results_of_the_reference(name: str, seed: int) -> None:
    run_random(name, seed, RANDOM_DECODES[name], random_decodes, 6)


def run_random(name: str, seed: int, family: dict[str, Any], lengths: Any, batches: int) -> None:
    """Run random batches of a family, whose words in KINDS say which lengths are drawn."""
    rng = random.Random(f"{name} {seed}")
    for _ in range(batches):
        drawn = lengths(rng, **{word: family[word] for word in KINDS & family.keys()})
        fields = {word: value for word, value in family.items() if word not in KINDS} | drawn
        run(sized(str(fields), seed=seed, **fields), DEVICE)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * x.startswith("small")) for x in BLOCKS])
@hopper_plans.mixed()
def test_blocks_over_x_packed_caches_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **BLOCKS[name])
    *_, blocks = planner.plan(problem_of(build(case, DEVICE))).launches
    assert blocks.pipe.PACKED
    assert not blocks.pipe.SHARES
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


SMALL_LINE = "chunks, window, not causal"


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.quick] * (x == SMALL_LINE)) for x in LINES])
def test_even_shares_of_a_line_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **LINES[name])
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    done = cut(launch, host_schedule.KnownBatch(case.query_lens, case.seq_lens, key_bounds_of(case)))
    assert done.schedule == "line"
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_x_packed_caches_may_be_parts_of_larger_ones(dtype: torch.dtype) -> None:
    """Caches are parts of pages with more slots, or lie beside each other in one tensor; all around is NaN."""
    case = sized("parts", **DECODES, **PACKED, cache_dtype=dtype, scales="per_head", decode_form=True, lse=False)
    inputs = build(case, DEVICE)
    k_cache, v_cache = inputs["k_cache"], inputs["v_cache"]
    assert k_cache.is_contiguous()
    pages, heads, runs, slots, x = k_cache.shape
    wide = torch.full((pages, 3, heads, runs * x * 2 * slots), torch.nan).to(k_cache.device, dtype)
    keys = wide[:, 0].view(pages, heads, runs, 2 * slots, x)[:, :, :, :slots]
    values = wide[:, 2].view(pages, heads, runs * x, 2 * slots)[..., slots:]
    bits(keys).copy_(bits(k_cache))
    bits(values).copy_(bits(v_cache))
    parts = inputs | dict(k_cache=keys, v_cache=values)
    (launch,) = planner.plan(problem_of(parts)).launches
    assert launch.pipe.PACKED
    compare(case, paged_attn.paged_attention(**parts), None, parts)


EVEN = [name for name in CASES if name.startswith(("even", "a chunk")) and name != "even prefills"]


@pytest.mark.parametrize("name", EVEN)
@hopper_plans.shares()
def test_even_shares_of_many_rows_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **CASES[name])
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert launch.pipe.SHARES
    run(case, DEVICE)


@hopper_plans.shares()
def test_blocks_that_no_sequence_has_are_nobodys() -> None:
    """The planner knows tokens for two sequences of 64 queries, but the sequences have fewer tokens."""
    case = sized("one block", **ragged((20, 5000), (9, 700)), padding=99)
    (launch,) = planner.plan(problem_of(build(case, DEVICE) | dict(max_seqlen_q=64))).launches
    assert launch.pipe.SHARES
    run(case, DEVICE, max_seqlen_q=64)


@pytest.mark.quick
@hopper_plans.three()
def test_three_consumers_do_a_small_batch() -> None:
    case = sized("three", **ragged((200, 300), (200, 200)), bounds=True)
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert launch.pipe.CONSUMERS == 3
    run(case, DEVICE)


@pytest.mark.quick
@pytest.mark.parametrize("plans", [hopper_plans.four, hopper_plans.four_uncut])
def test_four_warpgroups_do_a_small_batch(plans: Any) -> None:
    with plans():
        case = sized("four", **ragged((200, 300), (200, 900), (200, 0)), head_dim=64, bounds=True)
        (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
        assert (256, plans == hopper_plans.four_uncut) == (launch.pipe.ROWS, launch.pipe.AHEAD)
        run(case, DEVICE)


@pytest.mark.quick
@pytest.mark.parametrize(("short", "tile"), [(0, 128), (1024, 64)])
def test_a_consumer_that_is_an_item_ahead_does_a_small_batch(short: int, tile: int) -> None:
    with hopper_plans.uncut(MAX_KEYS_OF_HALF_TILES=short):
        case = sized("ahead", **ragged((200, 300), (200, 0), (200, 200), (200, 900)), bounds=True)
        (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
        assert (True, tile) == (launch.pipe.AHEAD, launch.shape.TILE)
        run(case, DEVICE)


@pytest.mark.quick
def test_decodes_whose_pieces_have_no_room_are_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one kernel of blocks that is told nothing of queries, for there is one of each sequence."""
    monkeypatch.setattr(portable_plan, "MAX_SCRATCH_BYTES", 1)
    with hopper_plans.planned():
        case = sized("whole", **DECODE, batch_invariant=True)
        (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
        assert not launch.pipe.SHARES
        assert not launch.shape.SPLIT
        run(case, DEVICE)


@pytest.mark.parametrize("name", [x for x in LONG if "head_dim 64" not in x and x != "prefills, softcap, no lse"])
@hopper_plans.three()
def test_three_consumers_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **LONG[name])
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert (2 if case.softcap and case.lse else 3) == launch.pipe.CONSUMERS
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


FOUR = [name for name in LONG if "head_dim" not in name or "head_dim 64" in name]


@pytest.mark.parametrize("name", FOUR)
@hopper_plans.four()
def test_four_warpgroups_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **LONG[name] | dict(head_dim=64))
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    window = case.window_size[0]
    keys = min(max(case.seq_lens), window + launch.shape.BLOCK_Q if window >= 0 else max(case.seq_lens))
    assert (keys > MIN_TILES_PER_PIECE * launch.shape.TILE) == launch.shape.SPLIT
    check_four(case, launch)


@pytest.mark.parametrize("name", FOUR)
@hopper_plans.four_uncut()
def test_four_warpgroups_that_are_an_item_ahead_give_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **LONG[name] | dict(head_dim=64))
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert launch.pipe.QUERY_BOX == launch.pipe.AHEAD
    check_four(case, launch)


def check_four(case: Case, launch: Launch) -> None:
    assert (launch.pipe.CONSUMERS, launch.pipe.ROWS) == (1, 256)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


@pytest.mark.parametrize("name", LONG)
@hopper_plans.one()
def test_one_code_for_two_warpgroups_gives_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **LONG[name])
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert (launch.pipe.CONSUMERS, launch.pipe.ROWS) == (1, 128)
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


@pytest.mark.parametrize("name", LONG)
@hopper_plans.uncut()
def test_a_consumer_that_is_an_item_ahead_gives_the_results_of_the_reference(name: str) -> None:
    case = sized(name, **LONG[name])
    (launch,) = planner.plan(problem_of(build(case, DEVICE))).launches
    assert (launch.pipe.QUERY_BOX and not launch.pipe.CONVERT and launch.shape.DIM <= 128) == launch.pipe.AHEAD
    run(case, DEVICE)
    run(case, DEVICE)  # with counters as the first run left them


TURNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": dict(softcap=30.0),
    "head_dim 64": dict(head_dim=64),
    "head_dim 256": dict(head_dim=256),
    "e4m3 cache": dict(cache_dtype=E4M3),
    "all e4m3": dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=torch.bfloat16),
    "group 3": dict(heads=24),
}


@hopper_plans.one()
def test_layouts_of_shared_memory_may_take_turns() -> None:
    """A tag that one kernel left behind must not mislead the next."""
    cases = [sized(name, **ragged((300, 1000)), lse=False, **fields) for name, fields in TURNS.items()]
    cases.insert(1, sized("decodes beside a chunk", **CASES["decodes beside a chunk"], lse=False))
    inputs = [build(case, DEVICE) for case in cases]
    first = [paged_attn.paged_attention(**x).clone() for x in inputs]
    for case, x, found in zip(cases, inputs, first):
        compare(case, found, None, x)
    for _ in range(10 if DEVICE == "cuda" else 1):
        for case, x, expected in zip(cases, inputs, first):
            assert torch.equal(paged_attn.paged_attention(**x), expected), case.name


@pytest.mark.parametrize("keys", [300, 2000, 5000, 40000])
@pytest.mark.parametrize("cache_dtype", [E4M3, torch.bfloat16])
def test_many_runs_give_the_same_bits(keys: int, cache_dtype: torch.dtype) -> None:
    """Partitions that begin, and pieces that arrive, in any order: what goes wrong there goes wrong now and then."""
    case = sized("runs", **ragged((1, keys)), decode_form=True, cache_dtype=cache_dtype)
    inputs = build(case, DEVICE) | dict(return_lse=False)
    first = paged_attn.paged_attention(**inputs).clone()
    for _ in range(300 if DEVICE == "cuda" else 2):
        assert torch.equal(paged_attn.paged_attention(**inputs), first)


@pytest.mark.parametrize("name", ["chunks", "drafts over e4m3, no lse"])
def test_cut_blocks_have_the_same_bits_whoever_is_done_last(name: str) -> None:
    """Blocks of three pieces and more: their states are joined in the order of the keys, whichever is in registers."""
    case = sized(name, **LINES[name])
    inputs = build(case, DEVICE)
    first = [x.clone() for x in _results(inputs)]
    for _ in range(100 if DEVICE == "cuda" else 2):
        assert all(map(torch.equal, _results(inputs), first))


@pytest.mark.parametrize("name", ["decodes beside a chunk", "decodes beside a chunk, one KV head"])
@hopper_plans.mixed()
def test_blocks_and_few_rows_beside_them_have_the_same_bits_whoever_is_done_last(name: str) -> None:
    inputs = build(sized(name, **CASES[name]), DEVICE)
    (launch,) = planner.plan(problem_of(inputs)).launches
    assert launch.beside is not None
    first = [x.clone() for x in _results(inputs)]
    for _ in range(100 if DEVICE == "cuda" else 2):
        assert all(map(torch.equal, _results(inputs), first))


def _results(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Results of a call, with a log-sum-exp or without."""
    found = paged_attn.paged_attention(**inputs)
    return found if isinstance(found, tuple) else (found,)


def test_new_keys_give_what_they_give_from_the_cache_after_they_were_written() -> None:
    """A batch of each kernel, whose keys the cache holds as well: only tiles, and so roundings, differ."""
    for case in (sized("chunk", **ragged((300, 1000), (700, 3000))), sized("decodes", **ragged(*[(1, 999)] * 8))):
        inputs = build(case, DEVICE) | dict(return_lse=False, out=None)
        held = paged_attn.paged_attention(**inputs)
        slots = [
            (int(inputs["page_table"][seq, pos // case.page_size]), pos % case.page_size)
            for seq, (query_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens))
            for pos in range(seq_len - query_len, seq_len)
        ]
        page, slot = torch.tensor(slots, device=DEVICE).T
        new = {f"{x}_new": inputs[f"{x}_cache"][page, slot].clone() for x in "kv"}
        for x in "kv":
            inputs[f"{x}_cache"][page, slot] = torch.nan
        # weights and results are rounded to bfloat16, 2^-8 of each, on both sides and in other tiles
        torch.testing.assert_close(paged_attn.paged_attention(**inputs | new), held, rtol=0.02, atol=0.002)
