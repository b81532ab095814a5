"""Whole pages: GB/s of copies, moves to and from the host, and dense rows.  `python -m benchmarks.pages [--json PATH]`.

A model of 32 layers, 8 KV heads x 128, bfloat16: a page of 16 tokens has 32 KiB in each of 64 tensors.  Each figure is
compared with torch's for the same bytes.  To and from the host, torch makes one copy_ of a dense block
(cudaMemcpyAsync); on the device, an index_copy_ of each tensor; for dense rows, one indexing by pages.  Moves of 64
pages or more to and from the host should reach ASKED times the block's speed.  A time is the median over replays of a
CUDA graph.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paged_attn
from paged_attn.records.formats import INT4

ASKED = 0.85
LAYERS, KV_HEADS, HEAD_DIM, PAGES = 32, 8, 128, 512
PAGE_SIZES, COUNTS = (16, 64), (1, 8, 64, 256)
Row = dict[str, Any]


def seconds(call: Callable[[], object], rounds: int, inner: int) -> float:
    """Return the median seconds of a call over `rounds` replays of a CUDA graph of `inner` calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / inner)
    return statistics.median(found)


def caches_of(page_size: int, pages: int, device: str, pinned: bool = False) -> list[Tensor]:
    """Return zeroed K and V caches of all layers."""
    shape = (pages, page_size, KV_HEADS, HEAD_DIM)
    return [
        torch.empty(shape, dtype=torch.bfloat16, device=device, pin_memory=pinned).zero_() for _ in range(2 * LAYERS)
    ]


def rows(rounds: int) -> Iterator[Row]:
    """Yield all figures."""
    for page_size in PAGE_SIZES:
        device = caches_of(page_size, PAGES, "cuda")
        host = caches_of(page_size, max(COUNTS), "cpu", pinned=True)
        for count in COUNTS:
            order = torch.randperm(PAGES, device="cuda")
            ids, others = order[:count].contiguous(), order[-count:].contiguous()
            room = torch.randperm(max(COUNTS), device="cuda")[:count].contiguous()
            size = count * sum(x[0].nbytes for x in device)
            inner = max(1, min(20, (1 << 28) // size))
            yield from _host(device, host, ids, room, size, rounds, inner, page_size)
            yield from _device(device, ids, others, size, rounds, inner, page_size)
        yield from _dense(device[0], rounds, page_size)
        del device, host


def _host(
    device: list[Tensor], host: list[Tensor], ids: Tensor, room: Tensor, size: int, rounds: int, inner: int,
    page_size: int,
) -> Iterator[Row]:  # fmt: skip
    block = torch.empty(size, dtype=torch.uint8, device="cuda")
    dense = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "to the host": (
            lambda: paged_attn.move_pages(device, host, ids, room),
            lambda: dense.copy_(block, non_blocking=True),
        ),
        "from the host": (
            lambda: paged_attn.move_pages(host, device, room, ids),
            lambda: block.copy_(dense, non_blocking=True),
        ),
    }
    for name, (ours, beside) in ways.items():
        yield _row(name, page_size, len(ids), size, seconds(ours, rounds, inner), seconds(beside, rounds, inner))


def _device(
    caches: list[Tensor], ids: Tensor, others: Tensor, size: int, rounds: int, inner: int, page_size: int
) -> Iterator[Row]:
    def beside() -> None:
        for x in caches:
            x.index_copy_(0, others, x[ids])

    ours = seconds(lambda: paged_attn.copy_pages(caches, ids, others), rounds, inner)
    yield _row("copy", page_size, len(ids), 2 * size, ours, seconds(beside, rounds, inner))


def numbers_of(stored: Tensor, scale: Tensor) -> Tensor:
    """Return stored elements [..., dims] times their scales by token [...] in bfloat16, by operators of torch."""
    if stored.dtype == INT4:
        words = scale.view(torch.int32)
        x = torch.stack((stored & 15, stored >> 4), -1).flatten(-2) - (words & 15)[..., None]
        return (x * (words & -16).view(torch.float32)[..., None]).bfloat16()
    return (stored.float() * scale[..., None]).bfloat16()


def _dense(cache: Tensor, rounds: int, page_size: int) -> Iterator[Row]:
    seqs = 8
    table = torch.randperm(PAGES, device="cuda").view(seqs, -1)
    lens = torch.full((seqs,), PAGES // seqs * page_size, device="cuda")
    out = torch.empty(PAGES * page_size, KV_HEADS, HEAD_DIM, dtype=cache.dtype, device="cuda")
    ours = seconds(lambda: paged_attn.gather_pages(cache, table, lens, out=out), rounds, 20)
    beside = seconds(lambda: cache[table.flatten()], rounds, 20)
    yield _row("dense rows", page_size, PAGES, 2 * cache.nbytes, ours, beside)
    scale = torch.rand(cache.shape[:3], device="cuda")
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("int8", torch.int8), ("int4", INT4)):
        stored = torch.zeros_like(cache[..., ::2] if dtype == INT4 else cache, dtype=dtype)

        def read(x: Tensor = stored) -> Tensor:
            return numbers_of(x[table.flatten()], scale[table.flatten()])

        call = functools.partial(paged_attn.gather_pages, stored, table, lens, out=out, scale=scale)
        ours, beside = seconds(call, rounds, 20), seconds(read, rounds, 20)
        size = stored.nbytes + scale.nbytes + out.nbytes
        yield _row(f"dense rows of {name} by token", page_size, PAGES, size, ours, beside)


def _row(name: str, page_size: int, pages: int, size: int, ours: float, beside: float) -> Row:
    numbers = {"MB": size / 1e6, "us": ours * 1e6, "GB/s": size / ours / 1e9, "torch GB/s": size / beside / 1e9}
    return {"what": name, "page_size": page_size, "pages": pages, **numbers, "ratio": beside / ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--rounds", type=int, default=11, help="of each figure, which is their median")
    asked = parser.parse_args()
    found = []
    for row in rows(asked.rounds):
        found.append(row)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True)
    short = [x for x in found if "host" in x["what"] and x["pages"] >= 64 and x["ratio"] < ASKED]
    print(f"host copies below {ASKED} of one block's speed: {len(short)}")
    if asked.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}
        asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
