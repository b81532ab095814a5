"""Paged attention for LLM inference engines, in plain Python."""

from . import backend, reference
from .api import merge_states, paged_attention, write_kv
from .preparation import prepare

backend.read_ahead()  # where the package is whole, for a module that is imported twice at once would be half there

__version__ = "0.1.0"
__all__ = ["merge_states", "paged_attention", "prepare", "reference", "write_kv"]
