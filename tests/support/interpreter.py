"""Triton's interpreter without what it does again and again: the same operations on the same numbers, in less time.

The interpreter finds out at every operation what the operation does for its operands' types.  At every call of a helper
it looks up all functions of triton.language.  It makes a table of types for every type, a tuple type for every shape.
It computes sums of integers again in 64 bits, for a check that takes effect only with Triton's option `debug`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any

import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.support.replayed import replayed

# Functions that are replaced or relied on -> first digits of the hashes of their sources as read in Triton 3.6 to 3.9.
READ = {
    interpreter.InterpretedFunction.__call__: {"f2446df4"},
    interpreter._patch_lang: {"e5beeba7"},
    interpreter._patch_attr: {"e0c1b7d6", "935587c8"},  # 3.6 has other lines
    TritonSemantic.to_tensor: {"aec8898b", "2111735b"},
    interpreter.TensorHandle: {"0efd336d", "3202e4a6"},
    interpreter._get_np_dtype: {"8f20d41e"},
    tl.block_type.__init__: {"403f4b01"},
    tl.tensor.__init__: {"d9b043b5"},
    tl.tuple.__eq__: {"1663772d"},
    TritonSemantic.binary_op_sanitize_overflow_impl: {"1ad65a10", "bdd7f3e2"},  # 3.8: assertions have messages
}


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter quicker until the patch is undone."""
    for change, of in PATCHES.items():
        if all(map(is_as_read, of)):
            change(patch)


def is_as_read(function: Any) -> bool:
    """Whether the source of this Triton's function is one that was read."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:8] in READ[function]


def _patch_language_once(patch: pytest.MonkeyPatch) -> None:
    """Patch triton.language for the first helper of a launch alone, where the interpreter patches it for every call."""
    launch = interpreter.GridExecutor.__call__
    patched: set[tuple[bool, bool]] = set()  # in this launch

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = _modules(self.fn)
        if modules not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(modules)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:  # whatever a kernel raises, as Triton's own does
            raise interpreter.InterpreterError(repr(error)) from error

    patch.setattr(interpreter.GridExecutor, "__call__", run)
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)


@functools.cache
def _modules(fn: Any) -> tuple[bool, bool]:
    """Whether a function can name tl, and tl.core: modules that are patched for the function."""
    named = {id(value) for value in fn.__globals__.values()}
    return id(tl) in named, id(tl.core) in named


def _look_types_up(patch: pytest.MonkeyPatch) -> None:
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = "pointer" if dtype.scalar.is_ptr() else dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    patch.setattr(interpreter, "_get_np_dtype", look_up)


def _share_shapes(patch: pytest.MonkeyPatch) -> None:
    """Share the attributes of equal types and shapes: there are only a few, and nothing changes them."""
    make_type, make_tensor, equal = tl.block_type.__init__, tl.tensor.__init__, tl.tuple.__eq__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(x.value if isinstance(x, tl.constexpr) else x for x in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def same(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, tl.tuple) else other
        if isinstance(values, list) and all(isinstance(x, int) for x in values):
            return tl.constexpr(self.values == values)
        return equal(self, other)

    patch.setattr(tl.block_type, "__init__", init_type)
    patch.setattr(tl.tensor, "__init__", init_tensor)
    patch.setattr(tl.tuple, "__eq__", same)


def _leave_out_unread_checks(patch: pytest.MonkeyPatch) -> None:
    """Leave out checks of overflow: device_assert, which would read the result, returns at once without debug."""
    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            check(self, *args)

    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", sanitize)


def _make_handles(patch: pytest.MonkeyPatch) -> None:
    """Make handles without a check of the numbers' size, because the interpreter itself has made them of the type."""

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    patch.setattr(interpreter.TensorHandle, "__init__", init)


def _replay_operations(patch: pytest.MonkeyPatch) -> None:
    """Replay operations, whose steps on arrays depend only on types and on the source's numbers (`replayed`)."""
    known: dict[Any, Any] = {}
    to_tensor = TritonSemantic.to_tensor

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if member not in known:
            known[member] = replayed(member)
        scope.set_attr(obj, name, known[member])

    def as_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tl.tensor else to_tensor(self, x, check_type)

    patch.setattr(interpreter, "_patch_attr", patch_attr)
    patch.setattr(TritonSemantic, "to_tensor", as_tensor)


PATCHES = {
    _patch_language_once: (interpreter.InterpretedFunction.__call__, interpreter._patch_lang),
    _look_types_up: (interpreter._get_np_dtype,),
    _share_shapes: (tl.block_type.__init__, tl.tensor.__init__, tl.tuple.__eq__),
    _make_handles: (interpreter.TensorHandle,),
    _replay_operations: (interpreter._patch_attr, TritonSemantic.to_tensor),
    _leave_out_unread_checks: (TritonSemantic.binary_op_sanitize_overflow_impl,),
}
