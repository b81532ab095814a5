"""The step loop: serve requests over a paged cache, and check what every step computes.

A step writes random keys and values with `write_kv`, attends with `paged_attention`, and is compared with the
reference.  The reference reads another cache, filled by the reference's `write_kv`, so a misplaced key shows as well.
Requests of the trace arrive during the run.  By the trace's clock, each step takes `step_seconds`, however long it
takes here.  Before the first step, `prepare` compiles the kernels of all steps, and no other kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from paged_attn.preparation.model import Lengths, Model
from paged_attn.preparation.prepare import Summary, compile_for
from paged_attn.serving.meter import Stopwatch, Work, work_of
from paged_attn.serving.scheduler import Planned, StepPart, planned
from paged_attn.serving.tensors import Caches, StepBatch, batch_of, rounded_up, sample
from paged_attn.serving.trace import Request


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |out - reference| of any element, and on ||out - reference|| / ||reference|| of any token's head.

    The relative bound is sharper, because outputs shrink with the square root of the context."""

    max_abs: float
    relative: float


# Values are normal, so outputs reach about 5.  There, neighbouring bfloat16 numbers differ by 2^-5, and neighbouring
# float16 numbers by 2^-8.  An absolute bound is this difference, because a store may truncate, plus the error of
# weights that are rounded to the dtype.
TOLERANCES = {
    torch.float32: Tolerance(2e-5, 1e-5),
    torch.float16: Tolerance(6e-3, 1e-3),
    torch.bfloat16: Tolerance(4e-2, 8e-3),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of attention, of its cache, and of a step."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    layers: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    layout: str
    budget: int  # tokens in a step
    max_seqs: int  # sequences in a step
    step_seconds: float  # time in the trace that a step takes
    checked: int | None  # sequences of a step that are compared, in all layers together; None: all, in each layer
    seed: int
    bucket: int = 1  # max_seqlen_k is a multiple of it, as in engines, so that most steps repeat a kept call

    checked_tokens = 64  # upper bound of the adjacent tokens compared in a checked sequence; all, if `checked` is None

    @property
    def checked_in_a_layer(self) -> int | None:
        """Number of sequences that are compared in each layer: `checked` / `layers`, rounded up.  None: all."""
        return None if self.checked is None else -(-self.checked // self.layers)

    @property
    def kv_scale(self) -> float | None:
        # Normal values times 32 stay inside both fp8 types.
        return 1 / 32 if self.kv_dtype.itemsize == 1 else None

    def planned(self, requests: Sequence[Request]) -> Iterator[Planned]:
        """Plan the steps in which these requests are served."""
        return planned(
            requests,
            pages=self.pages,
            page_size=self.page_size,
            budget=self.budget,
            max_seqs=self.max_seqs,
            step_seconds=self.step_seconds,
        )

    def work(self, parts: list[StepPart]) -> Work:
        """The least work of attention in a step, for all layers together."""
        shape = (self.heads, self.kv_heads, self.head_dim, self.page_size)
        return work_of(parts, *shape, self.dtype.itemsize, self.kv_dtype.itemsize) * self.layers


@dataclass(frozen=True)
class Outcome:
    """Largest errors of a step's attention over all layers, by comparison with the reference, and times."""

    max_abs: float
    relative: float
    attention_seconds: float
    reference_seconds: float

    def within(self, tolerance: Tolerance) -> bool:
        return self.max_abs <= tolerance.max_abs and self.relative <= tolerance.relative  # False for NaN


@dataclass(frozen=True)
class ServedStep:
    """A step that has run: its size, the state of the scheduler, and its outcome."""

    prefill_tokens: int
    decode_tokens: int
    running: int  # sequences that hold pages, while the step runs
    waiting: int  # sequences that have arrived and hold no pages
    pages: int  # pages in use while the step runs
    finished: int  # requests that need no further step
    preemptions: int  # number since the start of the run
    seconds: float
    outcome: Outcome
    work: Work


def serve(requests: Sequence[Request], sizes: Sizes, device: torch.device) -> Iterator[ServedStep]:
    """Serve all requests, in order of arrival; yield each step once it has been checked."""
    layers = _Layers(sizes, device)
    began = perf_counter()
    for step in sizes.planned(requests):
        layers.poison(step.preempted)
        scheduler, parts = step.scheduler, step.parts
        running, waiting, pages = len(scheduler.running), len(scheduler.waiting), scheduler.pages.used
        outcome = layers.step(parts)
        layers.poison(scheduler.complete(parts))
        yield ServedStep(
            prefill_tokens=sum(part.query_len for part in parts if not part.decode),
            decode_tokens=sum(part.decode for part in parts),
            running=running,
            waiting=waiting,
            pages=pages,
            finished=step.finished,
            preemptions=scheduler.preemptions,
            seconds=perf_counter() - began,
            outcome=outcome,
            work=sizes.work(parts),
        )
        began = perf_counter()


class _Layers:
    """A cache for every layer, and one cache for the reference, in which the pages of all layers follow one another.

    One call of the reference thus serves all layers.  A call for each layer would be slower: most of its time is the
    CPU's.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        form = (sizes.page_size, sizes.kv_heads, sizes.head_dim, sizes.kv_dtype, device)
        self.caches = [Caches.allocate(sizes.layout, sizes.pages, *form) for _ in range(sizes.layers)]
        # id of each layer's first page in the reference's cache
        self.first_pages = [layer * sizes.pages for layer in range(sizes.layers)]
        self.twin = Caches.allocate(sizes.layout, sizes.layers * sizes.pages, *form)
        self.choice = random.Random(sizes.seed)
        self.normal = torch.Generator(device).manual_seed(sizes.seed)
        self.stopwatch = Stopwatch(device) if device.type == "cuda" else None

    def poison(self, pages: list[int]) -> None:
        for caches in self.caches:
            caches.poison(pages)
        self.twin.poison([first + page for first in self.first_pages for page in pages])

    def step(self, parts: list[StepPart]) -> Outcome:
        """Run one step in all layers, and the reference for the sequences that are compared."""
        sizes = self.sizes
        batch = batch_of(parts, sizes.page_size, self.device, sizes.bucket)
        tokens = len(batch.slot_mapping)
        drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        outs: list[Tensor] = []
        attention_seconds = 0.0
        for caches in self.caches:
            q, k, v = (self._draw(tokens, heads) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
            drawn.append((q, k, v))
            self._write(paged_attn.write_kv, k, v, caches, batch.slot_mapping)
            began = self._now()
            outs.append(self._attend(paged_attn.paged_attention, q, caches, batch))
            attention_seconds += self._now() - began
        began = self._now()
        max_abs, relative = self._compared(parts, batch, drawn, outs)
        reference_seconds = self._now() - began

        if self.stopwatch is not None:
            # To time the GPU alone, attend again in all layers in turn, now that the kernels are compiled.
            attention_seconds = self.stopwatch.seconds(
                lambda: [
                    self._attend(paged_attn.paged_attention, q, caches, batch)
                    for (q, _, _), caches in zip(drawn, self.caches)
                ]
            )
        return Outcome(max_abs, relative, attention_seconds, reference_seconds)

    def _compared(
        self,
        parts: list[StepPart],
        batch: StepBatch,
        drawn: list[tuple[Tensor, Tensor, Tensor]],
        outs: list[Tensor],
    ) -> tuple[float, float]:
        """(largest absolute error, largest relative error) of a step; NaN if any error is NaN."""
        sizes = self.sizes
        slots = [batch.slot_mapping + first * sizes.page_size for first in self.first_pages]
        _, keys, values = (torch.cat(tensors) for tensors in zip(*drawn))
        self._write(reference.write_kv, keys, values, self.twin, torch.cat(slots))
        checked: list[StepPart] = []
        first_pages: list[int] = []
        queries, got = [], []
        for (q, _, _), out, first in zip(drawn, outs, self.first_pages):
            runs: list[StepPart] = parts
            rows: Tensor | slice = slice(None)
            if sizes.checked_in_a_layer is not None:
                runs, some = sample(parts, self.choice, sizes.checked_in_a_layer, sizes.checked_tokens)
                rows = torch.tensor(some, device=self.device)
            checked += runs
            first_pages += [first] * len(runs)
            queries.append(q[rows])
            got.append(out[rows])
        of_all = batch_of(checked, sizes.page_size, self.device, first_pages=first_pages)
        wanted = self._attend(reference.paged_attention, torch.cat(queries), self.twin, of_all).double()
        difference = torch.cat(got).double() - wanted
        relative = difference.norm(dim=-1) / wanted.norm(dim=-1)
        max_abs, most = torch.stack([difference.abs().max(), relative.max()]).tolist()  # max() keeps a NaN
        return max_abs, most

    def _draw(self, tokens: int, heads: int) -> Tensor:
        shape = (tokens, heads, self.sizes.head_dim)
        return torch.randn(shape, generator=self.normal, device=self.device).to(self.sizes.dtype)

    def _write(self, write_kv: Callable[..., None], k: Tensor, v: Tensor, caches: Caches, slots: Tensor) -> None:
        scale = self.sizes.kv_scale
        write_kv(k, v, caches.k, caches.v, slots, kv_layout=caches.kv_layout, k_scale=scale, v_scale=scale)

    def _attend(self, attention: Callable[..., Any], q: Tensor, caches: Caches, batch: StepBatch) -> Tensor:
        out = attention(
            q,
            caches.k,
            caches.v,
            batch.page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            kv_layout=caches.kv_layout,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            k_scale=self.sizes.kv_scale,
            v_scale=self.sizes.kv_scale,
        )
        assert isinstance(out, Tensor)  # no lse was asked for
        return out

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


# ---- kernels of the steps ------------------------------------------------------------------------


def prepare(requests: Sequence[Request], sizes: Sizes, device: torch.device, processes: int | None) -> Summary:
    """Compile the kernels of all steps in parallel processes.  Nothing happens in the interpreter or in plain torch.

    processes: None stands for one process for each processor.
    """
    return compile_for(model_of(sizes), batches(requests, sizes), device, processes)


def batches(requests: Sequence[Request], sizes: Sizes) -> Iterator[Lengths]:
    """Yield the lengths of each step.  Steps do not depend on results of attention, so they are known beforehand."""
    for step in sizes.planned(requests):
        queries = [part.query_len for part in step.parts]
        keys = [part.seq_len for part in step.parts]
        yield Lengths(True, len(queries), sum(queries), max(queries), rounded_up(max(keys), sizes.bucket))
        step.scheduler.complete(step.parts)


def model_of(sizes: Sizes) -> Model:
    """Return what all calls of the demo have in common."""
    return Model(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        page_size=sizes.page_size,
        dtype=sizes.dtype,
        cache_dtype=sizes.kv_dtype,
        out_dtype=sizes.dtype,
        kv_layout="x" if sizes.layout == "x-packed" else sizes.layout,
    )
