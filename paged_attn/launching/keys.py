"""What tells kernels on disk apart: the same in every process, whichever kernel it asks for first.

Up to 3.7 Triton's key of a function has the constants of functions that it calls, but only of those whose own keys were
made before.  So a kernel's are made from the innermost outwards.
"""

from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from triton.runtime import jit

FUNCTIONS: Any = getattr(jit, "JITCallable", jit.JITFunction)


def settle(kernel: Any, callers: tuple[Any, ...] = ()) -> None:
    """Make the keys of all that a kernel calls, and then its own, unless it has one."""
    if not isinstance(kernel, FUNCTIONS) or kernel.hash is not None or any(kernel is x for x in callers):
        return
    for called in _called(kernel.fn):
        settle(called, (*callers, kernel))
    _ = kernel.cache_key


def _called(function: Any) -> Iterator[Any]:
    """Functions that the names in one's text stand for: perhaps more of them than it calls, in an order that stays."""
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
