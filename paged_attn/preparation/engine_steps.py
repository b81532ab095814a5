"""A model as a host serves it: what its calls have in common, and what the host knows of its steps beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .model import Lengths, Model, batches_up_to
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


def plain(**fields: Any) -> Model:
    """A model of these fields; caches and results are of `dtype`, where they are not told."""
    dtype = fields["dtype"]
    if fields.get("value_dim") == fields["head_dim"] and not fields.get("latent"):
        fields["value_dim"] = None
    return Model(**dict(cache_dtype=dtype, out_dtype=dtype) | fields)
