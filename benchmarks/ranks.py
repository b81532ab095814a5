"""Compare keys divided among the GPUs of one host with one GPU: `python -m benchmarks.ranks --json PATH`.

Calls run in CUDA graphs, except prefills.  A time is the median of replays (prefills: of runs) on the slowest rank.
The time of one GPU is measured in the same run on every GPU, and is the mean over the GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import paged_attn
from benchmarks import runner
from paged_attn import distributed
from tests.distributed import spawned, works

PAGE, STRIPE = 16, 128
MOST_TOKENS = 32
Call = Callable[[], Any]


class Batch(NamedTuple):
    """A batch of sequences of equal length: decodes, or several query tokens each."""

    seqs: int
    keys: int  # of a whole sequence, over all ranks
    heads: int = 32
    kv_heads: int = 8
    latent: bool = False
    queries: int = 1

    @property
    def dims(self) -> tuple[int, int]:
        return (576, 512) if self.latent else (128, 128)


SPEED = {  # case -> (batch, least speed-up wanted on 2 and on 4 GPUs)
    "1 x 1M": (Batch(1, 1 << 20), (1.93, 3.7)),
    "1 x 128k": (Batch(1, 1 << 17), (1.70, 2.75)),
    "32 x 128k": (Batch(32, 1 << 17), (1.96, 3.85)),
    "1 x 1M, heads 8/1": (Batch(1, 1 << 20, 8, 1), (1.70, 2.75)),
    "1 x 1M, latents of 16 heads": (Batch(1, 1 << 20, 16, 1, latent=True), (1.70, 2.75)),
}
EXCHANGED = (1, 8, 32)  # numbers of sequences, of one query token each, whose states are exchanged
LOCAL_KEYS = 8192  # own keys of a rank, for each sequence of EXCHANGED
OWN_KEYS = {"32 x 32k own keys": (32, 32768), "1 x 128k own keys": (1, 1 << 17), "1 x 8k": (1, 8192)}
FEATURES = Batch(8, 65536)
PROMPT = 1 << 18
# Cycles of the GPU, from some 200 us to 100 ms, in which the hosts launch a replay.
HOST_CYCLES, MOST_HOST_CYCLES = 400_000, 200_000_000
LIMIT = 540  # seconds of the whole run, after which ranks are killed


class Ranks:
    """One rank, and what it measures."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.device = rank, world, torch.device(works.device_of(rank))
        self.rows: list[dict[str, Any]] = []
        self.together, self.cycles = torch.zeros(1, device=self.device), HOST_CYCLES

    def say(self, part: str, name: str, **numbers: Any) -> None:
        self.rows.append({"part": part, "case": name, **numbers})
        if self.rank == 0:
            print(f"{part:10} {name:34} " + ", ".join(f"{k} {_short(v)}" for k, v in numbers.items()), flush=True)

    def times(self, call: Call, inner: int = 20, rounds: int = 25) -> list[float]:
        """Return the microseconds of one call on each rank: the median over replays of a graph of `inner` calls.

        Replays begin together.  Rounds in which a host was late do not count (`on_time`).
        """
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(inner):
                call()
        counted = self.on_time(lambda: self._rounds(graph, rounds, inner), rounds // 2 + 1)
        return self.of_all(statistics.median(counted))

    def on_time(self, measured: Callable[[], list[float]], least: int) -> list[float]:
        """Return the first list of `least` times or more.  After each shorter list, hosts get twice as long."""
        while len(counted := measured()) < least:
            self.cycles *= 2
            if self.cycles > MOST_HOST_CYCLES:
                raise RuntimeError(f"hosts took longer than {MOST_HOST_CYCLES} cycles to launch a replay")
        return counted

    def _rounds(self, graph: torch.cuda.CUDAGraph, rounds: int, inner: int) -> list[float]:
        """Return this rank's microseconds of a call, for each round in which no host was late."""
        found, late = [], []
        for _ in range(rounds):
            dist.barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(self.cycles)
            dist.all_reduce(self.together)  # replays begin together, whenever the hosts launch them
            begin.record()
            graph.replay()
            end.record()
            late.append(begin.query())  # the host took longer than the GPU was kept busy
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / inner)
        of_any = torch.tensor(late, dtype=torch.int32, device=self.device)
        dist.all_reduce(of_any, dist.ReduceOp.MAX)
        return [x for x, was_late in zip(found, of_any.tolist()) if not was_late]

    def of_all(self, number: float) -> list[float]:
        """All-gather a number: entry r is rank r's."""
        mine = torch.tensor([number], dtype=torch.float64, device=self.device)
        return [float(x) for x in distributed.groups.gather(mine, None).flatten()]


