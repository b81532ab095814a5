"""Locks that survive a fork: in the child the threads that held them are gone."""

import os
import threading
from contextlib import AbstractContextManager

_hook = getattr(os, "register_at_fork", lambda **_: None)  # where there is no fork there is no hook


def waited_for() -> AbstractContextManager[bool]:
    """A lock that a fork waits for, so that the child finds what it guards whole."""
    lock = threading.RLock()
    _hook(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def left_free() -> AbstractContextManager[bool]:
    """A lock of what is whole after each line; a forked child finds it free."""
    lock = threading.Lock()
    _hook(after_in_child=getattr(lock, "_at_fork_reinit", lambda: None))
    return lock


# Whoever imports a module of ours or of Triton during a call, compiles a kernel or interprets one holds it: a fork must
# not come between, and Triton does none of these for two threads at once.
# Nobody launches with it: a launch may wait for room in the queue, and what makes room may be another thread's first.
FIRST = waited_for()
