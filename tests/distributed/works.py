"""What ranks do in tests: on the CPU over gloo, on GPUs over NCCL and each other's memory."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import paged_attn
from paged_attn import distributed
from tests.support.comparing import TOLERANCES

HEADS, KV_HEADS, DIM, STRIPE = 8, 2, 32, 8


def device_of(rank: int) -> str:
    return f"cuda:{rank}" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"


def states(world: int, tokens: int, heads: int, dims: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """outs [world, tokens, heads, dims], lses and sinks, alike on all ranks; some ranks have seen nothing."""
    rng = torch.Generator().manual_seed(seed)
    outs, lses = (
        torch.randn(world, tokens, heads, dims, generator=rng),
        3 * torch.randn(world, tokens, heads, generator=rng),
    )
    lses[torch.rand(lses.shape, generator=rng) < 0.2] = -torch.inf
    sinks = torch.randn(heads, generator=rng)
    return outs.to(device), lses.to(device), sinks.to(device)


def assert_merges(rank: int, world: int, group: Any, tokens: int, dims: int, dtype: torch.dtype, seed: int) -> None:
    """Both ways of giving have the bits of merge_states in one process."""
    heads = 2 * world
    outs, lses, sinks = states(world, tokens, heads, dims, device_of(rank), seed)
    outs = outs.to(dtype)
    for with_sinks in (None, sinks):
        want, want_lse = paged_attn.merge_states(outs.float(), lses, with_sinks)
        out, lse = distributed.merge(outs[rank], lses[rank], group, with_sinks, "all", return_lse=True)
        assert torch.equal(out, want.to(dtype))
        assert torch.equal(lse, want_lse)
        own = slice(2 * rank, 2 * rank + 2)
        into = torch.full((tokens, 4, dims), torch.nan, device=outs.device)[:, 1:3]
        out, lse = distributed.merge(outs[rank], lses[rank], group, with_sinks, into=into, return_lse=True)
        assert out.data_ptr() == into.data_ptr()
        assert torch.equal(out, want[:, own])
        assert torch.equal(lse, want_lse[:, own])


def merges_by_collectives(rank: int, world: int) -> None:
    for tokens, dims, dtype in ((2, 24, torch.float32), (1, 16, torch.float16), (0, 8, torch.float32)):
        assert_merges(rank, world, None, tokens, dims, dtype, seed=tokens)
    mesh = dist.device_mesh.init_device_mesh(device_of(rank).split(":")[0], (world,))
    assert_merges(rank, world, mesh, 1, 8, torch.float32, seed=9)


def keys_of_a_rank(rank: int, world: int, device: str, seq_lens: tuple[int, ...], page: int = 4) -> dict[str, Any]:
    """Caches of whole sequences, the same on all ranks, and the rank's own: {"whole": ..., "own": ...} arguments."""
    rng = torch.Generator().manual_seed(1)
    longest, shard = max(seq_lens), (rank, world, STRIPE)
    keys, values = torch.randn(2, len(seq_lens), longest, KV_HEADS, DIM, generator=rng)
    found = {}
    for name, shard_of in (("whole", None), ("own", shard)):
        pages = -(-longest // page)
        k_cache, v_cache = torch.full((2, len(seq_lens) * pages, page, KV_HEADS, DIM), torch.nan)
        table = torch.randperm(len(seq_lens) * pages, generator=rng).int().view(len(seq_lens), pages)
        starts = torch.tensor([0, *seq_lens]).cumsum(0).int()
        positions = torch.cat([torch.arange(n) for n in seq_lens])
        if shard_of is None:
            slots = paged_attn.slots(table, positions, page, starts)
        else:
            slots = distributed.slots(table, positions, page, shard_of, starts)
        new = [torch.cat([x[s, :n] for s, n in enumerate(seq_lens)]) for x in (keys, values)]
        paged_attn.reference.write_kv(*new, k_cache, v_cache, slots)
        found[name] = dict(k_cache=k_cache.to(device), v_cache=v_cache.to(device), page_table=table.to(device))
    return found


def attends_to_keys_of_all_ranks(rank: int, world: int, group: Any = None) -> None:
    device = device_of(rank)
    query_lens, seq_lens = (1, 3, 0), (3, 29, 7)  # some ranks have no key of the first
    found = keys_of_a_rank(rank, world, device, seq_lens)
    rng = torch.Generator().manual_seed(2)
    q = torch.randn(sum(query_lens), HEADS, DIM, generator=rng).to(device)
    sinks = torch.randn(HEADS, generator=rng).to(device)
    batch = dict(
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
    )
    own = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    for options in ({"window_size": (9, -1)}, {"alibi_slopes": torch.rand(HEADS, generator=rng).to(device)}):
        whole = found["whole"] | batch | options
        want, want_lse = paged_attn.reference.paged_attention(q, **whole, sinks=sinks, return_lse=True)
        given: dict[str, Any] = found["own"] | batch | options | dict(group=group, stripe=STRIPE, sinks=sinks)
        out, lse = distributed.paged_attention(q, **given, give="all", return_lse=True, check=True)
        compute, store = TOLERANCES[torch.float32]
        torch.testing.assert_close(out.double(), want, rtol=store, atol=20 * compute)
        torch.testing.assert_close(lse.double(), want_lse, rtol=2e-5, atol=2e-5)
    some = distributed.paged_attention(q[:, own], **given, q_heads="own")
    assert torch.equal(some, out[:, own])


def refuses_other_lengths_of_a_rank(rank: int, world: int) -> None:
    """The last rank has another length: every rank is told which rank differs from it, and in what."""
    device, last = device_of(rank), world - 1
    found = keys_of_a_rank(rank, world, device, (3, 5))
    lens = torch.tensor([3, 5 - (rank == last)], dtype=torch.int32, device=device)
    q = torch.zeros(2, HEADS, DIM, device=device)
    told = ""
    try:
        distributed.paged_attention(q, **found["own"], seq_lens=lens, group=None, stripe=STRIPE, check=True)
    except ValueError as error:
        told = str(error)
    other = 0 if rank == last else last
    assert told == f"seq_lens must be the same on all ranks, but rank {other} has others than rank {rank}"


def attends_to_a_prompt_in_zigzag(rank: int, world: int) -> None:
    """Gathered keys are a paged cache, and two chunks of each rank two rows of a batch."""
    device, page, tokens = device_of(rank), 4, 2 * world * 8
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(tokens, n, DIM, generator=rng).to(device) for n in (HEADS, KV_HEADS, KV_HEADS))
    chunks = distributed.zigzag(tokens, rank, world, device)
    own = [distributed.groups.gather(x[chunks.tokens], None).flatten(0, 1) for x in (k, v)]
    caches = [x.view(-1, page, KV_HEADS, DIM) for x in own]
    table = distributed.gathered_table(tokens, page, world, device)
    out = paged_attn.paged_attention(
        q[chunks.tokens], *caches, table, chunks.seq_lens, chunks.cu_seqlens_q, max_seqlen_q=tokens // (2 * world)
    )
    whole = torch.arange(tokens // page, dtype=torch.int32, device=device)[None]
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    want = paged_attn.reference.paged_attention(
        q, k.view(-1, page, KV_HEADS, DIM), v.view(-1, page, KV_HEADS, DIM), whole, starts[1:], starts
    )
    torch.testing.assert_close(out.double(), want[chunks.tokens], rtol=1e-4, atol=1e-4)


def falls_back_to_collectives(rank: int, world: int) -> None:
    peers = distributed.Peers(max_tokens=4, heads=2 * world, head_dim=24, device="cpu")
    assert peers.why_not is not None
    assert_merges(rank, world, peers, 1, 24, torch.float32, seed=4)


# ---- faults ------------------------------------------------------------------------------------------------------


def loses_a_rank(rank: int, world: int, how: str) -> str:
    """The last rank is killed, or hangs, before a merge; the others return the error that they get."""
    outs, lses, _ = states(world, 2, 2 * world, 8, device_of(rank))
    distributed.merge(outs[rank], lses[rank], None)
    if rank == world - 1:
        if how == "killed":
            os.kill(os.getpid(), 9)
        time.sleep(600)
    try:
        distributed.merge(outs[rank], lses[rank], None)
    except RuntimeError as error:
        return str(error)
    return ""


# ---- on several GPUs ---------------------------------------------------------------------------------------------


def peers_of(rank: int, world: int, tokens: int, heads: int, dims: int, timeout: float = 10.0) -> distributed.Peers:
    peers = distributed.Peers(max_tokens=tokens, heads=heads, head_dim=dims, timeout=timeout)
    assert peers.why_not is None, peers.why_not
    return peers


def merges_by_peers(rank: int, world: int) -> None:
    """Bits of one process, in calls of any size after each other, of both ways to give, by both dtypes."""
    peers = peers_of(rank, world, 40, 2 * world, 128)
    for seed, tokens in enumerate((1, 40, 3, 17, 1, 32, 2)):
        for dtype in (torch.float32, torch.bfloat16):
            assert_merges(rank, world, peers, tokens, 128, dtype, seed)
    assert_merges(rank, world, peers, 50, 128, torch.float32, seed=8)  # more than they hold: through NCCL
    nothing = torch.zeros(3, 2 * world, 128, device=device_of(rank))  # as of zeroed queries and caches
    joined = distributed.merge(nothing, nothing[..., 0].contiguous(), peers)
    assert torch.equal(joined, nothing[:, :2]), "words of zeros arrive"
    odd = peers_of(rank, world, 4, 2 * world, 72)
    assert_merges(rank, world, odd, 3, 72, torch.float32, seed=9)


def attends_by_peers(rank: int, world: int) -> None:
    attends_to_keys_of_all_ranks(rank, world, peers_of(rank, world, 8, HEADS, DIM))


def delay(most: int) -> None:
    """Keep this rank's stream busy for some cycles, up to so many."""
    cycles = int(torch.randint(most, ()).item())
    if cycles:
        torch.cuda._sleep(cycles)


def replays_with_delays(rank: int, world: int, replays: int = 100_000) -> int:
    """Graphs of several merges and eager ones, mixed, ranks late by up to 100 us: always the bits of one process.

    States change from replay to replay, so that what an earlier call has left would be seen.
    """
    device, heads, dims = device_of(rank), 2 * world, 128
    peers = peers_of(rank, world, 32, heads, dims)
    torch.manual_seed(rank)
    sizes, inputs, outputs, wanted, graphs = (1, 32, 5), [], [], [], []
    for seed, tokens in enumerate(sizes):
        outs, lses, sinks = states(world, tokens, heads, dims, device, seed)
        want = torch.stack([paged_attn.merge_states(outs + i, lses, sinks)[0] for i in range(4)])
        inputs.append((outs[rank].clone(), lses[rank], sinks, outs[rank].clone()))
        outputs.append((torch.empty(tokens, heads, dims, device=device), torch.empty(tokens, 2, dims, device=device)))
        wanted.append((want, want[:, :, 2 * rank : 2 * rank + 2]))

    def call(i: int, give: int) -> None:
        out, lse, sinks, _ = inputs[i]
        distributed.merge(out, lse, peers, sinks, ("all", "heads")[give], into=outputs[i][give])

    bad = torch.zeros((), dtype=torch.int64, device=device)
    for which in ([(0, 1)], [(1, 0), (0, 1), (2, 1)], [(2, 0), (1, 1)]):
        for x in which:
            call(*x)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for x in which:
                call(*x)
        graphs.append((graph, which))
    dist.barrier()
    choices = torch.Generator().manual_seed(5)  # alike on all ranks
    for n in range(replays):
        moved = int(torch.randint(4, (), generator=choices))
        which = int(torch.randint(len(graphs) + 1, (), generator=choices))
        for out, _, _, base in inputs:
            torch.add(base, moved, out=out)
        if n % 4 == 0:
            delay(200_000)
        called = graphs[which][1] if which < len(graphs) else [(1, 1)]
        if which < len(graphs):
            graphs[which][0].replay()
        else:
            call(1, 1)
        if n % 3 == 0:
            delay(200_000)
        for i, give in called:
            bad += (outputs[i][give] != wanted[i][give][moved]).any()
    torch.cuda.synchronize()
    assert int(bad) == 0, f"{int(bad)} of {replays} replays were wrong"
    return replays


def tells_of_a_rank_that_does_not_answer(rank: int, world: int) -> str:
    """The last rank does not come; the context of the others lives, and every later call says who it was."""
    peers = peers_of(rank, world, 4, 2 * world, 64, timeout=0.5)
    outs, lses, _ = states(world, 4, 2 * world, 64, device_of(rank))
    distributed.merge(outs[rank], lses[rank], peers)
    torch.cuda.synchronize()
    dist.barrier()
    told = ""
    if rank != world - 1:
        late = distributed.merge(outs[rank], lses[rank], peers)
        torch.cuda.synchronize()
        assert late.isnan().all()
        for _ in range(2):
            try:
                distributed.merge(outs[rank], lses[rank], peers)
            except RuntimeError as error:
                told = str(error)
        assert float(torch.ones(3, device=outs.device).sum()) == 3
    dist.barrier()
    return told


def errors_of_merged_states(rank: int, world: int) -> tuple[float, float]:
    """(error norm of one GPU's bfloat16 results, of those merged over ranks), as shares of the results' norm."""
    device, page, seqs, keys, heads, kv_heads, dim = device_of(rank), 16, 4, 8192, 32, 8, 128
    rng = torch.Generator(device).manual_seed(1)
    whole = torch.randn(2, seqs * keys // page, page, kv_heads, dim, generator=rng, device=device).bfloat16()
    q = torch.randn(seqs, heads, dim, generator=rng, device=device).bfloat16()
    table = torch.arange(seqs * keys // page, dtype=torch.int32, device=device).view(seqs, -1)
    lens = torch.full((seqs,), keys, dtype=torch.int32, device=device)
    want = paged_attn.reference.paged_attention(q, *whole, table, lens)
    one = paged_attn.paged_attention(q, *whole, table, lens).double()
    own = distributed.page_table(table, page, (rank, world, 4 * page))
    peers = peers_of(rank, world, seqs, heads, dim)
    merged = distributed.paged_attention(q, *whole, own, lens, group=peers, stripe=4 * page, give="all").double()
    norms = [float((x - want).norm() / want.norm()) for x in (one, merged)]
    assert norms[1] <= 1.05 * norms[0], norms
    return norms[0], norms[1]
