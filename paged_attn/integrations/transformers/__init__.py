"""transformers over this library: `generate_batch` on the host's own paged cache, and plain `generate`.

`register()` returns the name for `model.set_attn_implementation`, and alone changes the host; `unregister()` undoes it.
"""

from .registration import register, unregister

__all__ = ["register", "unregister"]
