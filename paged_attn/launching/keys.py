"""Keys of kernels on disk, equal in every process, whichever kernel a process asks for first.

Up to Triton 3.7, a function's key has the constants of the functions that it calls, but only if the keys of these were
made before.  So keys are made from the innermost function outwards.
"""

from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from triton.runtime import jit

FUNCTIONS: Any = getattr(jit, "JITCallable", jit.JITFunction)


def settle(kernel: Any, callers: tuple[Any, ...] = ()) -> None:
    """Make the keys of all functions that a kernel calls, and then the kernel's own, unless it has a key already."""
    if not isinstance(kernel, FUNCTIONS) or kernel.hash is not None or any(kernel is x for x in callers):
        return
    for called in _called(kernel.fn):
        settle(called, (*callers, kernel))
    _ = kernel.cache_key


def _called(function: Any) -> Iterator[Any]:
    """Values that the names in a function's code stand for: all functions that it calls, and more, in a fixed order."""
    names = list(dict.fromkeys(_names(function.__code__)))
    held = dict(zip(function.__code__.co_freevars, [cell.cell_contents for cell in function.__closure__ or ()]))
    known = function.__globals__ | held
    values = [known[name] for name in names if name in known]
    modules = [value for value in values if isinstance(value, ModuleType)]
    for module in modules:  # and modules in these, as the list grows
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
