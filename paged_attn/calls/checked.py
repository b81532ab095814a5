"""Which calls are checked ones."""

from __future__ import annotations

import os
from typing import Protocol

from ..checks.options import boolean
from ..launching.backend import INTERPRET, Device


class InTorch(Protocol):
    """A device, or a kept call, that says whether plain torch serves it."""

    @property
    def in_torch(self) -> bool: ...


def said() -> str:
    """What PAGED_ATTN_CHECK says now."""
    return os.environ.get("PAGED_ATTN_CHECK", "").lower()


def asked() -> bool:
    """Whether all calls are.  Unsaid, they are in the interpreter, which dies of reading foreign memory."""
    return said() in ("1", "true", "yes", "on") if said() else INTERPRET


ALWAYS = asked()  # read once: a look into the environment takes a tenth of a kept call's time
IN_TORCH = ALWAYS or not said()  # where a host reads its own memory, and waits for no device


def by_default(run: InTorch) -> bool:
    """Whether calls of a device, or like a kept one, are checked where they do not say so."""
    return ALWAYS or (IN_TORCH and run.in_torch)


def enabled(check: bool | None, device: Device) -> bool:
    """Whether this call is a checked one: `check` itself or, where it is None, as PAGED_ATTN_CHECK said."""
    if check is None:
        return by_default(device)
    boolean("check", check, "True, False or None")
    return bool(check)  # of numpy, too
