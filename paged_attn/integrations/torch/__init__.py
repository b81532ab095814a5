"""torch's own `varlen_attn` over this library, from torch 2.13 on, on CUDA and on the CPU.

`register()` adds a name to torch's list of FlashAttention implementations, but changes no call.  Inside the scope
`activated()`, torch calls this library.
"""

from .registration import activated, register, unregister

__all__ = ["activated", "register", "unregister"]
