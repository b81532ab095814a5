"""A user's function in the kernels: what a plan knows of it, how it is called there, and how it is compiled alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ...launching.backend import INTERPRET
from ...launching.keys import settle
from ...launching.locks import FIRST

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class ScoreMod(NamedTuple):
    """What a plan depends on: the function, and the types of its arguments as Triton names them."""

    function: Any
    types: tuple[str, ...]


def score_mod_of(function: Any, args: Sequence[Any] | None) -> ScoreMod | None:
    """None where there is no function."""
    return None if function is None else ScoreMod(function, tuple([type_of(x) for x in args or ()]))


def type_of(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return POINTERS[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32"


def of_this_dialect(asked: ScoreMod | None) -> Any:
    """The function as kernels call it here, interpreted or compiled, whichever it was made for."""
    return None if asked is None else interpreted(asked.function) if INTERPRET else compiled(asked.function)


class Inlined(JITFunction):
    """A function that is a field of a kernel's Shape, whose text is part of what Triton finds the kernel by on disk."""

    def __repr__(self) -> str:
        return f"Inlined({self.__name__} {self.cache_key})"


@functools.lru_cache(maxsize=256)
def compiled(function: Any) -> Any:
    made = Inlined(function.fn)
    settle(made)
    return made


@functools.lru_cache(maxsize=256)
def interpreted(function: Any) -> Any:
    return function if isinstance(function, InterpretedFunction) else InterpretedFunction(function.fn)


def compile_trial(asked: ScoreMod, try_kernel: Any, source: Any = ASTSource) -> Any:
    """try_kernel(scores, args, score_mod) with the function for sm_90; None where Triton is interpreted.

    source: how the dialect of try_kernel is read.
    """
    if isinstance(triton.language.standard.sum, InterpretedFunction):
        return None
    signature: dict[str, Any] = {"scores": "*fp32", "args": asked.types, "score_mod": "constexpr"}
    with FIRST:
        read = source(try_kernel, signature, {(2,): compiled(asked.function)})
        return triton.compile(read, target=GPUTarget("cuda", 90, 32))
