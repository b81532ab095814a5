"""Changes to the host, chosen by its signatures and attributes, and how they are undone."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import plain, ready
from .plain import forward

# The host reads features from an implementation's name.  "flash" in it means that no mask is needed and that CUDA
# graphs pay.  A 2 or 3 after "flash" means that decodes may pass a block table.
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
        *batching_changes(api, NAMES, _attribute),
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
    """Wrap the host's check of names so that the check keeps our names.

    If a model lists its flash kernels, the host's check replaces unknown names.
    """
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
    """Wrap the host's test for flash implementations so that it is false for our names.

    In masking_utils only `create_chunked_causal_mask` calls the test.  With a flash implementation, that function
    refuses more keys than a chunk has.
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
    """If models call the cache's `update`, wrap it so that it hands over the cache instead of gathering K and V."""
    original = _attribute(paged, "update")
    parameters = list(inspect.signature(original).parameters)
    if parameters[-2:] == ["read_index", "write_index"]:  # here only attention functions call `update`
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


# ---- defaults of continuous batching, changed if the user sets nothing ---------------------------

# Each call of `generate_batch` captures its graphs anew, with two passes of the model for each graph.  Graphs pay for
# decodes, whose sizes recur.  They do not pay for batches with prompts, whose sizes hardly ever recur.
DECODES = (False, True)  # use_cuda_graph for (batches with prompts, decodes by block table)
COMPILES = ("default_compile_level", "varlen_compile_config", "decode_compile_config")
GRAPHS = (
    "paged_attn: use_cuda_graph = {} has transformers capture batches with prompts, in each call anew: leave it out, "
    "or say use_cuda_graph=(False, True), which captures decodes alone"
)


def batching_changes(
    api: ModuleType, names: tuple[str, ...], attribute: Callable[[Any, str], Any]
) -> list[tuple[Any, str, Any]]:
    """Return replacements (owner, name, value) of attributes of the host.

    names: our names of attention implementations.  attribute: getattr that raises RuntimeError if a name is missing.
    """
    mixin, manager = attribute(api, "ContinuousMixin"), attribute(api, "ContinuousBatchingManager")
    resolve = "resolve_continuous_batching_config"
    found = [
        (api, resolve, _capture_decodes(attribute(api, resolve), names)),
        (manager, "__init__", _compile_ahead(attribute(manager, "__init__"), names)),
    ]
    generate = attribute(mixin, "generate_batch")
    if "warmup" in inspect.signature(generate).parameters:
        found.append((mixin, "generate_batch", _leave_out_warmup(generate, names)))
    return found


def _capture_decodes(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resolve(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation in names and _by_block_table(config):
            if _is_open(cb_config, config):
                cb_config = copy.copy(cb_config)
                cb_config.use_cuda_graph = DECODES
            elif cb_config.cuda_graph_booleans[0]:
                warnings.warn(GRAPHS.format(cb_config.use_cuda_graph), stacklevel=2)
        return original(config, cb_config, *args, **kwargs)

    return resolve


def _leave_out_warmup(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Wrap generate_batch to leave out the warm-up, unless the user asks for it or for graphs of prompts.

    The warm-up captures decodes of all sizes, but a call meets few of these sizes.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        settings, config = given.get("continuous_batching_config"), self.config.get_text_config()
        if "warmup" not in given and self.config._attn_implementation in names and _by_block_table(config):
            decodes_alone = settings is None or _is_open(settings, config) or not settings.cuda_graph_booleans[0]
            kwargs |= {"warmup": False} if decodes_alone else {}
        return original(self, *args, **kwargs)

    return generate_batch


def _compile_ahead(original: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.model.config._attn_implementation in names:
            ready.prepare_for(self, signature.bind(self, *args, **kwargs).arguments.get("workload_hints"))

    return __init__


def _by_block_table(config: Any) -> bool:
    """Whether decodes will come with block tables, which distinguish them from batches with prompts."""
    kinds = getattr(config, "layer_types", None)
    full = {*kinds} == {"full_attention"} if kinds else getattr(config, "sliding_window", None) is None
    return full and torch.cuda.is_available()


def _is_open(settings: Any, config: Any) -> bool:
    """Whether the user sets nothing that concerns CUDA graphs: use_cuda_graph, a padding interval or torch.compile."""
    sizes = settings.q_padding_interval_size or settings.kv_padding_interval_size
    compiles = [getattr(settings, name, None) for name in COMPILES]
    asks = sizes or any(compiles) or getattr(config, "compile_config", None)
    return settings.use_cuda_graph is None and not asks
