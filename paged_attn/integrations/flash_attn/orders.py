"""Argument orders of FlashAttention's versions: find the order of a call, and give each argument one name.

The types of positional arguments and the keywords tell the order.  Contents of tensors on a GPU are not read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...checks.keywords import hint
from ...checks.options import window

REST2 = ("window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs")
REST3 = (
    "qv", "q_descale", "k_descale", "v_descale", "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa",
    "deterministic", "sm_margin", "return_attn_probs",
)  # fmt: skip
MODS4 = ("window_size", "learnable_sink", "softcap", "num_splits", "pack_gqa", "deterministic", "score_mod",
         "score_mod_bwd", "mask_mod")  # fmt: skip
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SEGMENTS = ("seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output", "softmax_segm_max",
            "softmax_segm_expsum")  # fmt: skip
SGLANG = ("only_qv", "sm_margin", "return_softmax_lse", "sinks", "score_mod", "aux_tensors", "sfq", "sfk", "sfv",
          "rel_bias", "rel_bias_prep_cache")  # fmt: skip
UNIFIED = (
    "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal", "window_size",
    "block_table", "softcap", "q_descale", "k_descale", "v_descale",
)  # fmt: skip
# Function -> version -> names of arguments after q, k and v, or after q, k_cache and v_cache.  If several versions
# fit and mean the same, the first one counts.
ORDERS: dict[str, dict[str, tuple[str, ...]]] = {
    "flash_attn_func": {
        "FA2": ("dropout_p", "softmax_scale", "causal", *REST2),
        "FA3": ("softmax_scale", "causal", *REST3),
        "FA4": (
            "qv", "gather_kv_indices", "softmax_scale", "causal", *MODS4, "aux_tensors", "aux_scalars",
            "block_sparse_tensors", "block_sparse_tensors_bwd", "return_lse",
        ),
    },
    "flash_attn_varlen_func": {
        "FA2": (*LENGTHS, "dropout_p", "softmax_scale", "causal", *REST2, "block_table"),
        "vLLM": (
            "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k", "seqused_k", "q_v", "dropout_p",
            "softmax_scale", "causal", *REST2, "block_table", "return_softmax_lse", "out", "scheduler_metadata",
            "q_descale", "k_descale", "v_descale", "num_splits", "output_scale", "fa_version", "s_aux",
            "cp_world_size", "cp_rank", "cp_tot_seqused_k", "mask_mod", "block_sparse_tensors", "aux_tensors",
            "aux_tensor_leading_dims", "dynamic_causal", "gather_kv_indices", "gather_kv_valid_length",
        ),
        "FA3": (*LENGTHS, "seqused_q", "seqused_k", "softmax_scale", "causal", *REST3),
        "FA4": (
            "qv", *LENGTHS, "min_seqlen_k", "seqused_q", "seqused_k", "gather_kv_indices", "page_table",
            "softmax_scale", "causal", *MODS4, "block_sparse_tensors", "aux_tensors", "aux_scalars", "return_lse",
            "scheduler_metadata", "seqlen_k_per_split", "disable_scheduler_metadata",
        ),
        "SGLang": (
            *LENGTHS, "seqused_q", "seqused_k", "page_table", "softmax_scale", "causal", "qv", "q_descale",
            "k_descale", "v_descale", "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa", *SGLANG,
            "ver", "out", "mask_mod",
        ),
    },
    "flash_attn_with_kvcache": {
        "FA2": (
            "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table",
            "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits",
            "return_softmax_lse", "out", "s_aux", "fa_version",
        ),
        "FA3": (
            "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad",
            "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "q_descale",
            "k_descale", "v_descale", "softmax_scale", "causal", "window_size", "attention_chunk", "softcap",
            "rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin", "return_softmax_lse",
            "sinks", "score_mod", "aux_tensors", "ver", "cp_world_size", "cp_rank", "cp_tot_seqused_k",
        ),
        "SGLang": (
            "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad",
            "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "q_descale",
            "k_descale", "v_descale", "softmax_scale", "causal", "window_size", "attention_chunk", "softcap",
            "rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", *SGLANG, "ver", "out",
            "max_seqlen_k", "mask_mod",
        ),
    },
    "unified_attention": {
        "vLLM": (
            *UNIFIED, *SEGMENTS, "alibi_slopes", "output_scale", "qq_bias", "sinks", "mm_prefix_range",
            "rswa_prefix_lens", "rswa_window", "use_alibi_sqrt", "kv_quant_mode", "k_scale_cache", "v_scale_cache",
            "chunk_lookback", "use_td", "mm_prefix_clamp_sliding_window",
        ),
        "AITER": (
            *UNIFIED, "q_scales", "alibi_slopes", "output_scale", "qq_bias", "sinks", "shuffled_kv_cache",
            "skip_reduce", "backend",
        ),
        "older": (*UNIFIED, "alibi_slopes", "output_scale", "qq_bias", "sinks"),
    },
}  # fmt: skip
ALIASES = {
    "block_table": "page_table", "s_aux": "sinks", "learnable_sink": "sinks", "return_softmax_lse": "return_lse",
    "q_v": "qv", "output_scale": "out_scale",
}  # fmt: skip
# ignored arguments: they change how a result is computed, but not the result
IGNORED = {
    "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "deterministic", "fa_version", "ver", "min_seqlen_k",
    "seqlen_k_per_split", "disable_scheduler_metadata", "cp_rank", "cp_tot_seqused_k", "backend", "use_td",
    "rel_bias_prep_cache",
    *SEGMENTS,
}  # fmt: skip
# refused arguments -> a neutral value, which is accepted, as None always is
REFUSED: dict[str, Any] = dict.fromkeys(
    ("gather_kv_indices", "gather_kv_valid_length", "score_mod", "score_mod_bwd", "mask_mod",
     "block_sparse_tensors", "block_sparse_tensors_bwd", "aux_tensors", "aux_scalars", "aux_tensor_leading_dims",
     "k_scale_cache", "v_scale_cache", "q_scales", "sfq", "sfk", "sfv", "rel_bias")
) | {
    "dropout_p": 0, "cp_world_size": 1, "use_alibi_sqrt": False, "kv_quant_mode": 0,
    "shuffled_kv_cache": False, "skip_reduce": False,
}  # fmt: skip

_VECTOR, _FLAG, _LENGTH, _TABLE = {"-", "i1"}, {"bool"}, {"-", "int", "int0", "i0"}, {"-", "i2"}
_NUMBER = {"int", "int0", "float", "float0"}
_SCALE, _SLOPES = {"-", "float", "f0", "f1", "f2"}, {"-", "f1", "f2"}
KINDS = {
    name: kinds
    for kinds, names in (
        (_VECTOR, "cu_seqlens_q cu_seqlens_k seqused_q seqused_k cache_batch_idx cache_leftpad cu_seqlens_k_new"
                  " rotary_seqlens"),
        (_LENGTH, "max_seqlen_q max_seqlen_k min_seqlen_k"),
        (_LENGTH | _VECTOR, "cache_seqlens"),
        (_TABLE, "block_table page_table gather_kv_indices"),
        (_FLAG, "causal only_qv rotary_interleaved deterministic return_attn_probs return_softmax_lse return_lse"),
        (_NUMBER, "dropout_p softcap"),
        ({"-", "int", "float"}, "softmax_scale"),  # without zeros: a 0 in this place is dropout_p
        ({"-", "pair"}, "window_size"),
        ({"-", "f2"}, "rotary_cos rotary_sin"),
        ({"-", "f3", "f4"}, "k v qv q_v out"),
        (_SCALE, "q_descale k_descale v_descale output_scale"),
        (_SLOPES, "alibi_slopes"),
        ({"-", "int", "int0"}, "seq_threshold_3D num_par_softmax_segments num_splits attention_chunk sm_margin"),
    )
    for name in names.split()
}  # fmt: skip


# names in other libraries -> arguments of these functions
MASKS = dict.fromkeys(
    ("attn_mask", "attn_bias", "attention_mask", "custom_mask", "packed_custom_mask", "mask"),
    "causal and window_size; qq_bias, qq_mask, spans and score_mod of paged_attention",
) | {"head_dim_v": "nothing, for the last axis of v says it", "is_causal": "causal", "scale": "softmax_scale"}


def bind(function: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the given arguments, each under one name (ALIASES), and the version whose order the call follows.

    Arguments that are None or IGNORED are left out, and so are REFUSED arguments with their neutral value.

    Raises TypeError for an unknown keyword, an argument given twice, or an order that cannot be told.  Raises
    ValueError for a refused argument.
    """
    version = _version(function, tuple([kind(x) for x in args]), tuple(keywords))
    named = dict(zip(ORDERS[function][version], args))
    named.update(keywords)
    given: dict[str, Any] = {}
    for name, value in named.items():
        if value is None or name in IGNORED:
            continue
        if name in ALIASES:
            name = ALIASES[name]
            if named.get(name) is not None or name in given:
                raise TypeError(f"{function}() got {name} twice, under two of its names")
        if name in REFUSED:
            _refuse(function, name, value)
            continue
        given[name] = value
    if "window_size" in given:
        sides = given["window_size"]
        if isinstance(sides, torch.Tensor) and sides.shape == (2,) and sides.device.type == "cpu":
            given["window_size"] = sides = sides.tolist()  # FlashAttention's own tests give a tensor
        _check_window(sides)
    return given, version


