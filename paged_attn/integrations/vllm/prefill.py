"""Prefills of latent attention in vLLM: ragged keys and values of every head, which vLLM expands from latents."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from paged_attn.integrations.flash_attn import flash_attn_varlen_func

from . import host


class Prefill(MLAPrefillBackend):
    """Attention of new tokens to each other, and to expanded chunks of their contexts.  vLLM merges the results."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "PAGED_ATTN"

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """Attend to new keys -> [tokens, heads, v_head_dim]; with return_softmax_lse also the LSE [heads, tokens]."""
        if output_scale is not None:
            raise NotImplementedError("paged_attn does not quantise results of latent attention, output_scale")
        of = self._prefill_metadata
        starts = of.query_start_loc
        return self._attend(q, k, v, starts, starts, of.max_query_len, of.max_query_len, True, return_softmax_lse, out)

    def run_prefill_context_chunk(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunk: Any = None,
        chunk_idx: int | None = None,
        out: Tensor | None = None,
    ) -> Any:
        """Attend to a chunk of contexts -> (out, LSE [heads, tokens]).

        chunk: the chunk and its requests.  vLLM up to 0.31 passes chunk_idx instead, the number of a chunk, which has
            keys of all requests.
        """
        of = self._prefill_metadata
        if chunk is not None:
            ends = chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len
        else:
            all_of = of.chunked_context
            assert all_of is not None
            assert chunk_idx is not None
            ends = of.query_start_loc, all_of.cu_seq_lens[chunk_idx], of.max_query_len, all_of.max_seq_lens[chunk_idx]
        return self._attend(q, k, v, *ends, False, True, out)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, key_starts: Tensor, most: int, most_keys: int,
        causal: bool, lse: bool, out: Tensor | None,
    ) -> Any:  # fmt: skip
        if q.dtype.itemsize == 1:
            raise NotImplementedError("paged_attn does not know use_prefill_query_quantization of vLLM's config")
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=key_starts, max_seqlen_q=most, max_seqlen_k=most_keys,
            softmax_scale=self.scale, causal=causal, return_softmax_lse=lse, out=out,
        )  # fmt: skip


host.implemented(Prefill)
