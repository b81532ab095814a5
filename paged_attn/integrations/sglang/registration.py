"""Registration of the backend: a name in SGLang's registry, and among the choices of its arguments."""

from __future__ import annotations

import importlib
import logging
from typing import Any

NAME = "paged_attn"
REGISTRY = "sglang.srt.layers.attention.attention_registry"
ARGUMENTS = "sglang.srt.server_args"
METHODS = "sglang.srt.models.deepseek_common.attention_backend_handler"


def register() -> str:
    """Offer the backend under NAME, for --attention-backend; return the name.  A second call changes nothing.

    Raises: ImportError where SGLang is absent or lacks the registry.
    """
    registry, arguments = _module(REGISTRY), _module(ARGUMENTS)
    add = _attribute(registry, "register_attention_backend")
    backends, choices = _attribute(registry, "ATTENTION_BACKENDS"), _attribute(arguments, "ATTENTION_BACKEND_CHOICES")
    if NAME not in backends:
        add(NAME)(_create)
    if NAME not in choices:
        _attribute(arguments, "add_attention_backend_choices")([NAME])
    fixed = getattr(arguments, "DETERMINISTIC_ATTENTION_BACKEND_CHOICES", None)
    if fixed is not None and NAME not in fixed:
        arguments.add_deterministic_attention_backend_choices([NAME])
    chunked = getattr(arguments, "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", None)
    if chunked is not None and NAME not in chunked:
        arguments.add_chunked_prefix_cache_attention_backend(NAME)
    return NAME


def plugin() -> None:
    """The entry point.  SGLang runs it even if another backend is chosen, so an ImportError becomes a warning."""
    try:
        register()
    except ImportError as error:
        logging.getLogger(__name__).warning("paged_attn is no attention backend of this SGLang: %s", error)


def _create(runner: Any) -> Any:
    if not getattr(runner, "use_mla_backend", False):
        from .backend import Backend

        return Backend(runner)
    from .latent import LatentBackend, method_of

    methods = _attribute(_module(METHODS), "AttentionBackendRegistry")
    methods.register(NAME, method_of)
    return LatentBackend(runner)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"paged_attn needs an SGLang that has {name}, 0.5.23 or later: {error}") from error


def _attribute(module: Any, name: str) -> Any:
    if not hasattr(module, name):
        raise ImportError(f"paged_attn does not know this SGLang: {module.__name__} has no {name}")
    return getattr(module, name)
