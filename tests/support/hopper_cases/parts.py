"""What cases of the Hopper kernels are made of: lengths, sizes and features."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch

from tests.simulator import SIMULATES
from tests.support.cases import E4M3, Case


def ragged(*lengths: tuple[int, int]) -> dict[str, Any]:
    """Return the fields of sequences with these (query_len, seq_len)."""
    return dict(query_lens=tuple(q for q, _ in lengths), seq_lens=tuple(k for _, k in lengths))


DEVICE = "cuda" if torch.cuda.is_available() and not SIMULATES else "cpu"
SIZES: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)


def quick_of(cases: Iterable[str], quick: Container[str]) -> list[Any]:
    """Names of cases as parameters of a test; those in `quick` have the marker `quick`."""
    return [pytest.param(name, marks=[pytest.mark.quick] * (name in quick)) for name in cases]


def sized(name: str, **fields: Any) -> Case:
    """Return a case with SIZES, changed by `fields`.

    The simulator has a quarter of the multiprocessors, so it gets a quarter of the heads, if kv_heads is a multiple of
    4: each multiprocessor then has the same work.
    """
    all_fields = SIZES | fields
    if SIMULATES and all_fields["kv_heads"] % 4 == 0:
        all_fields |= {x: all_fields[x] // 4 for x in ("heads", "kv_heads")}
    return Case(name, **all_fields)


# Decodes, speculation, chunks behind contexts, whole prefills, empty sequences, and queries that see no key.
MIXED = ragged(
    (1, 5000), (300, 300), (0, 100), (1, 1), (700, 4000), (17, 33), (1, 0), (2, 130), (128, 128), (129, 1000), (40, 9)
)  # fmt: skip
# So few long queries beside decodes that two lists serve the batch.
FEW_LONG = ragged((30, 5000), (17, 600), *[(1, 1 + 130 * i) for i in range(31)]) | dict(bounds=True)
# A chunk beside decodes and drafts; a program gets several of these, and other programs complete some of them.
BESIDE = ragged((300, 3000), *[(1 + i % 2, 64 + 97 * i) for i in range(40)], (90, 90)) | dict(bounds=True)
# MIXED with one more decode and 48 heads on one KV head, which do not fill a block: decodes have their own launch.
PARTED = ragged(*zip(MIXED["query_lens"], MIXED["seq_lens"]), (1, 77)) | dict(heads=48, kv_heads=1, bounds=True)
TREES = ragged((32, 32), (20, 5000), (0, 77), (7, 3000), (1, 1), (32, 4096)) | dict(bounds=True, qq_bias=32, tree=True)
DRAFTS = ragged(*[(32, 2000)] * 12) | dict(bounds=True)
# 64 queries of each sequence, in two blocks, over many keys and over few.
CHUNKS = ragged((64, 5000), (64, 70), (64, 64), (64, 900), (64, 30), (64, 0)) | dict(bounds=True)
# Up to 64 rows, in two blocks of columns or, with more sequences (MANY_DRAFTS), in one block of rows.
DRAFTS_OF_16 = ragged((16, 3000), (9, 700), (0, 50), (16, 20), (1, 2000), (16, 0)) | dict(bounds=True)
MANY_DRAFTS = ragged(*[(1 + i % 16, 300 + 90 * i) for i in range(20)]) | dict(bounds=True)
SPECULATION_OF_4 = ragged((4, 512), (3, 5000), (0, 77), (4, 4), (1, 1), (2, 4096), (4, 1000)) | dict(bounds=True)
# With groups of 3, 4 and 24, a consumer has no rows of a sequence's last block, and the next sequence's block follows.
PREFILLS = ragged(*[(393, 1500)] * 3, (393, 393), (393, 700)) | dict(bounds=True)
DECODES = ragged((1, 512), (1, 0), (1, 1), (1, 5000), (1, 130), (1, 4096), (1, 33))
DECODE = DECODES | dict(decode_form=True)
NEW: dict[str, Any] = dict(new=True)
# Caches that end at, just before and just behind borders of tiles, and before the first key.
SEAMS = ragged(*[(q, c + q) for q in (1, 40) for c in (0, 1, 63, 64, 65, 127, 128, 129, 256, 1000)], (5, 3), (200, 90))
E4M3_CACHE: dict[str, Any] = dict(cache_dtype=E4M3, scales="per_head")
E4M3_NO_LSE: dict[str, Any] = E4M3_CACHE | dict(lse=False)
ALL_E4M3: dict[str, Any] = dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=torch.bfloat16, scales="per_head")
PACKED: dict[str, Any] = dict(layout="x")
# A softcap by tanh.approx, which is used only without log-sum-exps; in blocks, a polynomial caps small scores.
CAPPED: dict[str, Any] = dict(softcap=20.0, lse=False)
FEATURES = dict(window_size=(200, -1), softcap=20.0, alibi=True, sinks=True)
WIDE: dict[str, Any] = dict(window_size=(1200, -1))  # so many tiles that blocks may be cut
