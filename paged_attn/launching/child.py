"""Processes of Python that this process starts."""

import os
import sys


def environment(*without: str) -> dict[str, str]:
    """Environment for a child: this process's packages, compiled kernels, and no variable named in `without`."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
    }
    for name in without:
        environment.pop(name, None)
    return environment
