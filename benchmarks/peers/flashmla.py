"""FlashMLA's dense decode, from the extension in vLLM's wheel: latents of 512 + 64 dims in pages of 64 tokens.

The first call, which is not timed, makes the schedule for the lengths of the case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.cannot import Cannot, allow
from tests.support.cases import Case

HEAD_DIM, VALUE_DIM, PAGE = 576, 512, 64


def call(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    allow(case, "latent", "wide heads", "values of another width")
    if not case.latent or (case.head_dim, case.value_width, case.page_size) != (HEAD_DIM, VALUE_DIM, PAGE):
        raise Cannot(f"only latents of {VALUE_DIM} and {HEAD_DIM - VALUE_DIM} dims in pages of {PAGE}")
    if len(set(case.query_lens)) > 1:
        raise Cannot("only as many queries of each sequence")
    if not case.causal or case.layout != "NHD":
        raise Cannot("only causal attention over an NHD cache")
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    q = inputs["q"][: case.tokens].contiguous().unflatten(0, (len(case.query_lens), -1))
    table, lengths = (inputs[name].to(torch.int32) for name in ("page_table", "seq_lens"))
    schedule, _ = get_mla_metadata()
    scale = case.softmax_scale or HEAD_DIM**-0.5

    def run() -> Tensor:
        out, _ = flash_mla_with_kvcache(
            q, inputs["k_cache"], table, lengths, VALUE_DIM, schedule, softmax_scale=scale, causal=True
        )
        return out.flatten(0, 1)

    return run
