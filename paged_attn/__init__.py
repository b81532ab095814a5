"""Paged attention for LLM inference engines, in plain Python."""

from . import reference
from .api import merge_states, paged_attention, write_kv
from .preparation import prepare

__version__ = "0.1.0"
__all__ = ["merge_states", "paged_attention", "prepare", "reference", "write_kv"]
