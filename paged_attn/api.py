"""The public functions: their specifications.

Keywords that they do not have end in `others`, and are told their names here (keywords.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from . import compiled
from .arguments import table_parts
from .calls.untraced import at_first_call
from .checks.axes import ScaleLike
from .checks.keywords import refuse, told

attend = at_first_call("attend", ".calls.attend", globals())
write = at_first_call("write", ".calls.write", globals())
merge = at_first_call("merge", ".calls.state_merge", globals())

TableLike = torch.Tensor | Sequence[torch.Tensor]
NO_ARGS: tuple[torch.Tensor | float, ...] = ()


@told
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: TableLike,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    kv_layout: str = "NHD",
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | torch.Tensor = True,
    window_size: tuple[int, int] | torch.Tensor = (-1, -1),
    prefix_lens: torch.Tensor | None = None,
    spans: torch.Tensor | None = None,
    clip_spans: bool = False,
    chunk: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    qq_bias: torch.Tensor | None = None,
    qq_mask: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_args: Sequence[torch.Tensor | float] = NO_ARGS,
    q_scale: ScaleLike = None,
    k_scale: ScaleLike = None,
    v_scale: ScaleLike = None,
    gate: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_scale: ScaleLike = None,
    return_lse: bool = False,
    only: str | None = None,
    batch_invariant: bool = False,
    check: bool | None = None,
    **others: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of ragged queries over a paged key-value cache.

        out[t, h] = sum_j softmax_j(modify(scale * <q[t, h], k[j]>)) * v[j]   over the keys j that query t may see.

    Positions: key j of a sequence has position j; its query i has position context_len + i, where
    context_len = seq_len - query_len, unless query_positions says otherwise.  modify: softcap, then ALiBi, then
    query-query bias, then score_mod, in this order.

    Args:
        q: [tokens, heads, head_dim] float16 | bfloat16 | float32 | float8_e4m3fn | float8_e5m2; last axis contiguous.
            head_dim up to 512.
        k_cache: 4-D: [pages, page_size, kv_heads, head_dim] (NHD) or [pages, kv_heads, page_size, head_dim] (HND);
            5-D: x-packed [pages, kv_heads, head_dim // x, page_size, x].  dtype of q, or fp8; beside fp8 queries also
            float16 | bfloat16.  Any page size, any outer strides; heads is a multiple of kv_heads.
        v_cache: as k_cache, but that its last axis, value_dim, may be of another size, up to 512; beside x-packed keys
            [pages, kv_heads, value_dim, page_size].  k_cache[..., :value_dim], a view: values are the first dims of
            keys, as in multi-head latent attention; both are read once, and head_dim may be up to 576.
        page_table: [seqs, max_pages] int32 | int64; entry p of a row is the page with positions p * page_size ... of
            that sequence.  Entries past the last key, or wholly before every query's window, may hold anything.
            Or ragged, as engines keep it: (indptr [seqs + 1], indices), int32 | int64 each and of any strides; row s is
            indices[indptr[s] : indptr[s + 1]].  What lies between and behind rows is not read.  Then max_seqlen_k is
            worth giving: without, a sequence is taken to have up to as many pages as there are indices.
        seq_lens: [seqs] int32 | int64; keys of each sequence, those of this call included.  0 or less: an empty
            sequence.  Numbers of all three have to fit 32 bits, whatever their type.
        cu_seqlens_q: [seqs + 1] int32 | int64; queries of sequence s are rows cu_seqlens_q[s] ...
            cu_seqlens_q[s + 1] - 1 of q.  Rows from cu_seqlens_q[-1] on are padding and give zeros.  None: one query
            token per sequence.
        kv_layout: "NHD" or "HND"; of no meaning for a 5-D k_cache.
        max_seqlen_q: upper bound of a sequence's query tokens, on the host; saves work.  Of a sequence that has more,
            rows may be left unwritten: where out is None these hold whatever the memory held.  check finds it.
        max_seqlen_k: upper bound of seq_lens, on the host; saves work.
        k_new, v_new: [tokens, kv_heads, head_dim] and [tokens, kv_heads, value_dim], dtype of q, or beside fp8 queries
            that of a 16-bit cache, or float16 | bfloat16; the call's own keys and values, which are then not read from
            the cache.  They are not scaled by k_scale and v_scale.  Where v_cache is k_cache[..., :value_dim], v_new
            may be None: k_new[..., :value_dim].
        softmax_scale: of the scores before everything else; head_dim ** -0.5 if None.  The product of it, q_scale and
            k_scale is a float32 number, and so are scores: where some of them, with ALiBi and biases, are finite and
            beyond 2^30 in magnitude, results may be no numbers.
        causal: a query sees no key after its own position.  False: every query sees all seq_len keys.
            Or bool [seqs]: which sequences are causal.
        window_size: (left, right) keys visible before and after a query's own position; -1 = all.  A model's "sliding
            window W" is left = W - 1.  Or [heads, 2] int32 | int64: those of each query head, as of streaming heads
            beside full ones; each number is less than 2^31.  Of a KV head is read what its own heads see.
        prefix_lens: [seqs] int32 | int64; keys of a sequence before this position are visible to all of its queries,
            whatever causal, the window and chunk hide: a prefix in both directions, that stays behind a window.  0 or
            less: none; more than the sequence has: all.  It counts places, as causal does.
        spans: [seqs, R, 2] int32 | int64; up to R ranges of places in each sequence, from the first of two numbers to
            before the second, within which queries see all keys, in both directions (tokens of an image); -1, -1: none.
            They show what causal hides and, unless clip_spans, what the window and chunk hide.
        clip_spans: the window and chunk bound what spans show, too.
        chunk: a query at position p sees only keys of its own chunk of so many positions, from p // chunk * chunk on
            (local layers of Llama 4); causal and the window hide more of them.  None: a sequence is one chunk.
        softcap: scores become softcap * tanh(scores / softcap); 0 = off.  Above 64 by code that is right however far
            below it scores are, and slower: only up to 64 on Hopper tanh is off by up to 2^-11 of a
            score for bfloat16 and fp8 queries, if a sequence may have more than 8 rows a KV head (16 of several tokens,
            64 over fp8 caches), unless return_lse or batch_invariant is asked for; and of more than 64 rows what weighs
            less than 2^-24 of the largest, or of the sink, may weigh nothing.
        alibi_slopes: [heads] float32; adds slope * (key position - query position).
        sinks: [heads] float32 | dtype of q; one more key with this score and value 0.
        qq_bias: [n, n], or of each sequence [seqs, n, n], float32 | dtype of q; adds qq_bias[i, j] for query i and key
            j of this call, 0 beyond n.  Minus infinity hides a key.
        qq_mask: [tokens, words] int32, up to 32 words; bit j % 32 of word j // 32 says whether a query sees key j of
            this call.  It hides, and shows nothing that other arguments hide; keys beyond 32 * words are seen as
            without it.  paged_attn.tree makes it of the parents of each sequence's own tree of drafts, once for all
            layers, and query_positions of its nodes' depths.  For trees it is the faster of the two: a word for 32
            nodes in place of a number for each pair.
        query_positions: [tokens] int32 | int64; the position of query i, and of the call's own key i, which is key
            context_len + i: at least context_len and at most context_len + i, its place in the sequence.  The window
            and ALiBi compare these positions; causal, qq_bias, qq_mask go by places.  A node of a tree of drafts
            stands at context_len + its depth; without, its place is its position, and a window cuts, and ALiBi counts,
            as if nodes before it were ancestors all.  In a window, every query of a sequence reads on from the first
            key that one at context_len may see: not for long prefills.  Padding may hold anything.  None: places.
        score_mod: a function under @triton.jit, (score, query_pos, key_pos, head, *score_mod_args) -> score, compiled
            into the kernels: of each score after scale, softcap, ALiBi and query-query bias, before the mask, so what
            causal and window_size hide stays hidden.  score is a block [rows, keys] of float32; query_pos [rows, 1],
            key_pos [1, keys] and head [rows, 1] are int32.  It returns a block as score; minus infinity hides a key.
            Positions are 0 ... seq_len - 1 whatever the block holds, so what is loaded by them needs no mask.  It must
            be elementwise: blocks are cut and turned in any way.  The reference takes the same in torch.
        score_mod_args: what it is given behind these: contiguous tensors, of which it gets pointers, floats and ints.
        q_scale, k_scale, v_scale: float, or float32 of shape [], [1], [kv_heads] or [1, kv_heads], expanded to
            [seqs, kv_heads] or not; real value = stored value * scale.  Required for fp8 queries and fp8 caches.
            q_scale may also be of each token, > 0, and then beside any queries: a temperature by position, as Llama 4
            has it.  [tokens, 1] or, of fp8 queries, whose descale it holds too, [tokens, kv_heads]; of others [tokens].
            Padding may hold anything.
        gate: [tokens, heads, value_dim] float32 | dtype of q; last axis contiguous.  Results are multiplied by
            1 / (1 + exp(-gate)) before they are rounded to out's type, where keys are split once all are joined; the
            log-sum-exp stays as it is.  A result of 0 stays 0 whatever its gate holds, so rows that see no key, and
            padding, may have any.  Parts that merge_states is to join are taken without it.
        out: [tokens, heads, value_dim]; written and returned; its dtype decides what the result is stored as.  It may
            be q itself.  Otherwise it shares no memory with any argument, nor two elements of it a place, which the
            first call of such shapes and strides makes sure of; later ones do not look at addresses.
        out_scale: float, or float32 of shape [] or [1]; an fp8 out holds clamp(result / out_scale) to its range.
        return_lse: also return the natural logarithm of each row's softmax denominator, sinks included.  Where weights
            are e4m3, in prefill of e4m3 queries over an e4m3 cache on Hopper, their exponentials are coarse without it:
            results of random data are 3.1% off instead of 2.6% (the norm of the error over that of the results).
            Without it scores of bfloat16 queries over an e4m3 cache are sums of 14 bits there, if a sequence may have
            more than 64 rows (tokens x heads on a KV head): off by some 2^-12 of what is added up in them.
        only: "decode": only sequences with exactly one query token; "prefill": only the others.  Other rows of out and
            of the log-sum-exp are left as they were.
        batch_invariant: True: a query's result has the same bits alone and in any batch, in any order, in a prefill cut
            into any chunks and as a decode, whatever the bounds and the width of page_table; on one device, for the
            same keys and options.  (With qq_bias or causal=False, chunks themselves change what a query sees.)
            Not with k_new: how keys are cut into tiles would depend on where the cache ends.
        check: True: first verify what only the device knows (page ids, lengths), with a host sync.  None: as the
            environment variable PAGED_ATTN_CHECK said at the first call; unset it is 1 in the interpreter, else 0.

    Returns:
        [tokens, heads, value_dim], dtype of q, or out's if given; with return_lse also [tokens, heads] float32.
        A query that sees no key gives zeros, and minus infinity (its sink, if there are sinks).

    Strides may be of any size, and tensors lie at any offset; lazily negated views are refused.

    Raises:
        ValueError: naming the tensor, the axis and both sizes.  Nothing is written.  There is no backward pass: under
            grad mode a tensor that requires grad is an error, which names it.
        TypeError: naming the dtype wanted.

    Inside torch.compile and torch.export it is the operator torch.ops.paged_attn.attention, without a graph break, and
    its errors are raised when the graph runs, but for gradients and options, which are found while it is traced.  What
    is checked on the device cannot be captured in a CUDA graph.  torch.autocast changes nothing.

    Source: Kwon et al. 2023 (paging), Dao 2023 (tiling), Milakov & Gimelshein 2018 (online softmax), Press et al. 2022
    (ALiBi), Xiao et al. 2023 (sinks).
    """
    if others:
        refuse(paged_attention, others)
    page_starts = causal_seqs = head_windows = None
    if isinstance(page_table, (tuple, list)):
        page_table, page_starts = table_parts(page_table)
    if causal is not True and causal is not False and isinstance(causal, torch.Tensor):
        causal, causal_seqs = False, causal
    if not isinstance(window_size, tuple) and isinstance(window_size, torch.Tensor):
        window_size, head_windows = (-1, -1), window_size
    if torch.compiler.is_compiling():
        if score_mod is not None:
            raise ValueError(
                "score_mod must be None inside torch.compile and torch.export: their graphs hold no functions"
            )
        return compiled.paged_attention(
            q=q, k_cache=k_cache, v_cache=v_cache, page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q,
            kv_layout=kv_layout, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, page_starts=page_starts,
            k_new=k_new, v_new=v_new, softmax_scale=softmax_scale, causal=causal, causal_seqs=causal_seqs,
            window_size=window_size, head_windows=head_windows, prefix_lens=prefix_lens, spans=spans,
            clip_spans=clip_spans, chunk=chunk, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
            qq_bias=qq_bias, qq_mask=qq_mask, query_positions=query_positions, q_scale=q_scale, k_scale=k_scale,
            v_scale=v_scale, gate=gate, out=out, out_scale=out_scale, return_lse=return_lse, only=only,
            batch_invariant=batch_invariant, check=check,
        )  # fmt: skip
    return attend(
        q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, out,
        (
            page_starts, k_new, v_new, causal_seqs, head_windows, prefix_lens, spans, alibi_slopes, sinks, qq_bias,
            qq_mask, query_positions, q_scale, k_scale, v_scale, gate, out_scale,
            None if score_mod_args is NO_ARGS else score_mod_args,
        ),
        (
            kv_layout, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, clip_spans, chunk,
            softcap, score_mod, return_lse, only, batch_invariant,
        ),
        check,
    )  # fmt: skip


