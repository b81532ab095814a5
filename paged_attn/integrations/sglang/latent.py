"""The backend for latent attention (MLA): absorbed queries over SGLang's pool of latents, or expanded keys.

SGLang chooses one of the two for each batch (`method_of`).  In an absorbed call, the layer has one KV head, with the
dims of a latent.  In an expanded call, the layer has the model's own KV heads.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from paged_attn import paged_attention
from paged_attn.integrations.flash_attn import flash_attn_varlen_func

from .backend import FP8_BYTES, Backend, positions_of, refuse_layer, window_of
from .tables import Tables, starts_of


class LatentBackend(Backend):
    """Attention over latents for decodes, drafts and some prompts (`method_of`), else over expanded keys and values."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        pool = getattr(self.token_to_kv_pool, "full_kv_pool", self.token_to_kv_pool)
        _refuse_pool(pool, self.slots.window_pool)
        self.kv_index_translator = runner.kv_index_translator  # SGLang reads this attribute to list slots of contexts
        self.rank, self.dims = pool.kv_lora_rank, pool.kv_cache_dim
        self.key_starts: Tensor | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        made = self.forward_metadata
        several = made is not None and made.cu_seqlens_q is not None
        self.key_starts = starts_of(forward_batch.seq_lens) if several else None

    def _attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save: bool,
                others: dict[str, Any]) -> Any:  # fmt: skip
        """Store new latents, then attend.  q: [tokens, heads * dims], without its rotated part if q_rope is given."""
        q_rope, k_rope, sinks = (others.pop(name, None) for name in ("q_rope", "k_rope", "sinks"))
        refuse_layer(layer, others)
        if layer.attn_type != AttentionType.DECODER or layer.xai_temperature_len > 0:
            asked = f"attn_type {layer.attn_type.value}, xai_temperature_len {layer.xai_temperature_len}"
            raise NotImplementedError(f"paged_attn does not know {asked} of latent attention in SGLang")
        tables = self.forward_metadata
        assert tables is not None, "SGLang calls init_forward_metadata first"
        sizes = layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
        if sizes == (1, self.dims, self.rank):
            if save and k is not None:
                self._store(k, v, k_rope, layer, batch)
            return self._absorbed(q, q_rope, layer, tables, sinks)
        if save or k is None or v is None or q_rope is not None:
            raise NotImplementedError(
                f"paged_attn knows layers of latents [1, {self.dims}, {self.rank}] in this pool, and layers whose keys "
                f"SGLang made of these; got {list(sizes)} (KV heads, dims of keys, dims of values) to store"
            )
        return self._expanded(q, k, v, layer, batch, tables, sinks)

    def _store(self, k: Tensor, v: Tensor | None, k_rope: Tensor | None, layer: Any, batch: Any) -> None:
        """Store latents and rotated parts, given in one or two tensors.

        The pool takes no scale, so this method divides by the layer's k_scale if the pool is fp8.
        """
        where = KVWriteLoc.for_batch(batch)
        if layer.k_scale is not None and self.token_to_kv_pool.dtype.itemsize == FP8_BYTES:
            k, k_rope = k / layer.k_scale, None if k_rope is None else k_rope / layer.k_scale
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, where, k, k_rope)

    def _absorbed(self, q: Tensor, q_rope: Tensor | None, layer: Any, tables: Tables, sinks: Tensor | None) -> Tensor:
        """Attend from absorbed queries to latents, whose first dims are the values -> [tokens, heads * rank]."""
        heads = layer.tp_q_head_num
        if q_rope is not None:
            parts = q.reshape(-1, heads, self.rank), q_rope.reshape(-1, heads, self.dims - self.rank)
            q = torch.cat(parts, dim=-1)
        keys, values = self._caches(layer.layer_id, self.slots.page_size)
        scale = (layer.k_scale_float or 1.0) if keys.dtype.itemsize == FP8_BYTES else None
        out = paged_attention(
            q.reshape(-1, heads, self.dims), keys, values, tables.page_table, tables.seq_lens,
            tables.cu_seqlens_q,
            max_seqlen_q=tables.max_seqlen_q,
            max_seqlen_k=tables.max_seqlen_k,
            softmax_scale=layer.scaling,
            window_size=window_of(layer),
            softcap=layer.logit_cap or 0.0,
            sinks=sinks,
            qq_mask=tables.qq_mask,
            query_positions=positions_of(layer, tables),
            k_scale=scale,
            v_scale=scale,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return out.flatten(1)  # type: ignore[union-attr]

    def _expanded(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, tables: Tables,
                  sinks: Tensor | None) -> Any:  # fmt: skip
        """Attend to expanded keys: to new keys only, to all keys of the sequences, or to a chunk of their contexts.

        Returns: [tokens, heads * v_head_dim].  If SGLang merges results, ([tokens, heads, v_head_dim], log-sum-exp
            [tokens, heads]).
        """
        heads, merged, context = layer.tp_q_head_num, bool(batch.mha_return_lse), bool(batch.attn_attend_prefix_cache)
        window = window_of(layer)
        if merged and (sinks is not None or window != (-1, -1)):
            raise NotImplementedError("paged_attn does not know sinks and windows of latent attention in chunks")
        starts = tables.cu_seqlens_q
        assert starts is not None, "decodes come absorbed"
        ends, longest = starts, tables.max_seqlen_q
        if context:
            chunk = batch.prefix_chunk_idx
            ends, longest = batch.prefix_chunk_cu_seq_lens[chunk], batch.prefix_chunk_max_seq_lens[chunk]
        elif batch.mha_one_shot and k.shape[0] != q.shape[0]:
            assert self.key_starts is not None
            ends, longest = self.key_starts, tables.max_seqlen_k
        out = flash_attn_varlen_func(
            q.reshape(-1, heads, layer.qk_head_dim),
            k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim).to(q.dtype),
            v.reshape(-1, layer.tp_k_head_num, layer.v_head_dim).to(q.dtype),
            cu_seqlens_q=starts, cu_seqlens_k=ends, max_seqlen_q=tables.max_seqlen_q, max_seqlen_k=longest,
            softmax_scale=layer.scaling, causal=not context, window_size=window, softcap=layer.logit_cap or 0.0,
            sinks=sinks, return_softmax_lse=merged,
        )  # fmt: skip
        return (out[0], out[1].t().contiguous()) if merged else out.flatten(1)

    def _pages_of(self, layer: int) -> tuple[Tensor, Tensor]:
        keys = self.token_to_kv_pool.get_key_buffer(layer)
        return keys, keys[..., : self.rank]


def method_of(attention: Any, batch: Any) -> Any:
    """Return how DeepSeek's models call attention, by SGLang's rule for FlashAttention-3.

    Decodes and drafts are absorbed.  So are prompts on a deterministic server, and prompts whose contexts together are
    not empty but shorter than SGLang's threshold.  All other prompts have expanded keys, also for their contexts, at
    once or in chunks.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import handle_attention_fa3

    return handle_attention_fa3(attention, batch)


def _refuse_pool(pool: Any, window_pool: Any) -> None:
    """Raises NotImplementedError naming features that a pool of latents has and the backend lacks."""
    asked = [] if hasattr(pool, "kv_lora_rank") else [f"latent attention over {type(pool).__name__}"]
    asked += ["sparse latent attention (DSA)"] if getattr(pool, "use_dsa", False) else []
    asked += ["latents in fp4"] if getattr(pool, "kv_scale_buffer", None) is not None else []
    asked += ["latents of sliding layers in a pool of their own"] if window_pool is not None else []
    if asked:
        raise NotImplementedError(f"paged_attn does not know SGLang's {', '.join(asked)}")
