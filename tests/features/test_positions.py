"""Queries at positions of their own: nodes of a tree under a window and ALiBi."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import paged_attn
from paged_attn import reference
from paged_attn.explain.host_schedule import cut
from paged_attn.kernels.common.bounds import row_tile, visible_range
from paged_attn.kernels.common.records import Block, Modifiers
from paged_attn.planning import planner
from tests.explain.asked import ask
from tests.support.bad_input import refuses
from tests.support.cases import BAD_PAGE, E4M3, Case, build, compare, run
from tests.support.one_sequence import attend, random_qkv
from tests.support.trees import assert_branches, bias_of, branches, depths, path_to, random_tree, with_tree

FP16, BF16 = torch.float16, torch.bfloat16
Cut = Callable[..., None]
ISSUE = (-1, 0, 0, 1, 1)  # nodes 0 / 1, 2 / 3, 4

# A tree that begins in the middle of a tile, and is several blocks; one across the border of two; some of no context;
# decodes, and plain ones between.
TREES = {"query_lens": (37, 1, 0, 9, 5, 2), "seq_lens": (87, 67, 9, 66, 5, 1)}
FEW = {"query_lens": (9, 1, 2), "seq_lens": (66, 67, 40)}
DRAFT = {"query_lens": (5, 5, 3), "seq_lens": (35, 69, 5)}
WINDOWS = [(0, -1), (3, -1), (12, -1), (31, -1), (-1, -1)]


# ---- the reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_branch_of_a_tree_is_a_plain_sequence_to_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    nodes, context = rng.randint(1, 12), rng.choice([0, 1, 7, 30])
    parents = random_tree(rng, nodes)
    options: dict[str, Any] = {"window_size": (rng.choice([-1, 0, 2, 5, 12]), -1)}
    if seed % 2:
        options["alibi_slopes"] = torch.rand(4) + 0.1
    q, k, v = random_qkv(nodes, context + nodes)
    positions = torch.tensor(depths(parents)) + context
    out = attend(q, k, v, qq_bias=bias_of(parents), query_positions=positions, **options)
    for node in range(nodes):
        path = path_to(parents, node)
        own = [*range(context), *(context + i for i in path)]
        torch.testing.assert_close(out[path], attend(q[path], k[own], v[own], **options))


def test_positions_move_windows_and_alibi_but_not_causality() -> None:
    """Scores are 0: the mean of what is seen.  Keys 0, 1 of the context, then queries at 2, 3, 3 by position."""
    q, k, v = torch.zeros(3, 1, 1), torch.zeros(5, 1, 1), torch.tensor([1.0, 2, 4, 8, 16]).view(5, 1, 1)
    positions = torch.tensor([2, 3, 3])

    def means(**options: Any) -> list[float]:
        return attend(q, k, v, query_positions=positions, **options)[:, 0, 0].tolist()

    assert means(window_size=(1, -1)) == pytest.approx([3, 6, (4 + 8 + 16) / 3])
    assert means(window_size=(0, -1)) == pytest.approx([4, 8, 12])
    assert means(window_size=(1, 0), causal=False) == pytest.approx([3, (4 + 8 + 16) / 3, (4 + 8 + 16) / 3])
    assert means(window_size=(0, 1), causal=False) == pytest.approx([(4 + 8 + 16) / 3, 12, 12])
    weights = torch.tensor([-3.0, -2, -1, 0, 0]).exp()  # of the last query, at 3
    wanted = float((weights * v[:, 0, 0]).sum() / weights.sum())
    assert means(alibi_slopes=torch.ones(1))[2] == pytest.approx(wanted)


# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 3])
def test_a_window_cuts_at_depths_of_a_tree(segments: int, device: str, cut: Cut) -> None:
    """Window 12 behind a context of 30: without positions nodes 2, 3 and 4 are off by 0.2 to 1."""
    cut(segments)
    case = Case("issue", (5,), (35,), window_size=(11, -1))
    inputs = with_tree(build(case, device), ISSUE)
    out, _ = paged_attn.paged_attention(**inputs)
    assert_branches(out, inputs, ISSUE)
    slots, _ = paged_attn.paged_attention(**inputs | {"query_positions": None})
    off = [float((slots[t[-1]] - want[-1]).abs().max()) for t, want, _ in branches(inputs, ISSUE)]
    assert max(off[:2]) < 1e-5
    assert min(off[2:]) > 0.01


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_branch_is_a_plain_sequence(window: tuple[int, int], alibi: bool, device: str, cut: Cut) -> None:
    for seed in range(2):
        cut(segments=1 + 2 * seed)
        parents = random_tree(random.Random(f"{window} {seed}"), 9)
        case = Case("tree", **FEW, window_size=window, alibi=alibi, page_size=12, sinks=seed == 1, seed=seed)
        inputs = with_tree(build(case, device), parents)
        out, _ = paged_attn.paged_attention(**inputs, check=True)
        assert_branches(out, inputs, parents)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_size": (20, -1)},
    "window of the own position": {"window_size": (0, -1)},
    "window both ways, causal": {"window_size": (5, 2)},
    "window both ways": {"window_size": (9, 4), "causal": False},
    "window to the right": {"window_size": (-1, 0), "causal": False},
    "alibi": {"alibi": True},
    "alibi, not causal": {"alibi": True, "causal": False},
    "no window": {},
    "softcap, window, alibi": {"softcap": 2.0, "window_size": (20, -1), "alibi": True},
    "tree, window, alibi": {"qq_bias": 30, "tree": True, "window_size": (6, -1), "alibi": True},
    "new, window": {"new": True, "window_size": (6, -1)},
    "new, alibi, window both ways": {"new": True, "alibi": True, "window_size": (9, 4), "causal": False},
    "x, page 24, window": {"layout": "x", "page_size": 24, "window_size": (20, -1), "alibi": True},
    "hnd, sinks, window": {"layout": "HND", "sinks": True, "window_size": (3, -1)},
    "fp8 cache": {"dtype": FP16, "cache_dtype": E4M3, "scales": "per_head", "window_size": (6, -1), "alibi": True},
    "fp8": {"dtype": E4M3, "scales": "tensor", "window_size": (6, 1), "causal": False},
    "invariant": {"batch_invariant": True, "window_size": (6, -1), "alibi": True, "sinks": True},
    "prefill only": {"only": "prefill", "padding": 3, "window_size": (6, -1)},
    "decode only": {"only": "decode", "padding": 3, "window_size": (6, -1), "alibi": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, device: str, cut: Cut) -> None:
    for segments in (1, 3):
        cut(segments)
        run(Case(name, **TREES, positions="tree", **FEATURES[name]), device)


@pytest.mark.parametrize("name", FEATURES)
def test_plans_as_they_are_take_positions(name: str, device: str) -> None:
    run(Case(name, **TREES, positions="tree", **FEATURES[name]), device)


def test_a_row_may_see_nothing_of_tiles_whose_slots_all_see(device: str, cut: Cut) -> None:
    """The last of 112 queries stands alone, far behind the others: of their keys, whole tiles, it sees none."""
    cut(segments=1)
    case = Case("alone", (112,), (112,), layout="x", window_size=(99, -1))
    positions = torch.zeros(112, dtype=torch.int32, device=device)
    positions[-1] = 111
    run(case, device, query_positions=positions)


def test_positions_may_be_int64(device: str, cut: Cut) -> None:
    cut(segments=2)
    case = Case("int64", **TREES, positions="tree", window_size=(6, -1), alibi=True)
    run(case, device, query_positions=build(case, device)["query_positions"].long())


@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("window", [(-1, -1), (20, -1)], ids=str)
def test_places_as_positions_change_no_bit(
    window: tuple[int, int], segments: int, invariant: bool, device: str, cut: Cut
) -> None:
    cut(segments)
    case = Case("slots", **TREES, window_size=window, alibi=True, positions="slots", batch_invariant=invariant)
    inputs = build(case, device)
    with_positions = [x.clone() for x in paged_attn.paged_attention(**inputs)]
    without = paged_attn.paged_attention(**inputs | {"query_positions": None})
    assert all(map(torch.equal, with_positions, without))


def test_a_tree_has_the_same_bits_alone_and_in_a_batch(device: str) -> None:
    case = Case("batch", **TREES, positions="tree", window_size=(6, -1), alibi=True, batch_invariant=True)
    inputs = build(case, device)
    out, _ = paged_attn.paged_attention(**inputs)
    token = 0
    for seq, queries in enumerate(case.query_lens):
        rows = slice(token, token + queries)
        one = {name: inputs[name][rows] for name in ("q", "query_positions")}
        one |= {name: inputs[name][seq : seq + 1] for name in ("seq_lens", "page_table")}
        one |= {"cu_seqlens_q": torch.tensor([0, queries], dtype=torch.int32, device=device), "out": None}
        alone, _ = paged_attn.paged_attention(**inputs | one)
        assert torch.equal(alone, out[rows])
        token += queries


# ---- what is visited -----------------------------------------------------------------------------


@triton.jit
def ranges(out, firsts, lasts, positions, seq_len, query_len, first, left, ROWS: tl.constexpr, S: tl.constexpr):
    mods = Modifiers(left, 0, None, None, None, None, None, None, positions, None)
    block = Block(0, 0, query_len, seq_len, first, 0)
    span = visible_range(block, mods, ROWS)
    tl.store(out, span.lo)
    tl.store(out + 1, span.hi)
    tl.store(out + 2, span.full_lo)
    tl.store(out + 3, span.full_hi)
    row = tl.arange(0, ROWS)
    rows = row_tile(block, row, mods, ROWS, S)
    tl.store(firsts + row, rows.first_key)
    tl.store(lasts + row, rows.last_key)


@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.parametrize("left", [0, 3, 9, 40])
@pytest.mark.parametrize("context", [0, 5, 30])
def test_a_block_visits_what_rows_may_see_at_any_position_and_no_more(
    context: int, left: int, first: int, device: str
) -> None:
    """Bounds are those of positions at their least, context, and at their most, the places."""
    queries, rows = 16, 8
    shape = planner.plan(ask(queries="16", keys="64", device="sm80").problem).launches[0].shape._replace(GROUP=1)
    firsts, lasts = torch.zeros(2, rows, dtype=torch.int32, device=device)
    found = torch.zeros(4, dtype=torch.int32, device=device)
    seen = []
    for positions in (torch.full((queries,), context), torch.arange(context, context + queries)):
        positions = positions.to(device, torch.int32)
        ranges[(1,)](found, firsts, lasts, positions, context + queries, queries, first, left, rows, shape)
        seen.append(firsts.tolist())
    lo, hi, full_lo, full_hi = found.tolist()
    assert (lo, full_lo) == (min(seen[0]), max(seen[1]))
    assert (hi, full_hi) == (int(lasts.max()) + 1, int(lasts.min()) + 1)


def test_explain_counts_tiles_from_where_a_node_of_depth_0_sees() -> None:
    """256 queries behind 1024 keys, window 128, in blocks of 32 over tiles of 64: all begin at key 896."""
    options = dict(queries="256", keys="1280", batch=64, window=(128, 0), device="sm80")
    plain, tree = ask(**options), ask(**options, query_positions=True)
    (launch,) = planner.plan(tree.problem).launches
    tokens, tile = launch.shape.BLOCK_Q, launch.shape.TILE
    ends = [-(-(1024 + first + tokens) // tile) for first in range(0, 256, tokens)]
    assert cut(launch, tree.batch).tiles == 64 * sum(end - 896 // tile for end in ends)
    begins = [(896 + first) // tile for first in range(0, 256, tokens)]
    assert cut(launch, plain.batch).tiles == 64 * sum(map(int.__sub__, ends, begins))


# ---- the checked mode ----------------------------------------------------------------------------

CHECKED = Case("checked", (1, 4, 2, 0), (20, 4, 33, 0), page_size=8, padding=1, positions="tree", window_size=(8, -1))


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "token, number, text",
    [
        (0, 20, "query_positions[0] = 20 (sequence 0, query 0) must be at least 19 and at most 19"),
        (1, -1, "query_positions[1] = -1 (sequence 1, query 0) must be at least 0 and at most 0"),
        (3, 3, "query_positions[3] = 3 (sequence 1, query 2) must be at least 0 and at most 2"),
        (6, 30, "query_positions[6] = 30 (sequence 2, query 1) must be at least 31 and at most 32"),
        (6, BAD_PAGE, "query_positions[6] = 2147483647 (sequence 2, query 1) must be at least 31 and at most 32"),
    ],
)
def test_a_position_outside_its_bounds_is_named(
    token: int, number: int, text: str, checked: dict[str, Any], device: str
) -> None:
    inputs = build(CHECKED, device)
    inputs["query_positions"][token] = number
    refuses(paged_attn.paged_attention, inputs | checked, ValueError, text)


def test_positions_of_padding_and_of_sequences_left_out_may_be_anything(device: str) -> None:
    case = replace(CHECKED, only="decode")
    inputs = build(case, device)
    assert inputs["query_positions"].tolist() == [19, *[BAD_PAGE] * 7]
    out, lse = paged_attn.paged_attention(**inputs, check=True)
    compare(case, out, lse, inputs)
    run(CHECKED, device, check=True)


def test_the_operator_takes_positions(device: str) -> None:
    case = Case("operator", **DRAFT, positions="tree", window_size=(6, -1), lse=False)
    inputs = {name: x for name, x in build(case, device).items() if name != "return_lse"}
    torch.ops.paged_attn.attention(**inputs)
    compare(case, inputs["out"], None, inputs)


def test_a_call_again_takes_other_positions(device: str) -> None:
    case = Case("again", **DRAFT, window_size=(6, -1), alibi=True, lse=False)
    inputs = build(case, device)
    for seed in range(4):
        other = build(replace(case, positions="tree", seed=seed), device)["query_positions"]
        given = inputs | {"query_positions": other if seed < 3 else None}
        compare(case, paged_attn.paged_attention(**given), None, given)
        assert seed == 3 or not torch.equal(other, build(replace(case, positions="slots"), device)["query_positions"])


def test_the_reference_writes_what_it_returns() -> None:
    inputs = build(Case("written", **DRAFT, positions="tree", window_size=(6, -1), dtype=BF16, lse=False))
    wanted = reference.paged_attention(**inputs | {"out": None})
    torch.testing.assert_close(reference.paged_attention(**inputs), wanted.to(BF16))
