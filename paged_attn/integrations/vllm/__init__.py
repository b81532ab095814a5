"""vLLM over this library: an attention backend, chosen as CUSTOM.

vLLM finds `plugin` by its entry point and calls it in each of its processes; `register` is for those who do it
themselves.
"""

from .registration import plugin, plugin_diffkv, register, unregister

__all__ = ["plugin", "plugin_diffkv", "register", "unregister"]
