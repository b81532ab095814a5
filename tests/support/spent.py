"""Where the time of a fuzzing process goes: compiling kernels, making inputs, comparing with the reference."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import triton

from tests.support import cases

PARTS = {"building": "build", "comparing": "compare"}  # functions of cases.py


@contextlib.contextmanager
def spent() -> Iterator[dict[str, float]]:
    """Yield seconds by part, which grow as calls are made; interpreted kernels are never compiled."""
    seconds = dict.fromkeys(("compiling", *PARTS), 0.0)
    before = triton.knobs.compilation.listener
    plain = {part: getattr(cases, function) for part, function in PARTS.items()}

    def compiled(*, times: Any, **_: Any) -> None:
        seconds["compiling"] += times.total / 1e6

    def timed(part: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return plain[part](*args, **options)
            finally:
                seconds[part] += time.perf_counter() - started

        return call

    triton.knobs.compilation.listener = compiled
    for part, function in PARTS.items():
        setattr(cases, function, timed(part))
    try:
        yield seconds
    finally:
        triton.knobs.compilation.listener = before
        for part, function in PARTS.items():
            setattr(cases, function, plain[part])
