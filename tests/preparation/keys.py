"""Which kernels calls ask Triton for, told by its own hook, and nothing compiled.

It needs a process of its own, in which kernels are compiled ones; `asked` is what a call asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

from paged_attn.launching.platform import Device
from paged_attn.preparation import processes

Key = tuple[str, str]  # a kernel's name; what Triton tells its variants by
_asked: set[Key] = set()


def pose_as(device: Device) -> None:
    """From now on calls of this process are planned for a device, on tensors of the CPU, and launch nothing."""

    def hook(*, key: Any, fn: Any, **_: Any) -> bool:
        _asked.add((fn.name, str(key)))
        return True  # for Triton: it is there

    processes.compile_only(device, lambda _: None)
    triton.knobs.runtime.jit_cache_hook = hook


def asked(call: Callable[[], Any]) -> set[Key]:
    _asked.clear()
    call()
    return set(_asked)
