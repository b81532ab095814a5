"""Paged attention for LLM inference engines, in plain Python."""

import importlib
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .launching.locks import FIRST

__version__ = "0.2.0"
__all__ = [
    "copy_pages",
    "distributed",
    "gather_pages",
    "merge_states",
    "move_pages",
    "pad_batch",
    "paged_attention",
    "pages_needed",
    "positions",
    "prepare",
    "reference",
    "slots",
    "tree",
    "write_kv",
    "write_qkv",
]

# Name -> module, for names that are imported when they are first used.
_LATER = {"prepare": ".preparation.prepare"}
_LATER |= dict.fromkeys(("pages_needed", "positions", "slots", "tree"), ".step") | {"pad_batch": ".padding"}
_LATER |= dict.fromkeys(("copy_pages", "gather_pages", "move_pages"), ".pages")
_LATER |= dict.fromkeys(("merge_states", "paged_attention", "write_kv", "write_qkv"), ".api")  # used only in commands


def _is_command() -> bool:
    """Whether this process is `paged-attn` or `python -m paged_attn`, most of whose verbs need no torch."""
    if sys.argv[:1] == ["-m"]:  # Python has not yet found the module of `python -m`
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == [__name__]
    return PurePath(sys.argv[0] if sys.argv else "").stem == "paged-attn"


if TYPE_CHECKING:
    from .padding import pad_batch
    from .pages import copy_pages, gather_pages, move_pages
    from .preparation.prepare import prepare
    from .step import pages_needed, positions, slots, tree
# Most commands do without torch, whose import takes seconds.  In other processes, api registers the operators at once.
if TYPE_CHECKING or not _is_command():
    from . import reference
    from .api import merge_states, paged_attention, write_kv, write_qkv


def __getattr__(name: str) -> Any:
    if name in ("distributed", "reference"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with FIRST:
        value = globals()[name] = getattr(importlib.import_module(_LATER[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