def _check_window(given: Any) -> None:
    """Check a window: (left, right), each an int, or None for no limit."""
    pair = isinstance(given, (tuple, list))
    window("window_size", [-1 if x is None else x for x in given] if pair else given)


def _refuse(function: str, name: str, value: Any) -> None:
    wanted = REFUSED.get(name)
    if name == "kv_quant_mode" and getattr(value, "name", "") == "FP8_PER_TENSOR":
        return
    if wanted is None or not isinstance(value, (int, float)) or value != wanted:
        got = f"a {type(value).__name__}" if not isinstance(value, (int, float)) else repr(value)
        raise ValueError(f"{function}() of paged_attn has no {name}: it must be {wanted!r} or left out, got {got}")


@functools.lru_cache(maxsize=1024)
def _version(function: str, kinds: tuple[str, ...], keywords: tuple[str, ...]) -> str:
    """Return the first version that fits the call; versions that have all keywords go before others.

    TypeError if no version has a keyword, if none fits, or if the versions that go first give positional arguments
    different names.
    """
    orders = ORDERS[function]
    known = {name for order in orders.values() for name in order}
    for name in keywords:
        if name not in known:
            near = hint(name, MASKS, known)
            raise TypeError(f"{function}() got an unknown keyword {name!r} ({near}); known: {', '.join(sorted(known))}")
    fits = [version for version, order in orders.items() if _fits(order, kinds, keywords)]
    if not fits:
        found = ", ".join(kinds)
        raise TypeError(
            f"{function}() got arguments behind q, k and v that fit no order of {', '.join(orders)}: [{found}]; "
            "give them by keyword"
        )
    whole = [version for version in fits if set(keywords) <= set(orders[version])]
    fits = whole or fits
    meanings = {tuple((ALIASES.get(n, n), i) for i, n in enumerate(orders[v]) if i < len(kinds) and kinds[i] != "-")
                for v in fits}  # fmt: skip
    if len(meanings) > 1:
        raise TypeError(
            f"{function}() got arguments that fit the orders of {' and '.join(fits)}, which mean different things; "
            "give those behind v by keyword"
        )
    return fits[0]


def _fits(order: tuple[str, ...], kinds: tuple[str, ...], keywords: tuple[str, ...]) -> bool:
    """Whether each positional argument has a kind that this order allows, and no keyword repeats one of them."""
    if len(kinds) > len(order) or any(name in order[: len(kinds)] for name in keywords):
        return False
    return all(kind in KINDS.get(name, {kind}) for name, kind in zip(order, kinds))


def kind(value: Any) -> str:
    """Return the kind of an argument.  Kinds tell one version's order from another's.

    "-" is None, "i1" a vector of integers, "f2" a matrix of floats, "int0" an int that is 0, "pair" a tuple or list.
    """
    if value is None:
        return "-"
    if isinstance(value, torch.Tensor):
        return f"{'f' if value.dtype.is_floating_point else 'i'}{value.ndim}"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return f"{'int' if isinstance(value, int) else 'float'}{'' if value else '0'}"
    return "pair" if isinstance(value, (tuple, list)) else type(value).__name__
