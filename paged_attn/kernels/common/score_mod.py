"""A user's score_mod: its key in a plan, its form in kernels, and its trial compilation."""

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

from ...launching.keys import settle
from ...launching.locks import FIRST
from ...launching.platform import INTERPRET

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
    """The function, and Triton's names of its arguments' types: all that a plan depends on."""

    function: Any
    types: tuple[str, ...]


def score_mod_of(function: Any, args: Sequence[Any] | None) -> ScoreMod | None:
    """Return the ScoreMod of a function and its arguments; None without a function."""
    return None if function is None else ScoreMod(function, tuple([type_of(x) for x in args or ()]))


def type_of(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return POINTERS[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32"


def of_this_dialect(asked: ScoreMod | None) -> Any:
    """Return the function as kernels call it: interpreted if Triton is interpreted here, otherwise compiled."""
    return None if asked is None else interpreted(asked.function) if INTERPRET else compiled(asked.function)


class Inlined(JITFunction):
    """A function in a kernel's Shape; its repr has the hash of its text, and so enters Triton's key of the kernel."""

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
    """Compile try_kernel(scores, args, score_mod) with the function for sm_90; None if Triton is interpreted.

    source: Triton's class for kernels of try_kernel's dialect.
    """
    if isinstance(triton.language.standard.sum, InterpretedFunction):
        return None
    signature: dict[str, Any] = {"scores": "*fp32", "args": asked.types, "score_mod": "constexpr"}
    with FIRST:
        read = source(try_kernel, signature, {(2,): compiled(asked.function)})
        return triton.compile(read, target=GPUTarget("cuda", 90, 32))
