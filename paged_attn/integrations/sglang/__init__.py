"""SGLang over this library: an attention backend with the name paged_attn.

SGLang finds `plugin` by its entry point.  Programs without entry points call `register` before arguments are parsed.
"""

from .registration import NAME, plugin, register

__all__ = ["NAME", "plugin", "register"]
