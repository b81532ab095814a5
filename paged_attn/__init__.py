"""Paged attention for LLM inference engines, in plain Python."""

from typing import TYPE_CHECKING, Any

from . import reference
from .api import merge_states, paged_attention, write_kv

if TYPE_CHECKING:
    from .preparation.prepare import prepare

__version__ = "0.1.0"
__all__ = ["merge_states", "paged_attention", "prepare", "reference", "write_kv"]


def __getattr__(name: str) -> Any:
    """`prepare` is imported when it is asked for, since it brings the kernels along."""
    if name != "prepare":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .preparation.prepare import prepare

    globals()[name] = prepare
    return prepare


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
