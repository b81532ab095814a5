"""Metadata of a batch for all layers of a group, and the builder that makes it from vLLM's common metadata."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import compute_mm_prefix_range_tensor

from paged_attn.integrations import BUCKET
from paged_attn.integrations.flash_attn.common_call import twice
from paged_attn.integrations.flash_attn.unified import spans_of, split

from . import host
from .ready import make_ready, of_layer

UNKNOWN = host.check(AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata)


@dataclasses.dataclass
class Metadata(AttentionMetadata):
    """What calls of write_kv and paged_attention need of a batch.  The first fields have vLLM's names."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor  # one flag for all sequences, or bool [seqs]
    spans: Tensor | None = None  # [seqs, R, 2]: images whose tokens see each other
    # R-SWA (flash_attn/unified.py): a generated token sees all keys of its prompt, and the keys in its window.  In
    # models with R-SWA, these fields replace the layer's window.
    window: int | None = None
    prefix_lens: Tensor | None = None  # [seqs]
    query_positions: Tensor | None = None  # [tokens]
    shard: tuple[int, int, int] | None = None  # (rank, world, stripe) if ranks share keys; seq_lens count all keys
    split: bool = False  # each of vLLM's sequences is split into two: queries in its prompt, and later ones


class Builder(AttentionMetadataBuilder[Metadata]):
    """Builder that never reads lengths on the CPU, so graphs can be replayed with other lengths."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.prompts = prompts_of(vllm_config, device)
        if self.prompts is not None:  # build() must copy prompt lengths in each step, and an update does not call it
            self.supports_draft_decode_metadata_update = False
        self.shard = host.shard_of(vllm_config, kv_cache_spec)
        if self.shard is not None:
            chunked = getattr(kv_cache_spec, "attention_chunk_size", None) is not None
            if chunked or self.prompts is not None:
                what = "chunked layers" if chunked else "R-SWA"
                raise NotImplementedError(f"paged_attn does not know decode context parallelism of {what}")
        make_ready(kv_cache_spec, layer_names, vllm_config, device, of_layer)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """With R-SWA, only decodes of one token can be captured: for other batches, build() makes new tensors."""
        rswa = getattr(vllm_config.model_config, "rswa_window", None) is not None
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if rswa else cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """Make a batch's metadata.  common_prefix_len is ignored: there is no cascade attention."""
        c = common_attn_metadata
        host.refuse(c, UNKNOWN)
        bound = -(-int(c.max_seq_len) // BUCKET) * BUCKET  # with chunks, vLLM's bounds are numpy integers
        made = Metadata(
            c.num_actual_tokens, int(c.max_query_len), bound, c.query_start_loc, c.seq_lens, c.block_table_tensor,
            c.slot_mapping, c.causal, _spans(c), shard=self.shard,
        )  # fmt: skip
        if self.prompts is None:
            return made
        if made.spans is not None or made.causal is not True:
            raise NotImplementedError("paged_attn does not know R-SWA beside images that see each other, or not causal")
        return self.prompts.applied(made, c.rswa_prefix_lens)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Metadata:
        """Make metadata for a capture.

        Bounds hold at each replay.  Lengths are 1, because a capture runs the model, and short sequences suffice.
        """
        made = self.build(0, common_attn_metadata)
        made.max_seq_len = max(made.max_seq_len, self.vllm_config.model_config.max_model_len)
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode.mixed_mode() == mode.decode_mode():
            # One graph serves decodes and prefills, though the captured batch may hold only decodes.
            made.max_query_len = made.num_actual_tokens
        made.seq_lens.fill_(1)
        return made

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        table = twice(blk_table) if metadata.split else blk_table
        return dataclasses.replace(metadata, block_table=table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Update nothing: all that changes from one draft step to the next lies in vLLM's tensors."""


def _spans(batch: CommonAttentionMetadata) -> Tensor | None:
    """Spans [seqs, R, 2] from ranges that vLLM gives on the CPU, with R a power of two; None without ranges."""
    told = getattr(batch, "mm_req_doc_ranges", None)
    most = max(map(len, told.values()), default=0) if told else 0
    if not told or most == 0:
        return None
    count = 1 << (most - 1).bit_length()
    padded = {i: [*told.get(i, ()), *[(0, 0)] * count][:count] for i in range(len(batch.seq_lens))}
    return spans_of(compute_mm_prefix_range_tensor(padded, len(padded), batch.seq_lens.device))


# ---- R-SWA: the window of a model, and the prompt lengths of a batch ------------------------------

ALL = 2**31 - 1  # length of a prefix that covers every key, for captures: vLLM then gives no prompt lengths


class Prompts:
    """The window of a model, and the prompt lengths of a batch, which stay at one address for graphs."""

    def __init__(self, window: int, seqs: int, device: Any) -> None:
        self.window = window
        self.lens = torch.full((seqs,), ALL, dtype=torch.int32, device=device)

    def tell(self, lens: Tensor | None, seqs: int) -> Tensor:
        """Copy prompt lengths, with 0 for padding that vLLM leaves out; return [seqs] int32.

        If `lens` is None, every length is ALL.
        """
        mine = self.lens[:seqs]
        if lens is None:
            return mine.fill_(ALL)
        told = lens[:seqs]
        mine[: len(told)].copy_(told)
        mine[len(told) :].zero_()
        return mine

    def applied(self, metadata: Metadata, lens: Tensor | None) -> Metadata:
        """Return metadata with prefixes.  Unless max_query_len is 1, sequences are cut in two where prompts end."""
        m = metadata
        prompts = self.tell(lens, len(m.seq_lens))
        if m.max_query_len == 1:  # the query is its sequence's last token, so the prefix has no later keys
            return dataclasses.replace(m, window=self.window, prefix_lens=prompts)
        table, lens, starts, prefixes, positions = split(
            prompts, m.block_table, m.seq_lens, m.query_start_loc, m.num_actual_tokens
        )
        return dataclasses.replace(
            m, window=self.window, prefix_lens=prefixes, query_positions=positions, query_start_loc=starts,
            seq_lens=lens, block_table=table, split=True,
        )  # fmt: skip


def prompts_of(vllm_config: Any, device: Any) -> Prompts | None:
    """Return a model's Prompts; None for models without R-SWA."""
    window = getattr(vllm_config.model_config, "rswa_window", None)
    return None if window is None else Prompts(window, vllm_config.scheduler_config.max_num_seqs, device)
