"""Tensor parallelism: each process has some heads and a cache for them; attention needs no communication.

    python examples/tensor_parallel.py

Two processes run the engine of tiny_engine.py side by side.  In each layer they sum the results of two products by an
all-reduce, as in Megatron-LM (Shoeybi et al. 2019).  Their tokens are those of one process.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor

from tiny_engine import Engine
from tiny_model import DEVICE, Transformer

WORLD = 2
PROMPTS, NEW_TOKENS = (13, 3, 9), 4


def shard(model: Transformer, rank: int, world: int) -> Transformer:
    """Cut the model to this rank's heads and to its part of every gated layer."""

    def part(weight: Tensor, dim: int) -> Tensor:
        return weight.chunk(world, dim)[rank].contiguous()

    dim, kv = model.head_dim, model.kv_heads
    q, k, v = model.qkv.split([model.heads * dim, kv * dim, kv * dim], dim=-1)
    gate, up = model.gate_up.chunk(2, dim=-1)
    # Query heads of a group follow one another, so equal parts of q, k and v belong together.
    model.qkv = torch.cat([part(x, -1) for x in (q, k, v)], dim=-1)
    model.gate_up = torch.cat([part(x, -1) for x in (gate, up)], dim=-1)
    model.out, model.down = part(model.out, -2), part(model.down, -2)
    model.heads, model.kv_heads = model.heads // world, kv // world
    return model


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def serve(model: Transformer) -> list[list[int]]:
    """Return the tokens of each request.  Every rank sees the same tokens, so all schedules are equal."""
    rng = torch.Generator().manual_seed(0)
    engine = Engine(model, pages=8, page_size=8, budget=16)
    sequences = [engine.add(torch.randint(211, (n,), generator=rng).tolist(), NEW_TOKENS) for n in PROMPTS]
    while engine.step():
        pass
    return [sequence.tokens for sequence in sequences]


def run(rank: int, meeting: str, results: str) -> None:
    """Run one process of the group."""
    gpus = torch.cuda.device_count()
    if gpus >= WORLD:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpus >= WORLD else "gloo", f"file://{meeting}", rank=rank, world_size=WORLD)
    model = shard(Transformer(), rank, WORLD)
    model.reduce = all_reduce
    torch.save(serve(model), f"{results}.{rank}")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/meeting", f"{folder}/tokens"), nprocs=WORLD)
        tokens = [torch.load(f"{folder}/tokens.{rank}") for rank in range(WORLD)]
    one = serve(Transformer())
    assert all(of_rank == one for of_rank in tokens)
    whole = Transformer()
    print(f"{WORLD} processes of {whole.kv_heads // WORLD} KV head each on {DEVICE}: tokens as of one process")


if __name__ == "__main__":
    main()
