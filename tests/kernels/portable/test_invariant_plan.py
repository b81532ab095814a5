"""Plans of batch-invariant calls: one arithmetic for all batches, bounded scratch; needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.explain.question import need_of
from paged_attn.kernels.portable import tuning
from paged_attn.launching.platform import Device
from paged_attn.planning import planner
from paged_attn.records.problem import Problem


def problem(**changes: Any) -> Problem:
    sizes = dict(tokens=64, seqs=64, heads=32, kv_heads=8, head_dim=128, page_size=16, max_seqlen_q=1)
    options = dict(
        ragged=True, positive=True, softcap=0.0, alibi=False, qq_bias=False, only=None, packed=False, boxable=True
    )
    dtypes = dict(compute=torch.bfloat16, cache=torch.bfloat16, device=Device("sm90", 132))
    rest = dict(max_seqlen_k=32768, window_left=-1, batch_invariant=True, lse=False, pairable=False, new=False)
    rest |= dict(query=torch.bfloat16, rows_per_page=16, adjacent=True, query_box=True, new_box=False)
    return Problem(**{**sizes, **options, **dtypes, **rest, **changes})


BATCHES: list[dict[str, Any]] = [
    dict(tokens=1, seqs=1, ragged=False),
    dict(tokens=1, seqs=1, max_seqlen_k=100, page_size=128),
    dict(tokens=4096, seqs=4096, max_seqlen_k=2**20),
    dict(tokens=64, seqs=8, max_seqlen_q=8),
    dict(tokens=20, seqs=1, max_seqlen_q=20),
    dict(tokens=4096, seqs=64, max_seqlen_q=2048),
    dict(tokens=65536, seqs=4, max_seqlen_q=65536, page_size=128),
    dict(tokens=300, seqs=9, max_seqlen_q=300, only="prefill"),
    dict(tokens=300, seqs=9, max_seqlen_q=300, only="decode"),
]


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "gfx942", "interpreter"])
@pytest.mark.parametrize(
    "call",
    [
        {},
        dict(compute=torch.float32, cache=torch.float32),
        dict(packed=True, boxable=False, rows_per_page=0),
        dict(head_dim=256),
        dict(cache=torch.float8_e4m3fn),
        dict(kv_heads=1),
        dict(kv_heads=32),
        dict(window_left=1023),
        dict(alibi=True),
        dict(softcap=30.0),
    ],
    ids=str,
)
def test_every_batch_gets_the_same_arithmetic(call: dict[str, Any], arch: str) -> None:
    """A plan's choices may depend on the batch only where they cut work."""
    found = set()
    for batch in BATCHES:
        for launch in planner.plan(problem(**{**call, **batch, "device": Device(arch, 132)})).launches:
            schedule: dict[str, Any] = dict(
                ONE_BLOCK=False, SPLIT=False, SCAN=0, ONE_SCAN=False, LIVE=0, CLEAR=False, PAGE=0, CHUNK=0, MERGE=0
            )
            if launch.pipe is not None:  # one or two consumers
                schedule |= dict(ROWS=launch.pipe.ROWS, BLOCK_Q=launch.shape.BLOCK_Q // launch.pipe.CONSUMERS)
            found.add((launch.shape._replace(**schedule), launch.config.warps, launch.config.boxes))
            assert launch.shape.PIECE % launch.shape.TILE == 0
    assert len(found) == 1


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("keys", [32768, 2**20, 2**30])
def test_scratch_is_bounded_however_wide_the_page_table(batch: dict[str, Any], keys: int) -> None:
    for launch in planner.plan(problem(**{**batch, "max_seqlen_k": keys})).launches:
        states = need_of(launch).states if launch.shape.SPLIT else 0
        assert 4 * states <= tuning.MAX_SCRATCH_BYTES


def test_one_long_sequence_fills_the_device() -> None:
    (launch,) = planner.plan(problem(tokens=1, seqs=1)).launches
    assert launch.grid[0] >= 0.9 * 132


def test_captured_calls_of_any_bound_take_few_counters() -> None:
    for keys in (4096, 2**20):
        for batch in BATCHES:
            for launch in planner.plan(problem(**{**batch, "max_seqlen_k": keys})).launches:
                assert need_of(launch).counters <= 1000


@pytest.mark.parametrize("keys", [32768, 131072])
def test_long_decodes_beside_a_prefill_are_cut_however_wide_the_page_table(keys: int) -> None:
    """Else a sequence of as many keys would be one program's for each KV head."""
    _, few = planner.plan(problem(tokens=527, seqs=16, max_seqlen_q=512, max_seqlen_k=keys)).launches
    assert few.shape.SPLIT
    assert few.grid[0] >= 0.9 * 132


def test_a_chunk_behind_a_long_context_is_cut_in_the_room_there_is() -> None:
    (launch,) = planner.plan(problem(tokens=64, seqs=1, max_seqlen_q=64, max_seqlen_k=131072)).launches
    assert launch.shape.SPLIT
    assert launch.grid[0] >= 56
