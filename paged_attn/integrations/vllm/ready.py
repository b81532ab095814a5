"""Kernels that the plug-in's layers will need, derived from the layers and from vLLM's config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from vllm.logger import init_logger

from paged_attn.integrations import BUCKET
from paged_attn.integrations.engine_kernels import ready
from paged_attn.preparation.engine_steps import Served, plain
from paged_attn.preparation.model import Model
from paged_attn.preparation.score_mod_ref import named

from ..score_mods import alibi_sqrt
from . import host

SPANS = (1, 2)  # values of R, as in `_spans`, whose kernels are prepared.  Others are compiled when a call needs them
SLOTS = 3  # number of the axis of slots in vLLM's layouts, whose axes are [layers, pages, heads, slots, dims]
E4M3 = torch.float8_e4m3fn
log = init_logger("vllm.paged_attn")  # vLLM shows only messages of loggers under "vllm"


class Steps(NamedTuple):
    """Bounds on vLLM's steps, from its config."""

    seqs: int
    tokens: int
    keys: int  # keys of a sequence
    decode: int  # query tokens of a decode: 1 + drafts
    page_size: int
    dtype: torch.dtype

    def served(self, model: Model, **changes: Any) -> Served:
        given: dict[str, Any] = dict(
            model=model, max_seqs=self.seqs, max_tokens=self.tokens, max_seqlen=self.keys, bucket=BUCKET,
            decode=self.decode,
        )  # fmt: skip
        return Served(**given | changes)


def make_ready(spec: Any, names: list[str], config: Any, device: Any, served: Any) -> None:
    """Compile the kernels of a group of layers.

    If the group has the page size of vLLM's config, the kernels of layers outside the group are compiled, too, for each
    layer whose `impl` has the same class.

    served: served(layer, steps, spec, config) yields the kinds of calls of one layer.
    """

    def layers() -> Iterator[Served]:
        steps = steps_served(config, spec)
        context = config.compilation_config.static_forward_context
        same = config.cache_config.block_size == steps.page_size
        kind = type(context[names[0]].impl)
        for name, layer in context.items():
            if name in names or (same and isinstance(getattr(layer, "impl", None), kind)):
                yield from served(layer, steps, spec, config)

    ready(layers, torch.device(device), log.info, log.warning)


