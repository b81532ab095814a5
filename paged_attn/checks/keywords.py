"""Names that other libraries have for arguments of ours: a call that uses one is told ours.

Python binds arguments before a function runs, and its own error says only that a name is not known.  So the public
functions take any keyword, and look whether one is left over: some 20 ns of a call.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SHAPES = "nothing, for the shapes of the tensors say it"
PLANNER = "nothing, for the planner decides"
LENGTHS = "seq_lens, lengths in which the call's own keys count"
TABLE = "page_table, [seqs, max_pages], a row for each sequence"
RAGGED = "page_table = (indptr, indices)"
BIAS = "qq_bias among the call's own tokens, else causal and window_size"
ATTENTION = {
    "query": "q",
    "query_states": "q",
    **dict.fromkeys(("k", "key", "keys", "key_states", "key_cache"), "k_cache, or k_new for the call's own keys"),
    **dict.fromkeys(("v", "value", "values", "value_states", "value_cache"), "v_cache, or v_new for the call's own"),
    **dict.fromkeys(("kv_cache", "paged_kv_cache", "kv"), "k_cache and v_cache, which may be views of one tensor"),
    **dict.fromkeys(("block_table", "block_tables", "page_tables"), TABLE),
    **dict.fromkeys(("kv_indptr", "paged_kv_indptr", "kv_page_indptr"), RAGGED),
    **dict.fromkeys(("kv_indices", "paged_kv_indices", "kv_page_indices"), RAGGED),
    **dict.fromkeys(
        ("cache_seqlens", "seqused_k", "context_lens", "kv_lens", "seqlens_k", "actual_seq_lens_kv"), LENGTHS
    ),
    **dict.fromkeys(("cu_seqlens_k", "cu_seq_lens_k"), "seq_lens, not their sums"),
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens_q", "query_start_loc", "qo_indptr", "cu_query_lens"), "cu_seqlens_q"),
    **dict.fromkeys(("max_seqlen", "max_query_len", "max_length_q", "max_q_len"), "max_seqlen_q"),
    **dict.fromkeys(("max_seq_len", "max_context_len", "max_length_k", "max_kv_len"), "max_seqlen_k"),
    **dict.fromkeys(("scale", "sm_scale", "scaling"), "softmax_scale"),
    "is_causal": "causal",
    "sliding_window": "window_size = (sliding_window - 1, -1)",
    **dict.fromkeys(("window_left", "window_size_left"), "window_size = (left, right), -1 = all"),
    **dict.fromkeys(("window_right", "window_size_right"), "window_size = (left, right), -1 = all"),
    **dict.fromkeys(("attention_chunk", "attention_chunk_size"), "chunk, None = off"),
    **dict.fromkeys(
        ("logits_soft_cap", "logits_softcap", "logit_cap", "soft_cap", "attn_logit_softcapping"), "softcap"
    ),
    **dict.fromkeys(("s_aux", "sink", "learnable_sink", "attention_sinks"), "sinks"),
    "q_descale": "q_scale",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
    **dict.fromkeys(("attn_bias", "attn_mask", "attention_mask", "custom_mask", "mask"), BIAS),
    **dict.fromkeys(("position_ids", "positions"), "query_positions"),
    **dict.fromkeys(("output", "o"), "out"),
    **dict.fromkeys(("output_scale", "o_scale"), "out_scale"),
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs", "return_softmax"), "return_lse"),
    **dict.fromkeys(("layout", "kv_cache_layout"), "kv_layout"),
    **dict.fromkeys(("page_size", "block_size", "num_heads", "num_kv_heads", "head_dim", "enable_gqa"), SHAPES),
    "kv_cache_dtype": "nothing, for the dtype of k_cache says it",
    **dict.fromkeys(("num_splits", "num_kv_splits", "split_kv", "scheduler_metadata", "workspace_buffer"), PLANNER),
    **dict.fromkeys(("dropout_p", "dropout"), "nothing, for inference drops nothing"),
}
WRITE = {
    "key": "k",
    "value": "v",
    "key_cache": "k_cache",
    "value_cache": "v_cache",
    **dict.fromkeys(("slots", "slot_map"), "slot_mapping"),
    **dict.fromkeys(("page_table", "block_table"), "slot_mapping, page * page_size + slot of each token"),
    **dict.fromkeys(("k_descale", "key_scale"), "k_scale"),
    **dict.fromkeys(("v_descale", "value_scale"), "v_scale"),
    **dict.fromkeys(("layout", "kv_cache_layout"), "kv_layout"),
    "kv_cache_dtype": "nothing, for the dtype of k_cache says it",
}
MERGE = {"v": "outs", "s": "lses", "outputs": "outs", "output": "outs", "lse": "lses"}
OTHERS = {"paged_attention": ATTENTION, "write_kv": WRITE, "merge_states": MERGE}


class nothing:
    """Stands for a required argument that a call does not name; checks refuse it by its name, as they do a list."""


def told(function: F) -> F:
    """The same function, which is entered even where required arguments are missing: it looks at `others` first.

    Its signature stays the one that people need: without defaults that are none, and without `others`.
    """
    signature = inspect.signature(function)
    named = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    places = [x for x in named if x.kind is x.POSITIONAL_OR_KEYWORD]
    given: Any = function
    given.__signature__ = signature.replace(parameters=named)
    given.__defaults__ = tuple([nothing() if x.default is x.empty else x.default for x in places])
    return function


def refuse(function: Callable[..., Any], given: Iterable[str]) -> NoReturn:
    """Say what each of the names that a function does not have is called here."""
    known, own = OTHERS[function.__name__], list(inspect.signature(function).parameters)
    hints = []
    for name in given:
        close = difflib.get_close_matches(name, own, 1)
        hint = f"here: {known[name]}" if name in known else f"did you mean {close[0]}?" if close else "nor one like it"
        hints.append(f"{name!r} ({hint})")
    raise TypeError(f"{function.__name__}() has no argument {', '.join(hints)}")
