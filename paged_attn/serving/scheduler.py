"""Continuous batching: choose the tokens of the next step, and pages for these tokens.

There are no tensors here.

The rules, in order, for a step of at most `budget` tokens:

1. A running sequence decodes if its newest token, a generated one, is the only known token that is not cached.  Decodes
   take one token each, in order of admission.
2. Other running sequences prefill their known tokens in chunks, in order of admission, as far as the budget reaches.
3. Waiting requests are admitted in order of arrival while the budget, `max_seqs` and free pages allow.  A request needs
   free pages for all its known tokens, and takes these pages at once.

So only a decode can lack a page, namely if its last page is full and no page is free.  Then the sequence admitted last
is preempted: it gives its pages back and waits at the head of the queue.  Once admitted again, it prefills its known
tokens anew.  The sequence admitted first is never preempted, so every request finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from paged_attn.serving.trace import Request


class OutOfPages(RuntimeError):
    """More pages were asked for than are free; no page was taken."""


class Pages:
    """`total` pages.  Pages freed last are taken first, so a sequence's pages are soon scattered over the cache."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a cache needs at least 1 page, got {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._is_free = [True] * total

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def take(self, count: int) -> list[int]:
        """Take `count` pages, or raise `OutOfPages` and take none."""
        if count < 0:
            raise ValueError(f"cannot take {count} pages")
        if count > self.free:
            raise OutOfPages(f"{count} pages wanted, {self.free} of {self.total} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._is_free[page] = False
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Give pages back.  `ValueError`, and no change, if a page is free already, given twice or not in the cache."""
        pages = list(pages)
        seen: set[int] = set()
        for page in pages:
            if not 0 <= page < self.total:
                raise ValueError(f"page {page} is outside the cache of {self.total} pages")
            if self._is_free[page]:
                raise ValueError(f"page {page} is free already")
            if page in seen:
                raise ValueError(f"page {page} is given back twice")
            seen.add(page)
        for page in pages:
            self._is_free[page] = True
        self._free.extend(pages)


@dataclass(eq=False)
class Sequence:
    """A request that is being served.  The last token of its output is never an input, so that token needs no slot."""

    request: Request
    known: int  # number of tokens of the prompt and of generated tokens so far
    cached: int = 0  # number of tokens whose keys and values are in the cache
    pages: list[int] = field(default_factory=list)

    @property
    def decoding(self) -> bool:
        return self.known > self.request.prompt and self.known - self.cached == 1

    @property
    def finished(self) -> bool:
        return self.known == self.request.prompt + self.request.output


@dataclass(frozen=True)
class StepPart:
    """One sequence's part of a step: its next `query_len` tokens, which follow `context_len` cached tokens."""

    sequence: Sequence
    context_len: int
    query_len: int
    decode: bool

    @property
    def seq_len(self) -> int:
        return self.context_len + self.query_len


class Scheduler:
    """Makes steps from requests: `submit` requests, then call `plan` and `complete` in turn until `idle`."""

    def __init__(self, pages: Pages, page_size: int, budget: int, max_seqs: int) -> None:
        if budget < max_seqs:
            raise ValueError(
                f"a step of {budget} tokens cannot decode {max_seqs} sequences: budget must be >= max_seqs"
            )
        self.pages, self.page_size, self.budget, self.max_seqs = pages, page_size, budget, max_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission, oldest first
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def submit(self, request: Request) -> None:
        """Append a request to the queue.  `ValueError`: the request needs more pages than the cache has."""
        needed = self._pages_for(request.prompt + request.output - 1)
        if needed > self.pages.total:
            raise ValueError(
                f"a request of {request.prompt} + {request.output} tokens needs {needed} pages of {self.page_size}, "
                f"the cache has {self.pages.total}"
            )
        self.waiting.append(Sequence(request, known=request.prompt))

    def plan(self) -> tuple[list[StepPart], list[int]]:
        """Return (the parts of the next step, decodes first; the pages that preemption freed).

        Tokens of the parts count as cached only after `complete`.
        """
        freed: list[int] = []
        parts: list[StepPart] = []
        left = self.budget

        for sequence in [s for s in self.running if s.decoding]:
            if sequence in self.running:  # no older sequence has preempted it
                freed += self._make_room(sequence)
            if sequence in self.running:  # it has not preempted itself
                parts.append(StepPart(sequence, sequence.cached, 1, decode=True))
                left -= 1

        for sequence in [s for s in self.running if not s.decoding]:
            left -= self._prefill(sequence, left, parts)

        while self.waiting and left and len(self.running) < self.max_seqs:
            needed = self._pages_for(self.waiting[0].known)
            if needed > self.pages.free:
                break
            sequence = self.waiting.popleft()
            sequence.pages = self.pages.take(needed)
            self.running.append(sequence)
            left -= self._prefill(sequence, left, parts)
        return parts, freed

    def complete(self, parts: Iterable[StepPart]) -> list[int]:
        """Record that a step has run; return the pages of finished requests, which are freed."""
        freed: list[int] = []
        for part in parts:
            sequence = part.sequence
            sequence.cached = part.seq_len
            if sequence.cached == sequence.known:  # the last known token has run and yields a new token
                sequence.known += 1
            if sequence.finished:
                self.running.remove(sequence)
                freed += self._release(sequence)
        return freed

    def _prefill(self, sequence: Sequence, left: int, parts: list[StepPart]) -> int:
        """Append a prompt's next chunk of at most `left` tokens to `parts`; return the chunk's length."""
        chunk = min(left, sequence.known - sequence.cached)
        if chunk:
            parts.append(StepPart(sequence, sequence.cached, chunk, decode=False))
        return chunk

    def _make_room(self, sequence: Sequence) -> list[int]:
        """Give a decoding sequence a page for its next token if it needs one; return the pages of preempted sequences.

        Sequences admitted last are preempted first, perhaps the decoding sequence itself.
        """
        freed: list[int] = []
        if sequence.cached < len(sequence.pages) * self.page_size:
            return freed
        while not self.pages.free:
            youngest = self.running.pop()
            self.preemptions += 1
            freed += self._release(youngest)
            youngest.cached = 0
            self.waiting.appendleft(youngest)
            if youngest is sequence:
                return freed
        sequence.pages += self.pages.take(1)
        return freed

    def _release(self, sequence: Sequence) -> list[int]:
        pages, sequence.pages = sequence.pages, []
        self.pages.give(pages)
        return pages

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


# ---- the steps of a trace ----------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A step that is about to run.  After it has run, the caller calls `scheduler.complete(parts)`."""

    scheduler: Scheduler
    parts: list[StepPart]
    preempted: list[int]  # pages that preemption freed
    submitted: int  # requests that have arrived

    @property
    def finished(self) -> int:
        """Requests that need no further step."""
        return self.submitted - len(self.scheduler.waiting) - len(self.scheduler.running)


def planned(
    requests: Iterable[Request], *, pages: int, page_size: int, budget: int, max_seqs: int, step_seconds: float
) -> Iterator[Planned]:
    """Yield every step until all requests are served.

    The clock by which requests arrive advances by `step_seconds` in each step.  If no request runs or waits, the clock
    jumps to the next arrival.
    """
    scheduler = Scheduler(Pages(pages), page_size, budget, max_seqs)
    arrivals = sorted(requests, key=lambda request: request.arrival)
    submitted, now = 0, 0.0
    while submitted < len(arrivals) or not scheduler.idle:
        if scheduler.idle:
            now = max(now, arrivals[submitted].arrival)
        while submitted < len(arrivals) and arrivals[submitted].arrival <= now:
            scheduler.submit(arrivals[submitted])
            submitted += 1
        parts, preempted = scheduler.plan()
        yield Planned(scheduler, parts, preempted, submitted)
        now += step_seconds
