"""The rules of continuous batching, and that under any load every request is served whole and every page comes back.

The free list of pages: nothing is handed out twice, and every misuse is an exact error that changes nothing.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.serving.meter import work_of
from paged_attn.serving.scheduler import OutOfPages, Pages, Scheduler, Sequence, StepPart
from paged_attn.serving.tensors import NO_PAGE, batch_of, sample
from paged_attn.serving.trace import Request


def _scheduler(pages: int = 64, page_size: int = 4, budget: int = 8, max_seqs: int = 4) -> Scheduler:
    return Scheduler(Pages(pages), page_size, budget, max_seqs)


def _lengths(parts: list[StepPart]) -> list[tuple[int, int]]:
    return [(part.context_len, part.query_len) for part in parts]


def _step(scheduler: Scheduler) -> list[tuple[int, int]]:
    parts, _ = scheduler.plan()
    scheduler.complete(parts)
    return _lengths(parts)


def test_a_prompt_is_prefilled_in_chunks_then_decoded_token_by_token() -> None:
    scheduler = _scheduler(budget=8)
    scheduler.submit(Request(0.0, prompt=19, output=3))
    # The last chunk makes the first output token, and the third one is never fed back.
    assert [_step(scheduler) for _ in range(5)] == [[(0, 8)], [(8, 8)], [(16, 3)], [(19, 1)], [(20, 1)]]
    assert scheduler.idle
    assert scheduler.pages.used == 0


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    scheduler = _scheduler(budget=8)
    for prompt in (2, 20, 20):
        scheduler.submit(Request(0.0, prompt, output=9))
    assert _step(scheduler) == [(0, 2), (0, 6)]
    assert _step(scheduler) == [(2, 1), (6, 7)]
    assert _step(scheduler) == [(3, 1), (13, 7)]
    assert _step(scheduler) == [(4, 1), (20, 1), (0, 6)]


def test_a_request_waits_until_the_free_pages_hold_its_prompt() -> None:
    scheduler = _scheduler(pages=5, budget=16)
    scheduler.submit(Request(0.0, prompt=12, output=1))
    scheduler.submit(Request(0.0, prompt=12, output=1))
    assert _step(scheduler) == [(0, 12)]
    assert len(scheduler.waiting) == 1
    assert _step(scheduler) == [(0, 12)]


def test_no_more_than_max_seqs_run() -> None:
    scheduler = _scheduler(budget=16, max_seqs=2)
    for _ in range(3):
        scheduler.submit(Request(0.0, prompt=2, output=2))
    assert len(_step(scheduler)) == 2


def test_out_of_pages_the_youngest_is_preempted_and_later_prefills_what_it_knew() -> None:
    scheduler = _scheduler(pages=4, page_size=4, budget=16)
    for _ in range(2):
        scheduler.submit(Request(0.0, prompt=8, output=9))
    assert _step(scheduler) == [(0, 8), (0, 8)]
    parts, freed = scheduler.plan()
    assert _lengths(parts) == [(8, 1)]
    assert len(freed) == 2
    assert scheduler.preemptions == 1
    assert scheduler.waiting[0].known == 9
    scheduler.complete(parts)
    while scheduler.waiting:
        last = _step(scheduler)
    assert last == [(0, 9)]  # its prompt and the token that it had made
    while not scheduler.idle:
        _step(scheduler)
    assert scheduler.pages.used == 0


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a request of 10 [+] 8 tokens needs 5 pages of 4, the cache has 4"):
        _scheduler(pages=4).submit(Request(0.0, prompt=10, output=8))
    with pytest.raises(ValueError, match="a step of 3 tokens cannot decode 4 sequences"):
        _scheduler(budget=3, max_seqs=4)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12),
    pages=st.integers(11, 20),
    page_size=st.integers(4, 7),
    budget=st.integers(4, 20),
)
def test_any_load_is_served_whole(lengths: list[tuple[int, int]], pages: int, page_size: int, budget: int) -> None:
    scheduler = _scheduler(pages, page_size, budget)
    for prompt, output in lengths:
        scheduler.submit(Request(0.0, prompt, output))
    sequences = list(scheduler.waiting)
    for _ in range(2000):
        if scheduler.idle:
            break
        parts, _ = scheduler.plan()
        assert 0 < sum(part.query_len for part in parts) <= budget
        assert [part.decode for part in parts] == sorted((part.decode for part in parts), reverse=True)
        held = [page for sequence in scheduler.running for page in sequence.pages]
        assert len(set(held)) == len(held) == scheduler.pages.used
        for part in parts:
            assert part.context_len == part.sequence.cached
            assert part.seq_len <= len(part.sequence.pages) * page_size
            assert part.query_len == 1 or not part.decode
        scheduler.complete(parts)
    assert scheduler.idle
    assert scheduler.pages.used == 0
    assert [sequence.cached for sequence in sequences] == [prompt + output - 1 for prompt, output in lengths]


def test_a_batch_says_where_each_token_goes_and_ends_tables_in_no_page() -> None:
    first = Sequence(Request(0.0, 5, 1), known=5, pages=[7, 2])
    second = Sequence(Request(0.0, 2, 1), known=3, cached=2, pages=[4])
    batch = batch_of([StepPart(second, 2, 1, True), StepPart(first, 1, 4, False)], 4, torch.device("cpu"))
    assert batch.page_table.tolist() == [[4, NO_PAGE], [7, 2]]
    assert batch.seq_lens.tolist() == [3, 5]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5]
    assert batch.slot_mapping.tolist() == [18, 29, 30, 31, 8]
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (4, 5)
    parts = [StepPart(second, 2, 1, True), StepPart(first, 1, 4, False)]
    in_buckets = batch_of(parts, 4, torch.device("cpu"), bucket=16)
    assert in_buckets.max_seqlen_k == 16
    assert in_buckets.page_table.tolist() == [[4, NO_PAGE, NO_PAGE, NO_PAGE], [7, 2, NO_PAGE, NO_PAGE]]


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_holds_both_kinds_and_names_its_rows(seed: int) -> None:
    parts = [StepPart(Sequence(Request(0.0, 9, 1), 9), i, 1, True) for i in range(4)]
    parts += [StepPart(Sequence(Request(0.0, 9, 1), 9), 3, 10 + i, False) for i in range(4)]
    runs, rows = sample(parts, random.Random(seed), sequences=3, tokens=4)
    assert len(runs) == 3
    assert {run.decode for run in runs} == {True, False}
    assert len(set(rows)) == len(rows) == sum(run.query_len for run in runs)
    starts = [0, 1, 2, 3, 4, 14, 25, 37]
    at = 0
    for run in runs:
        (i,) = [i for i, part in enumerate(parts) if part.sequence is run.sequence]
        # A row's position in its sequence is the same in the run and in the batch.
        assert rows[at] - starts[i] + parts[i].context_len == run.context_len
        at += run.query_len


def test_bytes_and_operations_are_counted_from_lengths() -> None:
    part = StepPart(Sequence(Request(0.0, 9, 1), 9), context_len=6, query_len=3, decode=False)
    work = work_of([part], heads=4, kv_heads=2, head_dim=8, page_size=4, q_bytes=2, kv_bytes=1)
    assert work.flops == 4 * 8 * 4 * (7 + 8 + 9)
    assert work.bytes == 2 * 9 * 2 * 8 * 1 + 2 * 3 * 4 * 8 * 2 + 3 * 4


# ---- the free list of pages ----------------------------------------------------------------------


def test_pages_are_handed_out_once_each() -> None:
    pages = Pages(5)
    assert sorted(pages.take(2) + pages.take(3)) == [0, 1, 2, 3, 4]
    assert (pages.free, pages.used) == (0, 5)


def test_taking_more_than_is_free_takes_none() -> None:
    pages = Pages(4)
    pages.take(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 are free"):
        pages.take(2)
    assert pages.free == 1


@pytest.mark.parametrize(
    ("given_back", "message"),
    [
        ([0, 3], "page 3 is free already"),
        ([0, 4], "page 4 is outside the cache of 4 pages"),
        ([0, -1], "page -1 is outside the cache of 4 pages"),
        ([1, 0, 1], "page 1 is given back twice"),
    ],
)
def test_a_wrong_page_is_named_and_none_is_given_back(given_back: list[int], message: str) -> None:
    pages = Pages(4)
    assert pages.take(3) == [0, 1, 2]
    with pytest.raises(ValueError, match=f"^{message}$"):
        pages.give(given_back)
    assert pages.used == 3


def test_sizes_make_sense() -> None:
    with pytest.raises(ValueError, match="at least 1 page, got 0"):
        Pages(0)
    with pytest.raises(ValueError, match="cannot take -1 pages"):
        Pages(1).take(-1)


@given(st.lists(st.integers(-4, 4), max_size=40))
def test_any_history_keeps_the_count_of_pages(history: list[int]) -> None:
    pages, held = Pages(8), list[int]()
    for change in history:
        if change < 0:
            pages.give(held[change:])
            held = held[:change]
        elif change <= pages.free:
            held += pages.take(change)
        assert len(set(held)) == len(held) == pages.used
        assert pages.used + pages.free == pages.total
