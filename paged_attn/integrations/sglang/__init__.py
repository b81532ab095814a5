"""SGLang over this library: an attention backend with the name paged_attn.

SGLang finds `plugin` by its entry point.  Where entry points are not loaded, call `register` before parsing arguments.
"""

from .registration import NAME, plugin, register

__all__ = ["NAME", "plugin", "register"]
