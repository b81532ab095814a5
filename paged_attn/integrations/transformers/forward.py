"""The registered attention function: it refuses some arguments, then calls continuous.py or plain.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import continuous, plain

# Arguments of some models' attention that would change the result.  They are refused; other arguments are ignored.
UNKNOWN = ("head_mask", "position_bias", "indices", "block_indices", "output_attentions")


class Scores(NamedTuple):
    """Options for scores, as arguments of paged_attention."""

    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None


@torch.compiler.disable
def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in transformers' shapes: q [B, heads, n, D], k and v [B, kv_heads, T, D] -> ([B, n, heads, D], None)."""
    if dropout:
        raise ValueError(f"paged_attn has no dropout, got dropout = {dropout}: call model.eval()")
    for name in UNKNOWN:
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise ValueError(f"paged_attn does not know the argument {name} of {type(module).__name__}")
    scores = Scores(scaling, softcap or 0.0, s_aux if s_aux is not None else sinks)
    if cache is not None:
        return continuous.attend(module, query, key, value, cache, sliding_window, scores, kwargs), None
    name = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
    if name.startswith("paged|"):  # with this prefix the host makes no mask, so padding would be seen
        raise ValueError(f"{name} works in generate_batch only: without the prefix it serves generate, too")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise ValueError(f"paged_attn serves causal attention here, {type(module).__name__} asks for is_causal = False")
    if sliding_window is None:
        sliding_window = getattr(module, "sliding_window", None)
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    return plain.attend(query, key, value, attention_mask, sliding_window, scores, chunk), None
