"""vLLM over this library: an attention backend, chosen as CUSTOM.

vLLM finds `plugin` by its entry point and calls it in each vLLM process.  Programs without entry points call
`register`.
"""

from .registration import plugin, plugin_diffkv, register, unregister

__all__ = ["plugin", "plugin_diffkv", "register", "unregister"]
