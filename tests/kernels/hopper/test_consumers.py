"""Consumer warpgroups of blocks of many rows: their number, their rows, and their turns; needs no GPU."""

from __future__ import annotations

import pytest
import torch

from paged_attn.kernels.hopper.planning import coverage as hopper
from paged_attn.kernels.hopper.planning.block_launches import blocks_launch
from paged_attn.records.problem import Problem
from tests.kernels.hopper.planned import CALL, FP8, MIXED, even


def test_blocks_weigh_at_once_but_of_two_lists_which_have_too_much_code() -> None:
    assert blocks_launch(CALL, 0, False).pipe.AT_ONCE
    assert not blocks_launch(CALL, 0, True).pipe.AT_ONCE


def test_consumers_beside_a_converter_weigh_at_once_where_registers_are_left() -> None:
    """Consumers of 64 keys a tile, or of 64 dims, weigh at once; the converter then has more registers as well."""
    kinds = {
        (True, 88): (FP8, FP8._replace(head_dim=64), FP8._replace(head_dim=64, lse=True)),
        (False, 56): (FP8._replace(lse=True), FP8._replace(query=torch.float8_e4m3fn, head_dim=64)),
    }
    for expected, problems in kinds.items():
        for problem in problems:
            pipe = blocks_launch(problem, 0, False).pipe
            assert expected == (pipe.AT_ONCE, pipe.CONVERT_REGISTERS), problem


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
        (even(64, 64, 1088)._replace(cache=torch.float8_e4m3fn), 128),
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
    """The rings of three consumers are for 128 dims; blocks of small heads have two or four warpgroups."""
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
        (even(32, 64, 512)._replace(cache=torch.float8_e4m3fn, lse=True), 128),
        (even(8, 1024, 1024)._replace(cache=torch.float8_e4m3fn, lse=True), 64),  # over a copy in 16 bits
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
        (even(128, 64, 512)._replace(cache=torch.float8_e4m3fn), False),
        (even(8, 1024, 1024)._replace(cache=torch.float8_e4m3fn), True),  # over a copy in 16 bits
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
