"""torch's own `varlen_attn` over this library, from torch 2.13 on, on CUDA and on the CPU.

`register()` adds a name to torch's list of FlashAttention implementations and changes no call.  `activated()` is a
scope in which torch calls this library.
"""

from .registration import activated, register, unregister

__all__ = ["activated", "register", "unregister"]
