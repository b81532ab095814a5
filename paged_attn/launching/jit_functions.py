"""Triton's jit functions before they are compiled: their keys on disk, and what compile hooks are told about them.

`settle` makes keys equal in every process, whichever kernel a process asks for first.  Up to Triton 3.7, a caller's key
includes the constants of a callee only if the callee's key was made earlier.  So keys are made from the innermost
callee outwards.

Triton writes a kernel's constants as JSON for `knobs.runtime.jit_cache_hook` and `jit_post_compile_hook`.  Engines set
these hooks to hear of late compilations (vLLM does).  Triton's JSON fails if a constant is a record that holds types
or functions, so hooks are given names instead.
"""

import functools
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import jit

FUNCTIONS: Any = getattr(jit, "JITCallable", jit.JITFunction)


def settle(kernel: Any, callers: tuple[Any, ...] = ()) -> None:
    """Make the keys of all functions that a kernel calls, and then the kernel's own key, unless the kernel has one.

    callers: functions whose keys are being made, for which recursion ends.
    """
    if not isinstance(kernel, FUNCTIONS) or kernel.hash is not None or any(kernel is x for x in callers):
        return
    for called in _called(kernel.fn):
        settle(called, (*callers, kernel))
    _ = kernel.cache_key


def _called(function: Any) -> Iterator[Any]:
    """Yield the values of all names in a function's code, in a fixed order: the functions that it calls, and more."""
    names = list(dict.fromkeys(_names(function.__code__)))
    held = dict(zip(function.__code__.co_freevars, [cell.cell_contents for cell in function.__closure__ or ()]))
    known = function.__globals__ | held
    values = [known[name] for name in names if name in known]
    modules = [value for value in values if isinstance(value, ModuleType)]
    for module in modules:  # the list grows by the modules found in these
        inner = [vars(module)[name] for name in names if name in vars(module)]
        modules += [value for value in inner if isinstance(value, ModuleType) and value not in modules]
        values += inner
    for value in values:
        yield from getattr(value, "hash_attrs", ()) if getattr(value, "__triton_aggregate__", False) else (value,)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# ---- compile hooks -------------------------------------------------------------------------------


def tell_plainly(kernel: Any) -> None:
    """Let Triton call hooks for this kernel with constants that JSON can hold; other arguments stay as they are."""
    if "_call_hook" not in vars(kernel) and hasattr(kernel, "_call_hook"):
        kernel._call_hook = functools.partial(_call, kernel._call_hook)


def _call(call_hook: Any, hook: Any, *args: Any) -> Any:
    """Call Triton's call_hook; args end with constants, options, configs, is_warmup in all known versions of Triton."""
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
    if isinstance(value, jit.JITFunction):
        return f"{value.fn.__module__}:{value.fn.__qualname__}"
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
