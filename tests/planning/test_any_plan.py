"""What the plan of any call on Hopper promises, of whatever model and batch; needs no GPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paged_attn.kernels.hopper.planning import coverage as hopper
from paged_attn.kernels.hopper.planning import operands
from paged_attn.planning import planner
from paged_attn.preparation.model import Lengths, Model, problem_of
from paged_attn.records.copies import PAGE
from paged_attn.records.formats import is_scaled
from paged_attn.records.plan import UNBOUNDED, Launch
from paged_attn.records.problem import Problem
from tests.kernels.hopper.planned import H200, MIXED
from tests.support.cases import E4M3, INT4, INT8
from tests.support.random_calls import SIZES, drawn


def any_model(rng: random.Random) -> Model:
    sizes = drawn(rng, SIZES)
    if is_scaled(sizes["cache_dtype"]) and rng.random() < 0.5:
        sizes["cache_dtype"] = rng.choice([INT8, INT8 if sizes["layout"] == "x" else INT4])
    of_bytes = is_scaled(sizes["cache_dtype"])
    kv_heads = rng.choice([1, 1, 2, 3, 4, 8, 16, 32])
    group = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24, 28, 32, 33, 40, 48, 56, 63, 64, 65, 71, 96, 128])
    return Model(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        out_dtype=torch.bfloat16 if sizes["dtype"] == E4M3 else sizes["dtype"],
        kv_layout=sizes.pop("layout"),
        causal=True,
        sinks=None,
        gate=None,
        qq_bias=rng.choice([0, 0, 0, 0, 32]),
        query_positions=rng.random() < 0.2,
        scales="per_token" if sizes["cache_dtype"] == INT4 or (of_bytes and rng.random() < 0.5) else "number",
        return_lse=rng.random() < 0.3,
        **sizes,
    )


def any_batch(rng: random.Random) -> Lengths:
    seqs, keys = (round(most ** rng.random()) for most in (512, 131072))
    if rng.random() < 0.2:
        return Lengths(False, seqs, seqs, 1, keys)
    longest = max(1, round(8192 ** rng.random()))
    tokens = rng.choice([seqs * longest, longest + seqs - 1, rng.randint(1, seqs * longest)])
    return Lengths(True, seqs, tokens, rng.choice([longest, tokens]), max(keys, longest))


def any_calls(seed: int, count: int) -> Iterator[Problem]:
    """Calls that the Hopper kernels cover."""
    rng = random.Random(seed)
    while count > 0:
        problem = problem_of(any_model(rng), any_batch(rng), H200)
        only = rng.choice([None, None, None, "decode", "prefill"]) if problem.ragged else None
        problem = problem._replace(only=only, batch_invariant=rng.random() < 0.1)
        if not hopper.uncovered(problem):
            count -= 1
            yield problem


def complaints(p: Problem, launches: tuple[Launch, ...]) -> Iterator[str]:
    """What is wrong with a plan."""
    parts = [x for launch in launches for x in launch.parts]
    served = sorted((x.shortest, x.longest) for x in parts)
    first, last = {None: (0, UNBOUNDED), "decode": (1, 1), "prefill": (2, UNBOUNDED)}[p.only if p.ragged else "decode"]
    if served[0][0] != first or served[-1][1] not in (last, UNBOUNDED):
        yield f"serves {served}"
    if any(before[1] + 1 != after[0] for before, after in itertools.pairwise(served)):
        yield f"serves some sequences twice, or not at all: {served}"
    clear = p.ragged and p.only is None
    if sum(x.shape.CLEAR for x in parts) != clear:
        yield "clears padding otherwise than once"
    leads = [x.shape.LEADS for x in launches]
    follows = [x.pipe is not None and x.pipe.FOLLOWS for x in launches]
    copy_leads = launches[-1].copied and launches[0].pipe is not None and launches[0].pipe.SHARES
    if [copy_leads, *leads][:-1] != follows or leads[-1]:
        yield f"leads {leads}, follows {follows}"
    if any(f and x.pipe.SHARES and x.copied for x, f in zip(launches, follows)):
        yield "shares read a copy that they do not wait for"
    for x in parts:
        yield from _complaints_of_one(p, x)


def _complaints_of_one(p: Problem, x: Launch) -> Iterator[str]:
    shape, pipe = x.shape, x.pipe
    if (shape.SPLIT and not shape.MERGE) != (x.merge is not None):
        yield f"cuts {shape.SPLIT}, joins {shape.MERGE} rows at a time, merges by {x.merge}"
    if shape.BLOCK_Q * shape.GROUP > shape.ROWS or x.block_tokens > shape.BLOCK_Q or x.programs < 1:
        yield f"has blocks of {shape.BLOCK_Q} tokens, {x.block_tokens} of them live, and {shape.ROWS} rows"
    if pipe is None:
        return
    if p.heads != shape.GROUP * shape.KV_HEADS:
        yield f"has {shape.GROUP} x {shape.KV_HEADS} heads"
    if (p.slot_scales and not x.copied) != pipe.SLOT_SCALES:
        yield f"reads scales by token: {pipe.SLOT_SCALES}"
    if shape.GROUP > 64:
        yield "has more heads in a group than a consumer has rows"
    if pipe.SHARES and (p.packed or p.cache.itemsize == 1) and not pipe.COLUMNS:
        yield "has rows where only columns can be multiplied with what the cache holds"
    if pipe.SHARES and p.packed and p.new:
        yield "reads new keys, which are not packed, as columns"
    if not pipe.SHARES and p.packed and (p.cache.itemsize != 2 or pipe.CONVERT != operands.NONE):
        yield "has blocks over an x-packed fp8 cache"
    if pipe.SHARES and pipe.COLUMNS and shape.ROWS != pipe.COLUMNS:
        yield f"has {shape.ROWS} rows as {pipe.COLUMNS} columns"
    if (PAGE if x.copied else p.page_size) % pipe.BOX or shape.TILE % pipe.BOX:
        yield f"has boxes of {pipe.BOX} slots"


@pytest.mark.parametrize("seed", range(4))
def test_any_call_is_served_once_by_kernels_that_can(seed: int) -> None:
    found = {}
    for problem in any_calls(seed, 3000):
        made = planner.plan.__wrapped__(problem)
        wrong = list(complaints(problem, made.launches))
        if (made.copies is not None) != any(x.copied for x in made.launches):
            wrong.append("makes copies that no launch reads, or reads copies that it does not make")
        if wrong:
            found[problem] = wrong
    assert not found, f"{len(found)}, among them {next(iter(found.items()))}"


@pytest.mark.parametrize("slot_scales", [True, False])
@pytest.mark.parametrize("changes", [dict(page_size=4), dict(rows_per_page=0)], ids=str)
def test_copies_of_long_queries_alone_serve_no_short_ones(changes: dict[str, Any], slot_scales: bool) -> None:
    """Decodes beside them would read their caches in boxes, which these calls have not."""
    problem = MIXED._replace(cache=torch.int8, compute=torch.float16, slot_scales=slot_scales)
    made = planner.plan(problem)
    assert made.copies is not None
    assert made.copies.shortest > 1
    for asked in (problem._replace(**changes), problem._replace(only="decode", **changes)):
        assert planner.plan(asked).copies is None
        assert {x.dialect for x in planner.plan(asked).launches} == {"portable"}
    prefills = problem._replace(only="prefill", **changes)
    copies = planner.plan(prefills).copies
    assert copies is None or copies.shortest <= 2


def test_a_plan_that_is_wrong_is_complained_about() -> None:
    problem = next(p for p in any_calls(0, 100) if not p.ragged and not p.packed and p.cache.itemsize == 2)
    (launch,) = planner.plan(problem).launches
    changes: dict[str, Any] = {
        "serves": launch._replace(shortest=3),
        "leads": launch._replace(shape=launch.shape._replace(LEADS=True)),
        "clears": launch._replace(shape=launch.shape._replace(CLEAR=True)),
        "has boxes": launch._replace(pipe=launch.pipe._replace(BOX=7)),
    }
    for words, wrong in changes.items():
        assert [text for text in complaints(problem, (wrong,)) if text.startswith(words)], words
    packed = problem._replace(packed=True)
    rows = launch._replace(pipe=launch.pipe._replace(COLUMNS=0))
    assert any(text.startswith("has rows where") for text in complaints(packed, (rows,)))
