"""Bad input of each public function, and what it gets: a line per argument.

The checks of each call look only at what the host knows (axes.py); a checked call reads the device, too (contents.py).
Nothing launches or writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..arguments import BY_NAME
from ..latent import MAX_DIM, lies_in
from ..launching.locks import FIRST
from .axes import (
    BIAS_FOR,
    BOOL,
    CACHE_FOR,
    FLOAT,
    FLOAT32,
    FP8,
    HALF,
    INT32,
    INTEGER,
    MAX_WORDS,
    QUERY,
    SAME,
    Axes,
    Door,
    apart,
    boolean,
    both,
    choice,
    integer,
    number,
    window,
    writable,
)
from .contents import check_attention_contents, check_write_contents
from .overlap import same_elements
from .page_table import STARTS, admit_page_table
from .query_scale import check_query_scale
from .swapped import looks_swapped, warn

__all__ = [
    "Axes",
    "check_attention",
    "check_attention_contents",
    "check_merge",
    "check_options",
    "check_write",
    "check_write_contents",
]

RULES: dict[str, Callable[..., None]] = {
    "boolean": boolean,
    "choice": choice,
    "integer": integer,
    "number": number,
    "window": window,
}


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    *,
    page_starts: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    causal_seqs: Tensor | None,
    prefix_lens: Tensor | None,
    spans: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    qq_bias: Tensor | None,
    qq_mask: Tensor | None,
    query_positions: Tensor | None,
    score_mod_args: Any,
    q_scale: float | Tensor | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    gate: Tensor | None,
    out: Tensor | None,
    out_scale: float | Tensor | None,
    **options: Any,
) -> Axes:
    """Everything the host can know about a call of paged_attention: raises, or returns its sizes."""
    door = Door()
    door.tensor("q", q, ("tokens", "heads", "head_dim"), QUERY)
    door.caches(k_cache, v_cache, options["kv_layout"], CACHE_FOR[q.dtype])
    admit_page_table(door, page_table, page_starts, seq_lens)
    sizes = door.sizes
    tokens, seqs, heads, kv_heads = sizes["tokens"], sizes["seqs"], sizes["heads"], sizes["kv_heads"]
    if heads < 1 or heads % kv_heads:
        raise door.wrong_heads(heads)
    if k_new is None and page_starts is None:  # new keys would have settled kv_heads; a ragged table has no width
        _doubt(door, options["max_seqlen_k"])
    if cu_seqlens_q is not None:
        sizes["seqs + 1"] = seqs + 1
        door.tensor("cu_seqlens_q", cu_seqlens_q, ("seqs + 1",), INTEGER)
    elif tokens != seqs:
        raise ValueError(f"cu_seqlens_q = None needs tokens = seqs, got q with tokens = {tokens} and seqs = {seqs}")
    if k_new is not None or v_new is not None:
        latent = k_new is not None and v_new is None and lies_in(v_cache, k_cache)
        if not latent:
            both("k_new", k_new, "v_new", v_new)
            if sizes["head_dim"] > MAX_DIM:
                raise ValueError(f"v_new must be None with head_dim = {sizes['head_dim']}: values lie in k_new")
        unscaled = (k_cache if q.dtype in FP8 else q).dtype
        dtypes = HALF if unscaled in FP8 else SAME[unscaled]
        door.tensor("k_new", k_new, ("tokens", "kv_heads", "head_dim"), dtypes)
        if not latent:
            door.tensor("v_new", v_new, ("tokens", "kv_heads", "value_dim"), SAME[k_new.dtype])  # type: ignore[union-attr]
    if causal_seqs is not None:
        door.tensor("causal", causal_seqs, ("seqs",), BOOL)
    if prefix_lens is not None:
        door.tensor("prefix_lens", prefix_lens, ("seqs",), INTEGER)
    if spans is not None:
        door.tensor("spans", spans, ("seqs", "R", "2"), INTEGER)
        if spans.shape[2] != 2:
            raise ValueError(f"spans must be [seqs, R, 2], begins and ends, got {list(spans.shape)}")
    if alibi_slopes is not None:
        door.tensor("alibi_slopes", alibi_slopes, ("heads",), FLOAT32)
    if sinks is not None:
        door.tensor("sinks", sinks, ("heads",), BIAS_FOR[q.dtype])
    if qq_bias is not None:
        of_seqs = isinstance(qq_bias, Tensor) and qq_bias.ndim == 3
        door.tensor("qq_bias", qq_bias, ("seqs", "n", "n") if of_seqs else ("n", "n"), BIAS_FOR[q.dtype])
    if qq_mask is not None:
        door.tensor("qq_mask", qq_mask, ("tokens", "words"), INT32)
        if sizes["words"] > MAX_WORDS:
            raise ValueError(f"qq_mask must have words <= {MAX_WORDS}, got {list(qq_mask.shape)}")
    if query_positions is not None:
        door.tensor("query_positions", query_positions, ("tokens",), INTEGER)
    if gate is not None:
        door.tensor("gate", gate, ("tokens", "heads", "value_dim"), BIAS_FOR[q.dtype])
    more: dict[str, Tensor] = {}
    score_mod = options["score_mod"]
    if score_mod is not None or score_mod_args is not None:
        with FIRST:
            from .score_mod import check_score_mod  # it is Triton's, which importing the package leaves alone

        more = check_score_mod(door, score_mod, () if score_mod_args is None else score_mod_args)
    if out is not None:
        door.tensor("out", out, ("tokens", "heads", "value_dim"), QUERY)
        writable("out", out)
        if not same_elements(out, q):  # a block's queries are read before its results are written
            apart("out", out, q=q)
        apart(
            "out", out, k_cache=k_cache, v_cache=v_cache, page_table=page_table, seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q, k_new=k_new, v_new=v_new, causal=causal_seqs, prefix_lens=prefix_lens,
            spans=spans, alibi_slopes=alibi_slopes,
            sinks=sinks, qq_bias=qq_bias, qq_mask=qq_mask, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, gate=gate,
            out_scale=out_scale, **more, **{STARTS: page_starts},
        )  # fmt: skip
    check_query_scale(door, q_scale, q)
    door.scale("k_scale", k_scale, "k_cache", k_cache.dtype)
    door.scale("v_scale", v_scale, "v_cache", v_cache.dtype)
    door.scale("out_scale", out_scale, "out", (q if out is None else out).dtype, axis=None)
    check_options(**options)
    if options["batch_invariant"] and k_new is not None:
        # a tile at the border would be two, one of the cache and one of k_new
        raise ValueError(
            "k_new must be None with batch_invariant = True, for results would depend on where the cache ends"
        )
    return Axes(
        tokens,
        seqs,
        heads,
        kv_heads,
        sizes["head_dim"],
        sizes["pages"],
        sizes["page_size"],
        sizes["max_pages"],
        sizes.get("x", 0),
        value_dim=sizes["value_dim"],
    )


def _doubt(door: Door, max_seqlen_k: object) -> None:
    """Warn of a cache whose sizes fit, and that yet looks as if its kv_layout were the other one."""
    if door.cache is None or not isinstance(max_seqlen_k, int):
        return
    sizes = door.sizes
    kv_heads, page_size, max_pages = sizes["kv_heads"], sizes["page_size"], sizes["max_pages"]
    if looks_swapped(sizes["heads"], kv_heads, page_size, max_pages, max_seqlen_k):
        warn(door.cache, kv_heads, page_size, max_pages, max_seqlen_k)


def check_options(**given: Any) -> None:
    """Arguments of paged_attention that are values on the host, within the limits that the table has for them."""
    for name, value in given.items():
        argument = BY_NAME[name]
        if argument.check and (value is not None or argument.default is not None):
            rule, *limits = argument.check
            RULES[rule](name, value, *limits)


def check_write(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    kv_layout: str,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> Axes:
    """Everything the host can know about a call of write_kv: raises, or returns its sizes."""
    door = Door()
    door.tensor("k", k, ("tokens", "kv_heads", "head_dim"), FLOAT)
    if v is None:
        door.latent(k_cache, v_cache, kv_layout, CACHE_FOR[k.dtype])
    else:
        door.tensor("v", v, ("tokens", "kv_heads", "value_dim"), SAME[k.dtype])
        door.caches(k_cache, v_cache, kv_layout, CACHE_FOR[k.dtype])
    door.tensor("slot_mapping", slot_mapping, ("tokens",), INTEGER)
    writable("k_cache", k_cache)
    door.scale("k_scale", k_scale, "k_cache", k_cache.dtype)
    if v is None:
        if v_scale is not None:
            raise ValueError("v_scale must be None with v = None, for values are the first dims of keys")
    elif v_cache is not None:  # which `caches` has made sure of
        writable("v_cache", v_cache)
        if not (same_elements(k, v) and same_elements(k_cache, v_cache)):
            apart("v_cache", v_cache, k_cache=k_cache)
        door.scale("v_scale", v_scale, "v_cache", v_cache.dtype)
    size = door.sizes
    return Axes(
        size["tokens"],
        kv_heads=size["kv_heads"],
        head_dim=size["head_dim"],
        value_dim=size.get("value_dim", 0),
        pages=size["pages"],
        page_size=size["page_size"],
        x=size.get("x", 0),
    )


def check_merge(outs: Tensor, lses: Tensor) -> Axes:
    """Everything the host can know about a call of merge_states: raises, or returns its sizes."""
    door = Door()
    door.place("outs", outs, FLOAT)
    door.bind("outs", outs, ("n", "tokens", "heads", "head_dim"))
    door.place("lses", lses, FLOAT32)
    door.bind("lses", lses, ("n", "tokens", "heads"))
    size = door.sizes
    if size["n"] < 1:
        raise ValueError(f"outs must be [n, tokens, heads, head_dim] with n >= 1, got {list(outs.shape)}")
    return Axes(size["tokens"], heads=size["heads"], head_dim=size["head_dim"], parts=size["n"])
