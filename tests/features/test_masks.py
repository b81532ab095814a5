"""Who sees what: each mask beside everything that it meets, through the portable kernels.

Which tiles are visited and which need no mask is counted in tests/kernels/common/test_visited_tiles.py; the Hopper
kernels have the same masks in tests/kernels/hopper/test_hopper_masks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import paged_attn
from paged_attn.explain import explain
from paged_attn.explain.host_schedule import cut as cut_of
from paged_attn.planning import planner
from paged_attn.records.key_bounds import KeyBounds, page_ids, visible_keys, visible_pairs
from tests.explain.asked import ask
from tests.support.bad_input import refuses
from tests.support.cases import BAD_PAGE, E4M3, Case, build, compare, run
from tests.support.chunks import attend as call
from tests.support.chunks import chunked, in_order, same, whole  # noqa: F401, a fixture of all tests
from tests.support.masks import BY_HAND, MASKS
from tests.support.one_sequence import attend, random_qkv

FP16 = torch.float16
Cut = Callable[..., None]

# Blocks of several tiles and pieces; queries that begin and end beside borders of tiles of 32 and of chunks; decodes,
# nobody, and queries before key 0.
LENGTHS = {"query_lens": (37, 1, 0, 9, 64, 1, 3), "seq_lens": (87, 67, 9, 66, 64, 1, 2)}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks, softcap, alibi": dict(sinks=True, softcap=2.0, alibi=True),
    "tree": dict(qq_bias=30, tree=True),
    "tree at depths": dict(qq_bias=30, tree=True, positions="tree", alibi=True),
    "new": dict(new=True, alibi=True),
    "x-packed, page 24": dict(layout="x", page_size=24, sinks=True),
    "hnd, padding, prefill only": dict(layout="HND", padding=3, only="prefill"),
    "decode only": dict(padding=3, only="decode", sinks=True),
    "fp8 cache": dict(dtype=FP16, cache_dtype=E4M3, scales="per_head"),
    "fp8": dict(dtype=E4M3, scales="tensor"),
    "invariant": dict(batch_invariant=True, sinks=True, alibi=True),
    "keys that hold their values": dict(latent=True, head_dim=48, value_dim=32, sinks=True),
    "ragged page table": dict(table="ragged", page_size=8),
    "a user's function": dict(score_mod="relative"),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_beside_features(mask: str, feature: str, device: str, cut: Cut) -> None:
    """In one piece, and with keys cut over three programs."""
    for segments in (1, 3):
        cut(segments)
        run(Case(f"{mask}, {feature}", **LENGTHS, **FEATURES[feature] | MASKS[mask]), device)


@pytest.mark.parametrize("mask", MASKS)
def test_plans_as_they_are_take_a_mask(mask: str, device: str) -> None:
    run(Case(mask, **LENGTHS, **MASKS[mask]), device)
    legal = {name: lengths[:-1] for name, lengths in LENGTHS.items()}
    run(Case(mask, **legal, **MASKS[mask], check=True), device)


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_shows_a_query_the_same_in_any_batch_and_any_chunks_of_prefill(mask: str, device: str) -> None:
    fields = MASKS[mask]
    if (
        not fields.get("causal", True)
        or fields.get("causal_by_seq")
        or fields.get("prefix", 0) > 11
        or "spans" in fields
    ):
        pytest.skip("what a query sees depends on the chunk of prefill that it is in")
    case = Case(mask, (37, 64, 9), (87, 110, 66), batch_invariant=True, sinks=True, **fields)
    inputs = build(case, device)
    want = call(case, inputs, whole(case))
    for chunks in chunked(case, 16):
        own = {"prefix_lens": inputs["prefix_lens"][[seq for seq, *_ in chunks]]} if case.prefix else {}
        same(case, call(case, inputs, chunks, **own), chunks, want)


def test_every_combination_is_of_these_lengths() -> None:
    """A cut launch of theirs has blocks of several tiles, of which some are whole, and decodes."""
    assert max(LENGTHS["seq_lens"]) > 2 * 32
    assert {0, 1} < {*LENGTHS["query_lens"]}
    assert any(queries > keys for queries, keys in zip(LENGTHS["query_lens"], LENGTHS["seq_lens"]))


# ---- causal or not, by sequence ----------------------------------------------------------------------------------


def test_a_sequence_is_causal_or_not(device: str) -> None:
    """As two calls, bit for bit; a window bounds what one that is not causal sees behind itself."""
    for window in ((-1, -1), (9, 2)):
        case = Case("by sequence", (5, 5, 1), (35, 20, 7), window_size=window, lse=False, own_out=True)
        inputs = build(case, device)
        which = torch.tensor([True, False, False], device=device)
        out = paged_attn.paged_attention(**inputs | {"causal": which}, check=True)
        for causal, rows in ((True, slice(0, 5)), (False, slice(5, 11))):
            assert torch.equal(out[rows], paged_attn.paged_attention(**inputs | {"causal": causal})[rows])


def test_the_same_call_takes_other_sequences_as_causal(device: str) -> None:
    case = Case("again", (5, 5), (35, 20), lse=False)
    inputs = build(case, device)
    for which in ((True, False), (False, True), (True, True), (False, False)):
        given = inputs | {"causal": torch.tensor(which, device=device)}
        compare(case, paged_attn.paged_attention(**given), None, given)
    compare(case, paged_attn.paged_attention(**inputs), None, inputs)


def test_the_operator_has_a_name_of_its_own_for_them(device: str) -> None:
    case = Case("operator", (5, 5), (35, 20), causal_by_seq=True, lse=False)
    inputs = {name: x for name, x in build(case, device).items() if name != "return_lse"}
    torch.ops.paged_attn.attention(**inputs | {"causal": False, "causal_seqs": inputs["causal"]})
    compare(case, inputs["out"], None, inputs)


# ---- prefixes ----------------------------------------------------------------------------------------------------


def test_a_prefix_is_visible_to_all_queries_in_both_directions() -> None:
    """Keys 0 ... 5, three queries, a prefix of 5, of which one is a query's; a window of one key."""
    of = lambda n: {"prefix_lens": torch.tensor([n])}  # noqa: E731
    assert means(3, 6, **of(5)) == [0b11111, 0b11111, 0b111111]
    assert means(3, 6, **of(2), window_size=(0, -1)) == [0b1011, 0b10011, 0b100011]
    assert means(3, 6, **of(5), window_size=(0, -1)) == [0b11111, 0b11111, 0b111111]
    assert means(3, 6, **of(1), chunk=4) == [0b1111, 0b10001, 0b110001]
    assert means(3, 6, **of(99)) == [0b111111] * 3
    assert means(3, 6, **of(-1)) == means(3, 6, **of(0)) == means(3, 6)


