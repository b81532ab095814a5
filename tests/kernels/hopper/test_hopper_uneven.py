"""Uneven queries on Hopper: blocks alone or beside few rows, two lists or two launches, by what a batch waits for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper.planning import coverage as hopper
from paged_attn.kernels.hopper.planning.share_launches import shares_launch
from paged_attn.planning import planner
from paged_attn.records.plan import UNBOUNDED
from paged_attn.records.problem import Problem
from tests import simulator
from tests.kernels.hopper.planned import MIXED, even
from tests.support import hopper_plans
from tests.support.cases import E4M3, build, problem_of, run
from tests.support.hopper_cases import DEVICE, sized

pytestmark = pytest.mark.simulated

E4M3_CACHE: dict[str, Any] = dict(cache=torch.float8_e4m3fn, compute=torch.float16)
ALL_E4M3: dict[str, Any] = dict(query=torch.float8_e4m3fn, cache=torch.float8_e4m3fn)
UNEVEN = {
    "decodes beside a prefill": (MIXED, "beside"),
    "no decodes, drafts of two tokens": (MIXED._replace(only="prefill"), "beside"),
    "no decodes, no drafts": (MIXED._replace(only="prefill", heads=64), "two lists"),
    "few long ones": (MIXED._replace(tokens=63 + 140, max_seqlen_q=140), "two lists"),
    "few long ones, fewer decodes than programs": (
        MIXED._replace(tokens=63 + 40, max_seqlen_q=40, max_seqlen_k=5000, heads=16, kv_heads=2),
        "2.. 0..1",
    ),
    "few long ones, more decodes": (
        MIXED._replace(tokens=63 + 40, max_seqlen_q=40, max_seqlen_k=5000, heads=32, kv_heads=4),
        "two lists",
    ),
    "few long ones, no decodes, fewer drafts than programs": (
        MIXED._replace(tokens=63 + 40, max_seqlen_q=40, max_seqlen_k=5000, heads=16, kv_heads=2, only="prefill"),
        "two lists",
    ),
    "one more": (MIXED._replace(tokens=64 + 141, max_seqlen_q=141), "beside"),
    "mostly long ones, of as many queries as keys": (MIXED._replace(tokens=64 * 128, max_seqlen_q=4096), "blocks"),
    "of half as many": (MIXED._replace(tokens=64 * 256), "blocks"),
    "one token less": (MIXED._replace(tokens=64 * 256 - 1), "beside"),
    "one long among decodes of more keys": (
        MIXED._replace(tokens=8255, max_seqlen_q=8192, max_seqlen_k=32768),
        "beside",
    ),
    "little to read": (MIXED._replace(seqs=8, tokens=520, max_seqlen_q=513, max_seqlen_k=600), "beside"),
    "little to read, few tokens": (MIXED._replace(seqs=8, tokens=198, max_seqlen_q=191, max_seqlen_k=3000), "blocks"),
    "little to read, one KV head": (MIXED._replace(heads=4, kv_heads=1, max_seqlen_k=2048), "blocks"),
    "as little in fp8": (MIXED._replace(max_seqlen_k=1000, **E4M3_CACHE), "blocks"),
    "two KV heads, which many pieces are joined of": (MIXED._replace(heads=8, kv_heads=2), "beside"),
    "small heads": (MIXED._replace(head_dim=64), "beside"),
    "strides that make no box": (MIXED._replace(query_box=False), "two lists"),
    "large heads": (MIXED._replace(head_dim=256), "blocks"),
    "a token of 16 rows": (MIXED._replace(heads=128), "beside"),
    "a token of 24 rows": (MIXED._replace(heads=24, kv_heads=1), "blocks"),
    "a token of 48 rows": (MIXED._replace(heads=48, kv_heads=1), "2.. 0..1"),
    "a token of 48 rows, no decodes": (MIXED._replace(heads=48, kv_heads=1, only="prefill"), "blocks"),
    "a token of 48 rows, fewer tokens": (
        MIXED._replace(heads=48, kv_heads=1, tokens=63 + 400, max_seqlen_q=400),
        "blocks",
    ),
    "over e4m3, a token of 48 rows, as few": (
        MIXED._replace(heads=48, kv_heads=1, tokens=63 + 400, max_seqlen_q=400, **E4M3_CACHE),
        "2.. 0..1",
    ),
    "a token of 48 rows, no bound": (MIXED._replace(heads=48, kv_heads=1, max_seqlen_q=2048 + 63), "blocks"),
    "x-packed": (MIXED._replace(packed=True, rows_per_page=1, boxable=False), "3.. 0..2"),
    "x-packed, a token of 48 rows": (
        MIXED._replace(heads=48, kv_heads=1, packed=True, rows_per_page=1, boxable=False),
        "blocks",
    ),
    "x-packed, a token of 16 rows of large heads": (
        MIXED._replace(heads=32, kv_heads=2, head_dim=256, packed=True, rows_per_page=1, boxable=False),
        "blocks",
    ),
    "over e4m3, which is converted": (MIXED._replace(**E4M3_CACHE), "3.. 0..2"),
    "over e4m3, a token of 16 rows": (MIXED._replace(heads=128, **E4M3_CACHE), "2.. 0..1"),
    "over e4m3, no decodes": (MIXED._replace(only="prefill", **E4M3_CACHE), "3.. 2..2"),
    "over e4m3, no decodes, a token of 8 rows": (MIXED._replace(only="prefill", heads=64, **E4M3_CACHE), "blocks"),
    "over e4m3, small heads": (MIXED._replace(head_dim=64, **E4M3_CACHE), "3.. 0..2"),
    "over e4m3, mostly long ones, over a copy": (
        MIXED._replace(tokens=9000, max_seqlen_q=9000, **E4M3_CACHE),
        "3.. 0..2",
    ),
    "all of e4m3, mostly long ones": (MIXED._replace(tokens=9000, max_seqlen_q=9000, **ALL_E4M3), "blocks"),
    "all of e4m3": (MIXED._replace(**ALL_E4M3), "3.. 0..2"),
    "all of e4m3, small heads": (MIXED._replace(head_dim=64, **ALL_E4M3), "3.. 0..2"),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_queries_are_two_lists_or_one_or_few_rows_beside_blocks_or_two_launches(name: str) -> None:
    """Whichever list or launch serves a sequence, one does."""
    call, expected = UNEVEN[name]
    launches = hopper.launches(call)
    served = sorted((x.shortest, x.longest) for launch in launches for x in launch.parts)
    assert served[0][0] == (2 if call.only == "prefill" else 0)
    assert served[-1][1] == UNBOUNDED
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(served))
    *shares, blocks = launches
    assert [x.pipe.SHARES for x in launches] == [True] * len(shares) + [False]
    assert all(x.shape.LEADS for x in shares)
    assert (len(shares) > 0) == blocks.pipe.FOLLOWS
    assert not blocks.shape.LEADS
    assert (call.only is None) == blocks.shape.CLEAR
    assert not any(x.shape.CLEAR for x in shares), "once is enough"
    if shares:
        assert f"{blocks.shortest}.. {shares[0].shortest}..{shares[0].longest}" == expected
        assert shares[0].longest * call.heads // call.kv_heads <= shares[0].shape.ROWS
    elif few := blocks.beside:
        assert expected == "beside"
        assert few.longest == few.pipe.COLUMNS // (call.heads // call.kv_heads)
        assert not few.shape.CLEAR
        assert blocks.programs == few.programs == call.device.multiprocessors
        # as `mixed.scratch_behind` has them
        behind = few.slots * few.shape.LIVE * (few.shape.DIM + 2)
        counted = hopper.COUNTERS_PER_LAUNCH + (3 if few.pipe.GROUPED else 1) * blocks.programs
        assert (behind, counted) == (hopper.need_of(few).states, hopper.need_of(few).counters)
        alone = hopper.need_of(blocks._replace(beside=None))
        assert (behind + alone.states, counted + alone.counters) == hopper.need_of(blocks)[:2]
    else:
        assert ("two lists" if blocks.pipe.MIXED else "blocks") == expected


def test_the_plans_of_other_tests_are_what_they_are_called() -> None:
    """The batch is one that a test can afford, with few decodes and many long queries."""
    small = MIXED._replace(seqs=11, tokens=1500, max_seqlen_q=700)
    kinds = {
        "beside": (hopper_plans.mixed(), [(False, True)]),
        "two lists": (hopper_plans.two_lists(), [(True, False)]),
        "two launches": (hopper_plans.apart(), [(False, False)] * 2),
        "long ones": (hopper_plans.long(), [(False, False)]),
    }
    for name, (planned, expected) in kinds.items():
        with planned:
            found = [(x.pipe.MIXED, x.beside is not None) for x in hopper.launches(small)]
        assert found == expected, name


WINDOW = MIXED._replace(window_left=127)
SHORT_TABLE = MIXED._replace(tokens=263, max_seqlen_q=200, max_seqlen_k=200)
BESIDE = {
    "decodes in a narrow window": (WINDOW, 4),
    "no decodes": (WINDOW._replace(only="prefill"), 4),
    "over e4m3, few keys without a window": (SHORT_TABLE._replace(**E4M3_CACHE), 4),
    "of 16 bits": (SHORT_TABLE, None),
    "of 16 bits, small heads": (SHORT_TABLE._replace(head_dim=64), 4),
    "of one KV head": (WINDOW._replace(heads=8, kv_heads=1), None),
    "of few sequences": (WINDOW._replace(seqs=32, tokens=600), None),
    "mostly long ones": (WINDOW._replace(tokens=64 * 128), None),
    "a wide window": (MIXED._replace(window_left=177), None),
    "large heads": (WINDOW._replace(head_dim=192), None),
    "x-packed": (WINDOW._replace(packed=True, rows_per_page=1, boxable=False), None),
    "a tree": (WINDOW._replace(qq_bias=True), None),
    "a token of 16 rows, no decodes": (WINDOW._replace(heads=128, only="prefill"), None),
}


@pytest.mark.parametrize("name", BESIDE)
def test_few_keys_of_many_decodes_are_left_to_the_portable_kernel_beside_blocks(name: str) -> None:
    call, longest = BESIDE[name]
    *beside, blocks = hopper.launches(call)
    assert not blocks.pipe.SHARES
    assert (len(beside) > 0) == blocks.pipe.FOLLOWS
    assert all(x.shape.LEADS for x in beside)
    assert longest == (beside[0].longest if beside and beside[0].pipe is None else None)
    if longest is not None:
        assert (blocks.shortest, blocks.pipe.MIXED) == (longest + 1, False)
        assert beside[0].shortest == (2 if call.only == "prefill" else 0)
        assert (call.only is None, False) == (blocks.shape.CLEAR, beside[0].shape.CLEAR)


MANY_HEADS = MIXED._replace(heads=71, kv_heads=1, head_dim=64)
MANY_HEADS_CASE: dict[str, Any] = dict(heads=71, kv_heads=1, head_dim=64, window_size=(-1, -1), bounds=True)


@pytest.mark.parametrize(
    ("call", "dialects"),
    [
        (MANY_HEADS, "portable Hopper"),
        (MANY_HEADS._replace(tokens=2048 + 64), "portable Hopper portable"),  # one may be a draft
        (MANY_HEADS._replace(heads=256, kv_heads=2, head_dim=128), "portable Hopper"),
        (MANY_HEADS._replace(heads=256, kv_heads=2, head_dim=128, tokens=2048 + 64), "portable Hopper"),
        (MANY_HEADS._replace(packed=True, rows_per_page=1, boxable=False), "portable Hopper"),
        (MANY_HEADS._replace(tokens=64 * 128), "Hopper"),
        (MANY_HEADS._replace(only="prefill"), "Hopper"),
        (MANY_HEADS._replace(max_seqlen_q=2048 + 63), "portable portable"),  # all may be drafts
        (MANY_HEADS._replace(max_seqlen_q=100), "portable portable"),
        (MANY_HEADS._replace(tokens=64, max_seqlen_q=1), "portable"),
        (MANY_HEADS._replace(batch_invariant=True), "portable portable"),
    ],
    ids=str,
)
def test_decodes_of_more_heads_than_a_block_has_rows_are_left_to_the_portable_kernel(
    call: Problem, dialects: str
) -> None:
    launches = planner.plan(call).launches
    assert dialects.split() == ["portable" if x.pipe is None else "Hopper" for x in launches]
    if dialects.startswith("portable Hopper"):
        few, blocks, *drafts = launches
        served = [(x.shortest, x.longest) for x in (few, *drafts, blocks)]
        assert served == [(0, 1), *[(2, 35)] * len(drafts), (2 + 34 * len(drafts), UNBOUNDED)]
        assert (few.shape.LEADS, blocks.pipe.FOLLOWS) == (True, True)
        assert [x.shape.CLEAR for x in launches] == [False, True, False][: len(launches)]
        assert blocks.pipe.PARTS > 1


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.skipif(simulator.SIMULATES, reason="portable kernels are not simulated")
@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(dtype=torch.float16, softcap=20.0, alibi=True),
        dict(head_dim=64, heads=64),
        dict(cache_dtype=E4M3, scales="per_head"),
        dict(cache_dtype=E4M3, scales="per_head", head_dim=64, lse=False),
        dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=torch.bfloat16, scales="per_head"),
        dict(new=True),
        dict(only="prefill"),
        MANY_HEADS_CASE,
        MANY_HEADS_CASE | dict(heads=128, head_dim=128, cache_dtype=E4M3, scales="per_head", window_size=(2000, -1)),
        MANY_HEADS_CASE | dict(new=True, alibi=True, lse=False),
        MANY_HEADS_CASE | dict(layout="x", head_dim=128),
    ],
    ids=str,
)
def test_launches_of_both_dialects_serve_a_batch_together(fields: dict[str, Any]) -> None:
    """Decodes, drafts on both sides of what a portable block holds, chunks, no queries, no keys."""
    queries = (1, 300, 0, 2, 1, 4, 5, 700, 1, 17) + (1,) * 60
    keys = (500, 300, 70, 900, 0, 64, 4000, 700, 1, 130) + tuple(range(30, 2430, 40))
    usual = dict(query_lens=queries, seq_lens=keys, window_size=(127, -1), sinks=True, padding=3)
    case = sized(str(fields), **usual | fields)
    launches = planner.plan(problem_of(build(case, DEVICE))).launches
    assert [x.pipe is None for x in launches[:2]] == [True, False]
    assert len(launches) == (3 if fields.get("heads") == 71 else 2)
    run(case, DEVICE)
    run(case, DEVICE)


def test_long_sequences_of_uneven_batches_may_be_cut() -> None:
    """One that decodes may have as many keys as all others, and no other blocks."""
    for keys, may in ((4096, False), (5000, True)):
        call = MIXED._replace(tokens=64 * 1000, max_seqlen_q=5000, max_seqlen_k=keys)
        (launch,) = hopper.launches(call)
        assert may == launch.shape.SPLIT
        (launch,) = hopper.launches(call._replace(alibi=True))
        assert (1 if may else 3) == launch.pipe.CONSUMERS, "three would be too much code with what is cut"
    (launch,) = hopper.launches(even(64, 200, 5000))
    assert not launch.shape.SPLIT


def test_what_the_host_does_not_know_is_taken_for_likely() -> None:
    """Without bounds one sequence may have all queries; on average they have not."""
    call = even(64, 12800, 2048)._replace(tokens=12800)
    (launch,) = hopper.launches(call)
    assert (launch.pipe.CONSUMERS, launch.pipe.ROWS) == (1, 128), "no copies for queries of 200 tokens"
    (launch,) = hopper.launches(call._replace(head_dim=64, tokens=64 * 40, max_seqlen_q=64 * 40, max_seqlen_k=500))
    assert launch.pipe.ROWS == 128, "blocks of four warpgroups would be half empty"
    assert shares_launch(MIXED._replace(heads=512, seqs=4, **E4M3_CACHE), 0, 1).least == 4, (
        "a sequence has one block of few"
    )
