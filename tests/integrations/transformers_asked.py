"""Kernels that batches of transformers ask for and that were not made ready, for an H200, with the host's own managers.

Run as a program, since kernels are compiled ones there: `python -m tests.integrations.transformers_asked llama` prints
as JSON how many kernels are prepared for the prompts, how many the batches ask for, and which of these are missing;
`"llama as general"` says the same of kernels that are prepared where no prompts are known.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
import transformers
from transformers.generation import configuration_utils
from transformers.generation.continuous_batching import initialization, model_runner

from paged_attn.integrations import transformers as adapter
from paged_attn.integrations.transformers import ready
from paged_attn.launching.platform import Device
from paged_attn.preparation.model import distinct
from paged_attn.preparation.processes import compile_call
from tests.preparation import keys

H200 = Device("sm90", 132)
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "dtype": torch.bfloat16,
}
MIXED = {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}
LENGTHS = [5, 130, 700, 2100, 1500, 64, 9, 3, 2, 1000]
NEW = 3


def model(kind: str) -> Any:
    with torch.device("cpu"):
        if kind == "llama":
            made: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        elif kind == "gemma2":
            caps = {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 128}
            made = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **MIXED, **caps))
        else:
            experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
            made = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, **MIXED, **experts))
    return made.to(torch.bfloat16).eval()


def padded(cb_config: Any, **_: Any) -> None:
    """What the host decides on CUDA."""
    cb_config.use_cuda_graph = (False, True)
    cb_config.use_async_batching = False


class Batches:
    """A manager's batches, padded as for graphs, and computed without."""

    def __init__(self, kind: str) -> None:
        self.model = model(kind)
        self.model.config._attn_implementation = adapter.register()
        self.told: list[Any] = []

    def run(self) -> None:
        """All batches of the prompts; nothing is launched, so tokens are any."""
        forward = model_runner.ModelRunner._get_forward_fn
        pools = "get_memory_pools" if hasattr(model_runner, "get_memory_pools") else "get_cuda_pools"
        eager = {"_get_forward_fn": lambda *a, **k: (forward(*a, **k)[0], False)}
        heard = {"prepare_for": lambda manager, hints: self.told.append((manager, hints))}
        with (
            mock.patch.object(initialization, "ensure_decode_fast_path_is_available", return_value=None),
            mock.patch.object(initialization, "decide_use_cuda_graphs", padded),
            mock.patch.object(model_runner, pools, return_value=(None, None)),
            mock.patch.multiple(model_runner.ModelRunner, **eager),
            mock.patch.multiple(ready, **heard),
            torch.no_grad(),
        ):
            outs = self.model.generate_batch(
                [[1 + i % 20] * n for i, n in enumerate(LENGTHS)],
                generation_config=transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1),
                continuous_batching_config=configuration_utils.ContinuousBatchingConfig(
                    num_blocks=48, max_batch_tokens=1024, max_memory_percent=0.5
                ),
            )
        assert all(len(out.generated_tokens) == NEW for out in outs.values()), [out.error for out in outs.values()]

    def served(self, general: bool) -> list[Any]:
        manager, hints = self.told[0]
        if general:
            return [
                *ready.served(self.model, 64, 1024, 4096, ready._page_size(manager.continuous_batching_config), None)
            ]
        return [*ready.served_by(self.model, manager.continuous_batching_config, hints)]


def prepared(served: list[Any]) -> set[keys.Key]:
    """What is compiled, as compiling processes do it."""
    found: set[keys.Key] = set()
    for one in served:
        for batch in distinct(one.model, one.batches(), H200):
            found |= keys.asked(lambda: compile_call(one.model, batch, one.writes))  # noqa: B023
    return found


def main() -> None:
    keys.pose_as(H200)
    for name in sys.argv[1:]:
        kind, _, general = name.partition(" as ")
        batches = Batches(kind)
        asked = keys.asked(batches.run)
        made = prepared(batches.served(bool(general)))
        missing = [f"{kernel}: {key}" for kernel, key in sorted(asked - made)]
        print(json.dumps(dict(name=name, ready=len(made), asked=len(asked), missing=missing)), flush=True)


if __name__ == "__main__":
    main()
