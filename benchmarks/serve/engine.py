"""Steps of a model over a paged cache: launched without waiting, decodes as CUDA graphs.

Tokens stay on the device: `history` has a row for each request, from which a step reads tokens and to which it appends
new ones.  The host knows only lengths, and plans the next step while the device runs the current one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import paged_attn
from benchmarks.serve.backends import Backend, Batch
from benchmarks.serve.model import Model
from paged_attn.serving.scheduler import StepPart

GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
BUFFERS = 3  # host buffers used in turn: the inputs of one step are copied while those of the next are written


@dataclass(frozen=True)
class Limits:
    """Sizes of the cache, of the largest step and of the longest sequence, and the number of requests of a run."""

    page_size: int
    pages: int
    max_seqs: int
    budget: int  # tokens in a step
    longest: int  # tokens of a sequence, generated tokens included
    requests: int

    @property
    def columns(self) -> int:
        return paged_attn.pages_needed(self.longest, self.page_size)


class Engine:
    """The model over its paged cache: `start` sets the prompts, `launch` launches a step that the scheduler planned."""

    def __init__(self, model: Model, backend: Backend, limits: Limits, graphs: bool) -> None:
        self.model, self.backend, self.limits = model, backend, limits
        shape, device = model.shape, model.device
        cache = (shape.layers, 2, limits.pages, limits.page_size, shape.kv_heads, shape.head_dim)
        # Zeros, because some backends multiply dead slots by weights of 0, which leaves NaN as it is.
        self.cache = torch.zeros(cache, dtype=model.dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self.cache]
        # The last row of `history` takes unwanted tokens: those after chunks that end inside a prompt, and of padding.
        self.nobody = limits.requests
        self.history = torch.zeros(self.nobody + 1, limits.longest + 1, dtype=torch.int32, device=device)
        # The host's copy of the page table, with a row for each request, and how many entries of each row are set.
        self.table = torch.zeros(self.nobody + 1, limits.columns, dtype=torch.int32)
        self.known = [0] * self.nobody
        ints, pinned = sum(sizes_of(limits.max_seqs, limits.columns)), device.type == "cuda"
        self.staging = [torch.empty(ints, dtype=torch.int32, pin_memory=pinned) for _ in range(BUFFERS)]
        self.steps = 0
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if graphs and backend.graphs and device.type == "cuda":
            self.capture()

    def start(self, prompts: Sequence[Tensor]) -> None:
        """Set the prompts: prompts[i] is that of request i."""
        for row, prompt in enumerate(prompts):
            self.history[row, : len(prompt)] = prompt.to(self.model.device, torch.int32)
        self.known = [0] * self.nobody

    def tokens(self, prompts: Sequence[int], made: Sequence[int]) -> list[list[int]]:
        """Return the generated tokens of each request.

        prompts: lengths of the prompts.  made: numbers of generated tokens.
        """
        rows = self.history.cpu()
        return [row[prompt : prompt + count].tolist() for row, prompt, count in zip(rows, prompts, made)]

    @torch.no_grad()
    def launch(self, parts: Sequence[StepPart], rows: Sequence[int], ends: Sequence[bool]) -> None:
        """Launch a step: part i belongs to request rows[i]; if ends[i], its last token yields a new token."""
        decodes = all(part.query_len == 1 for part in parts)
        for part, row in zip(parts, rows):
            pages = part.sequence.pages
            first = self.known[row] if part.decode else 0  # after a preemption a prompt may have other pages
            if first < len(pages):
                self.table[row, first : len(pages)] = torch.tensor(pages[first:], dtype=torch.int32)
            self.known[row] = len(pages)
        size = next((n for n in sorted(self.graphs) if n >= len(parts)), None) if decodes else None
        if size is not None:
            graph, inputs = self.graphs[size]
            inputs.copy_(self.inputs(parts, rows, ends, size, self.limits.columns), non_blocking=True)
            graph.replay()
            return
        columns = max(len(part.sequence.pages) for part in parts)
        host = self.inputs(parts, rows, ends, len(parts), columns)
        self.run(
            host.to(self.model.device, non_blocking=True), len(parts), columns,
            [part.query_len for part in parts], [part.seq_len for part in parts], decodes,
        )  # fmt: skip

    def inputs(
        self, parts: Sequence[StepPart], rows: Sequence[int], ends: Sequence[bool], seqs: int, columns: int
    ) -> Tensor:
        """Write all integers of a step into one host buffer; sequences beyond len(parts) are empty padding."""
        self.steps += 1
        host = self.staging[self.steps % BUFFERS][: sum(sizes_of(seqs, columns))]
        lens, row, target, starts, table = split(host, seqs, columns)
        count, nobody = len(parts), self.nobody
        lens[:count] = torch.tensor([part.seq_len for part in parts], dtype=torch.int32)
        lens[count:] = 0
        row[:count] = torch.tensor(rows, dtype=torch.int32)
        row[count:] = nobody
        target[:count] = torch.tensor([r if end else nobody for r, end in zip(rows, ends)], dtype=torch.int32)
        target[count:] = nobody
        starts[: count + 1] = torch.tensor([0, *(part.query_len for part in parts)]).cumsum(0)
        starts[count + 1 :] = starts[count]
        table[:count] = self.table[torch.tensor(rows), :columns]
        return host

    def run(
        self, inputs: Tensor, seqs: int, columns: int, query_lens: list[int] | None, key_lens: list[int] | None,
        decodes: bool,
    ) -> None:  # fmt: skip
        """Run a step on the device; query_lens and key_lens are None during a capture."""
        lens, rows, target, starts, table = split(inputs, seqs, columns)
        page_size = self.limits.page_size
        if decodes:
            batch = Batch(table, lens, None, 1, max(key_lens or [self.limits.longest]), query_lens, key_lens)
            positions = paged_attn.positions(lens)
            of_token = rows
        else:
            assert query_lens is not None
            assert key_lens is not None
            tokens = sum(query_lens)
            batch = Batch(table, lens, starts, max(query_lens), max(key_lens), query_lens, key_lens)
            positions = paged_attn.positions(lens, starts, tokens=tokens)
            of_token = rows.repeat_interleave(starts.diff(), output_size=tokens)
        slot_mapping = paged_attn.slots(table, positions, page_size, batch.starts)
        prepared = self.backend.prepare(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            paged_attn.write_kv(k, v, *self.layers[layer], slot_mapping)
            return self.backend.attend(q, *self.layers[layer], batch, prepared)

        h = self.model(self.history[of_token.long(), positions], positions, attend)
        last = h if decodes else h[starts[1:].long() - 1]
        self.history[target.long(), lens.long()] = self.model.greedy(last).int()

    @torch.no_grad()
    def capture(self) -> None:
        """Capture a graph of decodes for each size of GRAPHS below max_seqs, and for max_seqs.

        The largest graph is captured first, so that the others reuse its memory.
        """
        limits, pool = self.limits, torch.cuda.graph_pool_handle()
        sizes = [n for n in GRAPHS if n < limits.max_seqs] + [limits.max_seqs]
        for seqs in sorted(sizes, reverse=True):
            inputs = torch.zeros(sum(sizes_of(seqs, limits.columns)), dtype=torch.int32, device=self.model.device)
            lens, rows, target, _, _ = split(inputs, seqs, limits.columns)
            rows.fill_(self.nobody)
            target.fill_(self.nobody)
            lens.zero_()  # all sequences are padding
            arguments: tuple[Any, ...] = (inputs, seqs, limits.columns, None, None, True)
            for _ in range(2):
                self.run(*arguments)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.run(*arguments)
            self.graphs[seqs] = graph, inputs


def sizes_of(seqs: int, columns: int) -> list[int]:
    """Return the size of each tensor of a step, in integers, rounded up so that each begins at a multiple of 128 bytes.

    Triton compiles a kernel again for unaligned addresses; tensors with their own allocations are aligned.
    """
    return [-(-n // 32) * 32 for n in (seqs, seqs, seqs, seqs + 1, seqs * columns)]


def split(ints: Tensor, seqs: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cut one tensor into (seq_lens, rows of history to read, rows to write, starts, page table [seqs, columns])."""
    lens, rows, target, starts, table = ints.split(sizes_of(seqs, columns))
    return lens[:seqs], rows[:seqs], target[:seqs], starts[: seqs + 1], table[: seqs * columns].view(seqs, columns)