class Inputs:
    """Tensors of a batch.  Caches hold whole sequences, and a sequence's first pages stand for a rank's own keys.

    With own_only, caches hold only as many pages as a rank's own keys fill.
    """

    def __init__(self, ranks: Ranks, batch: Batch, own_only: bool = False) -> None:
        device, (dim, value_dim) = ranks.device, batch.dims
        self.ranks, self.batch, self.shard = ranks, batch, (ranks.rank, ranks.world, STRIPE)
        pages = batch.keys // PAGE // (ranks.world if own_only else 1)
        rng = torch.Generator(device).manual_seed(ranks.rank)
        shape = (batch.seqs * pages, PAGE, batch.kv_heads, dim)
        self.k_cache = torch.randn(shape, generator=rng, device=device, dtype=torch.bfloat16)
        self.v_cache = self.k_cache[..., :value_dim]
        if not batch.latent:
            self.v_cache = torch.randn(shape, generator=rng, device=device, dtype=torch.bfloat16)
        order = torch.randperm(batch.seqs * pages, generator=rng, device=device, dtype=torch.int32)
        self.table = order.view(batch.seqs, pages)
        tokens = batch.seqs * batch.queries
        self.q = torch.randn(tokens, batch.heads, dim, generator=rng, device=device, dtype=torch.bfloat16)
        self.out = torch.empty(tokens, batch.heads, value_dim, device=device)
        self.lens = torch.full((batch.seqs,), batch.keys, dtype=torch.int32, device=device)
        self.own_lens = self.lens // ranks.world
        self.starts = torch.arange(batch.seqs + 1, dtype=torch.int32, device=device) * batch.queries

    def call(self, table: Tensor, lens: Tensor, most: int, **options: Any) -> Any:
        starts: dict[str, Any] = (
            {} if self.batch.queries == 1 else dict(cu_seqlens_q=self.starts, max_seqlen_q=self.batch.queries)
        )
        return paged_attn.paged_attention(
            self.q, self.k_cache, self.v_cache, table, lens, **starts, max_seqlen_k=most, **options
        )

    def whole(self) -> Any:
        """Attend over whole sequences on one GPU."""
        return self.call(self.table, self.lens, self.batch.keys)

    def plain(self) -> Any:
        """Attend without a shard, over as many keys as a rank has of its own."""
        keys = self.batch.keys // self.ranks.world
        return self.call(self._own(), self.own_lens, keys, out=self.out, return_lse=True)

    def local(self, **options: Any) -> Any:
        """Return this rank's attention over its own keys, before the exchange."""
        shard = options.pop("shard", self.shard)
        return self.call(self._own(), self.lens, self.batch.keys, shard=shard, out=self.out, return_lse=True, **options)

    def _own(self) -> Tensor:
        return self.table[:, : self.batch.keys // PAGE // self.ranks.world]

    def merged(self, group: Any, sinks: Tensor | None = None, **options: Any) -> Any:
        out, lse = self.local(**options)
        return distributed.merge(out, lse, group, sinks)


def exchanges(ranks: Ranks, peers_of: Callable[[Batch], Any]) -> None:
    """Measure what an exchange and a merge add to a local decode."""
    for tokens in EXCHANGED:
        batch = Batch(tokens, LOCAL_KEYS * ranks.world)
        x, peers = Inputs(ranks, batch, own_only=True), peers_of(batch)
        out, lse = x.local()
        local = max(ranks.times(x.local))
        numbers = {"local us": local}
        for name, group in (("peers", peers), ("NCCL", None)):
            numbers[f"{name} adds us"] = max(ranks.times(partial(x.merged, group))) - local
            numbers[f"{name} alone us"] = max(ranks.times(partial(distributed.merge, out, lse, group)))
        ranks.say("exchange", f"{tokens} x 32 heads", **numbers)


def speeds(ranks: Ranks, peers_of: Callable[[Batch], Any]) -> None:
    """Measure calls over all ranks, and the same batches on one GPU."""
    for name, (batch, asked) in SPEED.items():
        _speed(ranks, name, batch, asked[ranks.world > 2], peers_of(batch))
        torch.cuda.empty_cache()


def _speed(ranks: Ranks, name: str, batch: Batch, asked: float, peers: Any) -> None:
    x, inner = Inputs(ranks, batch), 4 if batch.seqs * batch.keys > 1 << 20 else 10
    each = ranks.times(x.whole, inner)
    one = statistics.mean(each)
    by_peers, by_nccl = (max(ranks.times(partial(x.merged, group), inner)) for group in (peers, None))
    numbers: dict[str, Any] = {"one GPU us": one, "peers us": by_peers, "NCCL us": by_nccl}
    numbers |= {"peers x": one / by_peers, "NCCL x": one / by_nccl, "asked x": asked, "each GPU us": each}
    ranks.say("speed", name, **numbers)


def features(ranks: Ranks, peers_of: Callable[[Batch], Any]) -> None:
    """Measure a rank's own call with each feature and without it.  For sinks, call and merge are measured together."""
    batch = FEATURES
    x = Inputs(ranks, batch, own_only=True)
    plain = max(ranks.times(x.local))
    slopes = 2.0 ** -torch.linspace(1, 8, batch.heads, device=ranks.device)
    given: dict[str, dict[str, Any]] = {
        "window": dict(window_size=(batch.keys, -1)),
        "ALiBi": dict(alibi_slopes=slopes),
        "ALiBi, stripes of 16": dict(alibi_slopes=slopes, shard=(ranks.rank, ranks.world, 16)),
        "ALiBi, stripes of 1": dict(alibi_slopes=slopes, shard=(ranks.rank, ranks.world, 1)),
        "stripes of 1": dict(shard=(ranks.rank, ranks.world, 1)),
    }
    for name, options in given.items():
        seconds = max(ranks.times(partial(x.local, **options)))
        ranks.say("features", name, **{"plain us": plain, "us": seconds, "ratio": seconds / plain})
    peers, sinks = peers_of(batch), torch.randn(batch.heads, device=ranks.device)
    pair = [max(ranks.times(partial(x.merged, peers, each))) for each in (None, sinks)]
    ranks.say("features", "sinks, at the merge", **{"plain us": pair[0], "us": pair[1], "ratio": pair[1] / pair[0]})
    trees = Inputs(ranks, batch._replace(queries=32), own_only=True)
    mask = torch.full((batch.seqs * 32, 1), -1, dtype=torch.int32, device=ranks.device)
    pair = [max(ranks.times(partial(trees.local, qq_mask=each))) for each in (None, mask)]
    ranks.say("features", "tree of 32", **{"plain us": pair[0], "us": pair[1], "ratio": pair[1] / pair[0]})


def shards(ranks: Ranks) -> None:
    """Measure a rank's own call, and a call without a shard over the same number of keys."""
    for name, (seqs, keys) in OWN_KEYS.items():
        x = Inputs(ranks, Batch(seqs, keys * ranks.world), own_only=True)
        plain, local = (max(ranks.times(call)) for call in (x.plain, x.local))
        ranks.say("shard", name, **{"plain us": plain, "us": local, "ratio": local / plain})


def prefill(ranks: Ranks, tokens: int) -> None:
    """Measure a prompt on all ranks with gathered keys, and on one GPU; without graphs, because one call is long."""
    device, world = ranks.device, ranks.world
    heads, kv_heads, dim = 32, 8, 128
    rng = torch.Generator(device).manual_seed(1)
    q, k, v = (
        torch.randn(tokens, n, dim, generator=rng, device=device, dtype=torch.bfloat16)
        for n in (heads, kv_heads, kv_heads)
    )
    whole = torch.arange(tokens // PAGE, dtype=torch.int32, device=device)[None]
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    caches = [x.view(-1, PAGE, kv_heads, dim) for x in (k, v)]
    one = ranks.of_all(_wall(partial(paged_attn.paged_attention, q, caches[0], caches[1], whole, starts[1:], starts)))
    chunks = distributed.zigzag(tokens, ranks.rank, world, device)
    table = distributed.gathered_table(tokens, PAGE, world, device)
    own = [x[chunks.tokens].contiguous() for x in (q, k, v)]

    def all_ranks() -> Any:
        keys, values = (distributed.groups.gather(x, None).view(-1, PAGE, kv_heads, dim) for x in own[1:])
        return paged_attn.paged_attention(
            own[0], keys, values, table, chunks.seq_lens, chunks.cu_seqlens_q, max_seqlen_q=tokens // (2 * world)
        )

    wall = ranks.of_all(_wall(all_ranks))
    asked = 3.8 if world > 2 else 1.95
    mean = statistics.mean(one)
    ranks.say(
        "prefill", f"{tokens >> 10}k", **{"one GPU ms": mean * 1e3, "ms": max(wall) * 1e3, "x": mean / max(wall),
        "asked x": asked},
    )  # fmt: skip


def _wall(call: Call) -> float:
    """Return median seconds of three runs of a long call, after a run that is not counted; ranks begin together."""
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def measure(rank: int, world: int, parts: list[str]) -> list[dict[str, Any]]:
    """Measure the given parts on one rank and return its rows of numbers."""
    ranks, held = Ranks(rank, world), {}

    def peers_of(batch: Batch) -> Any:
        key = (batch.heads, batch.dims[1])
        if key not in held:
            held[key] = distributed.Peers(
                max_tokens=MOST_TOKENS, heads=batch.heads, head_dim=batch.dims[1], device=ranks.device
            )
            if rank == 0 and held[key].why_not:
                print(f"no peers: {held[key].why_not}", flush=True)
        return held[key]

    for name, part in {
        "exchange": lambda: exchanges(ranks, peers_of),
        "speed": lambda: speeds(ranks, peers_of),
        "shard": lambda: shards(ranks),
        "features": lambda: features(ranks, peers_of),
        "errors": lambda: _errors(ranks),
        "prefill": lambda: prefill(ranks, PROMPT),
    }.items():
        if name in parts:
            part()
            torch.cuda.empty_cache()
    return ranks.rows


def _errors(ranks: Ranks) -> None:
    one, merged = works.errors_of_merged_states(ranks.rank, ranks.world)
    ranks.say("errors", "4 x 8k, norms", **{"one GPU": one, "merged": merged, "ratio": merged / one})


PARTS = ("exchange", "speed", "shard", "features", "errors", "prefill")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(map(_short, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        numbers = {k: v for k, v in row.items() if k not in ("part", "case") and not isinstance(v, list)}
        yield f"{row['part']:9} {row['case']:28} " + "  ".join(f"{k} {_short(v)}" for k, v in numbers.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--world", type=int, default=torch.cuda.device_count(), help="GPUs")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, of " + ", ".join(PARTS))
    given = parser.parse_args()
    answers = spawned.run([measure], given.world, given.parts.split(","), backend="nccl", timeout=LIMIT)
    rows: list[Any] = next((x.result for x in answers if x.rank == 0 and not x.error), [])
    facts = {**runner.versions(), "world": given.world, "rows": rows}
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"\n{facts['device']}, {given.world} GPUs, {facts['versions']}")
    print("\n".join(_lines(rows)))
    spawned.results(answers)


if __name__ == "__main__":
    main()
