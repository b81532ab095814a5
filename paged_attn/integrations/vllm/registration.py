"""Registration of the backends: names in vLLM's registry, and the path of the class that vLLM imports for each."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

REGISTRY = "vllm.v1.attention.backends.registry"
BACKENDS = {
    "CUSTOM": "paged_attn.integrations.vllm.Backend",
    "TRITON_ATTN_DIFFKV": "paged_attn.integrations.vllm.backend.DiffKVBackend",
    "CPU_ATTN": "paged_attn.integrations.vllm.backend.CPUBackend",
    "CPU_MLA": "paged_attn.integrations.vllm.latent.CPUBackend",
}
# Latent attention: member of AttentionBackendEnum -> member of MLAPrefillBackendEnum that is registered with it.
PREFILL_REGISTRY = "vllm.v1.attention.backends.mla.prefill.registry"
PREFILL = "paged_attn.integrations.vllm.prefill.Prefill"
PREFILLS = {"CUSTOM": "CUSTOM", "CPU_MLA": "CPU"}


def register(member: str = "CUSTOM") -> str:
    """Take a member of vLLM's AttentionBackendEnum for this library; return its name, which chooses the backend.

    Args:
        member: "CUSTOM", or one of three members whose own backend is replaced in this process until unregister().
            Models whose values have another width than keys ask for "TRITON_ATTN_DIFFKV".  On a CPU, vLLM always takes
            "CPU_ATTN", or "CPU_MLA" for latent attention.

    "CUSTOM" is also registered as a prefill backend for latent attention, which users choose separately.  "CPU_MLA"
    also replaces vLLM's prefill backend "CPU".

    Raises: ImportError where vLLM is absent or lacks the registry.  ValueError for another member, or one that this
        vLLM lacks.  RuntimeError if another plug-in has taken the member.
    """
    if member not in BACKENDS:
        raise ValueError(f"paged_attn takes the member {' or '.join(BACKENDS)} of vLLM's backends, not {member!r}")
    registry = _registry()
    chosen = getattr(registry.AttentionBackendEnum, member, None)
    if chosen is None:
        raise ValueError(f"this vLLM has no attention backend {member} to take the place of")
    if chosen.is_overridden() and chosen.get_path() != BACKENDS[member]:
        raise RuntimeError(f"vLLM's backend {member} has been taken by {chosen.get_path()}")
    registry.register_backend(chosen, BACKENDS[member])
    prefill = _prefill(member)
    if prefill is not None and not prefill.is_overridden():
        importlib.import_module(PREFILL_REGISTRY).register_mla_prefill_backend(prefill, PREFILL)
    return member


def unregister() -> None:
    """Give back all members that register() took."""
    enum = _registry().AttentionBackendEnum
    for member, path in BACKENDS.items():
        chosen = getattr(enum, member, None)
        if chosen is None:
            continue
        if chosen.is_overridden() and chosen.get_path() == path:
            chosen.clear_override()
        prefill = _prefill(member)
        if prefill is not None and prefill.is_overridden() and prefill.get_path() == PREFILL:
            prefill.clear_override()


def plugin() -> None:
    """The entry point.  vLLM runs it even if another backend is chosen, so an error becomes a warning."""
    try:
        register()
    except (ImportError, RuntimeError) as error:
        logging.getLogger(__name__).warning("paged_attn is no attention backend of this vLLM: %s", error)


def plugin_diffkv() -> None:
    """A second entry point, which replaces vLLM's TRITON_ATTN_DIFFKV, but only if VLLM_PLUGINS names it."""
    if "paged_attn_diffkv" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    try:
        register("TRITON_ATTN_DIFFKV")
    except (ImportError, RuntimeError, ValueError) as error:
        logging.getLogger(__name__).warning("paged_attn has no values of another width in this vLLM: %s", error)


def _prefill(member: str) -> Any:
    """Member of vLLM's MLAPrefillBackendEnum that goes with a backend, or None."""
    enum = importlib.import_module(PREFILL_REGISTRY).MLAPrefillBackendEnum
    return getattr(enum, PREFILLS.get(member, ""), None) if member in PREFILLS else None


def _registry() -> Any:
    try:
        registry = importlib.import_module(REGISTRY)
    except ModuleNotFoundError as error:
        raise ImportError(f"paged_attn needs a vLLM that has {REGISTRY}, 0.26 or later") from error
    for name in ("AttentionBackendEnum", "register_backend"):
        if not hasattr(registry, name):
            raise ImportError(f"paged_attn does not know this vLLM: {REGISTRY} has no {name}")
    return registry
