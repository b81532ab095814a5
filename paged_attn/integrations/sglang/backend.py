"""SGLang's attention backend.  SGLang gives it each batch, then queries, keys and values of each layer."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from paged_attn import paged_attention

from ..score_mods import modifier
from .tables import ALGORITHMS, Captured, Slots, Tables, mask_of, mask_words, tables_of

FP8_BYTES = 1
BOTH_WAYS = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)


class Backend(AttentionBackend):
    """Decodes, drafts, prefills and mixed batches over SGLang's token pool, without copies."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        _refuse_runner(runner)
        pool = runner.token_to_kv_pool
        _refuse_scales_of_blocks(pool)
        translates = hasattr(pool, "translate_loc_from_full_to_swa") and hasattr(pool, "layers_mapping")
        self.token_to_kv_pool = pool
        self.slots = Slots(runner.req_to_token_pool.req_to_token, getattr(runner, "page_size", 1) or 1,
                           pool if translates else None)  # fmt: skip
        self.batch_invariant = _deterministic()
        rows = self.slots.rows
        self._mask = mask_of(len(rows), rows.device)
        self.forward_metadata: Tables | None = None
        self._captured: Captured | None = None
        self._pages: dict[tuple[int, int], tuple[int, Tensor, Tensor]] = {}

    # ---- batches ------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        idle = forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0
        self.forward_metadata = None if idle else tables_of(forward_batch, self.slots)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._captured = Captured(self.slots, max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if self._captured is None:
            raise RuntimeError("SGLang asked for a graph's metadata before init_cuda_graph_state")
        self.forward_metadata = self._captured.fill(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # a padding sequence has one key, in the slot that the pool reserves for padding

    @property
    def verify_mask(self) -> Any:
        """Buffer into which SGLang writes the masks of draft trees; None without speculation."""
        return self._mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Copy the masks of draft trees, which do not exist yet when SGLang makes a batch's metadata."""
        of = self.forward_metadata
        if of is not None and of.qq_mask is not None:
            of.qq_mask.copy_(mask_words(spec_info.custom_mask, len(of.seq_lens), int(spec_info.draft_token_num)))

    # ---- layers -------------------------------------------------------------------------------------

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
                       **others: Any) -> Any:  # fmt: skip
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, others)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
                       **others: Any) -> Any:  # fmt: skip
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, others)

    def _attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save: bool,
                others: dict[str, Any]) -> Any:  # fmt: skip
        """Store new keys and values, then attend: q [tokens, heads * head_dim] -> [tokens, heads * v_head_dim]."""
        sinks = others.pop("sinks", None)
        refuse_layer(layer, others)
        tables = self.forward_metadata
        assert tables is not None, "SGLang calls init_forward_metadata first"
        if save and k is not None and v is not None:
            where = KVWriteLoc.for_batch(batch, swa_loc=tables.window_slots)
            scales = () if layer.k_scale is None else (layer.k_scale, layer.v_scale)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, *scales)
        pool = self.slots.window_pool
        apart = pool is not None and pool.layers_mapping[layer.layer_id][1]
        page_size = 1 if apart else self.slots.page_size
        k_cache, v_cache = self._caches(layer.layer_id, page_size)
        fp8 = k_cache.dtype.itemsize == FP8_BYTES
        both = layer.attn_type in BOTH_WAYS and batch.forward_mode.is_extend_without_speculative()
        before, after = window_of(layer)
        out = paged_attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim), k_cache, v_cache,
            tables.window_table if apart else tables.page_table,  # type: ignore[arg-type]
            tables.seq_lens, tables.cu_seqlens_q,
            max_seqlen_q=tables.max_seqlen_q,
            max_seqlen_k=tables.max_seqlen_k,
            softmax_scale=layer.scaling,
            causal=not both,
            window_size=(before, before if both else after),
            softcap=layer.logit_cap or 0.0,
            sinks=sinks,
            qq_mask=tables.qq_mask,
            query_positions=positions_of(layer, tables),
            k_scale=(layer.k_scale_float or 1.0) if fp8 else None,
            v_scale=(layer.v_scale_float or 1.0) if fp8 else None,
            batch_invariant=self.batch_invariant,
            **(modifier(layer.xai_temperature_len) if layer.xai_temperature_len > 0 else {}),
        )  # fmt: skip
        return out.flatten(1)  # type: ignore[union-attr]

    def _caches(self, layer: int, page_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, page_size, kv_heads, head_dim]: views of the pool, which are kept."""
        keys, values = self._pages_of(layer)
        kept = self._pages.get((layer, page_size))
        if kept is None or kept[0] != keys.data_ptr():
            if keys.ndim != 3:
                raise NotImplementedError(
                    "paged_attn knows SGLang's caches [slots, kv_heads, head_dim], got "
                    f"{list(keys.shape)} of {type(self.token_to_kv_pool).__name__}"
                )
            whole = len(keys) // page_size * page_size
            views = [x[:whole].unflatten(0, (-1, page_size)) for x in (keys, values)]
            kept = self._pages[layer, page_size] = (keys.data_ptr(), *views)
        return kept[1:]

    def _pages_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [slots, kv_heads, head_dim], as the pool has them."""
        return self.token_to_kv_pool.get_kv_buffer(layer)

    def support_triton(self) -> bool:
        return True


