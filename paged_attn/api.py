"""The public functions and their specifications.

Each function collects unknown keywords in `others`.  The error for these keywords says what to use instead of each one
(checks/keywords.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from . import ops
from .arguments import table_parts
from .calls.untraced import at_first_call
from .checks.axes import ScaleLike
from .checks.keywords import refuse, told

attend = at_first_call("attend", ".calls.attend", globals())
write = at_first_call("write", ".calls.writes", globals())
fused_write = at_first_call("fused_write", ".calls.writes", globals())
merge = at_first_call("merge", ".calls.attend", globals())

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
    shard: tuple[int, int, int] | None = None,
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
    alibi_symmetric: bool = False,
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

    Key j of a sequence has place j.  Query i of the sequence has place context_len + i, where
    context_len = seq_len - query_len.  Positions are places, unless query_positions are given.  modify applies softcap,
    ALiBi, query-query bias and score_mod, in this order.

    Args:
        q: [tokens, heads, head_dim] float16 | bfloat16 | float32 | float8_e4m3fn | float8_e5m2; last axis contiguous.
            head_dim is 1 to 512, or up to 576 if keys hold their values (see v_cache).  heads is a multiple of
            kv_heads.
        k_cache: NHD [pages, page_size, kv_heads, head_dim], or HND [pages, kv_heads, page_size, head_dim].  A 5-D cache
            is x-packed: [pages, kv_heads, head_dim // x, page_size, x].  dtype of q, fp8, or int8; beside fp8 queries
            also float16 | bfloat16.  Any page size; any strides of the outer axes.
            uint8 means int4, in NHD or HND with a last axis of head_dim / 2 bytes.  Byte d has dim 2 d in its lower
            four bits and dim 2 d + 1 in its upper four bits, both as numbers from 0 to 15.  Real value =
            (stored value - zero point) * scale.  head_dim and value_dim are multiples of 4.  The address and the
            strides of outer axes are even.  Keys may not hold their values (see v_cache).
        v_cache: dtype and layout of k_cache, with value_dim (1 to 512) in place of head_dim.  Beside x-packed keys
            [pages, kv_heads, value_dim, page_size].  The view k_cache[..., :value_dim] means that the first dims of
            keys are the values (multi-head latent attention).  Keys and values are then read once, and head_dim is up
            to 576.
        page_table: [seqs, max_pages] int32 | int64; entry p of a row is the page of keys p * page_size to
            (p + 1) * page_size - 1.  Entries past the last key may hold anything.  So may entries whose keys all lie
            before the window of every query.
            Ragged: a pair (indptr [seqs + 1], indices), int32 | int64 each, any strides.  Row s is
            indices[indptr[s] : indptr[s + 1]].  Indices of a row past its sequence's last key, and indices outside of
            all rows, may hold anything.  Pass max_seqlen_k here: without it, the call is planned as if one sequence
            could have all indices.
        seq_lens: [seqs] int32 | int64; number of keys of each sequence, the call's own included.  0 or less: an empty
            sequence.  Values of page_table, seq_lens and cu_seqlens_q must fit 32 bits, whatever their dtype.  A
            sequence of several query tokens needs at least as many keys as query tokens if it is causal, or if k_new is
            given; otherwise it may have fewer keys.  Checked calls refuse a sequence with too few keys, but accept
            negative lengths.
        cu_seqlens_q: [seqs + 1] int32 | int64; sequence s has the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1 of q.
            Rows from cu_seqlens_q[-1] on are padding; they give zeros.  None: one query token per sequence.
        kv_layout: "NHD" or "HND"; ignored for a 5-D k_cache.
        max_seqlen_q: an int on the host, upper bound of the query tokens of a sequence; saves work.  None: the number
            of tokens.  If a sequence has more, its extra rows are not computed and may be uninitialised.  Checked calls
            refuse such a sequence.
        max_seqlen_k: an int on the host, upper bound of seq_lens; saves work.  None: the number of keys that a row of
            page_table has room for, plus the tokens of k_new.  Checked calls refuse longer sequences.
        shard: (rank, world, stripe), three ints, if keys are divided among ranks.  The caches and page_table belong to
            this rank: they hold the keys at places p with p // stripe % world == rank, one after another, without gaps.
            All other arguments count places of whole sequences and are equal on all ranks: seq_lens, cu_seqlens_q,
            max_seqlen_k, masks and biases.  The result is the attention over the keys of this rank.  distributed.merge
            or merge_states joins it with the results of other ranks: pass return_lse = True and a float32 out.  A query
            that sees no key of this rank gives exactly 0 and minus infinity.  Not with k_new, sinks, gate, out_scale or
            batch_invariant.  All ranks compile the same kernels.
        k_new, v_new: [tokens, kv_heads, head_dim] and [tokens, kv_heads, value_dim]; keys and values of the call's own
            tokens.  The call reads them instead of their cache slots, without k_scale and v_scale.  dtype of q;
            beside fp8 queries the dtype of a 16-bit cache, or float16 | bfloat16 over other caches.  v_new may be None
            if v_cache is k_cache[..., :value_dim].  Values are then k_new[..., :value_dim].
        softmax_scale: factor of the scores, before all modifiers.  None: head_dim ** -0.5.  Scores and the product
            softmax_scale * q_scale * k_scale are float32.  A finite score beyond 2^30 in magnitude, ALiBi and biases
            included, may give NaN.
        causal: True: a query sees no key after its own place.  False: a query sees all seq_len keys.  bool [seqs]:
            which sequences are causal.
        window_size: (left, right), numbers of keys visible before and after a query's own position; -1: all.  A model's
            "sliding window W" is (W - 1, -1).  Or a tensor [heads, 2] int32 | int64: a window for each query head, with
            numbers from -1 to 2^31 - 1.  Each KV head reads only what its own query heads see.
        prefix_lens: [seqs] int32 | int64; every query sees the keys before this place of its sequence, also those that
            causal, the window or chunk would hide.  0 or less: no prefix.  More than seq_len: all keys.
        spans: [seqs, R, 2] int32 | int64; up to R ranges [begin, end) of places in each sequence.  A query in a range
            sees all keys of the range, also later ones (tokens of an image).  The end of a range may exceed seq_len by
            any number.  -1, -1: an unused range.  A range shows keys that causal hides and, unless clip_spans, keys
            that the window or chunk hides.
        clip_spans: True: the window and chunk hide keys of spans, too.
        chunk: number of positions in a chunk (local layers of Llama 4).  A query at position p sees only keys of its
            own chunk, from position p // chunk * chunk to p // chunk * chunk + chunk - 1.  The window and causal hide
            further keys.  None: no chunks.
        softcap: number >= 0; scores become softcap * tanh(scores / softcap).  0: off.  A softcap above 64 takes a
            slower form, which is exact to float32 even for small scores.  With a softcap up to 64 and without
            batch_invariant, the Hopper kernels approximate in two cases.  Both depend on the number of rows that a
            sequence may have, one row for each query token and each query head of a KV head:

            - With bfloat16 or fp8 queries and without return_lse, tanh may be off by up to 2^-11 of a score.  This
              happens over an fp8 cache only with more than 32 rows.  Over another cache it happens only with more than
              8 rows if sequences have one query token, and with more than 16 rows if they may have several.
            - If a sequence may have more than 64 rows, a weight below 2^-24 of the row's largest weight, or of its
              sink, may count as 0.
        alibi_slopes: [heads], or [seqs, heads] for each sequence, float32; adds slope * (key position - query position)
            to the scores.  Positive slopes raise scores of keys after a query.
        alibi_symmetric: True: ALiBi adds -slope * |key position - query position| instead, as FlashAttention and
            encoders have it.  Both give the same for keys up to a query's own position.
        sinks: [heads] float32 | dtype of q (for fp8 queries float16 | bfloat16 | float32); each head has one more key
            with this score, whose value is 0.
        qq_bias: [n, n], or [seqs, n, n] for each sequence; dtypes as for sinks; adds qq_bias[i, j] to the score of
            query i and key j of the call's own tokens.  Other scores do not change.  Minus infinity hides a key.
        qq_mask: [tokens, words] int32, up to 32 words; bit j % 32 of word j // 32 tells whether a query sees key j of
            the call's own tokens.  Clear bits hide keys; set bits show nothing that another argument hides.  Keys from
            32 * words on are not masked.  paged_attn.tree makes the mask from trees of drafts.  For trees it is faster
            than qq_bias: one word holds 32 nodes.
        query_positions: [tokens] int32 | int64; position of query i, and of the call's own key i (key context_len + i
            of the sequence).  At least context_len, at most the query's place.  The window, chunk, ALiBi and score_mod
            use positions.  causal, prefix_lens, spans, qq_bias and qq_mask use places.  In a tree of drafts, a node's
            position is context_len + its depth.  Without positions, windows and ALiBi count every earlier node as an
            ancestor.  With a window or chunk, every query of a sequence reads from the first key that position
            context_len may see, which is slow for long prefills.  Padding may hold anything.  None: positions are
            places.
        score_mod: a function under @triton.jit, (score, query_pos, key_pos, head, *score_mod_args) -> score, compiled
            into the kernels.  It changes scores after scale, softcap, ALiBi and query-query bias.  Masks follow, so
            hidden keys stay hidden.  score is float32 [rows, keys]; query_pos [rows, 1], key_pos [1, keys] and head
            [rows, 1] are int32.  The result has the shape and dtype of score; minus infinity hides a key.  Positions
            are always in 0 to seq_len - 1, so loads by position need no mask.  The function must be elementwise,
            because blocks may be split or transposed.  The reference takes a function of torch instead.  Calls in plain
            torch take either.
        score_mod_args: a tuple of further arguments of score_mod: floats, ints, and contiguous tensors, which score_mod
            gets as pointers.
        q_scale, k_scale, v_scale: real value = stored value * scale.  A float, or float32 of shape [], [1], [kv_heads],
            [1, kv_heads] or, for each sequence, [seqs, kv_heads]; any strides.  A scale of fp8 queries, or of an fp8 or
            int8 cache, is required.  A scale of 16-bit or float32 queries or caches must be None, except a q_scale by
            token (see below).  Rows of sequences without keys may hold anything.
            k_scale and v_scale may also be by token, with a number >= 0 for each slot and KV head: float32 | float16
            [pages, page_size, kv_heads], or [pages, kv_heads, page_size] for HND and x-packed caches; any strides.
            Slots without a key may hold anything.  If v_cache is k_cache[..., :value_dim], v_scale = None means
            k_scale.  int4 caches require scales by token, in float32.  The lowest four bits of such a scale are the
            zero point, an integer, and count as zeros in the scale.
            q_scale may also hold a number > 0 for each token, with any dtype of q: a temperature by position, as in
            Llama 4.  Its shape is then [tokens, 1], or [tokens] for queries that are not fp8.  For fp8 queries it
            includes the descale, and may be [tokens, kv_heads].  If there are as many tokens as sequences, each row of
            q_scale belongs to a token.  Padding may hold anything.
        gate: [tokens, heads, value_dim]; dtypes as for sinks; last axis contiguous.  Results are multiplied by
            1 / (1 + exp(-gate)), after the merge of splits and before rounding.  The log-sum-exp does not change.  A
            result of 0 stays 0 whatever its gate holds, so gates of padding and of rows that see no key may hold
            anything.  If merge_states will join results, compute them without a gate.
        out: [tokens, heads, value_dim], any dtype that q may have; last axis contiguous.  It is written and returned.
            None: a new tensor of q's dtype.  out may be q itself.  Otherwise it may share no memory with any argument,
            and no two of its elements may share memory.  Only the first call of given shapes and strides verifies both.
        out_scale: float, or float32 of shape [] or [1].  Required for an fp8 result, which holds result / out_scale
            clamped to the dtype's range.  None for other results.
        return_lse: also return the log-sum-exp of each query token and head: the natural logarithm of the softmax
            denominator, sinks included.  Hopper kernels make two approximations, beside that of tanh (see softcap),
            only with return_lse = False:

            - e4m3 queries over an e4m3 cache, in prefills: exponentials are coarse.  Results of random data then have a
              relative error (in norm) of 3.1%.  With return_lse it is still 2.6%, because weights are e4m3, too.
            - bfloat16 queries over an e4m3 cache, if a sequence may have more than 64 rows (see softcap): scores are
              accumulated in 14 bits, off by about 2^-12 of the summands.
        only: "decode": compute only sequences of exactly one query token.  "prefill": compute only the others.  Rows of
            out and of the log-sum-exp that are not computed, padding included, are then not written.  None: compute
            all.
        batch_invariant: True: the result of a query has the same bits alone and in every batch.  A decode, a whole
            prefill and a prefill in several calls give equal bits, too.  max_seqlen_q, max_seqlen_k and the width of
            page_table do not matter.  This holds on one device, for the same keys and options.  With qq_bias or
            causal=False, cutting a prefill changes what a query sees.  Not with k_new, because tiles would depend on
            where the cache ends, and not with shard.
        check: True: first verify what only the device knows (page ids, lengths), with a host sync.  None: as the
            environment variable PAGED_ATTN_CHECK said at the first call.  If the variable is unset, calls are checked
            in plain torch and in the interpreter only.

    Returns:
        [tokens, heads, value_dim] in the dtype of q, or in that of out.  With return_lse also [tokens, heads] float32.
            A query that sees no key gives zeros; its log-sum-exp is minus infinity, or its sink.

    Raises:
        ValueError: names the tensor, the axis and both sizes, and what to do.  Nothing has been written.  Under grad
            mode, also for a tensor that requires grad: there is no backward pass.
        TypeError: names the dtype or type wanted, and what to do.

    Strides of outer axes are free, and so are storage offsets; lazily negated views are refused.

    Inside torch.compile and torch.export the call is one operator, torch.ops.paged_attn.attention or, with return_lse,
    attention_lse, without a graph break.  Errors about gradients and options are raised while the graph is traced, all
    others when it runs.  Checks on the device cannot be captured in a CUDA graph.  torch.autocast changes nothing.

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
        return ops.paged_attention(
            q=q, k_cache=k_cache, v_cache=v_cache, page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q,
            kv_layout=kv_layout, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, shard=shard,
            page_starts=page_starts, k_new=k_new, v_new=v_new, softmax_scale=softmax_scale, causal=causal,
            causal_seqs=causal_seqs, window_size=window_size, head_windows=head_windows, prefix_lens=prefix_lens,
            spans=spans, clip_spans=clip_spans, chunk=chunk, softcap=softcap, alibi_slopes=alibi_slopes,
            alibi_symmetric=alibi_symmetric, sinks=sinks, qq_bias=qq_bias, qq_mask=qq_mask,
            query_positions=query_positions, q_scale=q_scale, k_scale=k_scale,
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
            kv_layout, max_seqlen_q, max_seqlen_k, shard, softmax_scale, causal, window_size, clip_spans, chunk,
            softcap, alibi_symmetric, score_mod, return_lse, only, batch_invariant,
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
        k: [tokens, kv_heads, head_dim] float16 | bfloat16 | float32; last axis contiguous.
        v: [tokens, kv_heads, value_dim], dtype of k; last axis contiguous.  None: values are the first dims of keys
            (see v_cache in paged_attention), and writing k writes them.
        k_cache, v_cache: as in paged_attention; dtype of k, fp8, int8, or uint8 (int4).  With v = None, v_cache is None
            or the view k_cache[..., :value_dim], and the cache may not be int4.
        slot_mapping: [tokens] int32 | int64; page * page_size + slot of each token.  Negative: the token is skipped.
            No slot may occur twice.
        kv_layout: "NHD" or "HND"; ignored for a 5-D k_cache.
        k_scale, v_scale: float, or float32 of shape [], [1], [kv_heads] or [1, kv_heads].  Required for an fp8 or int8
            cache, which holds clamp(value / scale), rounded to nearest even.  Quotients are float32.  int8 is clamped
            to +-127, and stores 0 for NaN.  None for a cache of 16 bits or float32.  With v = None, v_scale is None.
            If scales are by token (see paged_attention), the call computes and writes them.  A scale is the largest
            magnitude of a token's head, divided by the largest number of the cache's dtype (448, 57344 or 127), in
            float32.  float16 scales are rounded to nearest, and at most 65504; values are divided by the scale as
            stored.  Where a head is all zeros, or its scale rounds to 0, the scale and what is stored are 0.  Where a
            head has a NaN or an infinity, its scale is NaN and what is stored is 0, so the head reads as NaN; other
            heads and tokens do not change.
            int4 requires scales by token.  least and largest are the extremes of a token's head together with 0.
            scale = (largest - least) / 15, with its lowest four bits cleared.  zero point = -least / scale.  stored =
            value / scale + zero point, clamped to 0 to 15.  Quotients are rounded as above, and NaN, infinity and a
            scale of 0 are as above.
        check: as in paged_attention; finds slots outside the cache, and slots that occur twice.

    Raises:
        ValueError: names the tensor, the axis and both sizes, and what to do.  Nothing has been written.  Under grad
            mode, also for a tensor that requires grad.
        TypeError: names the dtype or type wanted, and what to do.

    Inside torch.compile the call is torch.ops.paged_attn.write_kv.  Inductor launches one kernel for each cache, which
    writes in place.

    Source: Kwon et al. 2023 (paging).
    """
    if others:
        refuse(write_kv, others)
    if torch.compiler.is_compiling():
        return ops.write_kv(k, v, k_cache, v_cache, slot_mapping, kv_layout, k_scale, v_scale, check)
    write(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_layout, check)


