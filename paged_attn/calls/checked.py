"""Decide whether the contents of a call's tensors are checked."""

from __future__ import annotations

import os
from typing import Protocol

from ..checks.options import boolean
from ..launching.platform import INTERPRET, Device


class InTorch(Protocol):
    """A device or a kept call.  in_torch: whether plain torch makes the device's calls, or the kept call."""

    @property
    def in_torch(self) -> bool: ...


def said() -> str:
    """Value of PAGED_ATTN_CHECK, in lower case."""
    return os.environ.get("PAGED_ATTN_CHECK", "").lower()


def asked() -> bool:
    """Whether every call is checked by default, as PAGED_ATTN_CHECK says.

    If the variable is unset: True in Triton's interpreter only, because it crashes on reads outside of tensors.
    """
    return said() in ("1", "true", "yes", "on") if said() else INTERPRET


ALWAYS = asked()  # read once: a look into the environment takes a tenth of a kept call's time
# Whether calls in plain torch are checked by default.  They usually run on the host, where checks wait for no device.
IN_TORCH = ALWAYS or not said()


def by_default(run: InTorch) -> bool:
    """Whether a call with check=None is checked.  run: the device of the call, or the kept call."""
    return ALWAYS or (IN_TORCH and run.in_torch)


def enabled(check: bool | None, device: Device) -> bool:
    """Whether a call is checked: `check`, or, if None, the default."""
    if check is None:
        return by_default(device)
    boolean("check", check, "True, False or None")
    return bool(check)  # check may be a numpy bool
