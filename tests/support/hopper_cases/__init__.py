"""Sizes that meet every path of the Hopper kernels: shares, blocks, pieces, both launches.

Each file has one kind of batch, built from the constants of `parts.py`.  A new case joins similar ones.  This module
exports the names that tests import.
"""

from __future__ import annotations

from typing import Any

from tests.support.cases import E4M3
from tests.support.hopper_cases.decodes import DECODE_CASES
from tests.support.hopper_cases.even import EVEN_CASES, LINES
from tests.support.hopper_cases.fp8 import ALL_FP8_CASES, FP8_CASES
from tests.support.hopper_cases.long import LONG
from tests.support.hopper_cases.mixed import MIXED_CASES, TREE_CASES
from tests.support.hopper_cases.new import NEW_CASES
from tests.support.hopper_cases.packed import BLOCKS, PACKED_CASES
from tests.support.hopper_cases.parts import (
    ALL_E4M3,
    BESIDE,
    CAPPED,
    CHUNKS,
    DECODE,
    DECODES,
    DEVICE,
    DRAFTS,
    DRAFTS_OF_16,
    E4M3_CACHE,
    E4M3_NO_LSE,
    FEATURES,
    FEW_LONG,
    MANY_DRAFTS,
    MIXED,
    NEW,
    PACKED,
    PARTED,
    PREFILLS,
    SEAMS,
    SIZES,
    SPECULATION_OF_4,
    TREES,
    WIDE,
    quick_of,
    ragged,
    sized,
)
from tests.support.hopper_cases.rising import RISING
from tests.support.hopper_cases.small import SMALL

__all__ = [
    "ALL_E4M3",
    "BESIDE",
    "BLOCKS",
    "CAPPED",
    "CASES",
    "CHUNKS",
    "DECODE",
    "DECODES",
    "DEVICE",
    "DRAFTS",
    "DRAFTS_OF_16",
    "E4M3_CACHE",
    "E4M3_NO_LSE",
    "FEATURES",
    "FEW_LONG",
    "LINES",
    "LONG",
    "MANY_DRAFTS",
    "MIXED",
    "NEW",
    "PACKED",
    "PARTED",
    "PREFILLS",
    "RISING",
    "SEAMS",
    "SIZES",
    "SMALL",
    "SPECULATION_OF_4",
    "TREES",
    "WIDE",
    "quick_of",
    "ragged",
    "sized",
]

CASES: dict[str, dict[str, Any]] = (
    MIXED_CASES | FP8_CASES | PACKED_CASES | ALL_FP8_CASES | TREE_CASES | NEW_CASES | DECODE_CASES | EVEN_CASES
)
# Without a log-sum-exp, weights of fp8 products are coarser, so fp8 cases also run without it.
CASES |= {
    f"{name}, no lse": fields | dict(lse=False)
    for name, fields in CASES.items()
    if fields.get("dtype") == E4M3 and not any(word in name for word in ("decodes", "trees, ", "group 3"))
}
