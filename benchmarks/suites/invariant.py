"""Cases with `batch_invariant`: a sequence's results have the same bits in every batch."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.suites.batches import log_uniform, ragged, uniform

INVARIANT = tuple(
    replace(case, name=f"{case.name}, batch-invariant", batch_invariant=True)
    for case in (
        *(uniform(f"decode b{n} x 32768", n, 1, 32768) for n in (1, 8, 64)),
        uniform("decode b1 x 8192", 1, 1, 8192),
        uniform("decode b1 x 131072", 1, 1, 131072),
        ragged("decode b64, 256..32768", (1,) * 64, log_uniform(256, 32768, 64)),
        ragged("1 x 2048 + 63 decodes at 4096", (2048,) + (1,) * 63, (2048,) + (4096,) * 63),
        uniform("prefill b4 x 4096", 4, 4096, 4096),
        uniform("chunk of 128 at 16384", 1, 128, 16384),
    )
)
