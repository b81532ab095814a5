"""FlashAttention's functions over paged_attention, for hosts that call them.  No host is imported or patched.

install() makes a module `flash_attn` of these functions, for hosts that import a module of this name.
"""

import inspect
from collections.abc import Callable
from typing import Any

from .kvcache import flash_attn_with_kvcache
from .orders import ORDERS
from .stand_in import install, uninstall
from .unified import unified_attention
from .varlen import flash_attn_func, flash_attn_varlen_func

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "install",
    "unified_attention",
    "uninstall",
]


def _sign(function: Callable[..., Any], first: tuple[str, ...]) -> None:
    """Give a function the signature that hosts inspect.

    Arguments: `first`, then those of the first version in ORDERS, then further names of other versions.
    """
    order, *others = ORDERS[function.__name__].values()
    places = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in first]
    places += [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for n in order]
    more = dict.fromkeys(name for other in others for name in other if name not in order)
    places += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in more]
    function.__signature__ = inspect.Signature(places)  # type: ignore[attr-defined]


for _function in (flash_attn_func, flash_attn_varlen_func, unified_attention):
    _sign(_function, ("q", "k", "v"))
_sign(flash_attn_with_kvcache, ("q", "k_cache", "v_cache"))
