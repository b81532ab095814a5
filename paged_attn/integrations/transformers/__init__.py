"""`transformers` over this library: `generate_batch` over the host's own paged cache, and plain `generate`.

`register()` changes the host and returns the name for `model.set_attn_implementation`.  `unregister()` undoes all
changes.
"""

from .registration import register, unregister

__all__ = ["register", "unregister"]
