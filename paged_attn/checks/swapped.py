"""A cache that was read in the wrong kv_layout: page_size and kv_heads stand in each other's place.

Where that does not fit the call, its error says how the cache was read.  Where it happens to fit, only a bound can
tell: `looks_swapped` is asked at the first call of some shapes, and costs later ones nothing.
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
LEAST = 16  # tokens in a page, of nearly all engines, and fewer KV heads than that on a device, of nearly all models


def reading(kv_layout: str, shape: Sequence[int], fits: bool) -> str:
    """How a 4-D cache was read, and that the other layout would fit the call, if it would."""
    read = f"k_cache was read as {kv_layout}: [{', '.join(LAYOUTS[kv_layout])}] = {list(shape)}"
    return read + f", and would fit as kv_layout={OTHER[kv_layout]!r}" * fits


def shares_out(heads: int, kv_heads: int) -> bool:
    """Whether so many query heads can be shared out among so many KV heads."""
    return 0 < kv_heads <= heads and heads % kv_heads == 0


def looks_swapped(heads: int, kv_heads: int, page_size: int, max_pages: int, max_seqlen_k: int) -> bool:
    """Whether a call whose sizes fit was probably meant in the other layout.

    All of this must hold, for each alone is true of some call that is meant as it was read: pages are smaller than
    engines make them and KV heads as many as such a page has tokens; the page table's pages hold fewer keys than the
    bound allows; and in the other layout they hold as many as the bound, to the page.  Pages of one token are left
    alone: engines that have these cut their tables to any length.
    """
    return (
        1 < page_size < LEAST
        and kv_heads % LEAST == 0
        and shares_out(heads, page_size)
        and max_pages * page_size < max_seqlen_k
        and -(-max_seqlen_k // kv_heads) == max_pages
    )


def warn(cache: tuple[str, Sequence[int]], kv_heads: int, page_size: int, max_pages: int, bound: int) -> None:
    """Say that a call was probably meant in another layout than the one that its `cache`, of a shape, was read in."""
    kv_layout, shape = cache
    held = f"{max_pages} pages of {page_size} slots hold fewer keys than max_seqlen_k = {bound}"
    warnings.warn(
        f"{reading(kv_layout, shape, False)}, so {kv_heads} KV heads, and {held}; as "
        f"kv_layout={OTHER[kv_layout]!r} they would hold just as many: is that meant?",
        stacklevel=_frames_of_ours() + 1,  # the caller's line
    )


def _frames_of_ours() -> int:
    """How many functions of this package the one that asks was called through, itself included."""
    frame, count = sys._getframe(1), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("paged_attn."):
        frame, count = frame.f_back, count + 1  # type: ignore[assignment]
    return count
