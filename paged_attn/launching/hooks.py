"""A kernel's constants in a form that JSON has, for Triton's compile hooks.

Triton writes a kernel's constants as JSON for `knobs.runtime.jit_cache_hook` and `jit_post_compile_hook`.  Engines set
these hooks to hear of late compilations (vLLM does).  Triton fails at types and functions in a record.
"""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITFunction


def tell_plainly(kernel: Any) -> None:
    """From now on call hooks for the kernel with constants that JSON has; nothing else of Triton's call changes."""
    if "_call_hook" not in vars(kernel) and hasattr(kernel, "_call_hook"):
        kernel._call_hook = functools.partial(_call, kernel._call_hook)


def _call(call_hook: Any, hook: Any, *args: Any) -> Any:
    """args: ..., constants, options, configs, is_warmup; Triton 3.7 put a target before these."""
    if not hook:
        return None
    *before, constants, options, configs, is_warmup = args
    told = {place: plain(value) for place, value in constants.items()}
    return call_hook(hook, *before, told, options, configs, is_warmup)


def plain(value: Any) -> Any:
    """A constant with types and functions by their names, at any depth."""
    if isinstance(value, tl.constexpr):
        return plain(value.value)
    if isinstance(value, (tuple, list)):
        return [plain(x) for x in value]
    if isinstance(value, JITFunction):
        return f"{value.fn.__module__}:{value.fn.__qualname__}"
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
