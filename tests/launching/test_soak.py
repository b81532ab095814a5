"""Many times the same, on a GPU: replays at changing lengths, repeats, two streams; looked at on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from benchmarks.measure import capture
from tests.kernels.common.test_schedule import Server
from tests.support import hopper_plans, portable_plans
from tests.support.cases import E4M3, build
from tests.support.hopper_cases import CASES, sized

pytestmark = pytest.mark.gpu
LONGEST = 20_000
DIALECTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "portable": portable_plans.portable,
    "hopper": hopper_plans.anywhere,
}
dialects = pytest.mark.parametrize(
    "dialect", ["portable", pytest.param("hopper", marks=pytest.mark.hopper)], indirect=True
)


@pytest.fixture
def dialect(request: pytest.FixtureRequest) -> Any:
    with DIALECTS[request.param]():
        yield request.param


class Changing:
    """A server whose lengths change from step to step, and what its results are at each."""

    def __init__(self, query_len: int, seed: int = 0, graph: bool = True) -> None:
        self.server = Server(6, LONGEST, query_len=query_len, seed=seed)
        rng = torch.Generator().manual_seed(seed)
        least = torch.tensor([0, query_len, LONGEST, 0, query_len, query_len])
        drawn = torch.randint(query_len, LONGEST, (16, 6), generator=rng)
        drawn = torch.where(torch.rand(16, 6, generator=rng) < 0.3, least, drawn // (1 + drawn % 97))
        self.lens = drawn.clamp(max=LONGEST).to("cuda", torch.int32)
        self.attend: Callable[[], Any] = self.server.attend
        if graph:
            self.attend = capture(self.server.attend).replay
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.want: list[Tensor] = []
        for lens in self.lens:
            self.server.lens.copy_(lens)
            self.attend()
            self.server.check(list(range(6)))
            self.want.append(self.server.out.clone())

    def step(self, number: int) -> None:
        """Other lengths, the call, and a look at each bit, all without the host."""
        which = number * 7 % 16
        self.server.lens.copy_(self.lens[which])
        self.server.out.fill_(torch.nan)
        self.attend()
        self.wrong += (self.server.out != self.want[which]).any()


@dialects
@pytest.mark.parametrize("query_len", [1, 16, 64])
def test_ten_thousand_replays_at_changing_lengths_have_the_bits_of_the_first(dialect: str, query_len: int) -> None:
    changing = Changing(query_len)
    for number in range(10_000):
        changing.step(number)
    assert changing.wrong == 0


REPEATED = ("decodes", "decodes beside a chunk", "200 mixed", "chunk", "e4m3 mixed, no lse", "new")


@dialects
@pytest.mark.parametrize("name", REPEATED)
def test_a_thousand_repeats_have_the_same_bits(dialect: str, name: str) -> None:
    inputs = build(sized(name, **CASES[name]), "cuda")
    found = paged_attn.paged_attention(**inputs)
    first = [x.clone() for x in (found if isinstance(found, tuple) else (found,))]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        inputs["out"].fill_(torch.nan)
        found = paged_attn.paged_attention(**inputs)
        for got, want in zip(found if isinstance(found, tuple) else (found,), first, strict=True):
            wrong += (got != want).any()
    assert wrong == 0


@dialects
@pytest.mark.parametrize("query_len", [1, 64])
def test_eager_calls_on_one_stream_beside_replays_on_another_do_not_meet(dialect: str, query_len: int) -> None:
    sides = [Changing(query_len, seed=1, graph=False), Changing(query_len, seed=2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for number in range(1000):
        for side, stream in zip(sides, streams, strict=True):
            with torch.cuda.stream(stream):
                side.step(number)
    torch.cuda.synchronize()
    assert [int(side.wrong) for side in sides] == [0, 0]


@dialects
def test_a_write_and_a_read_of_what_was_written_take_turns_a_thousand_times(dialect: str) -> None:
    """Each step writes the newest key of each sequence, over fp8, and its query sees it: nothing else has weight."""
    seqs, page, pages = 8, 16, 64
    caches = torch.zeros(2, pages, page, 2, 128, device="cuda").to(E4M3).unbind()
    table = torch.randperm(pages, device="cuda").view(seqs, -1).to(torch.int32)
    q = torch.ones(seqs, 8, 128, dtype=torch.bfloat16, device="cuda")
    scales = dict(k_scale=1.0, v_scale=1.0)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    numbers = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=torch.bfloat16, device="cuda")
    for step in range(1000):
        at = step % (page * pages // seqs)
        lens = torch.full((seqs,), at + 1, dtype=torch.int32, device="cuda")
        slots = table[:, at // page].long() * page + at % page
        new = numbers[(torch.arange(seqs, device="cuda") + step) % 4][:, None, None].expand(seqs, 2, 128).contiguous()
        paged_attn.write_kv(new, new, *caches, slots, **scales)
        out = paged_attn.paged_attention(q, *caches, table, lens, window_size=(0, -1), **scales)
        wrong += (out != new[:, :1]).any()
    assert wrong == 0
