"""A serving engine around paged attention, with a tiny model: continuous batching, chunked prefill, preemption.

    python examples/tiny_engine.py

Every sequence's greedy tokens are those of the same model with dense attention over the whole sequence.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

import paged_attn
from tiny_model import DEVICE, Transformer, dense


@dataclass(eq=False)
class Sequence:
    tokens: list[int]  # the prompt and the tokens generated so far
    wanted: int  # number of tokens at the end, those of the prompt included
    cached: int = 0  # number of tokens whose keys and values are in the cache
    pages: list[int] = field(default_factory=list)


class Engine:
    """`add` requests, then call `step` until it returns False.  A step is a batch of decodes and chunks of prompts."""

    def __init__(self, model: Transformer, pages: int, page_size: int, budget: int) -> None:
        self.model, self.page_size, self.budget = model, page_size, budget
        self.cache = torch.zeros(model.layers, 2, pages, page_size, model.kv_heads, model.head_dim, device=DEVICE)
        self.free = list(range(pages))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0

    def add(self, prompt: list[int], new_tokens: int) -> Sequence:
        self.waiting.append(Sequence(list(prompt), len(prompt) + new_tokens))
        return self.waiting[-1]

    def step(self) -> bool:
        """Run one step; return False if there was nothing to do."""
        batch = self.schedule()
        if not batch:
            return False
        for (sequence, _), token in zip(batch, self.forward(batch).tolist()):
            if sequence.cached == len(sequence.tokens):  # not inside a prompt
                sequence.tokens.append(token)
            if len(sequence.tokens) == sequence.wanted:
                self.running.remove(sequence)
                self.release(sequence)
        return True

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Return (sequence, number of its tokens) for the next step: running sequences, oldest first, then new ones."""
        batch, left = [], self.budget
        while self.waiting and sum(len(s.tokens) - s.cached for s in self.running) < left:
            needed = paged_attn.pages_needed(len(self.waiting[0].tokens), self.page_size)
            if needed > len(self.free):
                break
            sequence = self.waiting.popleft()
            sequence.pages = [self.free.pop() for _ in range(needed)]
            self.running.append(sequence)
        for sequence in list(self.running):
            count = min(left, len(sequence.tokens) - sequence.cached)
            if count and sequence in self.running and self.make_room(sequence, sequence.cached + count):
                batch.append((sequence, count))
                left -= count
        return batch

    def make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence pages for `tokens` tokens; if none is free, preempt the youngest running sequence.

        Return False if the sequence itself was preempted.
        """
        while len(sequence.pages) < paged_attn.pages_needed(tokens, self.page_size):
            if not self.free:
                youngest = self.running.pop()
                self.release(youngest)
                self.waiting.appendleft(youngest)  # it will prefill all its tokens again
                self.preemptions += 1
                if youngest is sequence:
                    return False
            else:
                sequence.pages.append(self.free.pop())
        return True

    def release(self, sequence: Sequence) -> None:
        self.free += sequence.pages
        sequence.pages, sequence.cached = [], 0

    def forward(self, batch: list[tuple[Sequence, int]]) -> Tensor:
        """Run `count` more tokens of each sequence through the model; return the greedy token after each sequence."""
        width = max(len(s.pages) for s, _ in batch)
        page_table = torch.tensor([s.pages + [-1] * (width - len(s.pages)) for s, _ in batch], dtype=torch.int32)
        seq_lens = torch.tensor([s.cached + count for s, count in batch], dtype=torch.int32)
        cu_seqlens_q = torch.tensor([0, *(count for _, count in batch)]).cumsum(0).int()
        tokens = torch.tensor([t for s, count in batch for t in s.tokens[s.cached : s.cached + count]])
        page_table, seq_lens, starts, tokens = (x.to(DEVICE) for x in (page_table, seq_lens, cu_seqlens_q, tokens))
        positions = paged_attn.positions(seq_lens, starts, tokens=len(tokens))
        slot_mapping = paged_attn.slots(page_table, positions, self.page_size, starts)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            paged_attn.write_kv(k, v, *self.cache[layer], slot_mapping)
            return paged_attn.paged_attention(q, *self.cache[layer], page_table, seq_lens, starts)

        x = self.model(tokens, positions, attend)
        for sequence, count in batch:
            sequence.cached += count
        return self.model.logits(x[starts[1:].long() - 1]).argmax(-1)


def main() -> None:
    rng, model = torch.Generator().manual_seed(0), Transformer()
    engine = Engine(model, pages=7, page_size=8, budget=16)
    asked = [
        (torch.randint(211, (n,), generator=rng).tolist(), new) for n, new in ((14, 12), (15, 12), (30, 3), (6, 7))
    ]
    sequences = [engine.add(prompt, new) for prompt, new in asked]
    steps = 0
    while engine.step():
        steps += 1
    for sequence, (prompt, new) in zip(sequences, asked):
        assert sequence.tokens == dense(model, prompt, new)
    print(f"{len(asked)} requests in {steps} steps, {engine.preemptions} preempted: tokens as of dense attention")


if __name__ == "__main__":
    main()
