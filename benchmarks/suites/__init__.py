"""Suites of cases, as data, except `trace`, `cliffs` and `writes`, which traces.py, cliffs.py and writes.py make.

The files make cases by functions of `batches.py`.  A new case joins the suite of similar cases.
"""

from __future__ import annotations

from benchmarks.suites.batches import SIZES, is_uniform, uniform
from benchmarks.suites.features import FEATURES
from benchmarks.suites.formats import FORMATS
from benchmarks.suites.fp8 import FP8_SUITE
from benchmarks.suites.invariant import INVARIANT
from benchmarks.suites.layouts import LAYOUTS, SMALL_PAGES
from benchmarks.suites.masks import MASKS, WINDOW
from benchmarks.suites.models import LAYERS, MODEL_LAYERS
from benchmarks.suites.phases import DECODE, MIXED, PREFILL, RAGGED
from benchmarks.suites.speculation import SINGLE, SPEC
from benchmarks.suites.widths import MLA, WIDE
from tests.support.cases import Case

__all__ = ["SIZES", "SUITES", "is_uniform", "uniform"]

SUITES: dict[str, tuple[Case, ...]] = {
    "decode": DECODE,
    "features": FEATURES,
    "prefill": PREFILL,
    "mixed": MIXED,
    "ragged": RAGGED,
    "spec": SPEC,
    "single": SINGLE,
    "fp8": FP8_SUITE,
    "formats": FORMATS,
    "window": WINDOW,
    "models": MODEL_LAYERS,
    "layouts": LAYOUTS + SMALL_PAGES,
    "invariant": INVARIANT,
    "wide": WIDE,
    "mla": MLA,
    "masks": MASKS,
    "layers": LAYERS,
}
