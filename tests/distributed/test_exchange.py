"""The exchange by stores to peers, of ranks that are one process' objects on one device: phases in any order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import distributed
from paged_attn.distributed import peers as peers_module
from paged_attn.distributed import steps
from paged_attn.distributed.steps import Sizes
from tests.distributed.works import states
from tests.support import own_process

pytestmark = pytest.mark.kernels


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def assert_same_bits(found: Tensor, want: Tensor) -> None:
    """Equal bits, so 0 and -0 differ; any NaN is as good as another."""
    integers = torch.int32 if found.dtype == torch.float32 else torch.int16
    same = (found.contiguous().view(integers) == want.contiguous().view(integers)) | found.isnan() & want.isnan()
    assert same.all()


class Merge(NamedTuple):
    """One merge of all ranks: what each has, and room for what each gets."""

    sizes: Sizes
    outs: Tensor  # [world, tokens, heads, dims]
    lses: Tensor
    sinks: Tensor | None
    into: Tensor  # [world, tokens, given, dims]
    merged: Tensor | None

    def give(self, peers: distributed.Peers, phase: str) -> None:
        rank = peers.rank
        merged = None if self.merged is None else self.merged[rank]
        assert peers.holds(self.sizes)
        peers.exchange(self.outs[rank], self.lses[rank], self.sinks, self.into[rank], merged, self.sizes, phase)

    def check(self, but: int | None = None) -> None:
        world, heads = self.sizes.world, self.sizes.given
        want, want_lse = paged_attn.merge_states(self.outs.float(), self.lses, self.sinks)
        for rank in {*range(world)} - {but}:
            own = slice(rank * heads, (rank + 1) * heads) if heads < self.sizes.heads else slice(None)
            assert_same_bits(self.into[rank], want[:, own].to(self.into.dtype))
            assert self.merged is None or torch.equal(self.merged[rank], want_lse[:, own])


def merge_of(rng: random.Random, world: int, heads: int, dims: int, device: str, tokens: int) -> Merge:
    """Return a merge with a random number of tokens, and at random: all heads or a rank's, dtype, sinks, LSEs."""
    sizes = Sizes(rng.randint(1, tokens), heads, rng.choice([heads, heads // world]), dims, world)
    dtype = rng.choice([torch.float32, torch.float16])
    outs, lses, sinks = states(world, sizes.tokens, heads, dims, device, rng.randrange(1000))
    room = torch.full((world, sizes.tokens, sizes.given, dims), torch.nan, dtype=dtype, device=device)
    merged = torch.full(room.shape[:3], torch.nan, device=device) if rng.random() < 0.5 else None
    return Merge(sizes, outs.to(dtype), lses, sinks if rng.random() < 0.5 else None, room, merged)


@pytest.mark.parametrize(("world", "programs"), [(1, 128), (2, 128), (2, 3), (3, 2), (5, 128)])
def test_phases_in_any_order_give_the_bits_of_one_process(
    world: int, programs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be one call ahead of ranks that have not read the rows of its earlier call yet.

    Few programs have several steps of rows in large calls, and are not all needed in small ones.
    """
    if programs < 128:
        monkeypatch.setattr(steps, "ELEMENTS", 32)
    for module in (steps, peers_module):
        monkeypatch.setattr(module, "MAX_PROGRAMS", programs)
    rng = random.Random(world)
    heads, dims, tokens = 2 * world, rng.choice([8, 24]), 5
    peers = distributed.Peers.of_one_process(world, max_tokens=tokens, heads=heads, head_dim=dims, device=device)
    merges = [merge_of(rng, world, heads, dims, device, tokens) for _ in range(7)]
    sent, received = [0] * world, [0] * world
    while min(received) < len(merges):
        rank = rng.randrange(world)
        number = received[rank]
        if sent[rank] == number < len(merges):
            merges[number].give(peers[rank], "send")
            sent[rank] += 1
        elif number < len(merges) and min(sent) > number:
            merges[number].give(peers[rank], "receive")
            received[rank] += 1
    for merge in merges:
        merge.check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("world", [2, 3])
def test_any_number_is_sent(world: int, device: str) -> None:
    """Results of 0 with a log-sum-exp of 0 come of zeroed caches.  A word of 0 would never arrive."""
    inf, nan = math.inf, math.nan
    values = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, inf, -inf, nan, 3e38, -3e38], device=device)
    tokens, heads = len(values), 2 * world
    peers = distributed.Peers.of_one_process(world, max_tokens=tokens, heads=heads, head_dim=8, device=device)
    for seed, sinks in enumerate([None, torch.zeros(heads, device=device), torch.full((heads,), inf, device=device)]):
        rng = torch.Generator().manual_seed(seed)
        picks = torch.randint(len(values), (world, tokens, heads, 9), generator=rng).to(device)
        picks[:, :2] = 0  # the first two tokens have only zeros
        chosen = values[picks]
        sizes = Sizes(tokens, heads, heads, 8, world)
        outs, lses = chosen[..., :8].contiguous(), values[picks[..., 8] % 9]  # log-sum-exps are no larger than 2^127
        merge = Merge(sizes, outs, lses, sinks, torch.full_like(outs, nan), None)
        for phase in ("send", "receive"):
            for x in peers:
                merge.give(x, phase)
        synchronize(device)
        assert not any(x._absent.value for x in peers)
        assert not any(x._own.any() for x in peers), "all words are 0 again"
        merge.check()


def test_a_rank_that_does_not_answer_is_named_by_every_later_call(device: str) -> None:
    peers = distributed.Peers.of_one_process(3, max_tokens=2, heads=3, head_dim=8, timeout=0.25, device=device)
    merge = merge_of(random.Random(0), 3, 3, 8, device, 2)
    for rank in (0, 1):
        merge.give(peers[rank], "send")
    merge.give(peers[0], "receive")
    synchronize(device)
    assert merge.into[0].isnan().all()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^rank 2 did not answer within 0\.25 s$"):
            merge.give(peers[0], "both")
        with pytest.raises(RuntimeError, match=r"^rank 2 did not answer within 0\.25 s$"):
            peers[0].holds(merge.sizes._replace(tokens=100))  # nor does it answer to a collective


def test_a_rank_that_was_left_waiting_gives_nan_ever_after_even_in_graphs(device: str) -> None:
    """A graph does not ask the host: a word that comes too late must not pass for a word of a later call."""
    peers = distributed.Peers.of_one_process(3, max_tokens=2, heads=3, head_dim=8, timeout=0.1, device=device)
    rng = random.Random(1)
    merges = [merge_of(rng, 3, 3, 8, device, 2) for _ in range(4)]

    told: dict[int, int] = {}

    def give(number: int, rank: int, phase: str) -> None:
        merges[number].give(peers[rank], phase)
        synchronize(device)
        if peers[rank]._absent.value:
            told[rank] = peers[rank]._absent.value - 1
            peers[rank]._absent.value = 0  # as a graph does not ask

    for rank, phase in ((0, "send"), (1, "send"), (0, "receive"), (2, "send"), (1, "receive"), (2, "receive")):
        give(0, rank, phase)
    assert merges[0].into[0].isnan().all(), "rank 2 came too late for rank 0"
    merges[0].check(but=0)
    for number in (1, 2, 3):
        for rank in (0, 1, 2):
            give(number, rank, "send")
        for rank in (0, 1, 2):
            give(number, rank, "receive")
        assert merges[number].into.isnan().all(), "rank 0 sends nothing, and so nobody has all"
    assert told == {0: 2, 1: 0, 2: 0}


def test_ranks_that_have_failed_may_begin_again(device: str) -> None:
    """With new memory: whatever is stored late goes to the old."""
    old = distributed.Peers.of_one_process(2, max_tokens=2, heads=2, head_dim=8, timeout=0.1, device=device)
    merge = merge_of(random.Random(2), 2, 2, 8, device, 2)
    merge.give(old[0], "both")
    new = distributed.Peers.of_one_process(2, max_tokens=2, heads=2, head_dim=8, device=device)
    for phase in ("send", "receive"):
        for x in new:
            merge.give(x, phase)
    synchronize(device)
    merge.check()


def test_a_forked_child_is_refused() -> None:
    script = """
import os, torch
from paged_attn import distributed

peers = distributed.Peers.of_one_process(1, max_tokens=1, heads=1, head_dim=8, device="cpu")[0]
state = torch.zeros(1, 1, 8), torch.zeros(1, 1)
if os.fork() == 0:
    try:
        distributed.merge(*state, peers)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    said = own_process.run(script, TRITON_INTERPRET="1")
    assert said.strip() == "Peers do not survive a fork: make them in the process that uses them"


def test_a_word_is_loaded_once_whenever_it_is_looked_at() -> None:
    """A compiler may load again what it needs in several layouts, and the first of two loads may find no word yet.

    No word is 0, because a log-sum-exp of 0 is sent as -0, whose bits are -2^31.

    Words are looked at in two places, before the loop that waits and in it.  In each, a thread of 128 has 4 of the 512
    words of every rank, by two loads.
    """
    script = """
import re, torch
from paged_attn import distributed
from paged_attn.distributed.steps import Sizes
from tests.machine_code import compile_calls

minus_zero = "selp.b(32|64) [^;]*, -(2147483648|9223372036854775808),"

def call(world, dims):
    peers = distributed.Peers.of_one_process(world, max_tokens=4, heads=2 * world, head_dim=dims, device="cpu")[0]
    peers._compiled |= dict(TIMED=True, DEPENDENT=True)
    out, lse, sinks = torch.zeros(4, 2 * world, dims), torch.zeros(4, 2 * world), torch.zeros(2 * world)
    sizes = Sizes(4, 2 * world, 2, dims, world)
    peers.exchange(out, lse, sinks, torch.zeros(4, 2, dims, dtype=torch.bfloat16), torch.zeros(4, 2), sizes)

for case in [(2, 128), (3, 24), (9, 512)]:
    for _, kernel in compile_calls("sm90", [("exchange", lambda: call(*case))]):
        ptx = kernel.asm["ptx"]
        print(case[0], ptx.count("ld.volatile.global"), ptx.count("st.global.wt"), bool(re.search(minus_zero, ptx)))
"""
    said = own_process.run(script, TRITON_INTERPRET="0")
    wanted = [[str(n), str(4 * n), str(2 * n), "True"] for n in (2, 3, 9)]
    assert [line.split() for line in said.splitlines()] == wanted


def test_torch_compile_leaves_a_merge_alone(device: str) -> None:
    peers = distributed.Peers.of_one_process(1, max_tokens=2, heads=2, head_dim=8, device=device)[0]

    def doubled(out: Tensor, lse: Tensor) -> Any:
        return distributed.merge(2 * out, lse, peers) + 1

    out, lse = torch.randn(2, 2, 8, device=device), torch.zeros(2, 2, device=device)
    assert torch.equal(torch.compile(doubled, backend="eager")(out, lse), 2 * out + 1)


def warm(merge: Merge, peers: list[distributed.Peers]) -> None:
    """Compile and load what each rank launches, while no kernel waits: the others send first, and receive last.

    The driver loads a kernel at its first launch, and may wait until running kernels end.  A kernel that waits for
    this very rank would never end.
    """
    torch.cuda._sleep(1)
    for rank in peers:
        others = [x for x in peers if x is not rank]
        for x in others:
            merge.give(x, "send")
        merge.give(rank, "both")
        for x in others:
            merge.give(x, "receive")
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_on_streams_of_one_device_wait_for_each_other(world: int) -> None:
    heads, tokens = 2 * world, 8
    peers = distributed.Peers.of_one_process(world, max_tokens=tokens, heads=heads, head_dim=64, device="cuda")
    rng = random.Random(world)
    merges = [merge_of(rng, world, heads, 64, "cuda", tokens) for _ in range(20)]
    for merge in merges:
        warm(merge, peers)
    streams = [torch.cuda.Stream() for _ in peers]
    for merge in merges:
        order = list(range(world))
        rng.shuffle(order)
        for rank in order:
            with torch.cuda.stream(streams[rank]):
                if rng.random() < 0.5:
                    torch.cuda._sleep(rng.randrange(100_000))
                merge.give(peers[rank], "both")
    torch.cuda.synchronize()
    for merge in merges:
        merge.check()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_graphs_and_eager_calls_follow_each_other(world: int) -> None:
    """Ranks of one device, one after the other.  States change between calls: those of an earlier call would show."""
    rng = random.Random(world)
    heads, tokens = 2 * world, 40
    peers = distributed.Peers.of_one_process(world, max_tokens=tokens, heads=heads, head_dim=64, device="cuda")
    merges = [merge_of(rng, world, heads, 64, "cuda", tokens) for _ in range(5)]

    def all_ranks(merge: Merge) -> None:
        for phase in ("send", "receive"):
            for x in peers:
                merge.give(x, phase)

    for merge in merges:
        all_ranks(merge)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for merge in merges[:3]:
            all_ranks(merge)
    for _ in range(50):
        for merge in merges:
            merge.outs.neg_()
        if rng.random() < 0.5:
            graph.replay()
            done = merges[:3]
        else:
            done = [rng.choice(merges)]
            all_ranks(done[0])
        for merge in done:
            merge.check()


def shared() -> dict[str, Any]:
    out = torch.zeros(2, 4, 8)
    return dict(out=out, into=out[:, :2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            lambda: dict(out=torch.zeros(2, 3, 8)),
            "out must be [tokens, heads, head_dim] with heads a multiple of world = 2, got [2, 3, 8]",
        ),
        (lambda: dict(lse=torch.zeros(2, 5)), "lse must be [tokens, heads] with heads = 4 from out, got [2, 5]"),
        (lambda: dict(sinks=torch.zeros(3)), "sinks must be [heads] with heads = 4 from out, got [3]"),
        (
            lambda: dict(into=torch.zeros(2, 4, 8)),
            "into must be [tokens, given heads, head_dim] with given heads = 2, got [2, 4, 8]",
        ),
        (shared, "into must share no memory with out"),
        (lambda: dict(give="some"), "give must be 'heads' or 'all', got 'some'"),
    ],
    ids=["out", "lse", "sinks", "into", "memory", "give"],
)
def test_what_cannot_be_merged_is_refused_before_anything_is_sent(
    changes: Callable[[], dict[str, Any]], message: str, device: str
) -> None:
    peers = distributed.Peers.of_one_process(2, max_tokens=2, heads=4, head_dim=8, device=device)
    with torch.device(device):
        given: dict[str, Any] = dict(out=torch.zeros(2, 4, 8), lse=torch.zeros(2, 4), group=peers[0]) | changes()
        if given["out"].shape[1] == 3:
            given["lse"] = torch.zeros(2, 3)
    with pytest.raises(ValueError) as error:
        distributed.merge(**given)
    assert str(error.value) == message
