"""A model of Llama 8B's shape with random bfloat16 weights, and prompts for it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from benchmarks.traces import requests

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


def build() -> Any:
    """Build the seeded model on the GPU."""
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def prompts(count: int, trace: Path | None, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens, with the trace's lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [min(r.prompt, 8000) for r in itertools.islice(requests(trace), count)]
    return [torch.randint(10, vocabulary, (n,), generator=generator).tolist() for n in lengths]