def test_pages_between_a_prefix_and_a_window_may_be_anything(device: str) -> None:
    """Pages of 8: a prefix of 9 keys and a window from key 36 on leave pages 2 and 3 out."""
    case = Case("pages", (1, 1), (40, 40), page_size=8, window_size=(3, -1), prefix=9)
    inputs = build(case, device)
    assert inputs["page_table"][0, :5].eq(BAD_PAGE).tolist() == [False, False, True, True, False]
    compare(case, *paged_attn.paged_attention(**inputs, check=True), inputs)
    inputs["page_table"][0, 1] = BAD_PAGE
    text = f"page_table[0, 1] = 2147483647, but the cache has {len(inputs['k_cache'])} pages"
    refuses(paged_attn.paged_attention, inputs | {"check": True}, ValueError, text)


@pytest.mark.parametrize("check", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("mask", [dict(window_size=(0, -1)), dict(chunk=2)], ids=["window", "chunk"])
def test_the_page_of_a_window_that_begins_with_the_new_keys_may_be_anything(
    mask: dict[str, Any], check: bool, device: str
) -> None:
    """Of 16 cached keys, 12 to a page, the first is a prefix; whatever else is seen is new, beside keys of page 1."""
    case = Case("new", (48,), (64,), page_size=12, new=True, prefix=1, check=check, **mask)
    inputs = build(case, device)
    assert inputs["page_table"][0, 1] == BAD_PAGE
    run(case, device)


def test_hopper_leaves_a_prefix_behind_a_window_to_the_portable_kernels() -> None:
    text = "which do not take a prefix that stays visible behind a window or a chunk"
    for options in (dict(window=(99, -1)), dict(chunk=100)):
        assert any(text in line for _, line in explain.explain(ask(prefix_lens=True, **options)))
    assert not any(text in line for _, line in explain.explain(ask(prefix_lens=True)))


# ---- spans -------------------------------------------------------------------------------------------------------


def test_queries_of_a_span_see_all_of_it() -> None:
    """Keys 0 ... 5, of which 2 3 4 are an image; queries from 1 on."""
    of = lambda *spans: {"spans": torch.tensor([spans])}  # noqa: E731
    assert means(5, 6, **of((2, 5))) == [0b11, 0b11111, 0b11111, 0b11111, 0b111111]
    assert means(5, 6, **of((2, 5)), window_size=(1, -1)) == [0b11, 0b11110, 0b11100, 0b11100, 0b110000]
    clipped = dict(clip_spans=True)
    assert means(5, 6, **of((2, 5)), window_size=(1, -1), **clipped) == [0b11, 0b11110, 0b11100, 0b11000, 0b110000]
    assert means(5, 6, **of((2, 5)), window_size=(1, 1), **clipped) == [0b11, 0b1110, 0b11100, 0b11000, 0b110000]
    assert means(5, 6, **of((2, 5)), chunk=4, **clipped) == [0b11, 0b1111, 0b1111, 0b10000, 0b110000]
    assert means(5, 6, **of((2, 5)), chunk=4) == [0b11, 0b11111, 0b11111, 0b11100, 0b110000]
    assert means(5, 6, **of((-1, -1), (3, 3), (5, 99))) == means(5, 6)
    assert means(3, 6, **of((0, 4), (4, 6)), window_size=(0, -1)) == [0b1111, 0b110000, 0b110000]


def test_pages_of_a_span_of_the_first_query_are_read_from_its_begin(device: str) -> None:
    """Pages of 8; a window of 3 keys, and an image from key 17 on, of which some are queries."""
    case = Case("pages", (4,), (40,), page_size=8, window_size=(2, -1))
    wide = build(replace(case, window_size=(-1, -1)), device)
    inputs = wide | {"window_size": (2, -1), "spans": torch.tensor([[[17, 38]]], dtype=torch.int32, device=device)}
    inputs["page_table"][0, :2] = BAD_PAGE
    compare(case, *paged_attn.paged_attention(**inputs, check=True), inputs)
    inputs["page_table"][0, 2] = BAD_PAGE
    text = f"page_table[0, 2] = 2147483647, but the cache has {len(inputs['k_cache'])} pages"
    refuses(paged_attn.paged_attention, inputs | {"check": True}, ValueError, text)
    clipped = inputs | {"clip_spans": True}
    clipped["page_table"][0, 3] = BAD_PAGE
    compare(case, *paged_attn.paged_attention(**clipped, check=True), clipped)


@pytest.mark.parametrize("span", [[-1, 4], [5, 3], [-2, -2]], ids=str)
def test_a_checked_call_refuses_a_span_that_is_none(span: list[int], device: str) -> None:
    case = Case("bad", (4, 2), (40, 20), spans=1)
    inputs = build(case, device)
    inputs["spans"][1, 1] = torch.tensor(span)
    text = f"spans[1, 1] = {span}, but a span begins at 0 or later and ends no earlier, or is [-1, -1]"
    refuses(paged_attn.paged_attention, inputs | {"check": True}, ValueError, text)


def test_spans_may_be_slices_of_wider_tensors_and_none_at_all(device: str) -> None:
    case = Case("slices", (5, 9), (35, 9), spans=2, window_size=(4, -1))
    inputs = build(case, device)
    spans = torch.full((2, 6, 2), 7, dtype=torch.int32, device=device)[:, ::2]
    spans[:] = inputs["spans"]
    compare(case, *paged_attn.paged_attention(**inputs | {"spans": spans}), inputs)
    none = inputs | {"spans": spans[:, :0]}
    compare(case, *paged_attn.paged_attention(**none, check=True), none)


# ---- chunks ------------------------------------------------------------------------------------------------------


def means(queries: int, keys: int, heads: int = 1, **options: Any) -> list[Any]:
    """Scores are 0, values powers of two: the sum of the values that each query sees, of the reference.

    Of several heads a list of theirs for each query.
    """
    q, k, v = torch.zeros(queries, heads, 1), torch.zeros(keys, 1, 1), 2.0 ** torch.arange(keys).view(keys, 1, 1)
    out, lse = attend(q, k, v, return_lse=True, **options)
    sums: list[Any] = (out[..., 0] * lse.exp()).round().tolist()
    return [x[0] for x in sums] if heads == 1 else sums


@pytest.mark.parametrize("queries, keys, options, seen", BY_HAND, ids=str)
def test_a_query_sees_what_is_said_by_hand(queries: int, keys: int, options: dict[str, Any], seen: list[int]) -> None:
    assert means(queries, keys, **options) == seen


def test_queries_of_a_chunk_are_a_sequence_of_their_own() -> None:
    q, k, v = random_qkv(14, 19)
    out = attend(q, k, v, chunk=8, alibi_slopes=torch.rand(4))
    for begin, end in ((5, 8), (8, 16), (16, 19)):
        own, first = slice(begin - 5, end - 5), begin // 8 * 8
        alone = attend(q[own], k[first:end], v[first:end])
        torch.testing.assert_close(attend(q, k, v, chunk=8)[own], alone)
    assert out.isfinite().all()


def test_nodes_of_a_tree_are_in_the_chunks_of_their_positions() -> None:
    """Two branches behind keys 0 1, chunks of 3: of positions 2 3 | 2 3 the second and the last see one key."""
    q, k, v = torch.zeros(4, 1, 1), torch.zeros(6, 1, 1), torch.tensor([1.0, 2, 4, 8, 16, 32]).view(6, 1, 1)
    out, lse = attend(q, k, v, query_positions=torch.tensor([2, 3, 2, 3]), chunk=3, return_lse=True)
    assert (out[:, 0, 0] * lse[:, 0].exp()).round().tolist() == [1 + 2 + 4, 8, 1 + 2 + 4 + 16, 8 + 32]


def test_pages_before_the_chunk_of_the_first_query_may_be_anything(device: str) -> None:
    """The chunk of 16 that holds 35, in pages of 8: pages 0 ... 3 are none."""
    case = Case("pages", (3,), (38,), page_size=8, chunk=16)
    inputs = build(case, device)
    assert inputs["page_table"][0, :5].eq(BAD_PAGE).tolist() == [True] * 4 + [False]
    compare(case, *paged_attn.paged_attention(**inputs, check=True), inputs)
    inputs["page_table"][0, 4] = BAD_PAGE
    text = "page_table[0, 4] = 2147483647, but the cache has 4 pages"
    refuses(paged_attn.paged_attention, inputs | {"check": True}, ValueError, text)


def test_work_is_that_of_the_chunks() -> None:
    """5 queries behind 3 keys, chunks of 4: keys 0 ... 3 | 4 ... 7, of which the first query sees four."""
    assert visible_keys(5, 8, KeyBounds(right=0, chunk=4)) == 8
    assert visible_keys(3, 8, KeyBounds(right=0, chunk=4)) == 4
    assert visible_pairs(5, 8, KeyBounds(right=0, chunk=4)) == 4 + 1 + 2 + 3 + 4
    assert visible_pairs(5, 8, KeyBounds(chunk=4)) == 4 * 5
    assert visible_pairs(5, 8, KeyBounds(left=1, right=0, chunk=4)) == 2 + 1 + 2 + 2 + 2
    assert page_ids(3, 8, 2, KeyBounds(right=0, chunk=4)) == 2


def test_explain_counts_the_tiles_of_chunks() -> None:
    """256 queries in blocks of 32 over tiles of 64, chunks of 128: 1, 1, 2, 2 of each chunk."""
    asked = ask(queries="256", keys="256", batch=64, chunk=128, device="sm80")
    (launch,) = planner.plan(asked.problem).launches
    assert cut_of(launch, asked.batch).tiles == 64 * 2 * (1 + 1 + 2 + 2)


def test_a_chunk_is_as_good_as_a_window_to_the_planner() -> None:
    assert ask(chunk=1024).problem == ask(window=(1023, -1)).problem
    assert ask(chunk=1024, window=(99, -1)).problem == ask(window=(99, -1)).problem


def test_the_operator_takes_chunks(device: str) -> None:
    case = Case("operator", (5, 1), (35, 20), chunk=16, lse=False)
    inputs = {name: x for name, x in build(case, device).items() if name != "return_lse"}
    torch.ops.paged_attn.attention(**inputs)
    compare(case, inputs["out"], None, inputs)


def test_another_chunk_is_another_call(device: str) -> None:
    case = Case("again", (5, 1), (35, 20), lse=False)
    inputs = build(case, device)
    for chunk in (16, 8, 16, None, 1):
        given = inputs | {"chunk": chunk}
        for _ in range(2):
            compare(case, paged_attn.paged_attention(**given), None, given)
    refuses(
        paged_attn.paged_attention, inputs | {"chunk": True}, TypeError, "chunk must be None or an int >= 1, got bool"
    )
