"""Whether a loop with a user's score_mod can be pipelined: not if a load of the function depends on the score.

Triton's pipeliner moves that load, and with it the product that makes the score, to an earlier stage of the loop.  Up
to Triton 3.8 the pipeliner then fails, because wgmma has no predicate for the first rounds.
"""

from __future__ import annotations

import functools
import re

import triton
import triton.language as tl

from ..common.score_mod import ScoreMod, compile_trial


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
    """Whether the function loads from addresses that depend on the score; False if Triton is interpreted."""
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
