"""Locks for data that forked children find whole, and files that other processes find whole.

A forked child lacks the threads that held locks in its parent, so nobody would release an ordinary lock there.
"""

import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path

_hook = getattr(os, "register_at_fork", lambda **_: None)  # systems without fork have no hook


def waited_for() -> AbstractContextManager[bool]:
    """A lock that a fork waits for, so that the child finds guarded data whole."""
    lock = threading.RLock()
    _hook(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def left_free() -> AbstractContextManager[bool]:
    """A lock that a forked child finds free, for data that is whole after each statement."""
    lock = threading.Lock()
    _hook(after_in_child=getattr(lock, "_at_fork_reinit", lambda: None))
    return lock


# A thread holds FIRST while it imports a module of this package or of Triton during a call, compiles a kernel or
# interprets one.  The process must not fork meanwhile, and Triton can do none of these in two threads at the same time.
# No thread launches on a GPU while it holds FIRST.  A launch into a full queue waits for kernels before it.  These may
# wait for another thread's first launch, which needs FIRST.
FIRST = waited_for()


def write_whole(file: Path, text: str) -> None:
    """Write a file, and its folders: a process that reads meanwhile finds the whole new file, the old one, or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(file)
