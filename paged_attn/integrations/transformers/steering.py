"""Defaults of the host's continuous batching, which change if our attention is chosen and the user sets nothing.

Each call of `generate_batch` captures its graphs anew, with two passes of the model for each graph.  Graphs pay for
decodes, whose sizes recur.  They do not pay for batches with prompts, whose sizes hardly ever recur.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import ready

DECODES = (False, True)  # use_cuda_graph for (batches with prompts, decodes by block table)
COMPILES = ("default_compile_level", "varlen_compile_config", "decode_compile_config")
GRAPHS = (
    "paged_attn: use_cuda_graph = {} has transformers capture batches with prompts, in each call anew: leave it out, "
    "or say use_cuda_graph=(False, True), which captures decodes alone"
)


def changes(
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
    """Whether decodes will come with block tables, by which they are told from batches with prompts."""
    kinds = getattr(config, "layer_types", None)
    full = {*kinds} == {"full_attention"} if kinds else getattr(config, "sliding_window", None) is None
    return full and torch.cuda.is_available()


def _is_open(settings: Any, config: Any) -> bool:
    """Whether the user sets nothing that concerns CUDA graphs: use_cuda_graph, a padding interval or torch.compile."""
    sizes = settings.q_padding_interval_size or settings.kv_padding_interval_size
    compiles = [getattr(settings, name, None) for name in COMPILES]
    asks = sizes or any(compiles) or getattr(config, "compile_config", None)
    return settings.use_cuda_graph is None and not asks
