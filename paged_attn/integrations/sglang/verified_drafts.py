"""Drafts that SGLang verifies: equally many query tokens of each sequence, as a chain or as nodes of a tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

WORD = 32  # nodes in a word of paged_attention's qq_mask
ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NEXTN")


class Drafts(NamedTuple):
    """Drafts of a batch: how many each sequence has; for trees, which node sees which, bool [seqs * each * each]."""

    each: int
    seen: Tensor | None = None


def drafts_of(batch: Any) -> Drafts:
    """Drafts of a batch; raises NotImplementedError naming a kind of drafts that is not known."""
    from sglang.srt.speculative.spec_info import SpecInputType

    told = batch.spec_info
    kind = getattr(told, "spec_input_type", None)
    if kind is not SpecInputType.EAGLE_VERIFY or told.ragged_verify_layout is not None:
        name = getattr(kind, "name", type(told).__name__)
        raise NotImplementedError(f"paged_attn does not know SGLang's drafts of kind {name}, or of uneven numbers")
    count = int(told.draft_token_num)
    if told.topk == 1 or count == 1:
        return Drafts(count)
    seen, cells = told.custom_mask, batch.batch_size * count * count
    if seen is None or len(seen) < cells:  # SGLang captures a graph, or the batch has no sequences
        seen = torch.ones(cells, dtype=torch.bool, device=batch.seq_lens.device)
    return Drafts(count, seen)


def mask_words(seen: Tensor, seqs: int, count: int) -> Tensor:
    """Pack a mask, which may be longer than the batch needs, into a qq_mask [seqs * count, words] int32."""
    words = -(-count // WORD)
    bits = torch.zeros(seqs * count, words * WORD, dtype=torch.int32, device=seen.device)
    bits[:, :count] = seen[: seqs * count * count].view(-1, count)
    places = torch.arange(WORD, dtype=torch.int32, device=seen.device)
    return (bits.view(-1, words, WORD) << places).sum(-1, dtype=torch.int32)


def mask_of(seqs: int, device: Any) -> Any:
    """Return a buffer for masks of draft trees, whose columns are drafts alone; None without speculation."""
    from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    spec = get_spec()
    if spec.speculative_algorithm is None or not spec.speculative_num_draft_tokens:
        return None
    mode = TreeMaskMode.QLEN_ONLY
    cells = tree_mask_numel(mode, seqs, spec.speculative_num_draft_tokens, 0)
    buffer = torch.zeros(cells, dtype=torch.bool, device=device)
    return VerifyMask(buffer=buffer, mode=mode, max_bs=seqs, is_read=spec.speculative_eagle_topk != 1)
