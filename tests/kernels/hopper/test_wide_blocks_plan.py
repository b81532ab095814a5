"""Calls with values of another width that have Hopper's blocks, by the plan alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper.planning import coverage, regimes
from paged_attn.kernels.hopper.planning.block_tiles import MAX_SLOTS, blocks_take
from paged_attn.kernels.hopper.planning.operands import WIDEN
from paged_attn.launching.platform import Device
from tests.planning.test_any_plan import complaints
from tests.support.cases import E4M3, Case, build, problem_of

PREFILL = Case(
    "prefill", (200, 900), (700, 900), heads=8, kv_heads=2, head_dim=192, value_dim=128, dtype=torch.bfloat16, lse=False
)
WORDS = "values of another width"
SHARED_MEMORY = 224 << 10  # of 227 KB, of which barriers and arguments need some


def problem(**changes: Any) -> Any:
    """The problem of a call on a GPU, where operands have 16 bits."""
    given = build(dataclasses.replace(PREFILL, **changes), filled=False)
    return problem_of(given, Device("sm90", 132))._replace(compute=torch.bfloat16)


@pytest.mark.parametrize("head_dim, value_dim", list(itertools.permutations([40, 64, 96, 128, 192, 256], 2)))
@pytest.mark.parametrize("more", [{}, dict(softcap=30.0), dict(window_size=(100, -1)), dict(new=True)], ids=str)
def test_blocks_of_any_two_widths_fit_shared_memory(head_dim: int, value_dim: int, more: dict[str, Any]) -> None:
    p = problem(head_dim=head_dim, value_dim=value_dim, **more)
    assert coverage.uncovered(p) == []
    assert regimes.regime_of(p).name == "many rows of two widths or wide heads"
    launches = coverage.launches(p)
    assert not list(complaints(p, launches))
    (launch,) = launches
    shape, pipe = launch.shape, launch.pipe
    assert shape.HEAD_DIM <= shape.DIM
    assert shape.VALUE_DIM <= shape.VALUE_PADDED
    queries = pipe.QUERY_SLOTS * pipe.CONSUMERS * pipe.ROWS * shape.DIM
    tiles = shape.TILE * (pipe.KEY_STAGES * shape.DIM + pipe.VALUE_STAGES * shape.VALUE_PADDED)
    assert 2 * (queries + tiles) <= SHARED_MEMORY
    assert 2 <= pipe.VALUE_STAGES <= pipe.KEY_STAGES <= MAX_SLOTS


@pytest.mark.parametrize("head_dim, value_dim", list(itertools.permutations([64, 128, 192], 2)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_fp8_of_two_widths_is_widened_in_blocks(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    sizes = dict(head_dim=head_dim, value_dim=value_dim, cache_dtype=E4M3, dtype=dtype, out_dtype=torch.bfloat16)
    p = problem(query_lens=(300, 300), seq_lens=(700, 900), bounds=True, **sizes)
    assert coverage.uncovered(p) == []
    (launch,) = coverage.launches(p)
    assert launch.pipe.CONVERT == WIDEN
    assert not list(complaints(p, (launch,)))
    beside = problem(query_lens=(300, *[1] * 9), seq_lens=(700, *[99] * 9), bounds=True, **sizes)
    assert [x.dialect for x in coverage.launches(beside)] == ["portable", "hopper"]


@pytest.mark.parametrize("head_dim, value_dim", [(512, 512), (320, 320), (512, 64), (64, 512), (264, 256), (512, 128)])
@pytest.mark.parametrize("more", [{}, dict(softcap=30.0), dict(window_size=(100, -1)), dict(new=True)], ids=str)
def test_wide_values_are_of_a_launch_for_each_256_dims(head_dim: int, value_dim: int, more: dict[str, Any]) -> None:
    p = problem(query_lens=(900, 900), seq_lens=(900, 900), bounds=True, head_dim=head_dim, value_dim=value_dim, **more)
    assert coverage.uncovered(p) == []
    launches = coverage.launches(p)
    assert [x.pipe.FROM_DIM for x in launches] == list(range(0, value_dim, 256))
    for launch in launches:
        assert not list(complaints(p, (launch,)))
        shape, pipe = launch.shape, launch.pipe
        assert not shape.SPLIT
        assert value_dim == shape.VALUE_DIM
        assert shape.VALUE_PADDED <= 256
        queries = pipe.QUERY_SLOTS * pipe.CONSUMERS * pipe.ROWS * shape.DIM
        tiles = shape.TILE * (pipe.KEY_STAGES * shape.DIM + pipe.VALUE_STAGES * shape.VALUE_PADDED)
        assert 2 * (queries + tiles) <= SHARED_MEMORY
        assert pipe.VALUE_STAGES >= 2
    beside = coverage.launches(p._replace(max_seqlen_q=900, tokens=910, seqs=11))
    assert [x.pipe is not None and x.pipe.SHARES for x in beside] == [True] + [False] * len(launches)
    assert [x.pipe.FOLLOWS for x in beside[1:]] == [True, False][: len(launches)]


@pytest.mark.parametrize(
    "changes",
    [dict(cache_dtype=E4M3), dict(layout="x"), dict(heads=12), dict(head_dim=508), dict(batch_invariant=True)],
    ids=str,
)
def test_what_wide_blocks_cannot_is_portable(changes: dict[str, Any]) -> None:
    assert coverage.uncovered(problem(**{**dict(head_dim=512, value_dim=512), **changes}))


def test_192_dims_are_no_256() -> None:
    (launch,) = coverage.launches(problem(query_lens=(2048,), seq_lens=(2048,)))
    assert (launch.shape.DIM, launch.shape.VALUE_PADDED, launch.shape.TILE) == (192, 128, 128)
    assert (launch.pipe.KEY_STAGES, launch.pipe.VALUE_STAGES) == (2, 2)


@pytest.mark.parametrize(
    "changes",
    [
        dict(batch_invariant=True),
        dict(layout="x", page_size=24),
        dict(layout="x", cache_dtype=E4M3),
        dict(value_dim=44),
        dict(value_dim=300),
        dict(value_dim=32),
        dict(page_size=4),
    ],
    ids=str,
)
def test_what_blocks_of_two_widths_cannot_is_portable(changes: dict[str, Any]) -> None:
    assert WORDS in coverage.uncovered(problem(**changes))


@pytest.mark.parametrize("changes", [dict(query_lens=(1, 1), decode_form=True), dict(query_lens=(4, 16), bounds=True)])
def test_few_rows_of_two_widths_are_no_blocks(changes: dict[str, Any]) -> None:
    p = problem(**changes)
    assert not blocks_take(p)
    assert regimes.regime_of(p).name != "many rows of two widths or wide heads"


@pytest.mark.parametrize(
    "head_dim, dims", [(64, 64), (80, 128), (128, 128), (136, 192), (192, 192), (200, 256), (256, 256)]
)
def test_keys_of_129_to_192_dims_are_three_parts_of_64_and_others_powers_of_two(head_dim: int, dims: int) -> None:
    assert [x.shape.DIM for x in coverage.launches(problem(head_dim=head_dim, value_dim=None))] == [dims]