def steps_served(config: Any, spec: Any) -> Steps:
    page, most = spec.block_size, config.model_config.max_model_len
    scheduled, drafting = config.scheduler_config, config.speculative_config
    seqs, tokens, keys = scheduled.max_num_seqs, scheduled.max_num_batched_tokens, -(-most // page) * page
    if (chunk := getattr(spec, "attention_chunk_size", None)) is not None:
        # vLLM makes a sequence of each chunk that has queries of a request
        seqs, keys = 2 * seqs + tokens // chunk, min(keys, -(-chunk // page) * page)
    decode = 1 + (drafting.num_speculative_tokens if drafting is not None else 0)
    return Steps(min(seqs, tokens), tokens, keys, decode, page, config.model_config.dtype)


def _layout(config: Any) -> str:
    """HND or NHD: the order of heads and slots within a page in vLLM's memory."""
    if hasattr(config, "get_resolved_kv_cache_layout"):
        *_, slots, _ = config.get_resolved_kv_cache_layout().value
        return "HND" if slots == SLOTS else "NHD"
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    return "HND" if get_kv_cache_layout() == "HND" else "NHD"


def of_layer(layer: Any, steps: Steps, spec: Any, config: Any) -> Iterator[Served]:
    """Yield kinds of calls of a layer with a cache of keys and values, or of an encoder's layer, without a cache."""
    impl, window = layer.impl, layer.impl.sliding_window
    left = -1 if window is None else window - 1
    causal = impl.attn_type == "decoder"
    model = plain(
        heads=impl.num_heads, kv_heads=impl.num_kv_heads, head_dim=impl.head_size, value_dim=impl.head_size_v,
        page_size=steps.page_size, dtype=steps.dtype, kv_layout=_layout(config.cache_config), side_by_side=True,
        causal=causal, window_size=(left, -1 if causal else left), softcap=impl.logits_soft_cap,
        sinks=None if impl.sinks is None else impl.sinks.dtype, batch_invariant=impl.batch_invariant,
    )  # fmt: skip
    if impl.alibi_slopes is not None:
        sqrt = impl.use_alibi_sqrt
        modifier = named(alibi_sqrt, (impl.alibi_slopes,)) if sqrt else None
        slopes = dict(alibi=not sqrt, alibi_symmetric=impl.encodes and not sqrt, score_mod=modifier)
        model = Model(**model._asdict() | slopes)
    if impl.fp8 is not None:
        quantised = getattr(layer, "query_quant", None) is not None
        each = "per_token" if impl.tail else "per_head" if layer._k_scale.numel() > 1 else "tensor"
        model = model._replace(cache_dtype=impl.fp8, dtype=E4M3 if quantised else steps.dtype, scales=each)
    if impl.encodes:
        model = model._replace(page_size=1, side_by_side=False, kv_layout="HND", new=True)
        yield steps.served(model, writes=())
        return
    if (shard := host.shard_of(config, spec)) is not None:
        over = dict(heads=shard[1] * impl.num_heads, shard=shard, sinks=None)  # sinks belong to the joined results
        model = Model(**model._asdict() | over | dict(return_lse=True, out_dtype=torch.float32))
        yield from _of_prompts(layer, model, steps, config)
        return
    passes = getattr(config.compilation_config, "pass_config", None)
    quantises = getattr(passes, "fuse_attn_quant", None) and impl.rotations is None
    results = [steps.dtype, E4M3] if quantises else [steps.dtype]
    for dtype in results:  # vLLM quantises results of some layers, and decides of which ones when it compiles the model
        scales = "tensor" if impl.fp8 is None and dtype != steps.dtype else model.scales
        yield from _of_prompts(layer, model._replace(out_dtype=dtype, scales=scales), steps, config)


def _of_prompts(layer: Any, model: Model, steps: Steps, config: Any) -> Iterator[Served]:
    """Yield kinds of calls of a layer with a cache: several for R-SWA, or for images whose tokens see each other."""
    if (window := getattr(config.model_config, "rswa_window", None)) is not None:
        model = model._replace(window_size=(window - 1, 0), prefix_lens=True)
        yield steps.served(model, decode=1, decodes=True)
        yield steps.served(model._replace(query_positions=True), max_seqs=2 * steps.seqs)
        return
    yield steps.served(model)
    if getattr(config.model_config, "is_mm_prefix_lm", False) and model.causal:
        clip = bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))
        window_size = model.window_size[0], -1
        for spans in SPANS:
            seen = dict(spans=spans, clip_spans=clip, window_size=window_size)
            yield steps.served(Model(**model._asdict() | seen), writes=())


def of_latents(layer: Any, steps: Steps, decode: int, shard: Any = None) -> Iterator[Served]:
    """Yield kinds of calls of latent attention: decodes of up to `decode` query tokens, and prefills of expanded keys.

    shard: (rank, world, stripe) if ranks share the latents.
    """
    impl = layer.impl
    width, rank = impl.head_size, impl.kv_lora_rank
    model = plain(
        heads=impl.num_heads, kv_heads=1, head_dim=width, value_dim=rank, latent=True, page_size=steps.page_size,
        dtype=steps.dtype,
    )  # fmt: skip
    if impl.fp8 is not None:
        model = model._replace(cache_dtype=impl.fp8, scales="tensor")
    if shard is not None:
        over = dict(heads=shard[1] * impl.num_heads, shard=shard, return_lse=True)
        model = Model(**model._asdict() | over)
    yield steps.served(
        model, max_tokens=min(steps.tokens, steps.seqs * decode), decode=decode, decodes=True, ragged=decode > 1,
        writes=("apart",) if width > rank else ("keys",),
    )  # fmt: skip
    for lse in (False, True):  # True: results that are merged with results over a context
        expanded = plain(
            heads=impl.num_heads, kv_heads=impl.num_heads, head_dim=impl.qk_head_dim, value_dim=impl.v_head_dim,
            page_size=1, dtype=steps.dtype, new=True, return_lse=lse,
        )  # fmt: skip
        yield steps.served(expanded, max_seqlen=steps.tokens, bucket=1, decode=1, writes=())
