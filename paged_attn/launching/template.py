"""Kernel arguments with holes: all that calls of one signature share, and a Hole where each tensor goes."""

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
with contextlib.suppress(ImportError):  # Gluon's descriptors have a class of their own
    from triton.experimental.gluon.nvidia import hopper

    Descriptors = (TensorDescriptor, hopper.TensorDescriptor)


class Hole:
    """Stands for one tensor of a call: has a slot number and, inside `arguments_for`, the tensor's attributes.

    Kernel arguments (records, which are named tuples) are kept for later calls and must not keep tensors alive.  So a
    Hole refers to the list of tensors, which `arguments_for` empties at its end.
    """

    __slots__ = ("dtype", "held", "slot")

    def __init__(self, slot: int, held: Sequence[Any] = (), dtype: torch.dtype | None = None) -> None:
        self.slot, self.held, self.dtype = slot, held, dtype

    def __getattr__(self, name: str) -> Any:
        # An AttributeError makes hasattr return False.  Some hosts call hasattr on every value of every module, and so
        # on STREAM.
        if name in Hole.__slots__ or not 0 <= self.slot < len(self.held):
            raise AttributeError(name)
        return getattr(self.held[self.slot], name)

    def view(self, dtype: torch.dtype) -> "Hole":
        """A Hole for this memory as elements of another type."""
        return Hole(self.slot, self.held, dtype)

    def element_size(self) -> int:
        """Bytes of an element of this view; the tensor's elements may have another size."""
        return (self.held[self.slot].dtype if self.dtype is None else self.dtype).itemsize


class Placed(Hole):
    """Stands for memory that a launch is given besides a call's tensors; has the attributes of a meta tensor."""

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


STREAM = Hole(-1)  # the stream of a launch; slot -1, because the stream is the last address


@contextlib.contextmanager
def arguments_for(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Replace each tensor by a Hole, whose slot is the tensor's index among tensors; release tensors at the end."""
    held = [x for x in values if isinstance(x, torch.Tensor)]
    slots = itertools.count()
    try:
        yield [Hole(next(slots), held, x.dtype) if isinstance(x, torch.Tensor) else x for x in values]
    finally:
        held.clear()


def fill(arg: Any, tensors: Sequence[Any]) -> Any:
    """Return an argument, for example a record, with tensors in place of its Holes."""
    if isinstance(arg, Hole):
        tensor = tensors[arg.slot]
        # view() to wider elements also checks strides of axes of size 1, so `settled` first replaces these strides
        return tensor if arg.dtype in (None, tensor.dtype) else settled(tensor).view(arg.dtype)
    if isinstance(arg, Descriptors):
        return _with_base(arg, fill(arg.base, tensors))
    if not isinstance(arg, tuple):
        return arg
    values = [fill(x, tensors) for x in arg]
    if all(map(operator.is_, values, arg)):
        return arg
    return type(arg)(*values) if hasattr(arg, "_fields") else tuple(values)


Encode = Callable[[Any, int], Sequence[Any]]  # (descriptor, its number among descriptors) -> what a launcher is given


def caller(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """A function of addresses that calls `function` with these arguments, addresses in place of Holes.

    Records become plain tuples.  The function is one expression, compiled once for all arguments of one form, because
    walking records would cost more than the launch.
    """
    constants: list[Any] = [function]
    expression = f"c0({', '.join([_expression(x, constants) for x in args])})"
    code = _compiled(expression, len(constants))
    make: Callable[..., Any] = eval(code)  # its only names are made here: c0, c1 ... and p
    return make(*constants)


def filler(args: tuple[Any, ...]) -> Callable[[Sequence[int]], tuple[Any, ...]]:
    """A function from addresses to the arguments of a compiled kernel."""
    return caller(lambda *filled: filled, args)


def _expression(arg: Any, constants: list[Any]) -> str:
    """Python code that builds an argument from addresses p; an argument without Holes becomes a constant."""
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
    """A copy of a descriptor for other memory of equal form; a constructor would repeat its checks."""
    other = copy.copy(descriptor)
    other.base = base
    return other


class _Address:
    """Stands for a descriptor's tensor: has the one method that launchers call."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class AtAddress:
    """Makes copies of a descriptor for memory at other addresses."""

    def __init__(self, descriptor: Any) -> None:
        self.descriptor, self.slot = descriptor, descriptor.base.slot

    def __call__(self, address: int) -> Any:
        return _at(self, address)

    def encoded(self, encode: Encode, number: int) -> Callable[[int], Sequence[Any]]:
        """A function from addresses to descriptors in the launcher's own form."""
        return lambda address: encode(_with_base(self.descriptor, _Address(address)), number)


@functools.lru_cache(maxsize=1 << 12)  # for all launches together, each with one address for each layer's KV cache
def _at(form: AtAddress, address: int) -> Any:
    return _with_base(form.descriptor, _Address(address))
