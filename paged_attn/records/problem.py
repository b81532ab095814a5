"""The facts that decide a plan: shapes, dtypes, strides and the device, but no number that only the device knows.

`problem_of` makes a Problem for a call, for `prepare` and for `explain`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import TINY, Options, Tensors, scales_slots, scales_tokens
from ..kernels.common.score_mod import ScoreMod, score_mod_of
from ..launching.platform import Device
from ..strides import lies_in
from . import layout
from .formats import is_fp8, is_scaled, page_of, value_dim_of
from .key_bounds import key_bounds_of

INT32_MAX = 2**31 - 1
# tanh by exponentials is off by about 2^-23 of the softcap.  Up to this softcap, float32 products have a larger error.
FAR_CAP = 64.0


class Stripes(NamedTuple):
    """Pattern by which keys are distributed over ranks, the same on every rank."""

    WORLD: int  # ranks
    STRIPE: int  # consecutive positions that lie with one rank


class Problem(NamedTuple):
    """The facts that decide a plan."""

    tokens: int
    seqs: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    max_seqlen_q: int  # upper bound that the host knows
    max_seqlen_k: int  # upper bound that the host knows; with a shard, for this rank's keys
    # Largest number of keys that a query sees before its position, by the window and chunk; -1: all.  With a shard,
    # only one rank's keys count.  Windows by head do not count.
    window_left: int
    ragged: bool  # cu_seqlens_q is given; otherwise each sequence has one query token
    positive: bool  # the softmax scale is positive
    softcap: float  # 0: none
    alibi: bool
    qq_bias: bool
    only: str | None  # "decode" or "prefill": the call serves only these sequences; None: all
    compute: torch.dtype  # dtype of the operands of products
    query: torch.dtype
    cache: torch.dtype
    packed: bool  # x-packed
    pairable: bool  # all keys are fp8, int8 or int4, and can be read two bytes at a time
    boxable: bool  # TMA can read the caches
    rows_per_page: int  # stride of pages / stride of slots (x-packed: 1); 0: TMA boxes cannot span several slots
    adjacent: bool  # a slot's KV heads lie side by side, in both caches
    query_box: bool  # TMA can read the queries
    new: bool  # k_new is given: keys outside the cache
    new_box: bool  # TMA can read keys outside the cache, and they have the cache's dtype
    lse: bool  # log-sum-exps are asked for
    batch_invariant: bool  # tile shapes and cuts must not depend on the batch
    device: Device
    score_mod: ScoreMod | None = None
    value_dim: int | None = None  # dims of values and results; None: head_dim
    token_scales: bool = False  # scores are scaled by token
    slot_scales: bool = False  # keys or values have a scale for each slot and KV head of the cache
    prefix: bool = False  # prefix_lens are given: first keys stay visible beyond a window
    spans: bool = False  # spans are given: in a span, causality hides no key, and without clip_spans no window does
    latent: bool = False  # values are the first dims of keys, in the same memory
    stripes: Stripes | None = None  # None: no shard
    head_windows: bool = False  # each head has a window, whose width only the device knows
    copied: bool = False  # the cache has copies of the call's keys, in whole pages

    @property
    def value_width(self) -> int:
        """Dims of values and results."""
        return self.value_dim or self.head_dim

    @property
    def widest(self) -> int:
        """The larger of both widths, which decides what fits into registers."""
        return max(self.head_dim, self.value_width)

    @property
    def biased(self) -> bool:
        """Whether scores are changed by a bias or a score_mod, which may hide keys."""
        return self.qq_bias or self.score_mod is not None

    @property
    def far_cap(self) -> bool:
        """Whether the softcap is so large that kernels compute tanh of small scores by a series."""
        return self.softcap > FAR_CAP

    @property
    def modified(self) -> bool:
        """Whether scores are changed by more than positive scales and a mask."""
        return not self.positive or self.softcap > 0 or self.alibi or self.biased

    @property
    def rescaled(self) -> bool:
        """Whether scores are changed by more than a mask and one positive scale that all rows share."""
        return self.modified or self.token_scales

    def keys_seen(self, beside: int) -> int:
        """Estimate the most keys that a block sees: with a window, window_left + beside; otherwise max_seqlen_k.

        beside: query tokens of the block.  A caller may add a tile, because a window may begin inside a tile.  With
        a window, keys after the block's queries do not count.  With a prefix or spans, all keys count.
        """
        if self.window_left < 0 or self.prefix or self.spans:
            return self.max_seqlen_k
        return min(self.max_seqlen_k, self.window_left + beside)

    @property
    def gap(self) -> bool:
        """Whether there may be a gap: keys between a prefix and a window, which no query sees."""
        return self.prefix and (self.window_left >= 0 or self.head_windows)

    def of_batch(self, ragged: bool, seqs: int, tokens: int, max_seqlen_q: int, max_seqlen_k: int) -> Problem:
        """Return the problem of the same call with another batch.

        `self` must have two tokens or more.  A problem of one fp8 token does not tell whether larger batches have a
        q_scale by token.
        """
        return self._replace(
            ragged=ragged,
            seqs=seqs,
            tokens=tokens,
            max_seqlen_q=min(max_seqlen_q, tokens),
            max_seqlen_k=max_seqlen_k,
            # with one fp8 query token, q_scale is one number
            token_scales=self.token_scales and (tokens > 1 or not is_fp8(self.query)),
        )


def problem_of(given: Tensors, options: Options, device: Device, interpreted: bool) -> Problem:
    """The Problem of a call.  Only shapes, dtypes, strides and addresses of tensors are read, so an example will do."""
    q, k_cache, v_cache, kv_layout = given.q, given.k_cache, given.v_cache, options.kv_layout
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = page_of(k_cache, kv_layout)
    value_dim = value_dim_of(k_cache, v_cache)
    scale, new = options.softmax_scale, given.k_new is not None
    slot_scales = scales_slots(given.k_scale) or scales_slots(given.v_scale)
    # Upper bound of seq_lens: slots of a row of the page table, and new keys.  A row of a ragged table may have all of
    # the table's pages.
    pages = given.page_table.shape[1 if given.page_starts is None else 0]
    room = min(pages * page_size + (tokens if new else 0), INT32_MAX)
    bounds = key_bounds_of(options)
    return Problem(
        tokens=tokens,
        seqs=given.seq_lens.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_seqlen_q=tokens if options.max_seqlen_q is None else min(options.max_seqlen_q, tokens),
        max_seqlen_k=room if options.max_seqlen_k is None else min(bounds.most_own(options.max_seqlen_k), room),
        spans=given.spans is not None,
        prefix=given.prefix_lens is not None,
        window_left=bounds.most_own(bounds.reach),
        ragged=given.cu_seqlens_q is not None,
        positive=scale is None or scale >= TINY,
        softcap=float(options.softcap),
        alibi=given.alibi_slopes is not None,
        qq_bias=given.qq_bias is not None,
        only=options.only,
        # in the interpreter only float32 arithmetic is right
        compute=torch.float32 if interpreted else _operand_dtype(q, k_cache, given.k_new),
        query=q.dtype,
        cache=k_cache.dtype,
        packed=k_cache.ndim == 5,
        pairable=not new and _pairable(q, k_cache, v_cache, kv_layout),
        boxable=layout.boxable(k_cache, v_cache),
        rows_per_page=layout.rows_per_page(k_cache, v_cache, kv_layout),
        adjacent=layout.adjacent(k_cache, v_cache, kv_layout),
        query_box=layout.aligned(q),
        new=new,
        new_box=new and layout.rows_boxable(given.k_new, given.v_new, k_cache.dtype),
        lse=bool(options.return_lse),
        batch_invariant=bool(options.batch_invariant),
        device=device,
        score_mod=score_mod_of(options.score_mod, given.score_mod_args),
        value_dim=None if value_dim == head_dim else value_dim,
        token_scales=scales_tokens(given.q_scale, q),
        slot_scales=slot_scales,
        latent=lies_in(v_cache, k_cache) and given.v_new is None,
        head_windows=given.head_windows is not None,
        stripes=None if options.shard is None else Stripes(*options.shard[1:]),
    )


def _operand_dtype(q: Tensor, k_cache: Tensor, k_new: Tensor | None) -> torch.dtype:
    """Dtype of the dots' operands: float32 for float32 queries, else the dtype of 16-bit keys.

    Keys of a byte or less, with no 16-bit k_new, are converted to float16, which holds every such number.  Queries are
    then brought into float16's range, row by row.  bfloat16 keys stay bfloat16, because they may exceed that range.
    """
    keys = [x.dtype for x in (k_cache, k_new) if x is not None]
    wide = [dtype for dtype in keys if not is_scaled(dtype)]
    return q.dtype if q.dtype == torch.float32 else wide[0] if wide else torch.float16


def _pairable(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> bool:
    """Whether fp8, int8 or int4 keys can be read two bytes at a time."""
    if q.dtype == torch.float32 or not is_scaled(k_cache.dtype):
        return False
    return layout.pairable(layout.cache(k_cache, v_cache, kv_layout).key, q.shape[2])
