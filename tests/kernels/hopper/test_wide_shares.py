"""Calls with two widths or wide heads that have shares on Hopper, by the plan alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton

from paged_attn.kernels.hopper import dialect
from paged_attn.kernels.hopper.planning import coverage
from paged_attn.kernels.hopper.planning.operands import WIDEN
from paged_attn.kernels.hopper.planning.wide_heads import shares_take
from paged_attn.launching.platform import Device
from tests.support.cases import E4M3, Case, build, problem_of

MIMO = Case(
    "two widths",
    (1,) * 4,
    (900,) * 4,
    heads=8,
    kv_heads=2,
    head_dim=192,
    value_dim=128,
    dtype=torch.bfloat16,
    lse=False,
    bounds=True,
)
TWO_WIDTHS, HEAD_DIM = "values of another width", "a head_dim other than 40..256 in steps of 8"


def problem(**changes: Any) -> Any:
    """The problem of a call on a GPU, where operands have 16 bits."""
    given = build(dataclasses.replace(MIMO, **changes), filled=False)
    compute = torch.bfloat16 if given["k_cache"].itemsize == 2 else torch.float16
    return problem_of(given, Device("sm90", 132))._replace(compute=compute)


def rings(p: Any) -> set[tuple[int, int, int]]:
    """(tile, slots of keys, of values) of a call's launches."""
    assert coverage.uncovered(p) == []
    launches = coverage.launches(p)
    assert all(x.dialect == "hopper" and x.pipe.SHARES and dialect.tiles_of(x) for x in launches)
    return {(x.shape.TILE, x.pipe.KEY_STAGES, x.pipe.VALUE_STAGES) for x in launches}


@pytest.mark.parametrize(
    "widths, heads, expected",
    [((192, 128), 8, (64, 4, 4)), ((64, 256), 8, (64, 5, 5)), ((128, 64), 8, (64, 6, 6)), ((192, 128), 64, (64, 4, 4))],
    ids=str,
)
def test_slots_follow_both_widths(widths: tuple[int, int], heads: int, expected: tuple[int, ...]) -> None:
    assert rings(problem(head_dim=widths[0], value_dim=widths[1], heads=heads)) == {expected}


GEMMA: dict[str, Any] = dict(heads=8, kv_heads=2, head_dim=512, value_dim=None)
MLA: dict[str, Any] = dict(heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True)
OF_512: dict[str, Any] = MLA | dict(head_dim=512)


@pytest.mark.parametrize(
    "changes, expected",
    [
        (GEMMA, (64, 3, 0)),  # three slots of 64 KB, keys and values in turn
        (GEMMA | dict(heads=64), (64, 2, 0)),
        (GEMMA | dict(value_dim=256), (64, 2, 2)),
        (GEMMA | dict(value_dim=64), (64, 2, 2)),
        (MLA, (64, 5, 3)),  # a tile takes two slots of 32 KB, and one of the rest
        (MLA | dict(heads=32), (64, 5, 3)),
        (MLA | dict(heads=64), (32, 4, 4)),
        (OF_512, (64, 6, 0)),  # behind their values keys have nothing
        (OF_512 | dict(heads=64), (32, 4, 0)),
        (MLA | dict(head_dim=320, value_dim=256), (64, 5, 4)),
    ],
    ids=str,
)
def test_wide_heads_and_latents_have_as_many_slots_as_shared_memory_has_room_for(
    changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert rings(problem(**changes)) == {expected}


@pytest.mark.parametrize(
    "heads, consumers, columns", [(1, 1, 8), (8, 1, 8), (12, 1, 16), (32, 1, 32), (33, 2, 0), (64, 2, 0)]
)
def test_more_than_32_rows_of_latents_are_rows_of_two_consumers(heads: int, consumers: int, columns: int) -> None:
    latents = problem(**MLA | dict(heads=heads, decode_form=True, bounds=False, seq_lens=(9000,) * 4))
    (launch,) = coverage.launches(latents)
    pipe, shape = launch.pipe, launch.shape
    assert [consumers, columns, 512, 64] == [pipe.CONSUMERS, pipe.COLUMNS, shape.DIM, shape.REST]
    assert launch.merge is not None or consumers == 1


@pytest.mark.parametrize(
    "heads, queries, parts, blocks",
    [(128, 1, 2, 1), (256, 1, 4, 1), (128, 2, 2, 2), (16, 8, 1, 2), (32, 8, 1, 4), (16, 100, 1, 25)],
)
def test_more_than_64_rows_of_latents_are_several_blocks(heads: int, queries: int, parts: int, blocks: int) -> None:
    (launch,) = coverage.launches(problem(**MLA | dict(heads=heads, query_lens=(queries,) * 4)))
    assert launch.shape.KV_HEADS == launch.pipe.PARTS == parts
    assert -(-queries // launch.shape.BLOCK_Q) == blocks
    assert launch.merge is not None


OF_E4M3: dict[str, Any] = MLA | dict(cache_dtype=E4M3)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, (4, 1, 3)),  # two tiles of 16 bits, of which one is multiplied, beside one and a half of fp8
        (dict(heads=32), (3, 1, 4)),
        (dict(heads=64), (3, 3, 2)),  # of rows: 32 keys each, and the rest beside them
        (dict(heads=128), (3, 3, 2)),
        (dict(head_dim=512), (4, 0, 4)),
        (dict(head_dim=320, value_dim=256), (2, 1, 6)),
        (dict(head_dim=192, value_dim=128, heads=64), (4, 4, 6)),
    ],
    ids=str,
)
def test_fp8_latents_have_slots_of_both_kinds(changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    (launch,) = coverage.launches(problem(**OF_E4M3 | changes))
    pipe = launch.pipe
    assert pipe.CONVERT == WIDEN
    assert expected == (pipe.KEY_STAGES, pipe.VALUE_STAGES, pipe.RAW_STAGES)


@pytest.mark.parametrize("heads", [16, 64], ids=["columns", "rows"])
@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16, E4M3], ids=str)
def test_fp8_latents_are_multiplied_in_float16_which_bfloat16_queries_are_normalized_for(
    query: torch.dtype, heads: int
) -> None:
    (launch,) = coverage.launches(problem(**OF_E4M3 | dict(dtype=query, heads=heads)))
    assert triton.language.float16 == launch.shape.COMPUTE
    assert launch.shape.NORMALIZED == launch.shape.BY_ROW == (query == torch.bfloat16)
    assert "of fp8, products of float16, " in dialect.tiles_of(launch)
    assert "4 that convert" in dialect.tiles_of(launch)


