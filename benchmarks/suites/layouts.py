"""Layouts of pages, from large pages to pages of one token."""

from __future__ import annotations

from benchmarks.suites.batches import uniform

# Memory-bound decodes in both layouts.  The largest page of a batch holds a whole sequence, except in 64x8192.
LAYOUTS = tuple(
    uniform(f"{name} {layout} {page}", *lengths, layout=layout, page_size=page, **sizes)
    for name, lengths, pages, sizes in (
        ("32/32 256x1024", (256, 1, 1024), (16, 64, 256, 1024), dict(kv_heads=32)),
        ("32/8 256x4096", (256, 1, 4096), (16, 64, 4096), {}),
        ("64/8 64x8192", (64, 1, 8192), (16, 1024), dict(heads=64)),
        ("96/8 128x1024", (128, 1, 1024), (16, 1024), dict(heads=96)),
        ("8x4096", (8, 1, 4096), (16, 4096), {}),
    )
    for layout in ("NHD", "HND")
    for page in pages
)
# Small pages beside pages of 16 tokens: in random order, and in runs of pages that hold 64 tokens side by side.
SMALL_PAGES = tuple(
    uniform(f"{name} NHD {page}{where}", *lengths, page_size=page, run=run // page if run else 1)
    for name, lengths in (("32/8 64x4096", (64, 1, 4096)), ("32/8 2x2048 of 2048", (2, 2048, 2048)))
    for page in (16, 4, 2, 1)
    for where, run in (("", 0), (", in runs of 64", 64))
)
