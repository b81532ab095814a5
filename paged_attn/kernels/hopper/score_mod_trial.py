"""Trial of a user's score_mod: the function is written for Triton, and Gluon lacks some of Triton."""

from __future__ import annotations

import functools

from ..common.score_mod import ScoreMod, compile_trial
from .shim import GluonASTSource, gl, gluon


@gluon.jit
def try_kernel(scores, args, score_mod: gl.constexpr):
    """Apply a score_mod to a float32 block [64, 64] of scores, in a layout like a consumer's."""
    L: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    place = gl.expand_dims(row, 1) * 64 + gl.expand_dims(key, 0)
    x = gl.load(scores + place)
    x = score_mod(x, row[:, None], key[None, :], row[:, None], *args)
    gl.store(scores + place, x.to(gl.float32))


@functools.lru_cache(maxsize=256)
def why_not(asked: ScoreMod) -> str | None:
    """Return the compiler's reason to refuse a score_mod, in one line; None if it compiles or is interpreted."""
    try:
        compile_trial(asked, try_kernel, GluonASTSource)
    except Exception as error:  # any exception: the function is the user's
        return _line(error)
    return None


def _line(error: BaseException) -> str:
    """Return the last line of the innermost error's message, or the name of that error's type."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
