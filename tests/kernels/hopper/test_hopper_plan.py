"""What the plans of the Hopper kernels promise; needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper.asm import caps
from paged_attn.kernels.hopper.planning import conversion
from paged_attn.kernels.hopper.planning import plan as hopper
from paged_attn.kernels.hopper.planning.block_items import blocks_launch
from paged_attn.kernels.hopper.planning.even_shares import shares_launch
from paged_attn.launching.backend import Device
from paged_attn.records.problem import Problem
from tests.cases import Case, build, problem_of, rounds_weights

H200 = Device("sm90", 132)
CALL = Problem(
    tokens=4096, seqs=8, heads=32, kv_heads=8, head_dim=128, page_size=16, max_seqlen_q=2048, max_seqlen_k=8192,
    window_left=-1, ragged=True, positive=True, softcap=0.0, alibi=False, qq_bias=False, only=None,
    compute=torch.bfloat16, query=torch.bfloat16, cache=torch.bfloat16, packed=False, pairable=False, boxable=True,
    rows_per_page=16, adjacent=True, query_box=True, new=False, new_box=False, lse=False, batch_invariant=False,
    device=H200,
)  # fmt: skip
PACKED = CALL._replace(packed=True, rows_per_page=1, boxable=False, max_seqlen_q=2)


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


FP8 = CALL._replace(cache=torch.float8_e4m3fn, compute=torch.float16)


def test_fp8_tiles_are_converted_for_the_products_that_queries_allow() -> None:
    assert blocks_launch(CALL, 0, False).pipe.CONVERT == conversion.NONE
    assert blocks_launch(FP8, 0, False).pipe.CONVERT == conversion.WIDEN_VALUES
    for change in (dict(lse=True), dict(query=torch.float16), dict(cache=torch.float8_e5m2)):
        pipe = blocks_launch(FP8._replace(**change), 0, False).pipe
        assert pipe.CONVERT == conversion.WIDEN, (
            f"{change}: sums of 14 bits, or queries of more than two times four, show"
        )
        assert not pipe.FP8_KEYS
    both = FP8._replace(query=torch.float8_e4m3fn)
    assert blocks_launch(both, 0, False).pipe.CONVERT == conversion.TRANSPOSE
    assert blocks_launch(both, 0, False).pipe.COARSE
    assert not blocks_launch(both._replace(lse=True), 0, False).pipe.COARSE, "log-sum-exps are of exact weights"
    assert blocks_launch(both._replace(heads=24), 0, False).pipe.CONVERT == conversion.TRANSPOSE
    for change in (dict(query_box=False), dict(cache=torch.float8_e5m2)):
        assert not blocks_launch(both._replace(**change), 0, False).pipe.COARSE
        assert blocks_launch(both._replace(**change), 0, False).pipe.CONVERT == conversion.WIDEN, change


def test_blocks_weigh_at_once_but_of_two_lists_which_have_too_much_code() -> None:
    assert blocks_launch(CALL, 0, False).pipe.AT_ONCE
    assert not blocks_launch(CALL, 0, True).pipe.AT_ONCE


def test_consumers_beside_a_converter_weigh_at_once_where_registers_are_left() -> None:
    """Those of tiles of 64 keys, or of 64 dims; and where they do, the converter has more as well."""
    kinds = {
        (True, 88): (FP8, FP8._replace(head_dim=64), FP8._replace(head_dim=64, lse=True)),
        (False, 56): (FP8._replace(lse=True), FP8._replace(query=torch.float8_e4m3fn, head_dim=64)),
    }
    for expected, problems in kinds.items():
        for problem in problems:
            pipe = blocks_launch(problem, 0, False).pipe
            assert expected == (pipe.AT_ONCE, pipe.CONVERT_REGISTERS), problem


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


def even(batch: int, queries: int, keys: int) -> Problem:
    return CALL._replace(tokens=batch * queries, seqs=batch, max_seqlen_q=queries, max_seqlen_k=keys)


MIXED = even(64, 2048, 4096)._replace(tokens=2048 + 63)
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
        (CAPPED._replace(cache=torch.float8_e4m3fn, compute=torch.float16), 0, 64, 1),
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
    assert terms in (0, *caps.CAPS)


@pytest.mark.parametrize(
    ("call", "consumers"),
    [
        (even(4, 8192, 8192), 3),
        (even(8, 8191, 8191), 1),
        (even(8, 1024, 1024), 1),  # fetching the code counts
        (even(8, 4096, 4096), 1),  # an item ahead
        (even(8, 4096, 4096)._replace(window_left=1024), 3),
        (even(8, 4096, 4096)._replace(window_left=1023), 1),  # an item ahead, too
        (even(8, 4095, 4095)._replace(window_left=1024), 1),
        (even(4, 8192, 8192)._replace(packed=True, rows_per_page=1, boxable=False), 1),
        (even(4, 8192, 8192)._replace(packed=True, rows_per_page=1, boxable=False, softcap=10.0, lse=True), 1),
        (even(1, 16384, 16384)._replace(alibi=True), 3),
        (even(1, 16384, 16384)._replace(window_left=1024), 3),
        (even(2, 1024, 1024), 1),
        (even(1, 2048, 16384), 1),
        (even(2, 8192, 8192)._replace(heads=32, kv_heads=32), 3),
        (even(8, 2048, 2048)._replace(heads=64), 1),
        (even(1, 4096, 131072), 1),  # alike: 6 rounds of 192 rows against 8 of 128
        (even(1, 8192, 131072), 1),  # 11 against 16
        (even(1, 7000, 131072), 3),  # 9 against 14
        (even(64, 200, 200), 1),
        (even(4, 4096, 4096)._replace(softcap=30.0), 1),  # by a polynomial
        (even(4, 4096, 4096)._replace(softcap=30.0, lse=True), 1),
        (even(4, 4096, 4096)._replace(softcap=30.0, alibi=True), 3),
        (even(4, 4096, 4096)._replace(softcap=10.0), 3),
        (even(4, 4096, 4096)._replace(softcap=10.0, lse=True), 2),  # no unit for tanh
        (even(4, 4096, 4096)._replace(softcap=10.0, query=torch.float16), 2),
        (even(8, 1024, 1024)._replace(softcap=30.0), 1),
        (even(4, 4096, 4096)._replace(qq_bias=True), 1),
        (even(4, 4096, 4096)._replace(new=True, new_box=True), 1),
        (even(4, 4096, 4096)._replace(head_dim=256), 1),
        (even(4, 4096, 4096)._replace(cache=torch.float8_e4m3fn), 1),
        (even(4, 4096, 4096)._replace(cache=torch.float8_e4m3fn, softcap=30.0), 1),
        (even(4, 4096, 4096)._replace(tokens=9000, alibi=True), 3),  # of uneven queries, but long
        (MIXED, 1),
        (MIXED._replace(head_dim=64), 1),
        (MIXED._replace(head_dim=64, query_box=False), 2),
        (MIXED._replace(heads=96), 1),
        (MIXED._replace(head_dim=256), 1),
        (MIXED._replace(softcap=30.0), 1),
    ],
)
def test_copies_of_a_consumer_are_for_long_queries_and_for_mixed_batches(call: Problem, consumers: int) -> None:
    (launch,) = hopper.launches(call)
    shape, pipe = launch.shape, launch.pipe
    assert not pipe.SHARES
    assert (consumers, 128 if consumers == 1 else 64) == (pipe.CONSUMERS, pipe.ROWS)
    assert shape.ROWS == pipe.SKIP == pipe.STRIDE == pipe.ROWS * consumers
    if consumers == 3:
        assert shape.TILE == 64
        assert not shape.SPLIT


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        (even(8, 8192, 8192), 256),
        (even(1, 2048, 2048), 256),
        (even(1, 1024, 1024), 128),  # some programs would have no block
        (even(64, 64, 1088), 256),
        (even(8, 64, 4160), 128),  # alike: a block of four warpgroups is as long as two of two
        (even(16, 64, 4160), 256),
        (even(1, 1024, 9216), 256),  # 128 blocks, as many as half a round of 256
        (even(1, 256, 16640), 128),
        (even(64, 32, 32), 128),  # half of a block would have no query
        (even(64, 96, 96), 128),
        (even(64, 288, 288), 256),  # a tenth
        (even(4, 4096, 4096)._replace(window_left=1000, alibi=True), 256),
        (even(4, 4096, 4096)._replace(softcap=30.0, lse=True), 256),
        (even(4, 4096, 4096)._replace(qq_bias=True), 256),
        (even(4, 4096, 4096)._replace(new=True, new_box=True), 256),
        (even(4, 4096, 4096)._replace(cache=torch.float8_e4m3fn), 128),
    ],
)
def test_four_warpgroups_are_for_small_heads_and_enough_blocks(call: Problem, rows: int) -> None:
    (launch,) = hopper.launches(call._replace(head_dim=64))
    assert (1, rows, rows) == (launch.pipe.CONSUMERS, launch.pipe.ROWS, launch.shape.ROWS)
    assert rows == 128 or launch.shape.TILE == 64
    (launch,) = hopper.launches(call)
    assert launch.shape.ROWS < 256


@pytest.mark.parametrize("window", [-1, 1000])
@pytest.mark.parametrize("seqs", [1, 3, 8])
def test_three_consumers_are_for_128_dims(seqs: int, window: int) -> None:
    """Whose rings are for these: blocks of small heads are those of two or four warpgroups."""
    for queries in range(100, 70000, 97):
        (launch,) = hopper.launches(even(seqs, queries, queries)._replace(head_dim=64, window_left=window))
        assert launch.pipe.CONSUMERS == 1, queries


@pytest.mark.parametrize(
    ("call", "tile"),
    [
        (even(8, 1024, 1024), 64),
        (even(8, 1025, 1025), 128),
        (even(32, 64, 512), 64),
        (even(8, 1024, 1024)._replace(softcap=30.0), 64),
        (even(8, 1024, 1024)._replace(new=True, new_box=True), 128),
        (even(8, 1024, 1024)._replace(cache=torch.float8_e4m3fn, lse=True), 128),
        (even(8, 1024, 1024)._replace(tokens=2000), 64),  # of uneven queries
        (MIXED._replace(max_seqlen_k=1024), 64),
        (MIXED._replace(max_seqlen_k=1024, query_box=False), 128),
    ],
)
def test_short_sequences_have_small_tiles_and_whole_blocks(call: Problem, tile: int) -> None:
    (launch,) = hopper.launches(call)
    assert tile == launch.shape.TILE
    assert not (tile == 64 and launch.shape.SPLIT)


@pytest.mark.parametrize(
    ("call", "ahead"),
    [
        (even(8, 1024, 1024), True),
        (even(128, 64, 512), True),
        (even(8, 1024, 1024)._replace(softcap=30.0), True),
        (even(1, 2048, 4096), True),  # 512 blocks of a head for four rounds of 132 programs
        (even(1, 1100, 4096), False),  # 280 for three: cut
        (even(1, 300, 8192)._replace(tokens=2048), False),  # most are padding
        (even(3, 600, 4096), False),  # how many keys each sequence has the host does not know
        (even(8, 4096, 4096), True),
        (even(8, 8192, 8192), False),  # three consumers
        (even(8, 1024, 1024)._replace(head_dim=256), False),
        (even(8, 1024, 1024)._replace(heads=24), True),
        (even(8, 1024, 1024)._replace(query_box=False), False),
        (even(8, 1024, 1024)._replace(cache=torch.float8_e4m3fn), False),
        (even(8, 1024, 1024)._replace(tokens=2000), True),  # of uneven queries
        (MIXED._replace(max_seqlen_k=1024), False),
    ],
)
def test_a_consumer_alone_is_an_item_ahead(call: Problem, ahead: bool) -> None:
    (launch,) = hopper.launches(call)
    assert not launch.pipe.SHARES
    assert ahead == launch.pipe.AHEAD


@pytest.mark.parametrize(
    ("call", "in_turn"),
    [
        (even(8, 1024, 1024), False),
        (even(1, 1024, 8192), False),
        (even(1, 1024, 8192)._replace(lse=True), True),
        (even(1, 1024, 8192)._replace(lse=True, window_left=2000), False),
        (even(8, 1024, 1024)._replace(lse=True), False),
        (even(8, 1024, 1024)._replace(softcap=30.0), True),
        (even(8, 1024, 1024)._replace(alibi=True), True),
        (even(8, 1024, 1024)._replace(new=True, new_box=True), True),
        (even(8, 1024, 1024)._replace(heads=24), True),
        (even(3, 600, 4096), True),  # may be cut
        (even(8, 8192, 8192)._replace(heads=24), False),  # three consumers
        (even(8, 1024, 1024)._replace(cache=torch.float8_e4m3fn), False),
    ],
)
def test_two_warpgroups_are_told_whose_turn_it_is_where_they_would_run_in_step(call: Problem, in_turn: bool) -> None:
    (launch,) = hopper.launches(call)
    assert in_turn == launch.pipe.IN_TURN


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
        assert not hopper.covers(call._replace(**change)) or hopper.launches(call._replace(**change))[0].pipe.PARTS == 1


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
