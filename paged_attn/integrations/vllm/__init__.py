"""vLLM over this library: an attention backend, chosen as CUSTOM.

vLLM finds `plugin` by its entry point and calls it in each of its processes; `register` is for those who do it
themselves.
"""

from .registration import plugin, register, unregister

__all__ = ["plugin", "register", "unregister"]
