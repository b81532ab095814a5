"""The `paged-attn` command: a file per verb.

A file has a verb's options and its output.  Heavy modules are imported when the verb runs, so `--help` needs no torch.
Modules of the library do the work.  A new verb is a file and a line in group.py.
"""

from .group import main

__all__ = ["main"]
