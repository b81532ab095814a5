"""What decides a plan: shapes, dtypes, strides and the device, and no number that only the device knows.

`problem_of` makes one of a call, of `prepare` and of `explain`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import TINY, Options, Tensors, scales_tokens
from ..kernels.common.score_mod import ScoreMod, score_mod_of
from ..latent import lies_in
from ..launching.backend import Device
from . import layout
from .formats import is_fp8, page_of, value_dim_of
from .key_bounds import key_bounds_of
from .plan import UNBOUNDED

# A softcap up to which 2^-23 of it is less than what float32 products are off.
FAR_CAP = 64.0


class Problem(NamedTuple):
    """What decides a plan."""

    tokens: int
    seqs: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    max_seqlen_q: int  # upper bounds, not readings
    max_seqlen_k: int
    window_left: int  # -1: none
    ragged: bool  # cu_seqlens_q given
    positive: bool  # the softmax scale is
    softcap: float  # 0: none
    alibi: bool
    qq_bias: bool
    only: str | None
    compute: torch.dtype
    query: torch.dtype
    cache: torch.dtype
    packed: bool  # x-packed
    pairable: bool  # all keys are fp8, and can be read two dims at a time
    boxable: bool  # the copy engine can read the caches
    rows_per_page: int  # slot strides from page to page, x-packed 1, if boxes of several slots can be cut out; else 0
    adjacent: bool  # a slot's KV heads lie side by side, in both caches
    query_box: bool  # the copy engine can read the queries
    new: bool  # keys outside the cache
    new_box: bool  # the copy engine can read them, and they are of the cache's type
    lse: bool  # log-sum-exps are asked for
    batch_invariant: bool  # one tile shape and fixed cuts; kernels that choose otherwise are out of the question
    device: Device
    score_mod: ScoreMod | None = None
    value_dim: int | None = None  # dims of values and results where these are not head_dim
    token_scales: bool = False  # scores are scaled by token
    prefix: bool = False  # keys that stay visible behind a window
    spans: bool = False  # keys that some queries see to both sides, maybe beyond a window
    latent: bool = False  # values are the first dims of keys, in the same memory
    head_windows: bool = False  # heads have windows of their own, of which only the device knows the widths

    @property
    def value_width(self) -> int:
        """Dims of values and results."""
        return self.value_dim or self.head_dim

    @property
    def widest(self) -> int:
        """The larger of both widths, which decides what fits registers."""
        return max(self.head_dim, self.value_width)

    @property
    def biased(self) -> bool:
        """Whether scores meet what may be anything, and may hide keys."""
        return self.qq_bias or self.score_mod is not None

    @property
    def far_cap(self) -> bool:
        """Whether a softcap lies so far above scores that these are capped by a series."""
        return self.softcap > FAR_CAP

    @property
    def modified(self) -> bool:
        """Whether scores meet more than positive scales and a mask."""
        return not self.positive or self.softcap > 0 or self.alibi or self.biased

    @property
    def rescaled(self) -> bool:
        """Whether scores meet more than a positive scale for all rows and a mask."""
        return self.modified or self.token_scales

    def keys_seen(self, beside: int) -> int:
        """The most keys of a sequence, or of a window with so many positions beside what it shows to the left."""
        if self.window_left < 0 or self.prefix or self.spans:
            return self.max_seqlen_k
        return min(self.max_seqlen_k, self.window_left + beside)

    @property
    def gap(self) -> bool:
        """Whether there may be keys between a prefix and a window that nobody sees."""
        return self.prefix and (self.window_left >= 0 or self.head_windows)


def problem_of(given: Tensors, options: Options, device: Device, interpreted: bool) -> Problem:
    """Of a call's tensors nothing is read but shapes, dtypes, strides and addresses: those of an example will do."""
    q, k_cache, v_cache, kv_layout = given.q, given.k_cache, given.v_cache, options.kv_layout
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = page_of(k_cache, kv_layout)
    value_dim = value_dim_of(k_cache, v_cache)
    scale, new = options.softmax_scale, given.k_new is not None
    # lengths that the host knows: of the queries, and of the keys that the page table and the call's own hold; a row
    # of a ragged one may be all of it
    pages = given.page_table.shape[1 if given.page_starts is None else 0]
    room = min(pages * page_size + (tokens if new else 0), UNBOUNDED)
    return Problem(
        tokens=tokens,
        seqs=given.seq_lens.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_seqlen_q=tokens if options.max_seqlen_q is None else min(options.max_seqlen_q, tokens),
        max_seqlen_k=room if options.max_seqlen_k is None else min(options.max_seqlen_k, room),
        spans=given.spans is not None,
        prefix=given.prefix_lens is not None,
        window_left=key_bounds_of(options).reach,
        ragged=given.cu_seqlens_q is not None,
        positive=scale is None or scale >= TINY,
        softcap=float(options.softcap),
        alibi=given.alibi_slopes is not None,
        qq_bias=given.qq_bias is not None,
        only=options.only,
        # the interpreter has no other arithmetic that is right
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
        latent=lies_in(v_cache, k_cache) and given.v_new is None,
        head_windows=given.head_windows is not None,
    )


def _operand_dtype(q: Tensor, k_cache: Tensor, k_new: Tensor | None) -> torch.dtype:
    """Operands of the dots: the type of keys that are not fp8; float16, which holds every fp8 number, if all are.

    Keys of bfloat16 may be anywhere in its range; queries alone are brought into float16's, row by row.
    """
    keys = [x.dtype for x in (k_cache, k_new) if x is not None]
    wide = [dtype for dtype in keys if not is_fp8(dtype)]
    return q.dtype if q.dtype == torch.float32 else wide[0] if wide else torch.float16


def _pairable(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> bool:
    """Whether fp8 keys can be read two dims at a time; new keys would have to lie in the same parts."""
    if q.dtype == torch.float32 or not is_fp8(k_cache.dtype):
        return False
    return layout.pairable(layout.cache(k_cache, v_cache, kv_layout).key, q.shape[2])
