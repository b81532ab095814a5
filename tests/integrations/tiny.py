"""Tiny random models of transformers, and what they say: greedy tokens of each prompt."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.17", reason="needs transformers >= 5.17: make hosts")

PROMPTS = [[3, 5, 7, 11], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1, *range(20, 32)], list(range(40, 75))]
NEW = 6
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MIXED = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
KINDS = ("llama", "qwen3", "gemma2", "gpt_oss")
# Layers that the host's own continuous batching does not take, with any attention.
PLAIN_KINDS = ("llama4", "deepseek_v3", "mimo_v2")


@functools.cache
def model(kind: str) -> Any:
    """Llama; Qwen3 with a full and a sliding layer; Gemma 2 with softcaps; GPT-OSS with sinks.

    Models for plain `generate` only: DeepSeek-V3; Llama 4 with a chunked layer, and a temperature by position in the
    other; MiMo-V2, whose layers have different numbers of KV heads.  Seeded, in float32.
    """
    torch.manual_seed(0)
    if kind == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    elif kind == "qwen3":
        made = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**SIZES, **MIXED, use_sliding_window=True, max_window_layers=1)
        )
    elif kind == "gemma2":
        caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 4}
        made = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **MIXED, **caps))
    elif kind == "llama4":
        local = {"no_rope_layers": [1, 0], "attention_chunk_size": 8, "floor_scale": 4}
        made = transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(**SIZES, **local, moe_layers=[], intermediate_size_mlp=64)
        )
    elif kind == "deepseek_v3":
        latent = {"kv_lora_rank": 32, "q_lora_rank": 24}
        dims = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2}
        sizes = {**SIZES, "num_key_value_heads": 4}
        del sizes["head_dim"]
        made = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes, **latent, **dims))
    elif kind == "mimo_v2":
        dense = {"mlp_layer_types": ["dense", "dense"], "v_head_dim": 8}
        made = transformers.MiMoV2FlashForCausalLM(transformers.MiMoV2FlashConfig(**SIZES, **MIXED, **dense))
        torch.nn.init.normal_(made.model.layers[1].self_attn.sinks, 1.0, 1.0)
    else:
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
        made = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, **MIXED, **experts))
        for layer in made.model.layers:  # sinks that matter
            torch.nn.init.normal_(layer.self_attn.sinks, 1.0, 1.0)
    return made.eval()


@contextlib.contextmanager
def choosing(made: Any, name: str) -> Iterator[Any]:
    """The model with this attention, and then as it was."""
    before = made.config._attn_implementation
    made.set_attn_implementation(name)
    try:
        yield made
    finally:
        made.set_attn_implementation(before)


@torch.no_grad()
def plain(kind: str, name: str, prompts: list[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
    """Greedy tokens of plain `generate` over left-padded prompts."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with choosing(model(kind), name) as chosen:
        out = chosen.generate(ids, attention_mask=seen, max_new_tokens=new, do_sample=False, **options)
    return out[:, width:].tolist()


@functools.cache
def wanted(kind: str) -> list[list[int]]:
    """The host's own eager attention, one prompt at a time."""
    return [plain(kind, "eager", [prompt])[0] for prompt in PROMPTS]


def settings(**options: Any) -> Any:
    """A ContinuousBatchingConfig; the page's size is called as this host calls it."""
    made = transformers.generation.configuration_utils.ContinuousBatchingConfig
    known = made.__dataclass_fields__
    given = {"num_blocks": 64, "max_batch_tokens": 64, "max_memory_percent": 0.3, "page_size": 16, **options}
    if "page_size" not in known:
        given["block_size"] = given.pop("page_size")
    return made(**given)


def greedy(new: int = NEW) -> Any:
    return transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)


@torch.no_grad()
def batched(
    kind: str, name: str, prompts: list[list[int]] = PROMPTS, new: int = NEW, **options: Any
) -> list[list[int]]:
    """Greedy tokens of `generate_batch`."""
    with choosing(model(kind), name) as chosen:
        outs = chosen.generate_batch(
            prompts,
            generation_config=greedy(new),
            continuous_batching_config=settings(**options),
            progress_bar=False,
        )
    by_prompt = {tuple(o.prompt_ids): list(o.generated_tokens) for o in outs.values()}
    return [by_prompt[tuple(p)] for p in prompts]
