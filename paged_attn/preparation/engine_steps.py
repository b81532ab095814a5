"""A model inside a host: what its calls have in common, and which steps the host may run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .model import Lengths, Model, batches_up_to, spread
from .processes import ModelBatches

PROMPT = 64  # a step counts as one with prompts if a sequence has at least this number of new tokens


class Served(NamedTuple):
    """Layers of one kind, in a host that does not pad batches."""

    model: Model
    max_seqs: int
    max_tokens: int
    max_seqlen: int
    bucket: int = 1  # bounds on keys are multiples of this, or max_seqlen
    decode: int = 1  # query tokens of a sequence in a decode: more than 1 if drafts are verified
    decodes: bool = False  # True: all steps are decodes
    ragged: bool = True  # True: decodes of one token come with cu_seqlens_q; False: without it
    writes: tuple[str, ...] = ("both",)

    def batches(self, usual: bool = False) -> Iterator[Lengths]:
        """Batches of all steps, or of usual steps only: decodes, and prompts beside decodes or alone.

        In an unusual step, the longest query has 2 to PROMPT - 1 tokens, and is not a decode.  It is a short prompt,
        the rest of a prompt, or the tokens after a cached prefix.
        """
        for batch in batches_up_to(self.max_seqs, self.max_tokens, self.max_seqlen, self.bucket, self.decode):
            # with `decodes`, a batch of one sequence and fewer than `decode` tokens is a decode, too
            decode = batch.max_seqlen_q == (min(self.decode, batch.tokens) if self.decodes else self.decode)
            if batch.max_seqlen_q == 1 and batch.ragged != self.ragged:
                continue
            if decode or not (self.decodes or (usual and 1 < batch.max_seqlen_q < PROMPT)):
                yield batch

    def work(self, usual: bool = False) -> ModelBatches:
        return ModelBatches(self.model, list(self.batches(usual)), self.writes)


class Padded(NamedTuple):
    """Layers of one kind, in a host that pads its batches.

    Decodes are padded to a few numbers of sequences, and other batches to multiples of `step` tokens.
    """

    model: Model
    max_seqs: int
    max_tokens: int
    max_seqlen: int
    widths: tuple[int, ...]  # numbers of keys for which page tables of decodes have columns
    bucket: int  # bounds on keys of other batches are multiples of this
    step: int  # tokens of other batches are multiples of this, or max_tokens
    exact: bool = False  # other batches of max_seqs tokens or more have max_seqs sequences; False: at most max_seqs
    writes: tuple[str, ...] = ("both",)

    def batches(self) -> Iterator[Lengths]:
        """Decodes for each width of page tables, then other batches, which come with cu_seqlens_q.

        With `exact`, the other batches have min(tokens, max_seqs) sequences; otherwise, several numbers of sequences up
        to min(tokens, max_seqs) are tried.  max_seqlen_q of the other batches is their number of tokens.
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
        """usual: has no effect, because all steps are usual."""
        return ModelBatches(self.model, list(self.batches()), self.writes)

    def covers(self, other: Padded) -> bool:
        """Whether all kernels of `other` are certainly among the kernels of these batches."""
        bounds = zip(self[1:4], other[1:4], strict=True)
        alike = (self.model, self.bucket, self.step, self.writes) == (
            other.model, other.bucket, other.step, other.writes
        )  # fmt: skip
        widest = max(self.widths, default=0) >= max(other.widths, default=0)
        return alike and widest and not self.exact and all(own >= its for own, its in bounds)


def plain(**fields: Any) -> Model:
    """A model of these fields; cache_dtype and out_dtype default to `dtype`.

    A value_dim equal to head_dim becomes None, the default, unless the cache is latent.
    """
    dtype = fields["dtype"]
    if fields.get("value_dim") == fields["head_dim"] and not fields.get("latent"):
        fields["value_dim"] = None
    return Model(**dict(cache_dtype=dtype, out_dtype=dtype) | fields)
