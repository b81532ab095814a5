"""What importing the package leaves to the first call: whatever asks for the device, changes Triton or takes time."""

import importlib
from collections.abc import Callable
from typing import Any

from .calls.untraced import untraced
from .launching.locks import FIRST


def at_first_call(name: str, module: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """Stands for a function of a module of ours, and puts it into its own place when it is called."""

    @untraced
    def first(*args: Any, **options: Any) -> Any:
        with FIRST:
            function = getattr(importlib.import_module(module, __package__), name)
        namespace[name] = function
        return function(*args, **options)

    return first
