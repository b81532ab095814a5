"""A user's score_mod: key in a plan, form in kernels, trial compilation, and whether loads depend on the score.

A loop cannot be pipelined if a load of its score_mod depends on the score.  Triton's pipeliner moves that load, and
with it the product that makes the score, to an earlier stage of the loop.  Up to Triton 3.8 the pipeliner then fails,
because wgmma has no predicate for the first rounds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ...launching.jit_functions import settle
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
    """The function, and Triton's names of the types of score_mod_args: all of a score_mod that a plan depends on."""

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
    """A function in a kernel's Shape.  Its repr, which is part of Triton's key of the kernel, has the text's hash."""

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
    """Compile try_kernel(scores, args, score_mod) with the function for sm_90; return None if Triton is interpreted.

    source: Triton's class for kernels of try_kernel's dialect.
    """
    if isinstance(triton.language.standard.sum, InterpretedFunction):
        return None
    signature: dict[str, Any] = {"scores": "*fp32", "args": asked.types, "score_mod": "constexpr"}
    with FIRST:
        read = source(try_kernel, signature, {(2,): compiled(asked.function)})
        return triton.compile(read, target=GPUTarget("cuda", 90, 32))


@triton.jit
def try_kernel(scores, args, score_mod: tl.constexpr):
    """Apply a score_mod to a float32 block [16, 16] of scores, the kernel's first load."""
    row, key = tl.arange(0, 16), tl.arange(0, 16)
    place = row[:, None] * 16 + key[None, :]
    x = tl.load(scores + place)
    x = score_mod(x, row[:, None], key[None, :], row[:, None], *args)
    tl.store(scores + place, x.to(tl.float32))


@functools.lru_cache(maxsize=256)
def loads_by_score(asked: ScoreMod) -> bool:
    """Whether a load or branch of the function may depend on the score; False if Triton is interpreted."""
    kernel = compile_trial(asked, try_kernel)
    if kernel is None:
        return False
    ttir = kernel.asm.get("ttir")  # absent with TRITON_STORE_BINARY_ONLY
    return ttir is None or address_depends_on_first_load(ttir)


def address_depends_on_first_load(ttir: str) -> bool:
    """Whether operands of a load, branch or loop derive from the result of the first load."""
    derived: set[str] = set()
    for line in ttir.splitlines():
        names, _, operation = line.partition(" = ") if re.match(r"\s*%", line) else ("", "", line)
        uses = derived.intersection(re.findall(r"%\w+", operation))
        if uses and ("tt.load" in operation or "scf." in operation):
            return True
        if uses or (not derived and "tt.load" in operation):
            derived.update(re.findall(r"%\w+", names))
    return False
