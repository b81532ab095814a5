"""Kernels of `generate_batch`, derived from the model, the host's settings and prompts, and compiled in advance.

Triton and the planner are imported only when there is something to compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import BUCKET

if TYPE_CHECKING:
    from paged_attn.integrations.engine_kernels import Begun
    from paged_attn.preparation.engine_steps import Padded
    from paged_attn.preparation.model import Model

STEP = 64  # tokens: the host pads batches with prompts to a multiple of this number
TOKENS = 8192  # bound on tokens of a batch, and on keys of a sequence, if neither settings nor hints give one
REQUESTS, KEYS = 1024, 131072  # in `prepare`, which knows no prompts: bounds on requests of a batch, keys of a sequence
_begun: list[Begun] = []


def prepare(model: Any) -> None:
    """Compile the kernels for batches of any prompts, and wait for them."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from paged_attn.integrations.engine_kernels import begin

    page = _page_size(ContinuousBatchingConfig())
    keys = min(getattr(model.config.get_text_config(), "max_position_embeddings", None) or KEYS, KEYS)
    found = begin(lambda: served(model, REQUESTS, TOKENS, keys, page, None), model.device, *_log())
    if found is not None:
        found.wait()


def prepare_for(manager: Any, hints: Any) -> None:
    """Begin to compile the kernels of a manager's batches.  hints: the host's bounds on prompts, or None."""
    settings, model = manager.continuous_batching_config, manager.model
    varlen, decodes = settings.cuda_graph_booleans
    # Kernels cannot be derived in two cases: without graphs the host pads no batch, and with tensor parallelism a rank
    # has only a part of the heads.
    if not (varlen or decodes) or getattr(manager.distributed_helper, "tp_size", 1) > 1:
        return
    from paged_attn.integrations.engine_kernels import begin

    found = begin(lambda: served_by(model, settings, hints), model.device, *_log())
    if found is not None:
        _begun.append(found)


def wait() -> None:
    """Wait for kernels that are being compiled, because the first launch would compile them once more."""
    while _begun:
        _begun.pop().wait()


def _log() -> tuple[Any, Any]:
    from transformers.utils import logging

    log = logging.get_logger("transformers.paged_attn")
    return log.info, log.warning


def _page_size(settings: Any) -> int:
    return int(getattr(settings, "page_size", None) or settings.block_size)


def served_by(model: Any, settings: Any, hints: Any) -> Iterator[Padded]:
    """Yield kinds of calls under the host's settings, after the host has filled in those that were left to it."""
    page = _page_size(settings)
    width = (settings.max_blocks_per_request or 0) * page
    keys = (hints.max_prompt_length + hints.max_generated_length if hints is not None else 0) or width or TOKENS
    if settings.cuda_graph_booleans[0]:  # the host then rounds bounds on keys up to powers of two
        keys = 1 << (keys - 1).bit_length()
    tokens = settings.max_batch_tokens or TOKENS
    return served(model, min(settings.max_requests_per_batch, tokens), tokens, keys, page, width)


def served(model: Any, requests: int, tokens: int, keys: int, page: int, width: int | None) -> Iterator[Padded]:
    """Yield kinds of calls for each kind of layers.

    `requests` and `tokens` are upper bounds on the sequences and query tokens of a batch.  `keys` is an upper bound on
    the keys of a sequence.  `page` is the page size.

    width: keys that a row of a decode's page table has columns for.  0: decodes come without page tables.  None:
        nothing is known about batches.
    """
    from paged_attn.preparation.engine_steps import Padded
    from paged_attn.preparation.model import spread

    config = model.config.get_text_config()
    window, exact = getattr(config, "sliding_window", None), width is not None
    kinds = {*(getattr(config, "layer_types", None) or [_only_kind(config)])}
    sizes: dict[str, Any] = dict(max_seqs=requests, max_tokens=tokens, bucket=BUCKET, step=STEP, exact=exact)
    plainly = _model(model, config, page)
    apart = {kind: _page_stride(kind, config, page) for kind in kinds}
    if "full_attention" in kinds:
        widths = [2 * n * page for n in spread(max(1, keys // page))] if width is None else [width] * (width > 0)
        alone = kinds == {"full_attention"}
        plainly = plainly._replace(page_stride=apart["full_attention"])
        yield Padded(plainly, max_seqlen=keys, widths=tuple(widths) if alone else (), **sizes)
    if "sliding_attention" in kinds and window is not None:
        seen = plainly._replace(new=True, window_size=(window - 1, 0))
        # Ring buffers are read as pages of one slot.  Batches without cached keys pass whole pages, which are not read.
        for size, stride in ((1, 0), (page, apart["sliding_attention"])):
            rows = seen._replace(page_size=size, page_stride=stride)
            yield Padded(rows, max_seqlen=min(keys, window + tokens), widths=(), **sizes)


def _page_stride(kind: str, config: Any, page: int) -> int:
    """Slots from a layer's page to its next page, if the host keeps all layers of a kind in one buffer; else 0."""
    from transformers.generation.continuous_batching import cache

    allocators = getattr(cache, "ATTN_TYPE_TO_ALLOCATOR", None)
    if allocators is None or kind not in allocators:
        return 0
    kinds = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    return int(allocators[kind].rows_per_token * kinds.count(kind) * page)


def _only_kind(config: Any) -> str:
    return "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"


def _model(model: Any, config: Any, page: int) -> Model:
    from paged_attn.preparation.engine_steps import plain

    heads = config.num_attention_heads
    sinks = [x.dtype for name, x in model.named_parameters() if name.endswith(".sinks")]
    return plain(
        heads=heads, kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads, page_size=page, dtype=model.dtype,
        softcap=getattr(config, "attn_logit_softcapping", None) or 0.0, sinks=next(iter(sinks), None),
    )  # fmt: skip
