"""Whether a user's function can be part of these kernels: it was written for Triton, and Gluon has not all of it."""

from __future__ import annotations

import functools

from ..common.score_mod import ScoreMod, compile_trial
from .shim import GluonASTSource, gl, gluon


@gluon.jit
def try_kernel(scores, args, score_mod: gl.constexpr):
    """A function on a block of scores as consumers have them."""
    L: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    place = gl.expand_dims(row, 1) * 64 + gl.expand_dims(key, 0)
    x = gl.load(scores + place)
    x = score_mod(x, row[:, None], key[None, :], row[:, None], *args)
    gl.store(scores + place, x.to(gl.float32))


@functools.lru_cache(maxsize=256)
def why_not(asked: ScoreMod) -> str | None:
    """What the compiler says of a function that it does not take, in a line; nothing where Triton is interpreted."""
    try:
        compile_trial(asked, try_kernel, GluonASTSource)
    except Exception as error:  # of any kind: it is the user's code
        return _line(error)
    return None


def _line(error: BaseException) -> str:
    """The innermost reason, which is the last thing that Triton says."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