@told
def write_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: ScaleLike = None,
    v_scale: ScaleLike = None,
    check: bool | None = None,
    **others: NoReturn,
) -> None:
    """Write new keys and values into their slots of a paged cache, in place.

    Args:
        k, v: [tokens, kv_heads, head_dim] and [tokens, kv_heads, value_dim] float16 | bfloat16 | float32; last axis
            contiguous.  v None: values are the first dims of keys (see v_cache of paged_attention), which are written.
        k_cache, v_cache: as in paged_attention; dtype of k, or fp8.  Where v is None, v_scale is, and v_cache may be.
        slot_mapping: [tokens] int32 | int64; page * page_size + slot of each token, negative = skip it.  No slot twice.
        kv_layout: "NHD" or "HND"; of no meaning for a 5-D k_cache.
        k_scale, v_scale: float, or float32 of shape [], [1], [kv_heads] or [1, kv_heads]; an fp8 cache holds
            clamp(value / scale), rounded to nearest.  Required for an fp8 cache.
        check: as in paged_attention; finds slots outside the cache and slots given twice.

    Raises:
        ValueError: naming the tensor, the axis and both sizes; or a tensor that requires grad under grad mode.
        TypeError: naming the dtype wanted.

    Inside torch.compile it is torch.ops.paged_attn.write_kv, of which Inductor makes a launch for each cache, in place.
    """
    if others:
        refuse(write_kv, others)
    if torch.compiler.is_compiling():
        return compiled.write_kv(k, v, k_cache, v_cache, slot_mapping, kv_layout, k_scale, v_scale, check)
    write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_layout, check)


@told
def merge_states(outs: torch.Tensor, lses: torch.Tensor, **others: NoReturn) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a union of disjoint key sets from the attention over each.

    Args:
        outs: [n, tokens, heads, head_dim] float16 | bfloat16 | float32; results over each set of keys.
        lses: [n, tokens, heads] float32; natural logarithms of their softmax denominators.  Minus infinity marks an
            empty set, whose out may hold anything; infinity a sink of infinity, beside which nothing has weight.

    Returns: (out [tokens, heads, head_dim], dtype of outs; lse [tokens, heads]).  Associative up to rounding; where all
        sets are empty, zeros and minus infinity.

    Raises:
        ValueError: naming the tensor, the axis and both sizes; or a tensor that requires grad under grad mode.
        TypeError: naming the dtype wanted.

    Inside torch.compile it is torch.ops.paged_attn.merge_states.

    Source: Milakov & Gimelshein 2018; Ye et al. 2025 (attention states).
    """
    if others:
        refuse(merge_states, others)
    if torch.compiler.is_compiling():
        return compiled.merge_states(outs, lses)
    return merge(outs, lses)
