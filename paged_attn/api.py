"""The public functions: check, plan, launch."""

import torch
import triton

from . import check as checks
from . import launch, layout
from .backend import INTERPRET, current, device_of
from .kernels.args import KeyValues, Modifiers
from .kernels.write import write_kv_kernel
from .launch import Call, ScaleLike
from .plan import Problem, plan

FAR = 1 << 30  # farther than any key, and position + FAR still fits 32 bits


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    kv_layout: str = "NHD",
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    qq_bias: torch.Tensor | None = None,
    q_scale: ScaleLike = None,
    k_scale: ScaleLike = None,
    v_scale: ScaleLike = None,
    out: torch.Tensor | None = None,
    out_scale: ScaleLike = None,
    return_lse: bool = False,
    only: str | None = None,
    batch_invariant: bool = False,
    check: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of ragged queries over a paged key-value cache.

    out[t, h] = sum_j softmax_j(modify(scale * <q[t, h], k[j]>)) * v[j]   over the keys j that query t may see.

    Positions: key j of a sequence has position j; its query i has position context_len + i, where
    context_len = seq_len - query_len.  modify: softcap, then ALiBi, then query-query bias, in this order.

    Args:
        q: [tokens, heads, head_dim] float16 | bfloat16 | float32 | float8_e4m3fn | float8_e5m2; last axis contiguous.
            head_dim up to 256.
        k_cache: 4-D: [pages, page_size, kv_heads, head_dim] (NHD) or [pages, kv_heads, page_size, head_dim] (HND);
            5-D: x-packed [pages, kv_heads, head_dim // x, page_size, x].  dtype of q, or fp8.  Any page size, any outer
            strides; heads is a multiple of kv_heads.
        v_cache: as k_cache; beside x-packed keys [pages, kv_heads, head_dim, page_size].
        page_table: [seqs, max_pages] int32; entry p of a row is the page with positions p * page_size ... of that
            sequence.  Entries past the last key, or wholly before every query's window, may hold anything.
        seq_lens: [seqs] int32; keys of each sequence, those of this call included.  0 or less: an empty sequence.
        cu_seqlens_q: [seqs + 1] int32; queries of sequence s are rows cu_seqlens_q[s] ... cu_seqlens_q[s + 1] - 1 of q.
            Rows from cu_seqlens_q[-1] on are padding and give zeros.  None: one query token per sequence.
        kv_layout: "NHD" or "HND"; of no meaning for a 5-D k_cache.
        max_seqlen_q: upper bound of a sequence's query tokens, on the host; saves work.
        max_seqlen_k: upper bound of seq_lens, on the host; saves work.
        k_new, v_new: [tokens, kv_heads, head_dim], dtype of q; the call's own keys and values, which are then not read
            from the cache.  They are not scaled by k_scale and v_scale.
        softmax_scale: of the scores before everything else; head_dim ** -0.5 if None.
        causal: a query sees no key after its own position.  False: every query sees all seq_len keys.
        window_size: (left, right) keys visible before and after a query's own position; -1 = all.  A model's "sliding
            window W" is left = W - 1.
        softcap: scores become softcap * tanh(scores / softcap); 0 = off.
        alibi_slopes: [heads] float32; adds slope * (key position - query position).
        sinks: [heads] float32 | dtype of q; one more key with this score and value 0.
        qq_bias: [n, n] float32 | dtype of q; adds qq_bias[i, j] for query i and key j of this call, 0 beyond n.
            Minus infinity hides a key: a tree of drafts is such a matrix.
        q_scale, k_scale, v_scale: float, [1] float32 or [kv_heads] float32; real value = stored value * scale.
            Required for fp8 queries and fp8 caches.
        out: [tokens, heads, head_dim]; written and returned; its dtype decides what the result is stored as.
        out_scale: float or [1] float32; an fp8 out holds clamp(result / out_scale) to its range.
        return_lse: also return the natural logarithm of each row's softmax denominator, sinks included.
        only: "decode": only sequences with exactly one query token; "prefill": only the others.  Other rows of out and
            of the log-sum-exp are left as they were.
        batch_invariant: True: a query's result has the same bits alone and in any batch, in any order, in a prefill cut
            into any chunks and as a decode, whatever the bounds and the width of page_table; on one device, for the
            same keys and options.  (With qq_bias or causal=False, chunks themselves change what a query sees.)
            Not with k_new: how keys are cut into tiles would depend on where the cache ends.
        check: True: first verify what only the device knows (page ids, lengths), with a host sync.  None: as the
            environment variable PAGED_ATTN_CHECK says.

    Returns:
        [tokens, heads, head_dim], dtype of q, or out's if given; with return_lse also [tokens, heads] float32.
        A query that sees no key gives zeros, and minus infinity (its sink, if there are sinks).

    Raises:
        ValueError naming the tensor, the axis and both sizes; TypeError naming the dtype wanted.  Nothing is written.

    Source: Kwon et al. 2023 (paging), Dao 2023 (tiling), Milakov & Gimelshein 2018 (online softmax), Press et al. 2022
    (ALiBi), Xiao et al. 2023 (sinks).
    """
    axes = checks.check_attention(
        q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, kv_layout=kv_layout, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, k_new=k_new, v_new=v_new, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, qq_bias=qq_bias,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, out_scale=out_scale,
        return_lse=return_lse, only=only, batch_invariant=batch_invariant,
    )  # fmt: skip
    device = device_of(q.device)
    if checks.enabled(check):
        checks.check_attention_contents(
            axes, page_table, seq_lens, cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            k_new=k_new, window_size=window_size, only=only,
        )  # fmt: skip
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(axes.tokens, axes.heads, dtype=torch.float32, device=q.device) if return_lse else None
    result = out if lse is None else (out, lse)
    if axes.seqs == 0:
        if only is None:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        return result

    left = min(window_size[0], FAR) if window_size[0] >= 0 else None
    # a causal query sees nothing to its right, however wide its window
    right = 0 if causal else min(window_size[1], FAR) if window_size[1] >= 0 else None
    softmax_scale = axes.head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    cache = layout.cache(k_cache, v_cache, kv_layout)
    problem = Problem(
        tokens=axes.tokens,
        seqs=axes.seqs,
        heads=axes.heads,
        kv_heads=axes.kv_heads,
        head_dim=axes.head_dim,
        page_size=axes.page_size,
        max_seqlen_q=axes.tokens if max_seqlen_q is None else min(max_seqlen_q, axes.tokens),
        max_seqlen_k=_longest(axes, max_seqlen_k, k_new is not None),
        window_left=window_size[0],
        ragged=cu_seqlens_q is not None,
        modified=softmax_scale <= 0 or softcap > 0 or alibi_slopes is not None or qq_bias is not None,
        qq_bias=qq_bias is not None,
        only=only,
        compute=_compute_dtype(q, k_cache, k_new),
        query_itemsize=q.element_size(),
        cache_itemsize=k_cache.element_size(),
        packed=axes.x > 0,
        # new keys, which are not fp8, would have to lie in the same parts
        pairable=k_new is None and q.dtype != torch.float32 and layout.pairable(cache.key, axes.head_dim),
        boxable=layout.boxable(k_cache, v_cache),
        rows_per_page=layout.rows_per_page(k_cache, v_cache, kv_layout),
        query_box=layout.aligned(q),
        out_box=layout.aligned(out) and out.dtype == q.dtype,
        new=k_new is not None,
        batch_invariant=batch_invariant,
        device=device,
    )
    mods = Modifiers(
        left=left,
        right=right,
        softcap=float(softcap) if softcap > 0 else None,
        alibi_slopes=alibi_slopes,
        qq_bias=qq_bias,
        qq_bias_stride=None if qq_bias is None else qq_bias.stride(0),
        qq_bias_size=None if qq_bias is None else qq_bias.shape[0],
        sinks=sinks,
    )
    call = Call(
        out=layout.rows(out),
        lse=lse,
        query=layout.rows(q),
        cache=cache,
        new=None if k_new is None or v_new is None else KeyValues(layout.contiguous(k_new), layout.contiguous(v_new)),
        query_starts=cu_seqlens_q,
        seq_lens=seq_lens,
        page_table=page_table,
        mods=mods,
        scales=launch.scales(softmax_scale, q_scale, k_scale, v_scale, out_scale),
    )
    with current(q.device):
        launch.attention(plan(problem), call)
    return result


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: ScaleLike = None,
    v_scale: ScaleLike = None,
    check: bool | None = None,
) -> None:
    """Write new keys and values into their slots of a paged cache, in place.

    Args:
        k, v: [tokens, kv_heads, head_dim] float16 | bfloat16 | float32; last axis contiguous.
        k_cache, v_cache: as in paged_attention; dtype of k, or fp8.
        slot_mapping: [tokens] int64; page * page_size + slot of each token, negative = skip it.  No slot twice.
        kv_layout: "NHD" or "HND"; of no meaning for a 5-D k_cache.
        k_scale, v_scale: float, [1] float32 or [kv_heads] float32; an fp8 cache holds clamp(value / scale), rounded to
            nearest.  Required for an fp8 cache.
        check: as in paged_attention; finds slots outside the cache and slots given twice.

    Raises: ValueError naming the tensor, the axis and both sizes; TypeError naming the dtype wanted.
    """
    axes = checks.check_write(
        k, v, k_cache, v_cache, slot_mapping, kv_layout=kv_layout, k_scale=k_scale, v_scale=v_scale
    )  # fmt: skip
    device_of(k.device)
    if checks.enabled(check):
        checks.check_write_contents(axes, slot_mapping)
    if axes.tokens == 0:
        return
    cache = layout.cache(k_cache, v_cache, kv_layout)
    dim = max(16, triton.next_power_of_2(axes.head_dim))
    block_heads = min(triton.next_power_of_2(axes.kv_heads), max(1, 2048 // dim))
    grid = (axes.tokens, triton.cdiv(axes.kv_heads, block_heads))
    scales = launch.scales(1.0, key=k_scale, value=v_scale)
    with current(k.device):
        launch.run(
            write_kv_kernel, grid, layout.rows(k), layout.rows(v), cache, slot_mapping, scales,
            axes.page_size, axes.kv_heads, axes.head_dim, dim, block_heads,
        )  # fmt: skip


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a union of disjoint key sets from the attention over each.

    Args:
        outs: [n, tokens, heads, head_dim] float16 | bfloat16 | float32; results over each set of keys.
        lses: [n, tokens, heads] float32; natural logarithms of their softmax denominators.  Minus infinity marks an
            empty set, whose out may hold anything.

    Returns: (out [tokens, heads, head_dim], dtype of outs; lse [tokens, heads]).  Associative up to rounding; where all
        sets are empty, zeros and minus infinity.

    Raises: ValueError naming the tensor, the axis and both sizes; TypeError naming the dtype wanted.

    Source: Milakov & Gimelshein 2018; Ye et al. 2025 (attention states).
    """
    axes = checks.check_merge(outs, lses)
    device_of(outs.device)
    outs, lses = outs.contiguous(), lses.contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    if axes.tokens and axes.heads:
        with current(outs.device):
            launch.merge_states(layout.rows(out), lse, outs, lses)
    return out, lse


def _longest(axes: checks.Axes, max_seqlen_k: int | None, new: bool) -> int:
    """An upper bound of seq_lens that the host knows."""
    room = axes.max_pages * axes.page_size + (axes.tokens if new else 0)
    return room if max_seqlen_k is None else min(max_seqlen_k, room)


def _compute_dtype(q: torch.Tensor, k_cache: torch.Tensor, k_new: torch.Tensor | None) -> torch.dtype:
    """Operands of the dots: the type of keys that are not fp8; float16, which holds every fp8 number, if all are.

    Keys of bfloat16 may be anywhere in its range; queries alone are brought into float16's, row by row.
    """
    if INTERPRET or q.dtype == torch.float32:  # the interpreter has no other arithmetic that is right
        return torch.float32
    wide = [x.dtype for x in (k_cache, k_new) if x is not None and not layout.is_fp8(x.dtype)]
    return wide[0] if wide else torch.float16
