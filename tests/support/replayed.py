"""Operations of Triton's interpreter, each worked out once for the types that it meets.

An operation of triton.language inspects the types of its operands, which takes long, and then asks a builder for a few
steps on arrays.  Which steps depends only on the types and on the numbers of the source.  So the steps are recorded
when an operation first meets these types and numbers, and replayed from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

# Prefixes of steps whose results nothing changes: results that depend on numbers of the source alone are made once.
CONSTANT = ("get_", "create_splat", "create_make_range", "create_int_cast", "create_fp_", "create_si_", "create_ui_")


class Unknown(Exception):
    """The operands or the steps of an operation cannot be recorded."""


class Recorder:
    """A builder that does the steps that it is asked for, and records them."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.steps: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self.looked = False  # the operation looked at a number, so later steps may depend on the number

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.builder, name)
        if not name.startswith(("create_", "get_")):
            return method

        def step(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.steps.append((name, args, kwargs, result))
            return result

        return step


def replayed(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that inspects operands of the same types only once."""
    semantic, tensor = interpreter.interpreter_semantic, tl.tensor
    plans: dict[tuple[Any, ...], Callable[..., Any] | None] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs.pop("_semantic", None)
        if type(semantic.builder) is Recorder:  # an operation within another
            return operation(*args, **kwargs, _semantic=semantic)
        key: list[Any] = []
        try:
            for x in args:
                if type(x) is tensor:
                    key.append(x.type.name)
                else:
                    _describe(x, key)
            for name, x in kwargs.items():
                key.append(name)
                _describe(x, key)
        except Unknown:
            return operation(*args, **kwargs, _semantic=semantic)
        kind = tuple(key)
        if kind not in plans:
            plans[kind], result = _recorded(operation, args, kwargs)
            return result
        plan = plans[kind]
        return operation(*args, **kwargs, _semantic=semantic) if plan is None else plan(*args, **kwargs)

    return call


def _describe(x: Any, key: list[Any]) -> None:
    """Add to `key` what an operation may know of an operand before it runs: a tensor's type, or a number's value."""
    kind = type(x)
    if kind is tl.tensor:
        key.append(x.type.name)
        return
    key.append(kind)
    if kind is tl.constexpr:
        _describe(x.value, key)
    elif kind is int or kind is bool or kind is str or x is None:
        key.append(x)
    elif kind is float:
        key.append(repr(x))  # 0.0 and -0.0 differ
    elif isinstance(x, tl.dtype):
        key.append(x.name)
    elif kind is slice:
        for part in (x.start, x.stop, x.step):
            _describe(part, key)
    elif kind is list or kind is tuple:
        key.append(len(x))
        for part in x:
            if type(part) is tl.tensor:
                raise Unknown
            _describe(part, key)
    else:
        raise Unknown


def _recorded(
    operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any] | None, Any]:
    """Run an operation; return (function that replays it, None if it must run anew each time; its result)."""
    semantic = interpreter.interpreter_semantic
    recorder = Recorder(semantic.builder)
    args, kwargs = tuple(map(_apart, args)), {name: _apart(x) for name, x in kwargs.items()}
    looks = [(of, name) for of in (tl.tensor, interpreter.TensorHandle) for name in ("__bool__", "__index__")]
    plain = {(of, name): getattr(of, name) for of, name in looks if hasattr(of, name)}

    def looked(of: type, name: str) -> Callable[[Any], Any]:
        def look(self: Any) -> Any:
            recorder.looked |= getattr(self, "handle", self).data.size == 1  # larger ones are true, whatever they hold
            return plain[of, name](self)

        return look

    semantic.builder = recorder
    for of, name in plain:
        setattr(of, name, looked(of, name))
    try:
        result = operation(*args, **kwargs, _semantic=semantic)
    finally:
        semantic.builder = recorder.builder
        for (of, name), method in plain.items():
            setattr(of, name, method)
    try:
        return None if recorder.looked else _plan(recorder, args, kwargs, result), result
    except Unknown:
        return None, result


def _apart(x: Any) -> Any:
    """Return a tensor of the same numbers with its own handle: operands that share one now may differ next time."""
    if type(x) is not tl.tensor:
        return x
    return tl.tensor(interpreter.TensorHandle(x.handle.data, x.handle.dtype, x.handle.attr), x.type)


def _plan(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Callable[..., Any]:
    """Return a function that does the recorded steps on operands of the same types."""
    names: dict[int, str] = {}  # where a handle comes from
    constants: dict[int, Any] = {}
    # the builder's functions are looked up each time, because tests replace some of them
    scope: dict[str, Any] = {"new": tl.tensor.__new__, "Tensor": tl.tensor, "builder": recorder.builder}
    for i, x in enumerate(args):
        if type(x) is tl.tensor:
            names.setdefault(id(x.handle), f"args[{i}].handle")
    for name, x in kwargs.items():
        if type(x) is tl.tensor:
            names.setdefault(id(x.handle), f"kwargs[{name!r}].handle")

    def bound(x: Any) -> str:
        name = f"c{len(scope)}"
        scope[name] = x
        return name

    def told(x: Any) -> str:
        if id(x) in names:
            return names[id(x)]
        if isinstance(x, (list, tuple)):
            parts = "".join(f"{told(part)}, " for part in x)
            return f"[{parts}]" if isinstance(x, list) else f"({parts})"
        if id(x) not in constants and type(x).__module__ == interpreter.__name__:
            raise Unknown  # a handle that comes from nowhere, a pointer to a block, a descriptor
        return bound(x)

    lines: list[str] = []
    for i, (name, given, named, made) in enumerate(recorder.steps):
        handles = list(_handles(made))
        operands = list(_handles([*given, *named.values()]))
        if all(id(x) in constants for x in operands) and name.startswith(CONSTANT):
            for x in handles:
                constants[id(x)] = x
                x.data.flags.writeable = False
            continue
        passed = [told(x) for x in given] + [f"{key}={told(x)}" for key, x in named.items()]
        lines.append(f"t{i} = builder.{name}({', '.join(passed)})")
        if isinstance(made, tuple):
            names |= {id(x): f"t{i}[{j}]" for j, x in enumerate(made)}
        elif isinstance(made, interpreter.TensorHandle):
            names[id(made)] = f"t{i}"
        elif made is not None:
            raise Unknown
    results = result if isinstance(result, tuple) else (result,)
    for i, x in enumerate(results):
        if type(x) is not tl.tensor:
            raise Unknown
        handle = "None" if x.handle is None else told(x.handle)
        lines += [f"r{i} = new(Tensor)", f"r{i}.handle = {handle}"]
        lines += [f"r{i}.{name} = {bound(value)}" for name, value in vars(x).items() if name != "handle"]
    every = "".join(f"r{i}, " for i in range(len(results)))
    lines.append(f"return ({every})" if isinstance(result, tuple) else "return r0")
    exec("def plan(*args, **kwargs):\n" + "".join(f"    {line}\n" for line in lines), scope)
    return scope["plan"]


def _handles(values: Any) -> Iterable[Any]:
    """Yield all handles, which stand for a launch's numbers, in nested values."""
    if isinstance(values, interpreter.TensorHandle):
        yield values
    elif isinstance(values, (list, tuple)):
        for x in values:
            yield from _handles(x)
