"""Keys over GPUs: each rank keeps some keys of every sequence, and results are those of one GPU with all keys.

    torchrun --nproc-per-node 2 examples/keys_over_gpus.py
    python examples/keys_over_gpus.py  # starts two processes

Every rank has the queries, keys and values of all tokens of a step, as if each rank computed all projections.  A rank
writes the keys and values at its own positions, attends to them, and gets the merged results of its own heads.  Then
the ranks compute a prompt: each rank takes two chunks of its queries, over keys that were gathered from all ranks.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor

import paged_attn
from paged_attn import distributed

WORLD = 2  # processes that this file starts without torchrun
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 1, 32, 4
STRIPE = PAGE_SIZE  # consecutive positions of one rank
STEPS = ((13, 3), (1, 5), (1, 1))  # new tokens of both sequences: prompts, a decode beside a chunk, decodes
GPUS = torch.cuda.device_count()


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")


def projected(tokens: int, seed: int, device: torch.device) -> list[Tensor]:
    """Return queries, keys and values of a layer, the same on all ranks."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, n, HEAD_DIM, generator=rng).to(device) for n in (HEADS, KV_HEADS, KV_HEADS)]


def caches(pages: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return K cache, V cache, and the page table of two sequences of `pages` pages each."""
    k_cache, v_cache = torch.zeros(2, 2 * pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device)
    return k_cache, v_cache, torch.arange(2 * pages, dtype=torch.int32, device=device).view(2, pages)


def decode(rank: int, world: int) -> float:
    """Run all steps; return the largest difference from the results of one rank that has all keys."""
    device, shard = device_of(rank), (rank, world, STRIPE)
    longest = max(map(sum, zip(*STEPS)))
    own = caches(paged_attn.pages_needed(distributed.own_lens(longest, shard), PAGE_SIZE), device)
    whole = caches(paged_attn.pages_needed(longest, PAGE_SIZE), device)
    # Made once, for all layers.  If ranks can reach each other's memory, a merge is one launch, else a collective.
    peers = distributed.Peers(max_tokens=max(map(sum, STEPS)), heads=HEADS, head_dim=HEAD_DIM, device=device)
    seq_lens, errors = torch.zeros(2, dtype=torch.int32, device=device), []
    for seed, new in enumerate(STEPS):
        # Once a step: lengths and positions of whole sequences, and slots of this rank's own keys.
        seq_lens += torch.tensor(new, dtype=torch.int32, device=device)
        starts = torch.tensor([0, new[0], sum(new)], dtype=torch.int32, device=device)
        positions = paged_attn.positions(seq_lens, starts, tokens=sum(new))
        slots = distributed.slots(own[2], positions, PAGE_SIZE, shard, starts)
        # In each layer:
        q, k, v = projected(sum(new), seed, device)
        paged_attn.write_kv(k, v, *own[:2], slots)
        out = distributed.paged_attention(q, *own, seq_lens, starts, group=peers, stripe=STRIPE)
        # For comparison: the step on one rank with all keys.
        paged_attn.write_kv(k, v, *whole[:2], paged_attn.slots(whole[2], positions, PAGE_SIZE, starts))
        wanted = paged_attn.paged_attention(q, *whole, seq_lens, starts)
        errors.append(float((out - wanted.chunk(world, dim=1)[rank]).abs().max()))
    return max(errors)


def prefill(rank: int, world: int) -> float:
    """Compute a prompt whose queries are divided among the ranks; return the largest difference from one rank's result.

    The number of tokens is a multiple of 2 * world * PAGE_SIZE.
    """
    device, tokens = device_of(rank), 4 * world * PAGE_SIZE
    q, k, v = projected(tokens, len(STEPS), device)
    chunks = distributed.zigzag(tokens, rank, world, device)
    gathered = [torch.empty_like(x) for x in (k, v)]
    for found, x in zip(gathered, (k, v)):
        dist.all_gather([*found.chunk(world)], x[chunks.tokens])
    pages = [x.view(-1, PAGE_SIZE, KV_HEADS, HEAD_DIM) for x in gathered]  # already a paged cache
    table = distributed.gathered_table(tokens, PAGE_SIZE, world, device)
    out = paged_attn.paged_attention(q[chunks.tokens], *pages, table, chunks.seq_lens, chunks.cu_seqlens_q)
    pages = [x.view(-1, PAGE_SIZE, KV_HEADS, HEAD_DIM) for x in (k, v)]
    table = torch.arange(tokens // PAGE_SIZE, dtype=torch.int32, device=device)[None]
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    wanted = paged_attn.paged_attention(q, *pages, table, starts[1:], starts)
    return float((out - wanted[chunks.tokens]).abs().max())


def run(rank: int, meeting: str | None = None, world: int = WORLD) -> None:
    """Run one process of the group.

    meeting: the file by which the processes find each other, or None if torchrun's environment tells them.
    """
    if meeting is None:
        world = int(os.environ["WORLD_SIZE"])
    backend = "nccl" if world <= GPUS else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, meeting and f"file://{meeting}", rank=rank, world_size=world)
    errors = decode(rank, world), prefill(rank, world)
    assert max(errors) < 1e-4, errors
    if rank == 0:
        print(f"keys over {world} ranks by {backend}: {len(STEPS)} steps and a prompt as of one", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/meeting",), nprocs=WORLD)


if __name__ == "__main__":
    main()