@told
def write_qkv(
    qkv: torch.Tensor | Sequence[torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    interleaved: bool = False,
    mrope_sections: Sequence[int] | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    k_scale: ScaleLike = None,
    v_scale: ScaleLike = None,
    q_out: torch.Tensor | None = None,
    q_scale: ScaleLike = None,
    check: bool | None = None,
    **others: NoReturn,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write keys and values into their slots, and return the queries, in one launch.

    The steps, in order: RMS norm of each head of q and k, rotary embedding of their first rotary_dim dims, quantisation
    for an fp8, int8 or int4 cache or an fp8 q_out, the write.  Norm and rotation are float32.  Only what is stored is
    rounded, as in vLLM's fused kernel (csrc/fused_qknorm_rope_kernel.cu).  Separate operators round the norm's result,
    too.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], packed: heads of q, then of k, then of v.  Or (q, k, v) of
            [tokens, heads, head_dim], [tokens, kv_heads, head_dim] and [tokens, kv_heads, value_dim].  float16 |
            bfloat16 | float32; any strides, last axis contiguous.
            With v_cache = None (multi-head latent attention) a triple (q_rope, latent, k_rope): [tokens, heads,
            rope_dim], [tokens, kv_heads, value_dim], [tokens, kv_heads, rope_dim].  A slot then holds [latent, k_rope].
        k_cache, v_cache: as in paged_attention; dtype of qkv, fp8, int8, or uint8 (int4).  v_cache = None: k_cache is a
            latent cache, NHD or HND, and not int4.
        slot_mapping: [tokens] int32 | int64; page * page_size + slot of each token.  Negative: the token's keys and
            values are skipped; its queries are not.  No slot may occur twice.
        kv_layout: "NHD" or "HND"; ignored for a 5-D k_cache.
        positions: [tokens] int32 | int64, or [3, tokens] with mrope_sections; row of cos_sin for each token.  A
            position outside cos_sin takes its nearest row.  None: row t of cos_sin belongs to token t.
        cos_sin: [max_positions, rotary_dim] float16 | bfloat16 | float32; cosines in the first half of a row, sines in
            the second, both multiplied by the model's scaling, if any.  rotary_dim is even and at most the dims of q;
            over int4 a multiple of 4, unless interleaved.  None: no rotary embedding.
        interleaved: False: dim i and dim i + rotary_dim / 2 are a pair (GPT-NeoX).  True: dims 2 i and 2 i + 1 (GPT-J).
        mrope_sections: three ints whose sum is rotary_dim / 2 (multimodal rotary embedding): numbers of pairs of dims
            that take positions[0], then positions[1], then positions[2].
        q_norm, k_norm: [head_dim] float16 | bfloat16 | float32; weights of the RMS norm.  None: no norm.  With
            v_cache = None, k_norm [value_dim] norms the latent, and q_norm must be None.
        eps: number >= 0, added to the mean square.
        norm_offset: number added to the weights: 1.0 where a model stores weight - 1.
        k_scale, v_scale: as in write_kv; the call computes and writes scales by token.  With v_cache = None, v_scale is
            None.
        q_out: [tokens, heads, head_dim] (with v_cache = None [tokens, heads, rope_dim]), dtype of q, or fp8; last axis
            contiguous.  It is written and returned.  q_out may be q itself, or the part of a packed tensor that is q.
            Otherwise it may share no memory with any argument, which only the first call of given shapes and strides
            verifies.  None: a new tensor of q's dtype.
        q_scale: float, or float32 of shape [], [1], [kv_heads] or [1, kv_heads].  Required for an fp8 q_out, which
            holds clamp(query / scale).  None for another q_out.
        check: as in paged_attention; finds slots outside the cache, slots that occur twice, and written tokens whose
            position is outside cos_sin.

    Returns:
        q_out, or a new tensor.

    Raises:
        ValueError: names the tensor, the axis and both sizes, and what to do.  Nothing has been written.  Under grad
            mode, also for a tensor that requires grad.
        TypeError: names the dtype or type wanted, and what to do.

    Inside torch.compile the call is torch.ops.paged_attn.write_qkv.

    Source: Zhang & Sennrich 2019 (RMS norm); Su et al. 2021 (rotary embedding); Wang et al. 2024 (sections).
    """
    if others:
        refuse(write_qkv, others)
    tensors = (positions, cos_sin, q_norm, k_norm, k_scale, v_scale, q_scale)
    if isinstance(mrope_sections, list):
        mrope_sections = tuple(mrope_sections)
    options = (kv_layout, interleaved, mrope_sections, eps, norm_offset)
    if torch.compiler.is_compiling():
        return ops.write_qkv(qkv, k_cache, v_cache, slot_mapping, tensors, options, q_out, check)
    return fused_write(qkv, k_cache, v_cache, slot_mapping, tensors, options, q_out, check)


@told
def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None = None, **others: NoReturn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a union of disjoint key sets, from the attention over each set.

    Args:
        outs: [n, tokens, heads, head_dim] float16 | bfloat16 | float32, n >= 1; attention over each set of keys.
        lses: [n, tokens, heads] float32; natural logarithms of the softmax denominators.  Minus infinity marks an empty
            set, whose out may hold anything.  Infinity marks a set with an infinite sink: then no key of any set has
            weight.
        sinks: [heads] float16 | bfloat16 | float32; one more state for each head, with this log-sum-exp and value 0.
            Pass them here if outs were computed without sinks.

    Returns:
        (out [tokens, heads, head_dim] in the dtype of outs, lse [tokens, heads] float32).  The merge is associative up
            to rounding.  Where all sets are empty, the results are zeros and minus infinity.

    Raises:
        ValueError: names the tensor, the axis and both sizes, and what to do.  Under grad mode, also for a tensor that
            requires grad.
        TypeError: names the dtype or type wanted, and what to do.

    Inside torch.compile the call is torch.ops.paged_attn.merge_states.

    Source: Milakov & Gimelshein 2018; Ye et al. 2025 (attention states).
    """
    if others:
        refuse(merge_states, others)
    if torch.compiler.is_compiling():
        return ops.merge_states(outs, lses, sinks)
    return merge(outs, lses, sinks)
