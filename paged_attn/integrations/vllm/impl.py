"""Attention of one layer: its options, and its calls of write_kv, write_qkv and paged_attention over vLLM's cache."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from paged_attn import distributed, paged_attention, write_kv, write_qkv
from paged_attn.distributed import groups

from ..score_mods import alibi_sqrt
from .cache_formats import INT4, Rotation, elements_in, elements_of, rotated, row_of, tail_of
from .metadata import Metadata

# Options of vLLM that are refused -> the value that turns the option off and is accepted.
NEUTRAL = {"chunk_lookback": -1}
# Encoders have no cache and see only the call's own keys.  A decoder's attention to an encoder has a cache.
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
SERVED = (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *ENCODERS)


class Impl(AttentionImpl):
    """Attention of a layer.  vLLM calls it after the layer's input projections and before its output projection."""

    # Decode context parallelism.  Masks go by positions in whole sequences, so drafts work with stripes of any size.
    supports_dcp: ClassVar[bool] = True
    can_return_lse_for_decode: ClassVar[bool] = True
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = True
    supports_pcp: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,
        **others: Any,
    ) -> None:
        if attn_type not in SERVED:
            raise NotImplementedError(
                f"paged_attn does not know attn_type {getattr(attn_type, 'value', attn_type)} of vLLM's layers"
            )
        for name, value in others.items():
            if value is not None and value != NEUTRAL.get(name):
                raise NotImplementedError(f"paged_attn does not know {name} = {value} of vLLM's attention layers")
        if getattr(self, "pcp_world_size", 1) > 1:
            raise NotImplementedError("paged_attn does not know prefill context parallelism, pcp_world_size > 1")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.head_size_v = self._dims_of_values()
        self.num_kv_heads = num_kv_heads or num_heads
        self.num_queries_per_kv = self.num_heads // self.num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.use_alibi_sqrt = bool(use_alibi_sqrt) and alibi_slopes is not None
        self.sinks = sinks
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.encodes = attn_type in ENCODERS
        if self.encodes and self.batch_invariant:
            raise NotImplementedError("paged_attn does not know VLLM_BATCH_INVARIANT of encoders, which have no cache")
        self.ranks = getattr(self, "dcp_world_size", 1)  # number of ranks that share the keys of one KV head
        if self.ranks > 1:
            self._check_ranks()
        self.fp8 = None if self.encodes else elements_of(kv_cache_dtype)
        self.tail = 0 if self.encodes else tail_of(kv_cache_dtype)
        # rotations of keys and of values; made here, because no graph may capture their making
        self.rotations: tuple[Rotation, Rotation] | None = None
        if kv_cache_dtype == INT4 and not self.encodes:
            self.rotations = Rotation(head_size), Rotation(self.head_size_v)
        # vLLM quantises queries to e4m3 only.
        quantises = kv_cache_dtype in ("fp8", "fp8_e4m3") and not self.encodes
        self.supports_quant_query_input = current_platform.is_cuda() and quantises
        self._all_slopes: Tensor | None = None
        self._seen: Tensor | None = None
        self._caches: tuple[Tensor, Tensor] | None = None
        self.slot_scales: tuple[Tensor, Tensor] | None = None  # of the cache that `caches` has seen last

    def _dims_of_values(self) -> int:
        return self.head_size

    def _check_ranks(self) -> None:
        for wrong, what in (
            (self.num_kv_heads > 1, "more than one KV head on a rank"),
            (self.attn_type == AttentionType.ENCODER_DECODER, "attention to an encoder's keys"),
            (self.batch_invariant, "VLLM_BATCH_INVARIANT"),
        ):
            if wrong and not self.encodes:
                raise NotImplementedError(f"paged_attn does not know decode context parallelism of {what}")

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values.  vLLM calls this before forward, unless the layer reads another layer's cache."""
        if self.encodes:
            return
        k_cache, v_cache = self.caches(kv_cache)
        tokens = slot_mapping.shape[0]
        if key.shape[0] != tokens:  # rows of padding have no slots
            key, value = key[:tokens], value[:tokens]
        if self.rotations is not None:
            key, value = (rotated(x, rotation.of_cache) for x, rotation in zip((key, value), self.rotations))
        write_kv(key, value, k_cache, v_cache, slot_mapping, kv_layout="HND", **self._scales(layer))

    # ---- hooks of vLLM's compiler passes, which fuse norm and rotation with the cache update --------

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether vLLM may call do_rope_and_kv_cache_update: only in decoders' attention to their own keys.

        Encoders have no cache to write, and attention to an encoder rotates nothing.  Over int4, heads are rotated once
        more (signs, Hadamard matrix) between the rotary embedding and the write.
        """
        return bool(self.attn_type == AttentionType.DECODER) and self.rotations is None

    fused_qk_norm_rope_kvcache_supported = fused_rope_kvcache_supported

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        kv_cache: Tensor,
        layer_slot_mapping: Tensor,
    ) -> None:
        """In one launch, rotate queries in place, and write values and rotated keys into the cache.

        `key` itself stays unrotated, because forward reads keys from the cache.
        """
        tokens = layer_slot_mapping.shape[0]
        parts = (query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads)
        qkv = tuple(x[:tokens] if x.ndim == 3 else x[:tokens].unflatten(-1, (heads, -1)) for x, heads in parts)
        self._write(layer, qkv, qkv[0], positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping)

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: Any,
        qkv: Tensor,
        q_out: Tensor,
        k_out: Tensor,
        positions: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        rms_norm_eps: float,
        cos_sin_cache: Tensor,
        is_neox: bool,
        kv_cache: Tensor,
        layer_slot_mapping: Tensor,
    ) -> None:
        """In one launch, norm and rotate queries into q_out, and write values and normed, rotated keys to the cache.

        k_out is not written, because forward reads keys from the cache.
        """
        tokens = layer_slot_mapping.shape[0]
        out = q_out[:tokens].view(tokens, self.num_heads, self.head_size)
        norms = {"q_norm": q_weight, "k_norm": k_weight, "eps": rms_norm_eps}
        self._write(
            layer, qkv[:tokens], out, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping, **norms
        )  # fmt: skip

    def _write(
        self, layer: Any, qkv: Any, out: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool, kv_cache: Tensor,
        slots: Tensor, **norms: Any,
    ) -> None:  # fmt: skip
        k_cache, v_cache = self.caches(kv_cache)
        write_qkv(
            qkv, k_cache, v_cache, slots, kv_layout="HND", positions=positions[: slots.shape[0]], cos_sin=cos_sin,
            interleaved=not is_neox, q_out=out, **norms, **self._scales(layer),
        )  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend; query [tokens, heads, head_size], output [tokens, heads, head_size_v].

        kv_cache is [blocks, kv_heads, block_size, head_size + head_size_v] with any strides, or half as wide for int4.
        A cache with scales by token has TAIL more bytes after each key and each value.  Rows of `output` after the
        batch's tokens are padding, and become zeros.
        """
        if attn_metadata is None:  # vLLM only measures how much memory a step takes
            return output.fill_(0)
        if output_block_scale is not None:
            raise NotImplementedError("paged_attn quantises results by one scale, not by output_block_scale")
        own: dict[str, Any] = {}
        if self.encodes:
            k_cache, v_cache, own = key.unsqueeze(2), value.unsqueeze(2), {"k_new": key, "v_new": value}
        else:
            k_cache, v_cache = self.caches(kv_cache)
        heads, dim = self.num_heads, self.head_size
        q = query if query.ndim == 3 else query.view(-1, heads, dim)
        out = final = output if output.ndim == 3 else output.view(-1, heads, self.head_size_v)
        if self.rotations is not None:
            q, out = rotated(q, self.rotations[0].of_queries), torch.empty_like(out)
        m = attn_metadata
        group = None if m.shard is None or self.encodes else group_of_keys()
        window = self.sliding_window if m.window is None else m.window
        positions = m.query_positions
        if positions is not None and len(positions) < len(q):  # padding may have any position
            positions = torch.nn.functional.pad(positions, (0, len(q) - len(positions)))
        if self.alibi_slopes is not None:
            own |= self._slopes(self._slopes_of(q.device, group), m)
        # The right side of a causal window is 0.  Beside spans it is -1, no limit, because 0 would hide later keys that
        # a span shows.  The causal mask still hides all other later keys.
        ahead = 0 if m.spans is None else -1
        attend: Any = paged_attention
        if group is None:
            own |= {"sinks": self.sinks, "out_scale": output_scale, "batch_invariant": self.batch_invariant}
        else:
            attend, own = distributed.paged_attention, own | self._over_ranks(group, m.shard, output_scale)
        attend(
            q, k_cache, v_cache, m.block_table, m.seq_lens, m.query_start_loc,
            kv_layout="HND",
            max_seqlen_q=m.max_query_len,
            max_seqlen_k=m.max_seq_len,
            softmax_scale=self.scale,
            causal=m.causal,
            # unless all sequences are causal, vLLM's windows reach as far ahead as back
            window_size=(-1, -1) if window is None else (window - 1, ahead if m.causal is True else window - 1),
            prefix_lens=m.prefix_lens,
            query_positions=positions,
            spans=m.spans,
            clip_spans=m.spans is not None and bool(getattr(layer, "mm_prefix_clamp_sliding_window", False)),
            softcap=self.logits_soft_cap,
            q_scale=layer._q_scale if q.dtype.itemsize == 1 else None,
            out=out,
            **own,
            **self._scales(layer),
        )  # fmt: skip
        if self.rotations is not None:
            final.copy_(rotated(out, self.rotations[1].of_results))
        return output

    def _over_ranks(self, group: Any, shard: Any, output_scale: Tensor | None) -> dict[str, Any]:
        """Keywords of distributed.paged_attention.  A rank passes queries of its own heads, and gets their results."""
        if output_scale is not None:
            raise NotImplementedError("paged_attn does not quantise results of decode context parallelism")
        _, world, stripe = shard
        # The call takes sinks of all heads, but a rank reads only its own part.  Copies of this part fill the rest.
        sinks = None if self.sinks is None else self.sinks.repeat(world)
        return {"group": group, "stripe": stripe, "q_heads": "own", "sinks": sinks}

    def _slopes_of(self, device: torch.device, group: Any) -> Tensor:
        """Return ALiBi slopes on the device: with a group those of all ranks' heads, else those of this rank's heads.

        Gathered slopes are kept for later calls, unless a graph is being captured: the graph then owns their memory.
        """
        assert self.alibi_slopes is not None
        if self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        if group is None:
            return self.alibi_slopes
        if self._all_slopes is not None:
            return self._all_slopes
        slopes: Tensor = groups.gather(self.alibi_slopes, group).flatten()
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._all_slopes = slopes
        return slopes

    def caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [blocks, kv_heads, block, head_size] and values [..., head_size_v]: views of the cache, which are kept.

        int4 has half as many elements.  If the cache has scales by token, `slot_scales` keeps views of the scales,
        [blocks, kv_heads, block] each.  A scale lies after its key or value.
        """
        if self._seen is not kv_cache or self._caches is None:
            kind, of_keys, of_values = self.kv_cache_dtype, self.head_size, self.head_size_v
            # where values begin on the last axis, and the length of this axis, scales included
            behind, width = row_of(kind, of_keys), row_of(kind, of_keys, of_values)
            if kv_cache.ndim != 4 or kv_cache.shape[-1] != width:
                raise NotImplementedError(
                    f"paged_attn knows vLLM's caches [blocks, {self.num_kv_heads}, block, {width}], keys of "
                    f"{self.head_size} dims beside values of {self.head_size_v}"
                    f"{', each with a scale behind it' * (self.tail > 0)}, got {list(kv_cache.shape)}"
                )
            cache = kv_cache if self.fp8 is None else kv_cache.view(self.fp8)
            self._seen = kv_cache
            of_keys, of_values = elements_in(kind, of_keys), elements_in(kind, of_values)
            self._caches = cache[..., :of_keys], cache[..., behind : behind + of_values]
            if self.tail:
                tails = kv_cache[..., behind - self.tail : behind], kv_cache[..., -self.tail :]
                self.slot_scales = tails[0].view(torch.float32)[..., 0], tails[1].view(torch.float32)[..., 0]
        return self._caches

    def _slopes(self, slopes: Tensor, metadata: Metadata) -> dict[str, Any]:
        """ALiBi as keywords of paged_attention.  slopes: result of `_slopes_of`."""
        if metadata.window is not None:
            raise NotImplementedError("paged_attn does not know ALiBi beside R-SWA, in which queries stand elsewhere")
        if self.use_alibi_sqrt:
            return {"score_mod": alibi_sqrt, "score_mod_args": (slopes,)}
        if metadata.causal is not True and not self.encodes:
            raise NotImplementedError("paged_attn knows ALiBi without causality in encoders alone")
        return {"alibi_slopes": slopes, "alibi_symmetric": self.encodes}

    def _scales(self, layer: Any) -> dict[str, Any]:
        """Scales as keywords.  Scales by token are views of the cache with which `caches` was last called."""
        if self.slot_scales is not None:
            return dict(zip(("k_scale", "v_scale"), self.slot_scales))
        return {} if self.fp8 is None else {"k_scale": layer._k_scale, "v_scale": layer._v_scale}

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether vLLM may fuse quantisation into attention: to e4m3 by one scale, not over ranks, not over int4."""
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

        # ranks exchange float32, and results over int4 are rotated back
        return bool(quant_key == kFp8StaticTensorSym) and self.ranks == 1 and self.rotations is None


def group_of_keys() -> Any:
    """The process group of ranks that share the keys of one KV head."""
    from vllm.distributed.parallel_state import get_dcp_group

    return get_dcp_group().device_group
