"""What the plans of the Hopper kernels promise; needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper.asm.weights import CAPS
from paged_attn.kernels.hopper.planning import coverage as hopper
from paged_attn.kernels.hopper.planning import operands
from paged_attn.kernels.hopper.planning.block_launches import blocks_launch
from paged_attn.kernels.hopper.planning.share_launches import shares_launch
from paged_attn.records.problem import Problem
from tests.kernels.hopper.planned import CALL, FP8, H200, MIXED, even
from tests.support.cases import Case, build, problem_of, rounds_weights


@pytest.mark.parametrize("group", [1, 3, 4, 7, 48, 64])
@pytest.mark.parametrize("query_box", [True, False])
def test_queries_of_any_group_come_as_boxes(group: int, query_box: bool) -> None:
    (launch,) = hopper.launches(CALL._replace(heads=8 * group, query_box=query_box))
    assert query_box == launch.pipe.QUERY_BOX


@pytest.mark.parametrize("page_size", [8, 24, 16, 128, 256, 544])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_boxes_are_whole_parts_of_pages_and_of_tiles(page_size: int, head_dim: int) -> None:
    for max_seqlen_q in (1, 16, 2048):
        (launch,) = hopper.launches(CALL._replace(page_size=page_size, head_dim=head_dim, max_seqlen_q=max_seqlen_q))
        assert page_size % launch.pipe.BOX == 0
        assert launch.shape.TILE // launch.pipe.LOADERS % launch.pipe.BOX == 0


def test_fp8_tiles_are_converted_for_the_products_that_queries_allow() -> None:
    assert blocks_launch(CALL, 0, False).pipe.CONVERT == operands.NONE
    assert blocks_launch(FP8, 0, False).pipe.CONVERT == operands.WIDEN_VALUES
    for change in (dict(lse=True), dict(query=torch.float16), dict(cache=torch.float8_e5m2)):
        pipe = blocks_launch(FP8._replace(**change), 0, False).pipe
        assert pipe.CONVERT == operands.WIDEN, (
            f"{change}: sums of 14 bits, or queries of more than two times four, show"
        )
        assert not pipe.FP8_KEYS
    both = FP8._replace(query=torch.float8_e4m3fn)
    assert blocks_launch(both, 0, False).pipe.CONVERT == operands.TRANSPOSE
    assert blocks_launch(both, 0, False).pipe.COARSE
    assert not blocks_launch(both._replace(lse=True), 0, False).pipe.COARSE, "log-sum-exps are of exact weights"
    assert blocks_launch(both._replace(heads=24), 0, False).pipe.CONVERT == operands.TRANSPOSE
    for change in (dict(query_box=False), dict(cache=torch.float8_e5m2)):
        assert not blocks_launch(both._replace(**change), 0, False).pipe.COARSE
        assert blocks_launch(both._replace(**change), 0, False).pipe.CONVERT == operands.WIDEN, change


def test_a_softcap_is_exact_where_its_error_would_show() -> None:
    """In log-sum-exps, in float16, and where no bit may depend on who asks."""
    capped = CALL._replace(softcap=30.0)
    assert blocks_launch(capped, 0, False).pipe.TANH
    assert not blocks_launch(CALL, 0, False).pipe.TANH, "kernels without a softcap are the same kernels"
    for change in (dict(lse=True), dict(query=torch.float16), dict(batch_invariant=True)):
        assert not any(x.pipe.TANH for x in hopper.launches(capped._replace(**change))), change
    assert not shares_launch(capped, 1, 1).pipe.TANH, "few rows divide"
    assert shares_launch(capped._replace(heads=128), 1, 1).pipe.TANH, "16 rows are no columns"


@pytest.mark.parametrize("group", [1, 8, 12, 16, 64])
@pytest.mark.parametrize("call", [CALL, FP8])
def test_a_block_holds_a_query_even_where_no_sequence_is_said_to_have_one(group: int, call: Problem) -> None:
    for only in (None, "prefill"):
        (launch,) = hopper.launches(call._replace(heads=8 * group, max_seqlen_q=0, only=only))
        assert 1 <= launch.shape.BLOCK_Q * group <= launch.shape.ROWS


@pytest.mark.parametrize(
    ("change", "rounds"),
    [
        (dict(), True),
        (dict(cache_dtype=torch.float8_e5m2), False),
        (dict(dtype=torch.bfloat16), False),
        (dict(heads=3), True),
        (dict(query_lens=(2,)), False),
        (dict(page_size=12), False),
        (dict(new=True), False),
    ],
    ids=str,
)
def test_results_are_held_to_fp8_weights_only_where_weights_are_fp8(change: dict[str, Any], rounds: bool) -> None:
    sizes: dict[str, Any] = dict(query_lens=(80,), seq_lens=(80,), heads=2, kv_heads=1, head_dim=64)
    fp8: dict[str, Any] = dict(dtype=torch.float8_e4m3fn, cache_dtype=torch.float8_e4m3fn)
    problem = problem_of(build(Case("fp8", **(sizes | fp8 | change))), H200)
    assert rounds_weights(problem._replace(compute=torch.float16)) == rounds  # the interpreter computes in float32


CAPPED = even(4, 4096, 4096)._replace(softcap=30.0)


@pytest.mark.parametrize(
    ("call", "terms", "tile", "loaders"),
    [
        (CAPPED, 3, 128, 2),
        (CAPPED._replace(page_size=128), 3, 128, 1),
        (CAPPED._replace(new=True, new_box=True), 3, 128, 2),
        (CAPPED._replace(max_seqlen_k=1024), 3, 64, 1),
        (CAPPED._replace(window_left=1000), 3, 64, 1),
        (CAPPED._replace(head_dim=64), 3, 64, 1),
        (CAPPED._replace(head_dim=64, lse=True), 0, 64, 1),
        (CAPPED._replace(head_dim=256), 0, 64, 1),
        (CAPPED._replace(lse=True), 5, 64, 1),
        (CAPPED._replace(compute=torch.float16, query=torch.float16, cache=torch.float16), 5, 64, 1),
        (CAPPED._replace(alibi=True), 0, 64, 1),
        (CAPPED._replace(qq_bias=True), 0, 64, 1),
        (CAPPED._replace(positive=False), 0, 64, 1),
        (CAPPED._replace(softcap=15.0), 0, 64, 1),
        (CAPPED._replace(softcap=22.0), 3, 128, 2),
        (CAPPED._replace(softcap=22.0, lse=True), 0, 64, 1),
        (even(4, 256, 4096)._replace(softcap=30.0, cache=torch.float8_e4m3fn, compute=torch.float16), 0, 64, 1),
        (CAPPED._replace(cache=torch.float8_e4m3fn, compute=torch.float16), 3, 128, 1),  # over a copy in 16 bits
        (MIXED._replace(softcap=30.0), 0, 64, 1),
        (CAPPED._replace(tokens=9000), 3, 128, 2),  # of uneven queries, but long
        (CAPPED._replace(batch_invariant=True), 0, 64, 1),
        (CAPPED._replace(softcap=0.0), 0, 128, 2),
    ],
)
def test_polynomials_cap_scores_where_these_meet_nothing_else(
    call: Problem, terms: int, tile: int, loaders: int
) -> None:
    (launch,) = hopper.launches(call)
    assert (terms, tile, loaders) == (launch.pipe.TERMS, launch.shape.TILE, launch.pipe.LOADERS)
    assert terms in (0, *CAPS)


@pytest.mark.parametrize(
    ("kv_heads", "call", "merged"),
    [
        (8, even(1, 32, 32768), True),  # 8 blocks for 132 programs
        (8, even(1, 64, 16384), True),
        (8, even(2, 64, 16384), False),  # 32: each is cut into four
        (8, even(2, 64, 16384)._replace(cache=torch.float8_e4m3fn), True),  # which join otherwise than in place
        (8, even(1, 128, 16384), False),
        (8, even(3, 32, 32768), False),  # as of four
        # uneven: as many as there may be
        (8, even(1, 64, 16384)._replace(seqs=2, tokens=128, max_seqlen_q=100), False),
        (1, even(1, 256, 16384), True),
        (1, even(1, 256, 256), False),  # none is cut
        (1, even(1, 4096, 8192)._replace(softcap=30.0, query=torch.float16, compute=torch.float16, lse=True), False),
    ],
    ids=str,
)
def test_pieces_of_few_blocks_are_joined_by_a_launch_of_its_own(kv_heads: int, call: Problem, merged: bool) -> None:
    launch = blocks_launch(call._replace(heads=4 * kv_heads, kv_heads=kv_heads), 0, False)
    assert (launch.shape.MERGE == 0, launch.merge is not None) == (merged, merged)
    if merged:
        assert (launch.merge.skip, launch.merge.stride) == (launch.shape.ROWS, launch.shape.ROWS)
        need = hopper.need_of(launch)
        assert (need.counters, need.two) == (hopper.COUNTERS_PER_LAUNCH, True)
        assert need.states == launch.slots * launch.shape.LIVE * (launch.shape.DIM + 2) + launch.cuts


@pytest.mark.parametrize("heads", [1, 3, 5, 31, 64])
def test_blocks_have_whole_groups(heads: int) -> None:
    """A consumer of 128 rows may have more of them than two of 64 would."""
    (launch,) = hopper.launches(even(8, 1024, 1024)._replace(heads=8 * heads))
    assert (launch.pipe.ROWS, launch.pipe.PARTS) == (128, 1)
    assert 128 // heads == launch.shape.BLOCK_Q


@pytest.mark.parametrize(("heads", "parts"), [(12, 3), (24, 3), (40, 5), (48, 3), (56, 7), (65, 65), (96, 3), (128, 2)])
def test_or_parts_of_a_power_of_two_where_these_leave_rows_empty(heads: int, parts: int) -> None:
    call = even(8, 1024, 1024)._replace(heads=heads, kv_heads=1)
    (launch,) = hopper.launches(call)
    assert (parts, parts, heads // parts) == (launch.pipe.PARTS, launch.shape.KV_HEADS, launch.shape.GROUP)
    assert launch.shape.BLOCK_Q * launch.shape.GROUP == launch.shape.ROWS
    for change in (dict(tokens=1000), dict(max_seqlen_q=100, tokens=800)):
        assert hopper.uncovered(call._replace(**change)) or hopper.launches(call._replace(**change))[0].pipe.PARTS == 1


@pytest.mark.parametrize(
    ("change", "tile", "split"),
    [
        (dict(), 128, True),
        (dict(window_left=1024), 128, True),
        (dict(window_left=1023), 64, False),
        (dict(window_left=0), 64, False),
        (dict(window_left=1023, new=True, new_box=True), 64, False),
        (dict(window_left=1023, softcap=50.0), 64, False),
        (dict(window_left=1023, softcap=50.0, alibi=True), 64, True),  # whose loop has too much code
        (dict(window_left=1023, head_dim=64, heads=8, kv_heads=1), 64, False),
        (dict(window_left=1023, head_dim=256), 64, True),
        (dict(window_left=200, head_dim=256), 64, False),
        (dict(window_left=1023, cache=torch.float8_e4m3fn, compute=torch.float16), 64, True),
        (dict(window_left=200, cache=torch.float8_e4m3fn, compute=torch.float16), 64, False),
        (dict(window_left=1023, lse=True, cache=torch.float8_e4m3fn, compute=torch.float16), 64, True),
        (dict(window_left=1023, cache=torch.float8_e4m3fn, query=torch.float8_e4m3fn), 128, True),
        (dict(window_left=900, cache=torch.float8_e4m3fn, query=torch.float8_e4m3fn), 128, False),
    ],
    ids=str,
)
def test_blocks_in_a_narrow_window_have_small_tiles_and_are_whole(
    change: dict[str, Any], tile: int, split: bool
) -> None:
    (launch,) = hopper.launches(even(2, 300, 16384)._replace(**change))
    assert (tile, split) == (launch.shape.TILE, launch.shape.SPLIT)
    if not split and launch.pipe.CONVERT == 0 and launch.shape.DIM <= 128:
        assert launch.pipe.AHEAD
