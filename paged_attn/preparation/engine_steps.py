"""A model as a host serves it: what its calls have in common, and what the host knows of its steps beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .model import Lengths, Model, batches_up_to, spread
from .processes import ModelBatches

PROMPT = 64  # new tokens of a sequence from which on a step counts as one with prompts


class Served(NamedTuple):
    """Layers of one kind."""

    model: Model
    max_seqs: int
    max_tokens: int
    max_seqlen: int
    bucket: int = 1  # of bounds on keys
    decode: int = 1  # query tokens of a decode: more, where drafts are verified
    decodes: bool = False  # there are no other steps
    ragged: bool = True  # a decode of one token says so by cu_seqlens_q, too
    writes: tuple[str, ...] = ("both",)

    def batches(self, usual: bool = False) -> Iterator[Lengths]:
        """Those of all steps, or of usual ones: decodes, and prompts beside decodes or alone.

        Others bring some sequence a few tokens: a short prompt, the rest of one, or what is behind a cached prefix.
        """
        for batch in batches_up_to(self.max_seqs, self.max_tokens, self.max_seqlen, self.bucket, self.decode):
            # where there are decodes alone, they may have fewer tokens, all of them, than one may have
            decode = batch.max_seqlen_q == (min(self.decode, batch.tokens) if self.decodes else self.decode)
            if batch.max_seqlen_q == 1 and batch.ragged != self.ragged:
                continue
            if decode or not (self.decodes or (usual and 1 < batch.max_seqlen_q < PROMPT)):
                yield batch

    def work(self, usual: bool = False) -> ModelBatches:
        return ModelBatches(self.model, list(self.batches(usual)), self.writes)


class Padded(NamedTuple):
    """Layers of one kind, whose host pads batches: decodes to a power of two, others to a multiple of `step` tokens."""

    model: Model
    max_seqs: int
    max_tokens: int
    max_seqlen: int
    widths: tuple[int, ...]  # keys that the page tables of decodes hold
    bucket: int  # bounds on keys of other batches are multiples of it
    step: int
    exact: bool = False  # max_seqs is the number of sequences of all large batches, no bound on it
    writes: tuple[str, ...] = ("both",)

    def batches(self) -> Iterator[Lengths]:
        """Decodes, which come with page tables of one width; other batches, which come with cu_seqlens_q.

        A padded batch has as many sequences as tokens or max_seqs, whatever is less, and bounds its queries by its
        tokens.
        """
        powers = [1 << power for power in range(self.max_seqs.bit_length())]
        for seqs in sorted({*powers, self.max_seqs} if self.exact else spread(self.max_seqs)):
            for width in self.widths:
                yield Lengths(False, seqs, seqs, 1, width)
        most = -(-self.max_seqlen // self.bucket) * self.bucket
        bounds = {-(-keys // self.bucket) * self.bucket for keys in spread(most, steps=8 if self.exact else 2)}
        for tokens in sorted({*range(self.step, self.max_tokens, self.step), self.max_tokens}):
            sizes = [self.max_seqs] if self.exact else spread(self.max_seqs)
            for seqs in sorted({min(tokens, size) for size in sizes}):
                yield from (Lengths(True, seqs, tokens, tokens, keys) for keys in sorted(bounds))

    def work(self, usual: bool = False) -> ModelBatches:
        """usual: all steps are."""
        return ModelBatches(self.model, list(self.batches()), self.writes)

    def covers(self, other: Padded) -> bool:
        """Whether the kernels of another are all among these."""
        bounds = zip(self[1:4], other[1:4], strict=True)
        alike = (self.model, self.bucket, self.step, self.writes) == (
            other.model, other.bucket, other.step, other.writes
        )  # fmt: skip
        widest = max(self.widths, default=0) >= max(other.widths, default=0)
        return alike and widest and not self.exact and all(own >= its for own, its in bounds)


def plain(**fields: Any) -> Model:
    """A model of these fields; caches and results are of `dtype`, where they are not told."""
    dtype = fields["dtype"]
    if fields.get("value_dim") == fields["head_dim"] and not fields.get("latent"):
        fields["value_dim"] = None
    return Model(**dict(cache_dtype=dtype, out_dtype=dtype) | fields)
