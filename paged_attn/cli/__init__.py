"""The `paged-attn` command: a file per verb.

A file holds a verb's options and what it prints, and imports nothing heavy before it runs: `--help` needs no torch.
The work lives in modules of the library.  A new verb is a file and a line in group.py.
"""

from .group import main

__all__ = ["main"]
