"""What the plans of even shares promise; needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.kernels.common.pieces import PIECES_PER_PROGRAM
from paged_attn.kernels.hopper.planning import coverage as hopper
from paged_attn.kernels.hopper.planning.share_launches import shares_launch
from paged_attn.records.plan import UNBOUNDED
from paged_attn.records.problem import Problem
from tests.kernels.hopper.planned import CALL, FP8, even

ALL_FP8: dict[str, Any] = dict(query=torch.float8_e4m3fn, cache=torch.float8_e4m3fn, compute=torch.float16)


@pytest.mark.parametrize("seqs", [1, 64, 4096])
def test_scratch_of_prefills_depends_on_the_device_not_on_keys(seqs: int) -> None:
    needs = {
        hopper.need_of(launch)
        for keys in (2**14, 2**20)
        for launch in hopper.launches(CALL._replace(seqs=seqs, tokens=2048 * seqs + 1, max_seqlen_k=keys))
    }
    assert all(need.states <= 2 * PIECES_PER_PROGRAM * 132 * 128 * 130 for need in needs)
    assert len(needs) == 1


def test_decodes_that_wait_for_their_code_have_little_of_it() -> None:
    """One loader, and pieces joined in few instructions, of few keys and of rows of one token."""
    small = CALL._replace(ragged=False, seqs=4, tokens=4, max_seqlen_q=1, max_seqlen_k=2048)
    for change in ({}, dict(max_seqlen_k=8192), dict(cache=torch.float8_e4m3fn), dict(seqs=2, head_dim=256)):
        assert shares_launch(small._replace(**change), 1, 1).pipe.BRIEF, change
    over_e4m3 = dict(cache=torch.float8_e4m3fn, max_seqlen_k=16384)
    apart = dict(head_dim=64, adjacent=False)
    for change in (dict(max_seqlen_k=16384), over_e4m3, apart, dict(heads=128)):
        assert not shares_launch(small._replace(**change), 1, 1).pipe.BRIEF, change
    assert not shares_launch(small._replace(ragged=True, max_seqlen_q=2), 0, UNBOUNDED).pipe.BRIEF, "drafts"


SMALL_HEADS = CALL._replace(head_dim=64, ragged=False, tokens=8, max_seqlen_q=1)


@pytest.mark.parametrize(
    ("change", "paired"),
    [
        ({}, True),
        (dict(heads=8), True),
        (dict(heads=8, ragged=True, max_seqlen_q=4, tokens=32), True),
        (dict(ragged=True, max_seqlen_q=2, tokens=16), False),  # 16 rows
        (dict(heads=64), False),
        (dict(adjacent=False), False),
        (dict(heads=4, kv_heads=1), False),
        (dict(heads=12, kv_heads=3), False),
        (dict(head_dim=56), False),
        (dict(head_dim=128), False),
        (dict(cache=torch.float8_e4m3fn, compute=torch.float16), False),
        (dict(packed=True, rows_per_page=1, boxable=False), False),
        (dict(new=True, new_box=True), False),
    ],
    ids=str,
)
def test_few_rows_of_two_heads_of_64_dims_are_those_of_one_of_128(change: dict[str, Any], paired: bool) -> None:
    call = SMALL_HEADS._replace(**change)
    (launch,) = hopper.launches(call)
    shape, heads = launch.shape, 1 + paired
    assert launch.pipe.SHARES
    assert paired == shape.PAIRED
    assert (call.head_dim, max(64, 1 << (call.head_dim * heads - 1).bit_length())) == (shape.HEAD_DIM, shape.DIM)
    assert (call.kv_heads // heads, call.heads) == (shape.KV_HEADS, shape.KV_HEADS * shape.GROUP)
    assert launch.grid[0] % shape.KV_HEADS == 0


@pytest.mark.parametrize(("group", "columns"), [(1, 8), (4, 8), (8, 8), (12, 16), (32, 32), (64, 64)])
def test_few_rows_over_fp8_are_columns(group: int, columns: int) -> None:
    call = FP8._replace(heads=8 * group, tokens=8, max_seqlen_q=1, ragged=False)
    (launch,) = hopper.launches(call)
    assert (columns, columns, columns // group) == (launch.pipe.COLUMNS, launch.shape.ROWS, launch.shape.BLOCK_Q)
    assert launch.grid[0] == (264 if columns <= 32 else 128)


@pytest.mark.parametrize(
    ("change", "seqs", "columns", "tokens"),
    [
        (dict(), 16, 0, 16),  # 128 blocks of rows, converted once
        (dict(), 9, 0, 16),
        (dict(), 8, 32, 8),  # 64, so two of columns each
        (dict(max_seqlen_k=1 << 20), 1, 32, 8),
        (dict(heads=64), 4, 32, 4),
        (dict(heads=384), 1, 64, 1),  # no smaller block holds a token
        (dict(head_dim=64), 8, 32, 8),
        (dict(head_dim=64), 9, 0, 16),
        (dict(head_dim=256), 8, 0, 16),
        (dict(head_dim=256), 4, 32, 8),
        (dict(tokens=20), 8, 32, 8),  # of uneven queries
        (dict(tokens=200), 32, 0, 16),
        (ALL_FP8, 2, 32, 8),
        (ALL_FP8, 4, 0, 16),
        (ALL_FP8, 8, 0, 16),
        (ALL_FP8 | dict(max_seqlen_k=1 << 14), 8, 0, 16),
        (ALL_FP8 | dict(max_seqlen_k=1 << 13), 1, 32, 8),
        (ALL_FP8 | dict(max_seqlen_k=1 << 14), 1, 0, 16),
        (dict(packed=True, rows_per_page=1), 64, 32, 8),
        (dict(packed=True, rows_per_page=1, cache=torch.bfloat16, compute=torch.bfloat16), 8, 32, 8),
        (dict(packed=True, rows_per_page=1, cache=torch.bfloat16, compute=torch.bfloat16), 16, 0, 16),
        (dict(packed=True, rows_per_page=1, cache=torch.bfloat16, compute=torch.bfloat16, page_size=24), 16, 32, 8),
        (dict(packed=True, rows_per_page=1, cache=torch.bfloat16, compute=torch.bfloat16, heads=384), 4, 0, 1),
    ],
    ids=str,
)
def test_up_to_64_rows_over_fp8_or_x_packed_caches_are_two_blocks_of_columns_or_one(
    change: dict[str, Any], seqs: int, columns: int, tokens: int
) -> None:
    queries = 1 if change.get("heads") == 384 else 8 if change.get("heads") == 64 else 16
    call = FP8._replace(tokens=seqs * queries, seqs=seqs, max_seqlen_q=queries, max_seqlen_k=4096)._replace(**change)
    (launch,) = hopper.launches(call)
    assert (columns, columns > 0) == (launch.pipe.COLUMNS, launch.pipe.SHARES)
    assert tokens == launch.block_tokens
    assert not launch.pipe.MIXED


@pytest.mark.parametrize(
    ("heads", "queries", "columns"),
    [(32, 1, 8), (32, 2, 8), (32, 3, 16), (32, 4, 16), (32, 5, 0), (32, 16, 0), (64, 1, 8), (64, 2, 16), (72, 1, 0)],
)
def test_16_bit_rows_are_columns_where_they_are_eight_or_of_several_tokens_sixteen(
    heads: int, queries: int, columns: int
) -> None:
    (launch,) = hopper.launches(CALL._replace(heads=heads, tokens=8 * queries, max_seqlen_q=queries))
    assert columns == launch.pipe.COLUMNS


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(48, 64), (64, 128), (72, 64), (80, 64), (96, 64), (120, 64), (128, 128), (192, 64)]
)
def test_rows_that_share_lines_of_memory_with_others_come_in_small_tiles(head_dim: int, tile: int) -> None:
    (launch,) = hopper.launches(even(64, 1, 8192)._replace(head_dim=head_dim))
    assert tile == launch.shape.TILE


@pytest.mark.parametrize(
    ("kv_heads", "call", "grouped"),
    [
        (8, even(1, 1, 32768), 0),
        (4, even(1, 1, 32768), 0),  # 33 shares, of 8 rows
        (2, even(1, 1, 32768), 45),
        (1, even(64, 1, 4096), 45),  # one sequence may have nearly all of the keys
        (1, even(64, 1, 2816), 0),  # in 44 tiles, which 45 shares may have
        (1, even(64, 1, 2880), 45),
        (1, even(64, 2, 32768), 26),  # 16 rows
        (1, even(64, 4, 32768), 10),  # 64
        (1, even(64, 4, 2880), 10),
        (1, even(64, 4, 512), 0),  # in eight tiles, which are a share
        (8, even(8, 16, 8192), 10),  # 16 shares for a block of 64 rows
        (8, even(8, 16, 512), 0),
        (8, even(1, 0, 8192), 0),
    ],
)
def test_pieces_are_joined_in_groups_where_a_block_may_have_many(kv_heads: int, call: Problem, grouped: int) -> None:
    heads = {1: 8, 2: 16}.get(kv_heads, 32)
    (launch,) = hopper.launches(call._replace(heads=heads, kv_heads=kv_heads))
    assert launch.pipe.SHARES
    assert grouped == launch.pipe.GROUPED
    assert hopper.need_of(launch).counters == hopper.COUNTERS_PER_LAUNCH + launch.programs + (
        launch.slots if grouped else 0
    )


@pytest.mark.parametrize(
    ("kv_heads", "call", "merge"),
    [
        (8, even(1, 1, 32768), None),  # of few rows
        (1, even(1, 1, 32768), None),
        (1, even(1, 1, 32768)._replace(head_dim=256), (1, 4)),  # whose states are twice as large
        (1, even(1, 2, 32768), (1, 8)),  # 16 rows in up to 132 pieces
        (1, even(1, 8, 32768), (1, 8)),
        (1, even(1, 8, 512), None),  # all of which one share has
        (1, even(1, 8, 576), (1, 8)),
        (8, even(1, 4, 8192), (4, 2)),  # 16 rows, in up to 16 pieces
        (8, even(2, 4, 8192), None),  # in 8, on average
        (8, even(1, 16, 8192), (4, 2)),
        (8, even(3, 16, 8192), (8, 1)),  # as of 4: where rows are enough, threads have all pieces of one
        (8, even(4, 16, 8192), (8, 1)),
        (8, even(5, 16, 8192), None),
        (8, even(1, 32, 8192), (8, 1)),  # two blocks
    ],
)
def test_pieces_of_many_rows_are_joined_by_a_launch_of_its_own(
    kv_heads: int, call: Problem, merge: tuple[int, int] | None
) -> None:
    (launch,) = hopper.launches(call._replace(heads={1: 8}.get(kv_heads, 32), kv_heads=kv_heads))
    assert (launch.merge and (launch.merge.rows, launch.merge.lanes)) == merge
    assert (launch.shape.MERGE == 0) == (launch.merge is not None)
    if merge:
        assert not launch.pipe.GROUPED
        assert hopper.need_of(launch)[1:] == (hopper.COUNTERS_PER_LAUNCH, True)


def test_shares_that_lead_join_their_own_pieces() -> None:
    batch = even(8, 200, 32768)._replace(tokens=207, head_dim=256, heads=8, kv_heads=1, cache=torch.float8_e4m3fn)
    first, second = hopper.launches(batch)
    assert (first.shape.LEADS, second.pipe.FOLLOWS, first.merge) == (True, True, None)
    assert hopper.launches(batch._replace(tokens=8, max_seqlen_q=1))[0].merge is not None


def test_a_merge_of_no_queries_can_be_planned() -> None:
    (launch,) = hopper.launches(even(1, 0, 32768)._replace(heads=48, kv_heads=1))
    assert launch.merge.blocks == 1


@pytest.mark.parametrize(
    ("kv_heads", "call", "shares"),
    [
        (1, even(1, 32, 65536), True),  # 4 blocks of 1024 tiles, for 132 programs
        (1, even(1, 32, 131072), True),
        (1, even(1, 32, 262144), False),
        (1, even(1, 64, 65536), True),  # 8 blocks
        (1, even(1, 64, 131072), False),
        (1, even(3, 24, 30000), True),  # 9 blocks
        (1, even(3, 24, 40000), False),
        (8, even(1, 16, 32768), True),
        (8, even(1, 32, 16384), True),  # 16 blocks
        (8, even(1, 32, 20000), False),
    ],
)
def test_even_shares_serve_more_of_so_few_blocks_that_each_would_be_cut_much(
    kv_heads: int, call: Problem, shares: bool
) -> None:
    (launch,) = hopper.launches(call._replace(heads=8 if kv_heads == 1 else 32, kv_heads=kv_heads))
    assert shares == launch.pipe.SHARES


@pytest.mark.parametrize(
    ("call", "shares"),
    [
        (even(96, 16, 1024), True),  # 64 rows: one block each
        (even(8, 32, 512), True),  # 128 blocks of 64 rows, 8 tiles each
        (even(8, 32, 4096), False),  # 64 tiles
        (even(9, 32, 512), False),  # 144 blocks for 132 multiprocessors
        (even(4, 64, 1024), True),
        (even(16, 64, 4096), False),
        (even(1, 128, 2048), True),
        (even(4, 128, 8192), False),
        (even(1, 256, 1024), False),
        (even(2, 128, 256), True),
        (even(4, 128, 256), False),
        (even(1, 100, 100), True),
        (even(4, 64, 64), True),
        (even(8, 64, 64), False),
        (even(1, 128, 1024)._replace(tokens=300, seqs=4), False),  # some have fewer queries
    ],
    ids=[
        "speculation", "trees", "trees of long sequences", "many trees", "drafts", "long drafts", "a chunk", "chunks",
        "a long chunk", "two prompts", "four prompts", "one prompt", "short prompts", "many short prompts", "uneven",
    ],
)  # fmt: skip
def test_even_shares_serve_few_blocks_of_sequences_with_as_many_queries(call: Problem, shares: bool) -> None:
    (launch,) = hopper.launches(call)
    assert shares == launch.pipe.SHARES
    assert launch.pipe.CONSUMERS * launch.pipe.ROWS == launch.shape.ROWS
    assert not shares or launch.shape.ROWS == 64


@pytest.mark.parametrize(
    ("seqs", "kv_heads", "whole"),
    [
        (1, 8, False),
        (3, 8, True),
        (16, 8, False),
        (24, 8, True),
        (128, 8, False),
        (129, 8, False),
        (128, 4, True),  # over 33 shares of a KV head
        (32, 1, True),
        (64, 16, False),
    ],
)
def test_shares_may_begin_with_blocks_where_even_ones_would_not(seqs: int, kv_heads: int, whole: bool) -> None:
    call = even(seqs, 1, 4096)._replace(kv_heads=kv_heads)
    assert whole == shares_launch(call, 0, 1 << 30).shape.WHOLE
    fp8 = call._replace(cache=torch.float8_e4m3fn, compute=torch.float16)
    assert (seqs <= 128 and (whole or kv_heads == 8)) == shares_launch(fp8, 0, 1 << 30).shape.WHOLE, "33 shares"


@pytest.mark.parametrize(
    ("call", "least"),
    [
        (even(2, 1, 8192), 1),
        (even(2, 8, 8192), 4),
        (even(2, 8, 64), 1),
        (even(2, 32, 256), 4),
        (even(2, 32, 512), 8),
        (even(2, 32, 512)._replace(new=True), 4),
        (even(2, 32, 576), 4),
        (even(2, 32, 0), 1),
        (even(2, 8, 8192)._replace(window_left=50), 2),
        (even(16, 8, 8192), 1),
    ],
    ids=[
        "few rows", "many rows", "one tile", "four tiles", "eight tiles", "eight and one for new keys", "nine tiles",
        "no keys", "a window", "a block for every program",
    ],
)  # fmt: skip
def test_even_shares_of_many_rows_have_a_few_tiles_or_all_of_a_sequence(call: Problem, least: int) -> None:
    (launch,) = hopper.launches(call)
    assert launch.least == least


@pytest.mark.parametrize(
    ("call", "pieces"),
    [
        (even(1, 1, 8192), 16),
        (even(2, 1, 8192), 8),
        (even(1, 1, 512), 8),
        (even(1, 8, 8192), 8),
        (even(1, 1, 8192)._replace(cache=torch.float8_e4m3fn, compute=torch.float16), 8),
    ],
    ids=["one sequence", "two", "a short one", "many rows", "fp8"],
)
def test_sixteen_states_are_loaded_together_where_a_block_may_have_more_than_eight(call: Problem, pieces: int) -> None:
    (launch,) = hopper.launches(call)
    assert pieces == launch.pipe.JOINED
