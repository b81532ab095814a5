"""Kernel arguments with holes: everything that the next call of the same signature shares, and where its tensors go."""

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..strides import settled

Descriptors: Any = (TensorDescriptor,)
with contextlib.suppress(ImportError):  # Gluon's are of a class of their own
    from triton.experimental.gluon.nvidia import hopper

    Descriptors = (TensorDescriptor, hopper.TensorDescriptor)


class Hole:
    """One tensor of a call while records are built: it answers like the tensor, and knows its slot among them.

    What is kept for later calls must not keep memory alive, so it only knows where the tensor is held.
    """

    __slots__ = ("dtype", "held", "slot")

    def __init__(self, slot: int, held: Sequence[Any] = (), dtype: torch.dtype | None = None) -> None:
        self.slot, self.held, self.dtype = slot, held, dtype

    def __getattr__(self, name: str) -> Any:
        # AttributeError is what hasattr waits for: hosts ask every value of every module for its attributes.
        if name in Hole.__slots__ or not 0 <= self.slot < len(self.held):
            raise AttributeError(name)
        return getattr(self.held[self.slot], name)

    def view(self, dtype: torch.dtype) -> "Hole":
        """The same memory as elements of another type."""
        return Hole(self.slot, self.held, dtype)

    def element_size(self) -> int:
        """Bytes of an element of this view, which need not be those of the tensor's."""
        return (self.held[self.slot].dtype if self.dtype is None else self.dtype).itemsize


class Placed(Hole):
    """Memory that a launch is given besides its tensors: it answers like one without any, of the meta device."""

    __slots__ = ("like",)

    def __init__(self, slot: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__(slot, (), like.dtype if dtype is None else dtype)
        self.like = like

    def __getattr__(self, name: str) -> Any:
        if name in (*Hole.__slots__, *Placed.__slots__):
            raise AttributeError(name)
        return getattr(self.like, name)

    def view(self, dtype: torch.dtype) -> "Placed":
        return Placed(self.slot, self.like, dtype)

    def element_size(self) -> int:
        return self.like.dtype.itemsize if self.dtype is None else self.dtype.itemsize


STREAM = Hole(-1)  # the stream that a launch is put on is the last of its addresses


@contextlib.contextmanager
def arguments_for(values: Sequence[Any]) -> Iterator[list[Any]]:
    """A Hole for each tensor, counted among them, and others as they are; they forget the tensors at the end."""
    held = [x for x in values if isinstance(x, torch.Tensor)]
    slots = itertools.count()
    try:
        yield [Hole(next(slots), held, x.dtype) if isinstance(x, torch.Tensor) else x for x in values]
    finally:
        held.clear()


def fill(arg: Any, tensors: Sequence[Any]) -> Any:
    """The same records around these tensors."""
    if isinstance(arg, Hole):
        tensor = tensors[arg.slot]
        # a view of wider elements asks even for strides that mean nothing
        return tensor if arg.dtype in (None, tensor.dtype) else settled(tensor).view(arg.dtype)
    if isinstance(arg, Descriptors):
        return _with_base(arg, fill(arg.base, tensors))
    if not isinstance(arg, tuple):
        return arg
    values = [fill(x, tensors) for x in arg]
    if all(map(operator.is_, values, arg)):
        return arg
    return type(arg)(*values) if hasattr(arg, "_fields") else tuple(values)


Encode = Callable[[Any, int], Sequence[Any]]  # (descriptor, its number among the arguments) -> what a launcher is given


def caller(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """A function of addresses that calls this one with these arguments around them, records as plain tuples.

    It is one expression, compiled once for all arguments of the same form: walking records would cost more than the
    launch.
    """
    constants: list[Any] = [function]
    expression = f"c0({', '.join([_expression(x, constants) for x in args])})"
    code = _compiled(expression, len(constants))
    make: Callable[..., Any] = eval(code)  # the names in it are ours: c0, c1 ... and p
    return make(*constants)


def filler(args: tuple[Any, ...]) -> Callable[[Sequence[int]], tuple[Any, ...]]:
    """A function from addresses to the arguments of a compiled kernel."""
    return caller(lambda *filled: filled, args)


def _expression(arg: Any, constants: list[Any]) -> str:
    """Python that builds the argument from addresses p; what holds no tensor becomes a constant."""
    if isinstance(arg, Hole):
        return f"p[{arg.slot}]"
    before = len(constants)
    if isinstance(arg, Descriptors):
        constants.append(AtAddress(arg))
        return f"c{before}(p[{arg.base.slot}])"
    if isinstance(arg, tuple):
        parts = [_expression(x, constants) for x in arg]
        if any("p[" in part for part in parts):
            return "(" + ", ".join([*parts, ""]) + ")"
        del constants[before:]
    constants.append(arg)
    return f"c{before}"


@functools.lru_cache(maxsize=256)
def _compiled(expression: str, constants: int) -> CodeType:
    names = ", ".join(f"c{i}" for i in range(constants))
    return compile(f"lambda {names}: lambda p: {expression}", "<arguments>", "eval")


def _with_base(descriptor: Any, base: Any) -> Any:
    """A copy that describes other memory of the same form; what a constructor would check has been checked."""
    other = copy.copy(descriptor)
    other.base = base
    return other


class _Address:
    """All that a launcher asks of a descriptor's base."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class AtAddress:
    """A descriptor of memory of the same form at any address."""

    def __init__(self, descriptor: Any) -> None:
        self.descriptor, self.slot = descriptor, descriptor.base.slot

    def __call__(self, address: int) -> Any:
        return _at(self, address)

    def encoded(self, encode: Encode, number: int) -> Callable[[int], Sequence[Any]]:
        """The same in the launcher's own form."""
        return lambda address: encode(_with_base(self.descriptor, _Address(address)), number)


@functools.lru_cache(maxsize=1 << 12)  # of all launches: the layers of a model have a cache each
def _at(form: AtAddress, address: int) -> Any:
    return _with_base(form.descriptor, _Address(address))
