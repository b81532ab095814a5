"""Keywords of other libraries: the error for an unknown keyword says what the argument is called here.

Python binds arguments before a function runs, and its own error says only that a keyword is unknown.  So the public
functions collect all unknown keywords and test whether there are any, which costs a call about 20 ns.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def _named(*rows: tuple[str, str]) -> dict[str, str]:
    """(names, hint) rows as a dict from each name to its hint."""
    return {name: hint for names, hint in rows for name in names.split()}


# docs/glossary.md says which library has each name; tests/docs/test_glossary.py compares both lists.
ATTENTION = _named(
    ("query query_states q_extend", "q"),
    ("k key key_states key_cache k_buffer k_extend", "k_cache, or k_new for the call's own keys"),
    ("v value value_states value_cache v_buffer v_extend", "v_cache, or v_new for the call's own"),
    ("kv kv_cache kv_pages paged_kv_cache cache", "k_cache and v_cache, which may be views of one tensor"),
    (
        "block_table block_tables block_table_tensor page_indices req_pool_indices cache_batch_idx",
        "page_table, [seqs, max_pages], a row for each sequence",
    ),
    (
        "indptr kv_indptr paged_kv_indptr window_kv_indptr indices kv_indices paged_kv_indices kv_page_indices "
        "window_kv_indices read_index",
        "page_table = (indptr, indices)",
    ),
    (
        "cache_seqlens seqused_k context_lens cache_seqlens_int32 extend_prefix_lens actual_seq_lens_kv "
        "kv_len kv_lens kv_len_arr seqlen_k",
        "seq_lens, lengths in which the call's own keys count",
    ),
    (
        "last_page_len paged_kv_last_page_len kv_last_page_lens",
        "seq_lens, (pages - 1) * page_size + last_page_len",
    ),
    ("cu_seqlens_k cu_seq_lens_k cu_seq_k cum_seq_lens_kv", "seq_lens, not their sums"),
    ("cu_seqlens cu_seq_q cu_seq_lens_q cum_seq_lens_q cu_q_lens query_start_loc qo_indptr", "cu_seqlens_q"),
    (
        "seq_lens_q actual_seq_lens_q seqused_q extend_seq_lens extend_start_loc q_len_per_req",
        "cu_seqlens_q, sums of lengths from 0 to the number of tokens",
    ),
    ("num_actual_tokens", "nothing, for cu_seqlens_q ends with it"),
    (
        "max_seqlen max_query_len max_length_q max_q_len max_q max_seq_len_q max_extend_len max_len_extend "
        "max_token_per_sequence",
        "max_seqlen_q",
    ),
    ("max_seq_len max_length_k max_kv_len max_k max_seq_len_k max_sequence_kv", "max_seqlen_k"),
    ("scale sm_scale scaling", "softmax_scale"),
    ("bmm1_scale", "softmax_scale, with q_scale and k_scale apart"),
    ("bmm2_scale", "v_scale, with out_scale apart"),
    ("is_causal", "causal, aligned to each sequence's last key"),
    ("dynamic_causal", "causal, which may be a bool tensor"),
    ("chunk_lookback", "chunk, or score_mod to hide keys of chunks further back"),
    ("sliding_window per_layer_sliding_window", "window_size = (sliding_window - 1, -1)"),
    ("sliding_window_size", "window_size = (sliding_window_size, -1)"),
    ("window_left window_right window_size_left window_size_right", "window_size = (left, right), -1 = all"),
    ("logits_soft_cap logit_cap soft_cap attn_logit_softcapping", "softcap"),
    ("s_aux learnable_sink attention_sinks sink_ptr", "sinks"),
    ("q_descale", "q_scale"),
    ("k_descale", "k_scale"),
    ("v_descale", "v_scale"),
    ("k_scale_cache", "k_scale, by token"),
    ("v_scale_cache", "v_scale, by token"),
    ("kv_cache_sf", "nothing, for k_scale and v_scale are of heads or tokens, not of blocks of dims"),
    (
        "attn_mask attn_bias attention_mask custom_mask packed_custom_mask mask",
        "qq_bias or qq_mask among the call's own tokens, else causal, window_size, spans or score_mod",
    ),
    ("position_bias", "score_mod, which may load it"),
    ("attention_chunk attention_chunk_size", "chunk, None = off"),
    ("mm_prefix_range", "spans, of which the second number is one more"),
    ("mm_prefix_clamp_sliding_window", "clip_spans"),
    ("rswa_prefix_lens", "prefix_lens"),
    ("rswa_window", "window_size = (rswa_window - 1, -1), beside prefix_lens"),
    ("mask_mod block_mask", "score_mod, in which minus infinity hides a key"),
    ("aux_tensors", "score_mod_args"),
    ("positions position_ids", "query_positions, which only trees of drafts need"),
    ("pos_encoding_mode", "alibi_slopes for ALIBI; else nothing, for queries and keys come rotated"),
    (
        "rotary_cos rotary_sin rotary_interleaved rotary_seqlens rope_scale rope_theta",
        "nothing, for queries and keys come rotated",
    ),
    ("output o o_extend", "out"),
    ("out_dtype o_data_type", "out, whose dtype is that of the results"),
    ("output_scale o_scale", "out_scale"),
    ("return_softmax_lse return_attn_probs return_aux return_lse_base_on_e lse", "return_lse"),
    ("kv_cache_layout", "kv_layout"),
    ("slot_mapping out_cache_loc write_index save_kv_cache", "nothing, for write_kv writes the cache"),
    (
        "page_size block_size batch_size num_reqs num_seqs num_heads num_kv_heads num_qo_heads head_size head_dim "
        "head_dim_qk head_dim_vo head_dim_v enable_gqa",
        "nothing, for the shapes of the tensors say it",
    ),
    ("kv_cache_dtype kv_data_type q_data_type", "nothing, for the dtypes of the tensors say it"),
    ("num_splits", "nothing, for the planner decides; batch_invariant for num_splits=1"),
    ("fixed_split_size disable_split_kv", "batch_invariant"),
    (
        "num_kv_splits max_kv_splits max_num_splits attn_logits attn_lse seq_threshold_3D num_par_softmax_segments "
        "softmax_segm_output softmax_segm_max softmax_segm_expsum scheduler_metadata pack_gqa sm_margin fa_version "
        "workspace_buffer float_workspace_buffer use_cuda_graph use_tensor_cores enable_pdl backend kernel_options "
        "non_blocking jit_args use_fp16_qk_reduction min_seqlen_k seqlen_k_per_split disable_scheduler_metadata "
        "use_td",
        "nothing, for the planner decides",
    ),
    ("dropout dropout_p", "nothing, for inference drops nothing"),
    ("deterministic", "nothing, for it is of the backward pass"),
    ("cu_seqlens_k_new", "nothing, for the call's own keys lie as its queries do"),
    ("cache_leftpad", "nothing, for a sequence begins in the first slot of its first page"),
    ("qv q_v", "q, [qv, q] side by side, over keys that are [v, k] side by side"),
    ("q_nope q_pe", "q, [q_nope, q_pe] side by side"),
    ("ckv_cache kpe_cache", "k_cache, [ckv, kpe] side by side, of which v_cache is the view of the first dims"),
    (
        "block_sparse_tensors gather_kv_indices use_alibi_sqrt kv_quant_mode "
        "gather_kv_valid_length cp_world_size cp_rank cp_tot_seqused_k",
        "nothing, for this is not done here",
    ),
)
WRITE = _named(
    ("key key_states append_key cache_k", "k"),
    ("value value_states append_value cache_v", "v"),
    ("key_cache", "k_cache"),
    ("value_cache", "v_cache"),
    ("kv_cache paged_kv_cache", "k_cache and v_cache, which may be views of one tensor"),
    ("out_cache_loc loc loc_info write_index", "slot_mapping"),
    (
        "page_table block_table cache_seqlens positions batch_indices kv_indices kv_indptr kv_last_page_len",
        "slot_mapping, page * page_size + slot of each token",
    ),
    ("kv_cache_dtype", "nothing, for the dtype of k_cache says it"),
)
WRITE_QKV = _named(
    ("q k v query key value", "qkv, one packed tensor or (q, k, v)"),
    ("q_pe kv_c k_pe", "qkv, (q_rope, latent, k_rope) with v_cache = None"),
    ("key_cache", "k_cache"),
    ("value_cache", "v_cache"),
    ("kv_cache paged_kv_cache", "k_cache and v_cache, which may be views of one tensor"),
    ("out_cache_loc", "slot_mapping"),
    ("batch_indices kv_indices kv_indptr", "slot_mapping, page * page_size + slot of each token"),
    ("position_ids pos_ids", "positions"),
    ("cos_sin_cache", "cos_sin"),
    ("cos sin", "cos_sin, cosines and sines side by side"),
    ("is_neox is_neox_style", "interleaved, its opposite"),
    ("mrope_section", "mrope_sections"),
    ("q_weight", "q_norm"),
    ("k_weight", "k_norm"),
    ("quant_scale_q", "q_scale"),
    ("quant_scale_kv", "k_scale and v_scale"),
    (
        "num_heads_q num_heads_k num_heads_v head_dim page_size rotary_dim",
        "nothing, for the shapes of the tensors say it",
    ),
)
MERGE = _named(
    ("v v_a v_b v_other prefix_output suffix_output out_partial", "outs, [n, tokens, heads, head_dim]"),
    ("s s_a s_b s_other prefix_lse suffix_lse lse_partial", "lses, [n, tokens, heads], natural logarithms"),
    ("mask prefill_tokens_with_context", "nothing, for minus infinity in lses marks a set without keys"),
    ("out output output_lse return_lse", "nothing, for both results are returned"),
    ("out_dtype output_scale", "nothing, for the result has the dtype of outs"),
)
PREPARE = _named(
    ("num_heads num_attention_heads num_qo_heads", "heads"),
    ("num_kv_heads num_key_value_heads", "kv_heads"),
    ("head_size head_dim_qk", "head_dim"),
    ("head_dim_v head_dim_vo v_head_dim kv_lora_rank", "value_dim"),
    ("block_size", "page_size"),
    ("kv_cache_dtype", "cache_dtype"),
    ("sliding_window", "window_size = (sliding_window - 1, -1)"),
    ("attn_logit_softcapping logits_soft_cap", "softcap"),
    ("attention_chunk_size", "chunk"),
    ("attn_mask attention_mask custom_mask", "qq_bias or qq_mask, sizes of those that calls pass"),
    ("alibi_slopes", "alibi = True"),
    ("max_num_seqs", "max_seqs"),
    ("max_num_batched_tokens", "max_tokens"),
    ("max_model_len max_seqlen_k", "max_seqlen"),
)
OTHERS = {
    "paged_attention": ATTENTION,
    "write_kv": WRITE,
    "write_qkv": WRITE_QKV,
    "merge_states": MERGE,
    "prepare": PREPARE,
}


class nothing:
    """Default of a required argument.  Checks refuse it like a wrong type, and say "got nothing"."""


def told(function: F) -> F:
    """Make `nothing` the default of required arguments, so that a call without them enters the function.

    The function then looks at `others` first.  Its visible signature has neither these defaults nor `others`.
    """
    signature = inspect.signature(function)
    named = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    places = [x for x in named if x.kind is x.POSITIONAL_OR_KEYWORD]
    given: Any = function
    given.__signature__ = signature.replace(parameters=named)
    given.__defaults__ = tuple([nothing() if x.default is x.empty else x.default for x in places])
    return function


def refuse(function: Callable[..., Any], given: Iterable[str]) -> NoReturn:
    """Raise TypeError for keywords that a function does not have, with a hint for each."""
    own = list(inspect.signature(function).parameters)
    hints = [f"{name!r} ({hint(name, OTHERS[function.__name__], own)})" for name in given]
    raise TypeError(f"{function.__name__}() has no argument {', '.join(hints)}")


def hint(name: str, known: Mapping[str, str], own: Iterable[str]) -> str:
    """What to use instead of an unknown keyword: its hint in `known`, else the nearest of the function's own names."""
    close = difflib.get_close_matches(name, list(own), 1)
    return f"here: {known[name]}" if name in known else f"did you mean {close[0]}?" if close else "nor one like it"
