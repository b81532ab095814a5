"""Launches that begin before the previous launch ends: each reads complete inputs, and all results are complete."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import paged_attn
from paged_attn.calls import call_cache, launched
from paged_attn.kernels import shared_steps
from paged_attn.kernels.common.copying import copy_pages_kernel
from paged_attn.launching import scratch
from paged_attn.planning import planner
from paged_attn.records.plan import Plan
from tests import simulator
from tests.support.cases import E4M3, INT8, bits, build, is_fp8, problem_of
from tests.support.hopper_cases import DEVICE, sized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.hopper,
    pytest.mark.skipif(simulator.SIMULATES, reason="simulated launches follow one another"),
]


@pytest.mark.parametrize("chunk", [(70, 70), (64, 9000)], ids=["a short block", "blocks that are cut"])
def test_two_launches_of_a_call_give_the_same_results_in_a_row_and_from_a_graph(
    chunk: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results equal separate launches: blocks begin beside the last programs of long decodes, with separate scratch."""
    monkeypatch.setattr(scratch, "_rooms", {})  # beside many others the second one would not be kept
    queries, keys = (chunk[0], *[1] * 40), (chunk[1], *[9000] * 40)
    case = sized("overlapped", query_lens=queries, seq_lens=keys, cache_dtype=E4M3, lse=False)
    inputs = build(case, DEVICE)
    assert [x.pipe.FOLLOWS for x in planner.plan(problem_of(inputs)).launches] == [False, True]
    out = attended(inputs)
    want = out.clone()
    assert {number for *_, number in scratch._rooms} == {0, 1}
    graph, copies = torch.cuda.CUDAGraph(), torch.empty(20, *out.shape, dtype=out.dtype, device=DEVICE)
    with torch.cuda.graph(graph):
        for copy in copies:
            out.fill_(float("nan"))
            attended(inputs | dict(out=out))
            copy.copy_(out)
    graph.replay()
    assert all(torch.equal(copy, want) for copy in copies)
    for _ in range(20):
        out.fill_(float("nan"))
        attended(inputs | dict(out=out))
        assert torch.equal(out.clone(), want)


@triton.jit
def write_late(to, source, count, BLOCK: tl.constexpr):
    """Lets the next launch begin at once, and copies 100 us later."""
    tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < 100_000:
        now = tl.extra.cuda.globaltimer()
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, at < count), at < count)


def copy_late(to: Tensor, source: Tensor) -> None:
    """Copy with few programs, which leave room for programs of the next launch."""
    assert to.is_contiguous()
    write_late[(16,)](bits(to).flatten(), bits(source).flatten(), to.numel(), BLOCK=4096)


KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # launches
    "decodes": (1, dict(query_lens=(1,) * 64, decode_form=True)),
    "prefills": (1, dict(query_lens=(600,) * 64)),
    "mixed": (1, dict(query_lens=(600, *[1] * 63))),
    "mixed over e4m3": (2, dict(query_lens=(600, *[1] * 63), cache_dtype=E4M3)),
    # A copy comes first.  Decodes begin while it runs; long queries read it, whether there are decodes or not.
    "mixed over int8": (2, dict(query_lens=(600, *[1] * 63), cache_dtype=INT8, scales="per_token")),
    "long over int8": (2, dict(query_lens=(600, *[601] * 63), cache_dtype=INT8, scales="per_token")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_waits_for_keys_that_the_launch_before_is_still_writing(kind: str) -> None:
    launches, fields = KINDS[kind]
    case = sized(kind, seq_lens=(2000,) * 64, lse=False, bounds=True, **fields)
    inputs = build(case, DEVICE)
    made = planner.plan(problem_of(inputs))
    assert launches == len(made.launches)
    assert (made.copies is not None) == made.launches[0].pipe.FOLLOWS == ("int8" in kind)
    cache = inputs["v_cache"]
    before = cache.clone()
    after = (bits(before) ^ 128).view(before.dtype) if is_fp8(before.dtype) else -before
    cache.copy_(after)
    want = attended(inputs).clone()
    cache.copy_(before)
    assert not torch.equal(attended(inputs), want)
    for _ in range(3):
        cache.copy_(before)
        torch.cuda.synchronize()
        copy_late(cache, after)
        assert torch.equal(attended(inputs), want)


@triton.jit
def copy_pages_late(
    cache, copies, table, query_starts, seq_lens, page_table, page_table_stride, page_starts, mods, shortest, pages,
    parts, FROM_PAGE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr, NEW: tl.constexpr, DEPENDENT: tl.constexpr, SHARD: tl.constexpr, RANKED: tl.constexpr,
    seqs, NATIVE: tl.constexpr,
):  # fmt: skip
    """Do `copy_pages_kernel`; the first program begins 100 us late, when all other programs have ended."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while (now - begin < 100_000) & (tl.program_id(0) == 0):
        now = tl.extra.cuda.globaltimer()
    copy_pages_kernel(
        cache, copies, table, query_starts, seq_lens, page_table, page_table_stride, page_starts, mods, shortest, pages,
        parts, FROM_PAGE, PAGE, KEYS, HEADS, KV_HEADS, HEAD_DIM, DIM, VALUE_DIM, VALUE_PADDED, NEW, DEPENDENT, SHARD,
        RANKED, seqs, NATIVE,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "int8" in kind])
def test_long_queries_wait_for_copies_that_are_late(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy's memory holds other keys before."""
    case = sized(kind, seq_lens=(2000,) * 64, lse=False, bounds=True, **KINDS[kind][1])
    inputs = build(case, DEVICE)
    cache = inputs["v_cache"]
    before, after = cache.clone(), -cache
    cache.copy_(after)
    want = attended(inputs).clone()
    monkeypatch.setattr(shared_steps, "copy_pages_kernel", copy_pages_late)
    call_cache.clear()
    for _ in range(3):
        cache.copy_(before)
        attended(inputs)
        cache.copy_(after)
        torch.cuda.synchronize()
        assert torch.equal(attended(inputs), want)
    call_cache.clear()


def test_writing_waits_for_keys_that_the_launch_before_is_still_writing() -> None:
    old, new = torch.randn(2, 64, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k, cache = old.clone(), torch.zeros(2, 4, 16, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.arange(64, device=DEVICE)
    for _ in range(3):  # the first of which compiles
        k.copy_(old)
        torch.cuda.synchronize()
        copy_late(k, new)
        paged_attn.write_kv(k, k, *cache, slots)
        assert torch.equal(cache[0].view(64, 8, 128), new)


def test_the_second_launch_of_a_call_ends_no_earlier_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written late here stands for the first."""
    _, fields = KINDS["mixed over e4m3"]
    inputs = build(sized("", seq_lens=(2000,) * 64, lse=False, bounds=True, **fields), DEVICE)
    _, second = planner.plan(problem_of(inputs)).launches
    assert second.pipe.FOLLOWS
    call_cache.clear()
    monkeypatch.setattr(launched, "plan", lambda problem: Plan((second,)))
    old, new = torch.randn(2, 1 << 20, device=DEVICE)
    x = old.clone()
    for _ in range(3):
        x.copy_(old)
        torch.cuda.synchronize()
        copy_late(x, new)
        attended(inputs)
        assert torch.equal(x.clone(), new)
    call_cache.clear()


def attended(inputs: dict[str, Any]) -> Tensor:
    """Results without log-sum-exps."""
    out = paged_attn.paged_attention(**inputs)
    assert isinstance(out, Tensor)
    return out