def _refuse_runner(runner: Any) -> None:
    """Raises NotImplementedError naming features that the server uses and the backend lacks."""
    from sglang.srt.runtime_context import get_parallel, get_spec

    translator = getattr(runner, "kv_index_translator", None)
    algorithm = get_spec().speculative_algorithm
    refused = {
        "encoders beside decoders": getattr(runner.model_config, "is_encoder_decoder", False),
        "the unified pool, whose slots are translated": getattr(translator, "is_translating", False),
        f"speculative decoding by {algorithm}": algorithm is not None and algorithm not in ALGORITHMS,
        "draft models (give --speculative-draft-attention-backend another)": getattr(runner, "is_draft_worker", False),
        "decode context parallelism": get_parallel().attn_dcp_size > 1,
    }
    if asked := [what for what, wanted in refused.items() if wanted]:
        raise NotImplementedError(f"paged_attn does not know SGLang's {', '.join(asked)}")


def _refuse_scales_of_blocks(pool: Any) -> None:
    """Raises NotImplementedError if a pool, or one of the pools that it consists of, has numbers in mxfp8 or fp4."""
    pools = [pool, *(getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))]
    for part in pools:
        if getattr(part, "is_quantized_kv_cache", False) or getattr(part, "k_scale_buffer", None) is not None:
            raise NotImplementedError(
                f"paged_attn does not know SGLang's caches with scales of blocks of dims, got {type(part).__name__}"
            )


def window_of(layer: Any) -> tuple[int, int]:
    """Return window_size for a layer.  SGLang's window does not count the query's own key; -1 or None is no window."""
    before = layer.sliding_window_size
    return (-1, -1) if before is None or before == -1 else (before, 0)


def positions_of(layer: Any, tables: Tables) -> Tensor | None:
    """Return positions of nodes in draft trees if the layer has a window, which goes by positions; else return None."""
    return None if window_of(layer) == (-1, -1) else tables.query_positions


def refuse_layer(layer: Any, others: dict[str, Any]) -> None:
    """Raises NotImplementedError naming options that a layer or a call has and the backend lacks."""
    asked = [name for name, value in others.items() if value is not None]
    asked += ["is_cross_attention"] if layer.is_cross_attention else []
    asked += [] if layer.pos_encoding_mode == "NONE" else [f"pos_encoding_mode {layer.pos_encoding_mode}"]
    asked += [] if layer.logit_capping_method == "tanh" else [f"logit_capping_method {layer.logit_capping_method}"]
    if asked:
        raise NotImplementedError(f"paged_attn does not know {', '.join(asked)} of SGLang's attention layers")


def _deterministic() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)
