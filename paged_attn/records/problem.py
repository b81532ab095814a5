"""What decides a plan: shapes, dtypes, strides and the device, and no number that only the device knows."""

from typing import NamedTuple

import torch

from ..kernels.common.score_mod import ScoreMod
from ..launching.backend import Device

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
