"""Changes to the host, chosen by its signatures and attributes, and how they are undone."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import plain, ready, steering
from .forward import forward

# The host reads features from an implementation's name.  "flash" in it means that no mask is needed and that CUDA
# graphs pay.  A 2 or 3 behind "flash" means that decodes may hand over a block table.
NAME = "paged_attn_flash3"
NAMES = (NAME, f"paged|{NAME}")  # transformers up to 5.19 uses the prefix in continuous batching

_undo: list[Callable[[], None]] = []


def register(model: Any = None) -> str:
    """Make this library an attention implementation of transformers; return its name there.

    model: a model that will use the name.  Its kernels are compiled now, on all processors; the model is not changed.
    None: kernels are compiled while the first call of `generate_batch` makes its cache.

    Raises: ImportError where transformers is absent or has no continuous batching.  RuntimeError naming what this host
        lacks, compared with transformers 5.17 to 5.24.  After an error nothing has changed.
    """
    if not _undo:
        _change_host()
    if model is not None:
        ready.prepare(model)
    return NAME


def _change_host() -> None:
    modeling, masking, cache, initialization, api = (
        _module(name)
        for name in (
            "modeling_utils",
            "masking_utils",
            "generation.continuous_batching.cache",
            "generation.continuous_batching.initialization",
            "generation.continuous_batching.continuous_api",
        )
    )
    paged = _attribute(cache, "PagedAttentionCache")
    model = _attribute(modeling, "PreTrainedModel")
    functions, mask_functions = (
        _attribute(modeling, "AttentionInterface"),
        _attribute(masking, "AttentionMaskInterface"),
    )
    changes = [
        (model, "_check_and_adjust_attn_implementation", _keep_name(model)),
        (initialization, *_offer_block_tables(initialization)),
        *_hand_over(paged),
        (masking, *_allow_chunks(masking)),
        *steering.changes(api, NAMES, _attribute),
    ]
    for name in NAMES:
        functions.register(name, forward)
        _undo.append(functools.partial(functions._global_mapping.pop, name, None))
    # Under the prefixed name the host needs no mask function: it then makes no mask.
    mask_functions.register(NAME, plain.mask)
    _undo.append(functools.partial(mask_functions._global_mapping.pop, NAME, None))
    for owner, attribute, wrapped in changes:
        _undo.append(functools.partial(setattr, owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, wrapped)


def unregister() -> None:
    """Restore transformers as it was before `register()`; models that still have the name can no longer run."""
    while _undo:
        _undo.pop()()


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"transformers.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(f"paged_attn needs transformers 5.17 or later, which has transformers.{name}") from error


def _attribute(owner: Any, name: str) -> Any:
    value = getattr(owner, name, None)
    if value is None:
        version = importlib.import_module("transformers").__version__
        raise RuntimeError(f"paged_attn does not know transformers {version}: {owner.__name__} has no {name}")
    return value


def _keep_name(model: type) -> Callable[..., str]:
    """Wrap the check of names to keep ours: models that list their flash kernels would replace an unknown name."""
    original = _attribute(model, "_check_and_adjust_attn_implementation")

    @functools.wraps(original)
    def check(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation in NAMES:
            return attn_implementation
        return original(self, attn_implementation, *args, **kwargs)

    return check


def _offer_block_tables(initialization: ModuleType) -> tuple[str, Callable[..., Any]]:
    """Wrap the lookup of the function that takes block tables: for our names it returns `forward`."""
    old, new = "lazy_import_paged_flash_attention", "lazy_import_flash_attention"
    name = old if hasattr(initialization, old) else new
    original = _attribute(initialization, name)
    answer = (None, forward) if name == old else ((None, None, forward, None, None), None)

    @functools.wraps(original)
    def lazy_import(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return answer if implementation in NAMES else original(implementation, *args, **kwargs)

    return name, lazy_import


def _allow_chunks(masking: ModuleType) -> tuple[str, Callable[..., bool]]:
    """Wrap the host's test for flash implementations, which are refused masks of chunks, to be false for our names.

    Only masks of chunks call the test.
    """
    name = "is_flash_attention_requested"
    original = _attribute(masking, name)

    @functools.wraps(original)
    def is_flash_attention_requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        if getattr(config, "_attn_implementation", None) in NAMES:
            return False
        return original(config, *args, **kwargs)

    return name, is_flash_attention_requested


def _hand_over(paged: type) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Wrap the cache's `update` to hand over the cache instead of gathering K and V, if models call `update`."""
    original = _attribute(paged, "update")
    parameters = list(inspect.signature(original).parameters)
    if parameters[-2:] == ["read_index", "write_index"]:  # called by attention functions only
        return []
    if parameters != ["self", "key_states", "value_states", "layer_idx", "kwargs"]:
        raise RuntimeError(f"paged_attn does not know PagedAttentionCache.update({', '.join(parameters)})")

    @torch.compiler.disable
    @functools.wraps(original)
    def update(self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        if self.config._attn_implementation not in NAMES:
            return original(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    return [(paged, "update", update)]
