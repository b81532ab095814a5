"""Latent attention (MLA): vLLM's module mla_attention (`frame`) calls this library for decodes, and for cache writes.

vLLM absorbs each head's key matrix into the query before `forward_mqa`.  For prefills, vLLM expands keys and values for
its prefill backend, which is prefill.py if the user chooses it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention as frame
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from paged_attn import paged_attention, write_kv
from paged_attn.integrations import BUCKET

from . import host
from .cache_formats import elements_of
from .ready import make_ready, of_latents

host.check_latent(frame.MLACommonImpl)
MOST_DIMS, MOST_RANK = 576, 512


@dataclasses.dataclass
class Decodes(frame.MLACommonDecodeMetadata):
    """Metadata of decodes, which may have several query tokens each."""

    query_start_loc: Tensor | None = None  # [seqs + 1] int32, as cu_seqlens_q; None: one query token each
    max_query_len: int = 1
    shard: tuple[int, int, int] | None = None  # (rank, world, stripe) if ranks share the keys


class Builder(frame.MLACommonMetadataBuilder):
    """vLLM's builder, with decodes of several query tokens, whose number may differ between sequences."""

    query_len_support: ClassVar[Any] = frame.QueryLenSupport.VARLEN
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **more: Any) -> None:
        self.shard = host.shard_of(vllm_config, kv_cache_spec)
        # Masks go by positions in whole sequences, so a rank masks its own keys correctly for several query tokens.
        more = {"supports_dcp_with_varlen": True} | more
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **more)
        most = self.reorder_batch_threshold or 1

        def served(layer: Any, steps: Any, *_: Any) -> Any:
            return of_latents(layer, steps, most, self.shard)

        make_ready(kv_cache_spec, layer_names, vllm_config, device, served)

    def _build_decode(self, **given: Any) -> Decodes:
        most = self.reorder_batch_threshold or 1
        starts = given["query_start_loc_device"] if most > 1 else None
        total = given["dcp_tot_seq_lens_device"]
        return Decodes(given["block_table_tensor"], given["seq_lens_device"], total, starts, most, self.shard)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata for a capture, with bounds that hold at each replay."""
        made = super().build_for_cudagraph_capture(common_attn_metadata)
        world = 1 if self.shard is None else self.shard[1]  # max_seq_len counts the keys of one rank
        made.max_seq_len = max(made.max_seq_len, -(-self.vllm_config.model_config.max_model_len // world))
        return made


class Impl(frame.MLACommonImpl):
    """Decodes of a layer, from absorbed queries.  vLLM's frame then multiplies results by each head's value matrix."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"paged_attn serves decoders in vLLM, not attn_type {attn_type}")
        if latent.get("indexer") is not None:
            raise NotImplementedError("paged_attn does not know sparse latent attention, an indexer of vLLM's layers")
        if alibi_slopes is not None:
            raise NotImplementedError("paged_attn does not know alibi_slopes of vLLM's latent attention")
        if latent["kv_lora_rank"] > MOST_RANK or head_size > MOST_DIMS:
            raise NotImplementedError(
                f"paged_attn serves latents of up to {MOST_RANK} dims in keys of up to {MOST_DIMS}, got "
                f"kv_lora_rank = {latent['kv_lora_rank']} in head_size = {head_size}"
            )
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, None, attn_type,
            kv_sharing_target_layer_name, **latent,
        )  # fmt: skip
        if sliding_window is not None or logits_soft_cap:
            # vLLM's frame calls prefill backends without a window or a softcap.
            raise NotImplementedError("paged_attn does not know windows and softcaps of vLLM's latent attention")
        self.supports_quant_query_input = False
        self.fp8 = elements_of(kv_cache_dtype)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write latents [tokens, rank] and rotated keys [tokens, 1, rope] side by side into slots, in one launch."""
        if kv_cache.numel() == 0:
            return
        keys, values = self.caches(kv_cache)
        slots = slot_mapping.flatten()
        tokens, scales = slots.shape[0], self._scales(1.0 if skip_scale else k_scale)
        latents = kv_c_normed[:tokens].unsqueeze(1)
        if keys.shape[-1] == values.shape[-1]:  # no part is rotated: latents are keys
            scales.pop("v_scale", None)
            write_kv(latents, None, keys, None, slots, **scales)
            return
        write_kv(k_pe[:tokens], latents, keys[..., values.shape[-1] :], values, slots, **scales)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from q [tokens, heads, rank + rope], or its two parts, to latents -> [tokens, heads, rank].

        If ranks share the keys, q has the heads of all ranks, and the second result is the log-sum-exp [tokens, heads]
        over this rank's keys, by which vLLM joins the results.  Else the second result is None.
        """
        decode = attn_metadata.decode
        if not getattr(attn_metadata, "causal", True):
            raise NotImplementedError("paged_attn does not know latent attention without causality in vLLM")
        keys, values = self.caches(kv_c_and_k_pe_cache)
        lens, bound, over = decode.seq_lens, attn_metadata.max_seq_len, {}
        if decode.shard is not None:  # decode.seq_lens and max_seq_len count the rank's own keys
            lens, bound = decode.dcp_tot_seq_lens, bound * decode.shard[1]
            over = {"shard": decode.shard, "return_lse": True}
        out = paged_attention(
            torch.cat(q, dim=-1) if isinstance(q, tuple) else q, keys, values,
            decode.block_table, lens, decode.query_start_loc,
            max_seqlen_q=decode.max_query_len,
            max_seqlen_k=-(-bound // BUCKET) * BUCKET,
            softmax_scale=self.scale,
            **over,
            **self._scales(layer._k_scale),
        )  # fmt: skip
        return (out, None) if isinstance(out, Tensor) else out

    def caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """View [blocks, block, rank + rope] as (keys [blocks, block, 1, rank + rope], values: their first dims)."""
        if kv_cache.ndim != 3 or kv_cache.shape[-1] != self.head_size:
            raise NotImplementedError(
                f"paged_attn knows caches of latents [blocks, block, {self.head_size}], got {list(kv_cache.shape)}"
            )
        keys = (kv_cache if self.fp8 is None else kv_cache.view(self.fp8)).unsqueeze(2)
        return keys, keys[..., : self.kv_lora_rank]

    def _scales(self, scale: Any) -> dict[str, Any]:
        return {} if self.fp8 is None else {"k_scale": scale, "v_scale": scale}


class Backend(host.Common, frame.MLACommonBackend):
    """The backend CUSTOM of latent attention, with its answers to what vLLM asks before it chooses a backend."""

    impl: ClassVar[type] = Impl
    builder: ClassVar[type] = Builder
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % host.PAGE == 0

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # a prefill with a context merges results, a prefill without one does not


class CPUBackend(Backend):
    """The backend on a CPU, in place of vLLM's own.  Calls run in plain torch, unless the interpreter is asked for."""

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"


host.implemented(Backend)
