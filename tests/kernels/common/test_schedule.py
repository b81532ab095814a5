"""One schedule for any lengths: graphs, long and many sequences, graphs side by side.  On a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from benchmarks.measure import capture
from paged_attn import reference
from tests.support.cases import TOLERANCES, bound_of

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 128, 16
LONGEST = 1_000_000


class Server:
    """A cache whose pages all sequences share, so that long lengths fit; page tables that lead into it."""

    def __init__(self, seqs: int, longest: int, pages: int = 4096, query_len: int = 1, seed: int = 0) -> None:
        rng = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, device="cuda", dtype=BF16)

        self.q = 4 * normal(seqs * query_len, HEADS, HEAD_DIM)  # few keys count: a lost or doubled piece shows
        self.k, self.v = normal(pages, PAGE, KV_HEADS, HEAD_DIM), normal(pages, PAGE, KV_HEADS, HEAD_DIM)
        columns = -(-longest // PAGE)
        self.table = torch.randint(pages, (seqs, columns), generator=rng, device="cuda", dtype=torch.int32)
        self.lens = torch.zeros(seqs, dtype=torch.int32, device="cuda")
        self.starts = None
        if query_len > 1:
            self.starts = torch.arange(0, seqs * query_len + 1, query_len, dtype=torch.int32, device="cuda")
        self.bounds: dict[str, Any] = {"max_seqlen_q": query_len} if query_len > 1 else {}
        self.out = torch.empty_like(self.q)

    def attend(self) -> Tensor:
        call = (self.q, self.k, self.v, self.table, self.lens, self.starts)
        out = paged_attn.paged_attention(*call, out=self.out, **self.bounds)
        assert isinstance(out, Tensor)
        return out

    def check(self, seqs: list[int]) -> None:
        """Check that these sequences' rows of out are right, up to the rounding of weights and results."""
        rows = len(self.q) // len(self.lens)
        for seq in seqs:
            own = slice(seq * rows, (seq + 1) * rows)
            length = int(self.lens[seq])
            starts = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
            table = self.table[seq : seq + 1, : max(1, -(-length // PAGE))]
            lens = self.lens[seq : seq + 1]
            window = {name: x for name, x in self.bounds.items() if name == "window_size"}
            want = reference.paged_attention(self.q[own], self.k, self.v, table, lens, starts, **window)
            weighted = reference.paged_attention(self.q[own], self.k, self.v.abs(), table, lens, starts, **window)
            assert isinstance(want, Tensor)
            assert isinstance(weighted, Tensor)
            error = (self.out[own].double() - want).abs()
            # not <=, which NaN is not either
            wrong = ~(error <= bound_of(want, weighted, TOLERANCES[BF16][0], BF16))
            assert not wrong.any(), (
                f"sequence {seq} of {length} keys: {int(wrong.sum())} elements, {error[wrong].max()}"
            )


@pytest.mark.parametrize("query_len", [1, 4, 16, 64])
@pytest.mark.parametrize("seqs", [1, 7])
def test_a_graph_captured_at_length_one_is_right_at_any(seqs: int, query_len: int) -> None:
    server = Server(seqs, longest=100_000, query_len=query_len)
    server.lens.fill_(query_len)
    graph = capture(server.attend)
    for length in (query_len, 100_000, 17, 100_000, 0, 4097, query_len):
        server.lens.fill_(length)
        server.out.fill_(torch.nan)
        graph.replay()
        server.check(list(range(seqs)))


@pytest.mark.parametrize("query_len", [1, 8])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_graph_is_right_for_any_windows_by_head(query_len: int, invariant: bool) -> None:
    """Windows decide how many programs a KV head has."""
    server = Server(7, longest=100_000, query_len=query_len)
    windows = torch.full((HEADS, 2), -1, dtype=torch.int32, device="cuda")
    server.bounds |= dict(window_size=windows, batch_invariant=invariant)
    server.lens.copy_(torch.tensor([100_000, 8, 33_333, 9, 4096, 50_000, 12_345]))
    graph = capture(server.attend)
    for of_first, of_second in ((-1, 100), (100, -1), (-1, -1), (0, 0), (3000, 90_000), (5, 40_000)):
        windows[: HEADS // 2, 0], windows[HEADS // 2 :, 0] = of_first, of_second
        server.out.fill_(torch.nan)
        graph.replay()
        server.check(list(range(7)))


@pytest.mark.parametrize("query_len", [1, 2])
def test_a_batch_of_4096_sequences(query_len: int) -> None:
    server = Server(4096, longest=2048, query_len=query_len)
    server.lens.copy_(torch.randint(0, 2049, (4096,), generator=torch.Generator().manual_seed(0)))
    server.lens[:3] = torch.tensor([0, 1, 2048])
    server.out.fill_(torch.nan)
    server.attend()
    assert not server.out.isnan().any()
    server.check([0, 1, 2, 3, 1000, 2047, 2048, 4095])


def test_lengths_from_zero_to_a_million_in_one_batch() -> None:
    server = Server(24, longest=LONGEST)
    lengths = [0, 1, 15, 16, 17, 63, 64, 65, 1000, 4096, 50_000, LONGEST] * 2
    server.lens.copy_(torch.tensor(lengths))
    server.out.fill_(torch.nan)
    server.attend()
    server.check([0, 1, 2, 5, 7, 9, 10, 11, 12, 22, 23])


def test_two_runs_of_a_ragged_batch_give_the_same_bits() -> None:
    """Whoever comes last joins the pieces in their order, not in that of arrival."""
    server = Server(9, longest=200_000)
    server.lens.copy_(torch.tensor([200_000, 3, 70_000, 0, 1, 33_333, 4096, 50, 12_345]))
    first = server.attend().clone()
    for _ in range(50):
        assert torch.equal(server.attend(), first)


@pytest.mark.parametrize("query_len", [1, 4])
def test_graphs_replayed_side_by_side_do_not_meet(query_len: int) -> None:
    """Different batches of one signature: each graph has counters of its own, and states of its own."""
    servers = [Server(3, longest=60_000, query_len=query_len, seed=seed) for seed in range(2)]
    lengths = [[60_000, 9_000, 33_333], [41, 60_000, 20_000]]
    for server, lens in zip(servers, lengths, strict=True):
        server.lens.copy_(torch.tensor(lens))
    graphs = [capture(server.attend) for server in servers]
    streams = [torch.cuda.Stream() for _ in servers]
    want = [server.attend().clone() for server in servers]
    torch.cuda.synchronize()
    for _ in range(200):
        for server, graph, stream in zip(servers, graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                server.out.fill_(torch.nan)
                graph.replay()
        torch.cuda.synchronize()
        for server, right in zip(servers, want, strict=True):
            assert torch.equal(server.out, right)
    for server in servers:
        server.check([0, 1, 2])


def test_eager_calls_on_two_streams_do_not_meet() -> None:
    servers = [Server(3, longest=60_000, seed=seed) for seed in range(2)]
    for server, lens in zip(servers, [[60_000, 9_000, 33_333], [41, 60_000, 20_000]], strict=True):
        server.lens.copy_(torch.tensor(lens))
    want = [server.attend().clone() for server in servers]
    streams = [torch.cuda.Stream() for _ in servers]
    torch.cuda.synchronize()
    for _ in range(100):
        for _ in range(3):
            for server, stream in zip(servers, streams, strict=True):
                with torch.cuda.stream(stream):
                    server.attend()
        torch.cuda.synchronize()
        for server, right in zip(servers, want, strict=True):
            assert torch.equal(server.out, right)


def test_more_captured_calls_than_the_arena_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.launching import scratch

    server = Server(2, longest=60_000)
    server.lens.copy_(torch.tensor([60_000, 100]))
    want = server.attend().clone()
    graphs = [capture(server.attend)]
    monkeypatch.setattr(scratch.arena(server.q.device), "left", 0)
    graphs.append(torch.cuda.CUDAGraph())
    with torch.cuda.graph(graphs[1]):
        server.attend()
    for graph in graphs * 3:
        server.out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(server.out, want)


@pytest.mark.parametrize("form", ["decode", "ragged"])
def test_kept_launches_follow_their_tensors(form: str) -> None:
    """Fifty layers in a row, each with tensors of its own, through one kept call."""
    layers = [Server(5, longest=5000, query_len=1 if form == "decode" else 3, seed=seed) for seed in range(50)]
    for layer in layers:
        layer.lens.copy_(torch.tensor([5000, 0, 17, 2500, 64]))
    for layer in layers:
        layer.attend()
    for layer in layers[::7]:
        layer.check([0, 1, 2, 3, 4])
