"""Launches and counts of `explain`: grids and scratch equal those of a call, work and memory are counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.calls import launched
from paged_attn.explain import question
from paged_attn.kernels.shared_steps import tiles_of_copies
from paged_attn.launching.template import arguments_for
from paged_attn.planning import planner
from paged_attn.planning.planner import steps_of
from tests.explain.asked import ask, call_to, printed, told

CALLS: dict[str, dict[str, Any]] = {
    "decode": dict(batch=64),
    "one": dict(keys="32768"),
    "prefill": dict(queries="2048", keys="2048"),
    "chunk": dict(queries="64", keys="16384"),
    "mixed": dict(queries="1x700,63x1", keys="1x2500,63x900"),
    "mixed over fp8": dict(queries="1x700,63x1", keys="1x2500,63x900", kv_dtype=torch.float8_e4m3fn),
    "uneven": dict(queries="1x700,5x1", keys="1x2500,5x900"),
    "window": dict(batch=3, keys="5000", window=(100, -1)),
    "mixed in a window": dict(queries="1x700,63x1", keys="1x2500,63x900", window=(127, -1)),
    "few keys": dict(batch=64, keys="100"),
    "many heads": dict(queries="1x1024,1x70,31x1", keys="1x4096,32x2048", heads=71, kv_heads=1, head_dim=64),
    "new": dict(queries="1x700,5x1", keys="1x2500,5x900", new=True),
    "new decode": dict(batch=5, keys="5000", new=True),
    "invariant": dict(keys="8192", batch_invariant=True),
    "invariant mixed": dict(queries="1x70,2x1", keys="1x2500,2x9000", batch_invariant=True),
    "fp8": dict(batch=5, kv_dtype=torch.float8_e4m3fn),
    "fp8 chunk": dict(queries="256", keys="2048", kv_dtype=torch.float8_e4m3fn),
    "fp8 prefill over a copy": dict(queries="2048", keys="2048", kv_dtype=torch.float8_e4m3fn),
    "int4 decode": dict(batch=5, kv_dtype=torch.uint8, scales="per_token"),
    "mixed over int4": dict(queries="1x700,63x1", keys="1x2500,63x900", kv_dtype=torch.uint8, scales="per_token"),
}


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_grids_and_scratch_are_those_that_would_be_launched(name: str, target: str) -> None:
    asked = ask(**CALLS[name], device=target)
    planned = planner.plan(asked.problem)
    given, options, axes = call_to(asked)
    with arguments_for((*given.slots, None)) as held:  # no log-sum-exp
        steps = steps_of(planned, launched._call(held, options, axes.head_dim))
    told = [(kernel, launch) for launch in planned.launches for kernel in question.grids(launch).items()]
    if planned.launches[0].shape.LEADS and planned.launches[0].merge:  # joined behind the launch that follows
        told.insert(2, told.pop(1))
    if planned.copies is not None:
        copy, *steps = steps
        assert copy.kernel.fn.__name__ == "copy_pages_kernel"
        assert copy.grid == (tiles_of_copies(planned.copies).programs,)
    assert [kernel for kernel, _ in told] == [(step.kernel.fn.__name__, step.grid) for step in steps]
    follows = [x.pipe is not None and x.pipe.FOLLOWS and not x.pipe.SHARES for _, x in told]
    assert follows == [step.room == 1 for step in steps], "scratch of its own where two run at the same time"
    needs = [question.need_of(x) for x in planned.launches if x.shape.SPLIT or x.pipe is not None]
    assert needs == [step.need for step in steps if step.need is not None]


# ---- work


def test_memory_is_counted_by_hand() -> None:
    asked = ask(queries="1,3", keys="20,33", heads=4, kv_heads=2, head_dim=64, kv_dtype=torch.float8_e5m2)
    moved = question.memory(asked)
    assert moved["keys and values"] == 53 * 2 * 2 * 64
    assert moved["queries"] == moved["results"] == 4 * 4 * 64 * 2
    assert moved["page ids"] == 4 * (2 + 3)
    assert "log-sum-exps" not in moved
    assert question.memory(asked._replace(model=asked.model._replace(return_lse=True)))["log-sum-exps"] == 4 * 4 * 4
    assert moved["lengths"] == 4 * (2 + 3)
    assert question.operations(asked) == 4 * 64 * 4 * (20 + 31 + 32 + 33)


def test_a_window_frees_pages_and_new_keys_have_their_own_dtype() -> None:
    asked = ask(queries="4", keys="100", window=(9, -1), new=True, kv_dtype=torch.float8_e4m3fn)
    moved = question.memory(asked)
    assert moved["keys and values"] == 2 * 8 * 128 * (9 * 1 + 4 * 2)
    assert moved["page ids"] == 4 * 2  # positions 87 ... 99 lie in pages 5 and 6
    assert question.operations(asked) == 4 * 128 * 32 * 4 * 10


def test_pieces_are_told() -> None:
    """8 blocks of 128 tiles in halves."""
    told = printed("--queries 256 --keys 16384 --device sm90")
    assert "from a counter: 128 items of up to 64 tiles" in told
    assert "8 blocks are cut, into 16 pieces" in told
    told = printed("--queries 64 --keys 131072 --heads 8 --kv-heads 1 --device sm90")  # four blocks for 132 programs
    assert "from a counter: 128 items of up to 32 tiles" in told


def test_pairs_of_kv_heads_and_parts_of_their_groups_are_told() -> None:
    assert "1024 tiles that somebody sees for each of 8 KV heads; " in told(batch=64, keys="2048")["  work"]
    pairs = told(batch=64, keys="2048", head_dim=64)
    assert "(1 tokens x 8 heads)" in pairs["  tiles"]
    assert "for each of 4 pairs of KV heads; " in pairs["  work"]
    parts = told(batch=2, queries="4096", heads=96)
    assert "(32 tokens x 4 heads)" in parts["  tiles"]
    assert "for each of 24 parts of 8 groups; " in parts["  work"]
    alone = told(batch=2, queries="4096", heads=71, kv_heads=1, head_dim=64)
    assert "for each of 71 parts of 1 group; " in alone["  work"]


def test_how_uneven_queries_are_served_is_told() -> None:
    told = printed("--queries 1x140,63x1 --keys 64x4096 --device sm90")
    assert "from two counters, of many rows and of few: 544 items" in told
    assert "up to 8 rows as columns" in told
    call = "--queries 1x2048,63x1 --keys 1x2048,63x4096 --device sm90"
    told = printed(call)
    assert "mixed_kernel, 132 programs of 16 warps, for sequences of 3 queries or more" in told
    assert "beside     6 warps of each program, for sequences of 1 to 2 queries" in told
    assert "from a counter: 512 items" in told
    assert "even shares: 16 of 252 tiles" in told
    told = printed(f"{call} --kv-dtype fp8")
    assert "for sequences of 3 queries or more" in told
    assert "for sequences of 1 to 2 queries" in told
    told = printed("--queries 4x2048,2x1 --keys 6x4096 --device sm90")
    assert "from a counter" in told
    assert "columns" not in told


def test_even_shares_of_a_line_are_told() -> None:
    """12 sequences of one block, which 8 heads see for each of them: 96 blocks of 128 tiles for 132 programs."""
    told = printed("--queries 32 --keys 16384 --batch 12 --device sm90")
    assert "even shares of all heads' tiles: 132 of 93 to 94 tiles" in told
    assert "12 blocks are cut, into" in told


def test_how_a_softcap_comes_about_is_told() -> None:
    def tiles(**changes: Any) -> str:
        return told(keys="2048", softcap=30.0, **changes)["  tiles"]

    coarse, exact = tiles(queries="2048"), tiles(queries="2048", lse=True)
    assert "tanh by one instruction" in coarse
    assert "tanh of small scores by a polynomial of 3 terms" in coarse
    assert "tanh by one instruction" not in exact
    assert "tanh of small scores by a polynomial of 5 terms" in exact
    assert "tanh" not in tiles(queries="1")


def test_values_of_another_width_are_told_and_counted() -> None:
    both = told(head_dim=192, value_dim=128)
    assert "32 heads on 8 of 192 and values of 128" in both["call"]
    assert both["kernels"] == "Hopper's"
    assert "values of another width" in told(head_dim=192, value_dim=36)["kernels"]
    asked, keys = ask(head_dim=192, value_dim=128), 8 * 4096
    assert question.memory(asked)["keys and values"] == 2 * keys * (192 + 128)
    assert question.memory(asked)["queries"] == 2 * 32 * 192
    assert question.memory(asked)["results"] == 2 * 32 * 128
    assert question.operations(asked) == 2 * 32 * 4096 * (192 + 128)


def test_scratch_is_as_wide_as_values() -> None:
    for head_dim, value_dim, padded in ((512, 64, 64), (64, 512, 512), (192, 128, 128)):
        asked = ask(head_dim=head_dim, value_dim=value_dim, page_size=4)  # of the portable kernel
        (launch,) = planner.plan(asked.problem).launches
        states = launch.slots * launch.programs * launch.shape.KV_HEADS * launch.shape.LIVE * (padded + 2)
        assert question.need_of(launch).states - (launch.cuts if launch.merge else 0) == states


def test_a_latent_cache_is_read_once_and_its_heads_are_shared_out() -> None:
    deepseek = dict(heads=128, kv_heads=1, head_dim=576, value_dim=512, latent=True)
    both, asked = told(**deepseek), ask(**deepseek)
    assert "128 heads on 1 of 576 whose first 512 are values" in both["call"]
    assert question.memory(asked)["keys and values"] == 2 * 4096 * 576
    assert question.operations(asked) == 2 * 128 * 4096 * (576 + 512)
    latent = "--kv-heads 1 --head-dim 576 --value-dim 512 --latent --device sm90"
    words = printed(f"--heads 128 {latent} --page-size 4")
    assert "keys that are their values read once" in words
    assert "2 parts of 64 heads, on one KV head" in words
    words = printed(f"--heads 128 {latent}")
    assert "tiles of keys that hold their values beside" in words
    assert "2 parts of 1 group" in words
    assert "parts of" not in printed(f"--heads 64 {latent}")
