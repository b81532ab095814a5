"""Paged attention for LLM inference engines, in plain Python."""

import importlib
from typing import TYPE_CHECKING, Any

from . import reference
from .api import merge_states, paged_attention, write_kv

if TYPE_CHECKING:
    from .preparation.prepare import prepare
    from .step import pad_batch, pages_needed, positions, slots

__version__ = "0.1.0"
__all__ = [
    "merge_states",
    "pad_batch",
    "paged_attention",
    "pages_needed",
    "positions",
    "prepare",
    "reference",
    "slots",
    "write_kv",
]

# Imported when they are asked for: `prepare` brings the kernels along.
_LATER = {"prepare": ".preparation.prepare"}
_LATER |= dict.fromkeys(("pad_batch", "pages_needed", "positions", "slots"), ".step")


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
