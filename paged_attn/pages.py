"""Whole pages of caches: copied, moved to and from the host, and gathered into dense rows.

A cache is any tensor with an axis of pages.  Other axes, strides and dtypes are free, because pages are copied by their
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import table_parts
from .calls.untraced import at_first_call
from .checks.axes import ScaleLike
from .checks.pages import check_in_trace, listed, rows_of
from .step import Table

Caches = Tensor | Sequence[Tensor]

move = at_first_call("move", ".calls.pages", globals())
gather = at_first_call("gather", ".calls.pages", globals())


def copy_pages(caches: Caches, src: Tensor, dst: Tensor, *, page_axis: int = 0, check: bool | None = None) -> None:
    """Copy pages to other pages of the same caches, in place, for example for copy on write and beam search.

    One launch copies the pages of all caches, for example of keys, values and scales of all layers.

    Args:
        caches: a tensor or a list of tensors of any shapes, strides and dtypes, which have `pages` entries along
            `page_axis`.  A cache [layers, pages, ...] or [2, pages, ...] has page_axis=1.  No two tensors may share
            memory, unless they are the same tensor, given twice.
        src, dst: [pairs] int32 | int64; pair i copies page src[i] of each cache to page dst[i].  A pair is skipped if
            either id is negative.  Among the other pairs, no page may occur twice in dst, or in both src and dst.
        page_axis: the axis of pages in all caches, an int >= 0.
        check: True: first verify page ids, with a host sync.  The check finds ids outside the caches, and pages that
            occur in dst twice or in both src and dst.  None: as in paged_attention.

    Raises:
        ValueError: names the tensor and both sizes.  Nothing has been copied.
        TypeError: names the type wanted.

    Without `check`, no page id is read on the host.  After a first call, CUDA graphs can capture calls with these
    caches.  Inside torch.compile the call is torch.ops.paged_attn.copy_pages.
    """
    if torch.compiler.is_compiling():
        check_in_trace(page_axis, check)
        torch.ops.paged_attn.copy_pages(listed("caches", caches), src, dst, page_axis=page_axis, check=check)
        return
    move(caches, None, src, dst, page_axis, check)


def move_pages(
    sources: Caches, targets: Caches, src: Tensor, dst: Tensor, *, page_axis: int = 0, check: bool | None = None
) -> None:
    """Copy pages from some caches to others: to and from pinned host memory, or on one device.

    One launch copies the pages of all caches.  On CUDA the kernel itself reads or writes host memory, so no copy is
    started for each page.  Calls in plain torch copy the pages of each tensor by operators of torch.

    Args:
        sources: a tensor or a list of tensors with an axis of pages, as in copy_pages.
        targets: as many tensors, which are written.  Each has the dtype and the shape of its source; the number of
            pages and the strides may differ.  Targets share no memory with sources or with each other, except a target
            that is given twice with the same source.
        src, dst: [pairs] int32 | int64; pair i copies page src[i] of each source to page dst[i] of its target.  A pair
            is skipped if either id is negative.  Among the other pairs, no page may occur twice in dst.
        page_axis: the axis of pages in all tensors, an int >= 0.
        check: as in copy_pages.

    src and dst are on one device.  Sources are all on this device or all in pinned host memory
    (torch.empty(..., pin_memory=True)), and so are targets.  Sources or targets, or both, are on the device.  The call
    does not wait.  Synchronise with the stream before the host reads targets, or writes or frees pinned memory of the
    call.

    Raises:
        ValueError: names the tensor and both sizes, or host memory that is not pinned.  Nothing has been copied.
        TypeError: names the dtype or type wanted.

    Inside torch.compile the call is torch.ops.paged_attn.move_pages.
    """
    if torch.compiler.is_compiling():
        check_in_trace(page_axis, check)
        given = listed("sources", sources), listed("targets", targets)
        torch.ops.paged_attn.move_pages(*given, src, dst, page_axis=page_axis, check=check)
        return
    move(sources, targets, src, dst, page_axis, check)


def gather_pages(
    cache: Tensor,
    page_table: Table,
    seq_lens: Tensor,
    *,
    kv_layout: str = "NHD",
    tokens: int | None = None,
    dtype: torch.dtype | None = None,
    scale: ScaleLike = None,
    out: Tensor | None = None,
    check: bool | None = None,
) -> Tensor:
    """Gather keys or values of a paged cache into dense rows, one sequence after another.

    Args:
        cache: [pages, page_size, kv_heads, head_dim] ("NHD") or [pages, kv_heads, page_size, head_dim] ("HND");
            x-packed keys [pages, kv_heads, head_dim // x, page_size, x], or values beside these,
            [pages, kv_heads, head_dim, page_size] ("HDN").  Last axis contiguous, elements of up to 8 bytes.
        page_table: [seqs, max_pages] int32 | int64, or (indptr [seqs + 1], indices), as in paged_attention.  Rows of a
            page with a negative id are zeros.
        seq_lens: [seqs] int32 | int64; number of rows of each sequence.  Negative lengths count as 0.
        kv_layout: "NHD", "HND" or "HDN"; ignored for a 5-D cache.
        tokens: number of rows of the result.  None: that of out, or the sum of seq_lens if these are on the host.  Rows
            beyond the sum of seq_lens are zeros.
        dtype: dtype of the result: float16 | bfloat16 | float32, or the cache's.  None: that of out, or the cache's.
            With a scale and without out, an fp8, int8 or int4 cache requires one of the first three.
        scale: value = cache value * scale.  A float, or float32 | float16 of shape [], [1], [kv_heads] or
            [1, kv_heads], or by token [pages, page_size, kv_heads] ("HND", "HDN" and 5-D: [pages, kv_heads,
            page_size]); any strides.  None: 1.  With a scale, or if dtypes differ, the cache must be float16, bfloat16,
            float32, fp8, int8 or int4.  int4 requires float32 scales by token, with zero points as in write_kv; rows
            then have head_dim dims, and the cache's last axis has head_dim / 2 bytes.
        out: [tokens, kv_heads, head_dim], into which the rows are written.  Last axis contiguous.  None: a new tensor.
        check: True: first verify lengths and page ids, with a host sync.  None: as in paged_attention.

    Returns:
        [tokens, kv_heads, head_dim], which is out if given.  Without a scale and in the cache's own dtype, rows have
            the bits of the cache.  Otherwise they are products in float32, rounded to nearest even.

    Raises:
        ValueError: names the tensor, the axis and both sizes, and what to do.
        TypeError: names the dtype or type wanted.

    Inside torch.compile the call is torch.ops.paged_attn.gather_pages.
    """
    pages, starts = table_parts(page_table)
    rows = rows_of(out, cache, seq_lens, kv_layout, tokens, dtype, scale)
    if not torch.compiler.is_compiling():
        gather(cache, pages, starts, seq_lens, rows, kv_layout, scale, check)
        return rows
    check_in_trace(0, check, scale)
    if scale is not None and not isinstance(scale, Tensor):
        scale = torch.full((1,), scale, dtype=torch.float32, device=cache.device)
    options = dict(kv_layout=kv_layout, scale=scale, check=check)
    torch.ops.paged_attn.gather_pages(cache, pages, starts, seq_lens, rows, **options)
    return rows
