"""Detection of the wrong kv_layout, in which page_size and kv_heads are swapped.

If the swapped sizes do not fit the call, the error says how the cache was read.  If they happen to fit, only
max_seqlen_k can reveal the mistake.  `looks_swapped` runs at the first call of given shapes, and not at later ones.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

LAYOUTS = {
    "NHD": ("pages", "page_size", "kv_heads", "head_dim"),
    "HND": ("pages", "kv_heads", "page_size", "head_dim"),
}
OTHER = {"NHD": "HND", "HND": "NHD"}
LEAST = 16  # nearly all engines have at least 16 tokens in a page, nearly all models less than 16 KV heads on a device


def reading(kv_layout: str, shape: Sequence[int], fits: bool) -> str:
    """How a 4-D k_cache was read, in words.  fits: the text also says that the other layout would fit the call."""
    read = f"k_cache was read as {kv_layout}: [{', '.join(LAYOUTS[kv_layout])}] = {list(shape)}"
    return read + f", and would fit as kv_layout={OTHER[kv_layout]!r}" * fits


def shares_out(heads: int, kv_heads: int) -> bool:
    """Whether heads is a positive multiple of kv_heads."""
    return 0 < kv_heads <= heads and heads % kv_heads == 0


def looks_swapped(heads: int, kv_heads: int, page_size: int, max_pages: int, max_seqlen_k: int) -> bool:
    """Whether a call whose sizes fit was probably meant in the other layout.

    All of these conditions must hold, because a correct call may meet some of them:
    - pages have fewer than LEAST tokens, and kv_heads is a multiple of LEAST;
    - heads is a multiple of page_size, which would be kv_heads in the other layout;
    - a row of the page table holds fewer keys than max_seqlen_k;
    - in the other layout, a row would have exactly the number of pages that max_seqlen_k keys need.
    Pages of one token never warn: engines with such pages cut their tables to any length.
    """
    return (
        1 < page_size < LEAST
        and kv_heads % LEAST == 0
        and shares_out(heads, page_size)
        and max_pages * page_size < max_seqlen_k
        and -(-max_seqlen_k // kv_heads) == max_pages
    )


def warn(cache: tuple[str, Sequence[int]], kv_heads: int, page_size: int, max_pages: int, bound: int) -> None:
    """Warn that a call was probably meant in the other layout.

    cache: kv_layout and shape that k_cache was read with.  bound: max_seqlen_k.
    """
    kv_layout, shape = cache
    held = f"{max_pages} pages of {page_size} slots hold fewer keys than max_seqlen_k = {bound}"
    warnings.warn(
        f"{reading(kv_layout, shape, False)}, so {kv_heads} KV heads, and {held}; as "
        f"kv_layout={OTHER[kv_layout]!r} they would hold just as many: is that meant?",
        stacklevel=_frames_of_ours() + 1,  # the caller's line
    )


def _frames_of_ours() -> int:
    """Number of frames of this package on top of the stack, from the caller of this function on."""
    frame, count = sys._getframe(1), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("paged_attn."):
        frame, count = frame.f_back, count + 1  # type: ignore[assignment]
    return count
