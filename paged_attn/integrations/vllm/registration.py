"""The backend's place among vLLM's: a name and the path of a class, which vLLM imports once it is chosen."""

from __future__ import annotations

import importlib
import logging
from typing import Any

REGISTRY = "vllm.v1.attention.backends.registry"
BACKENDS = {
    "CUSTOM": "paged_attn.integrations.vllm.backend.Backend",
    "CPU_ATTN": "paged_attn.integrations.vllm.backend.CPUBackend",
}


def register(member: str = "CUSTOM") -> str:
    """Take a member of vLLM's AttentionBackendEnum for this library; returns its name, to choose the backend by.

    Args:
        member: "CUSTOM", or "CPU_ATTN", which vLLM takes on a CPU whatever is asked for: its own CPU backend is then
            replaced in this process.  unregister() gives it back.

    Raises: ImportError where vLLM is absent or has no such registry; ValueError for another member; RuntimeError if
        another plug-in has taken it.
    """
    if member not in BACKENDS:
        raise ValueError(f"paged_attn takes the member {' or '.join(BACKENDS)} of vLLM's backends, not {member!r}")
    registry = _registry()
    chosen = getattr(registry.AttentionBackendEnum, member)
    if chosen.is_overridden() and chosen.get_path() != BACKENDS[member]:
        raise RuntimeError(f"vLLM's backend {member} has been taken by {chosen.get_path()}")
    registry.register_backend(chosen, BACKENDS[member])
    return member


def unregister() -> None:
    """Give back what register() took."""
    enum = _registry().AttentionBackendEnum
    for member, path in BACKENDS.items():
        chosen = getattr(enum, member)
        if chosen.is_overridden() and chosen.get_path() == path:
            chosen.clear_override()


def plugin() -> None:
    """The entry point.  vLLM runs it whether the backend is wanted or not, so what prevents it is only told."""
    try:
        register()
    except (ImportError, RuntimeError) as error:
        logging.getLogger(__name__).warning("paged_attn is no attention backend of this vLLM: %s", error)


def _registry() -> Any:
    try:
        registry = importlib.import_module(REGISTRY)
    except ModuleNotFoundError as error:
        raise ImportError(f"paged_attn needs a vLLM that has {REGISTRY}, 0.26 or later") from error
    for name in ("AttentionBackendEnum", "register_backend"):
        if not hasattr(registry, name):
            raise ImportError(f"paged_attn does not know this vLLM: {REGISTRY} has no {name}")
    return registry