@pytest.mark.parametrize("seqs, together", [(4, 8), (16, 8), (32, 4), (64, 2), (132, 2)])
def test_as_many_pieces_of_latents_are_loaded_together_as_blocks_have(seqs: int, together: int) -> None:
    of_each = dict(query_lens=(1,) * seqs, seq_lens=(4096,) * seqs)
    (launch,) = coverage.launches(problem(**MLA | of_each))
    assert together == launch.pipe.JOINED


@pytest.mark.parametrize(
    "seqs, heads, merges",
    [(64, 16, False), (64, 32, False), (32, 16, False), (32, 32, True), (16, 16, True), (1, 8, True)],
)
def test_a_launch_merges_latents_where_their_last_program_would_wait_four_times(
    seqs: int, heads: int, merges: bool
) -> None:
    of_each = dict(heads=heads, query_lens=(1,) * seqs, seq_lens=(4096,) * seqs)
    (launch,) = coverage.launches(problem(**MLA | of_each))
    assert (launch.merge is not None) == merges


@pytest.mark.parametrize("seqs, heads, rows, lanes", [(1, 16, 1, 16), (1, 64, 2, 8), (64, 64, 16, 1)])
def test_pieces_of_latents_are_merged_64_dims_at_a_time(seqs: int, heads: int, rows: int, lanes: int) -> None:
    of_each = dict(heads=heads, query_lens=(1,) * seqs, seq_lens=(32768 // seqs * 8,) * seqs)
    (launch,) = coverage.launches(problem(**MLA | of_each))
    assert launch.merge is not None
    assert (launch.merge.rows, launch.merge.dims, launch.merge.lanes) == (rows, 64, lanes)


@pytest.mark.parametrize(
    "changes",
    [
        dict(heads=71),
        dict(heads=320),
        dict(page_size=4),
        dict(batch_invariant=True),
        dict(cache_dtype=E4M3, batch_invariant=True),
    ],
    ids=str,
)
def test_other_latents_are_portable(changes: dict[str, Any]) -> None:
    assert HEAD_DIM in coverage.uncovered(problem(**MLA | changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(cache_dtype=E4M3),
        dict(batch_invariant=True),
        dict(layout="x"),
        dict(page_size=12),
        dict(value_dim=132),
        dict(value_dim=32),
        dict(head_dim=36),
    ],
    ids=str,
)
def test_what_shares_do_not_take_is_portable(changes: dict[str, Any]) -> None:
    assert TWO_WIDTHS in coverage.uncovered(problem(**changes))


@pytest.mark.parametrize("changes", [dict(query_lens=(1, 100, 1, 1)), dict(heads=130)], ids=str)
def test_more_than_64_rows_have_no_shares(changes: dict[str, Any]) -> None:
    assert not shares_take(problem(**changes))
