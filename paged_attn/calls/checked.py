"""Which calls are checked ones."""

from __future__ import annotations

import os

from ..checks.options import boolean
from ..launching.backend import INTERPRET


def asked() -> bool:
    """What PAGED_ATTN_CHECK says now.  Unset it is on in the interpreter, which dies of reading foreign memory."""
    said = os.environ.get("PAGED_ATTN_CHECK", "").lower()
    return said in ("1", "true", "yes", "on") if said else INTERPRET


ALWAYS = asked()  # read once: a look into the environment takes a tenth of a kept call's time


def enabled(check: bool | None) -> bool:
    """Whether this call is a checked one: `check` itself or, where it is None, as PAGED_ATTN_CHECK said."""
    if check is None:
        return ALWAYS
    boolean("check", check, "True, False or None")
    return bool(check)  # of numpy, too
