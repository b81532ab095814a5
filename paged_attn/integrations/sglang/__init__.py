"""SGLang over this library: an attention backend by the name paged_attn.

SGLang finds `plugin` by its entry point; `register` is for those who do it themselves, before arguments are parsed.
"""

from .registration import NAME, plugin, register

__all__ = ["NAME", "plugin", "register"]
