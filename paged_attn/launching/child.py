"""Processes of Python that this one starts."""

import os
import sys


def environment(*without: str) -> dict[str, str]:
    """That of this process, from which the other one has the same packages, and kernels that are compiled."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
    }
    for name in without:
        environment.pop(name, None)
    return environment
