"""A user's function compiled alone, before a plan has it in a kernel: each dialect looks for what it cannot take."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from ...launching.locks import FIRST
from .score_mod import ScoreMod, compiled


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
