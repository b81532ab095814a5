"""Where a sequence's page ids lie: in a row of a dense table, or from its start on in a ragged one's.

What the ids mean, pages of a cache, is its loaders' business.
"""

import triton
import triton.language as tl


@triton.jit
def pages_of(batch, seq):
    """Where a sequence's page ids begin."""
    if batch.page_starts is None:
        return batch.page_table + tl.cast(seq, tl.int64) * batch.page_table_stride
    else:
        first = tl.load(batch.page_starts.starts + tl.cast(seq, tl.int64) * batch.page_starts.stride)
        return batch.page_table + tl.cast(first, tl.int64) * batch.page_starts.step


@triton.jit
def page_at(pages, column, page_starts):
    """Where the id of a sequence's page of this number lies, or ids of some pages."""
    if page_starts is None:
        return pages + column
    else:
        return pages + tl.cast(column, tl.int64) * page_starts.step
