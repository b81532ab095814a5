"""vllm_asked for latent attention with vLLM's own builder and frame; sizes are DeepSeek-V3's for a rank of 8."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations import vllm_latent
from tests.integrations.vllm_asked import BF16, E4M3, H200, pose_as_rank, prepared
from tests.integrations.vllm_ranks import parallel
from tests.preparation import keys

SIZES = dict(HEADS=16, RANK=512, ROPE=64, NOPE=128, VALUE=128)
LAYERS: dict[str, dict[str, Any]] = {
    "deepseek": {},
    "deepseek, drafts": dict(drafts=2),
    "deepseek, fp8 cache": dict(dtype="fp8"),
    "deepseek, drafts, 2 ranks": dict(drafts=2, ranks=2),
}
SEQS, TOKENS, KEYS = 8, 64, 256  # of vllm_latent's config
LAYER = SimpleNamespace(_k_scale=torch.tensor(1.0))


class Latent:
    """A layer, and steps over its cache."""

    def __init__(self, patch: pytest.MonkeyPatch, drafts: int = 0, dtype: str = "auto", ranks: int = 1) -> None:
        pose_as_rank(ranks, patch)
        self.ranks = ranks
        for name, size in SIZES.items():
            patch.setattr(vllm_latent, name, size)
        patch.setitem(vllm_latent.DIMS, "kv_lora_rank", SIZES["RANK"])
        patch.setitem(vllm_latent.DIMS, "qk_nope_head_dim", SIZES["NOPE"])
        patch.setitem(vllm_latent.DIMS, "v_head_dim", SIZES["VALUE"])
        self.model = vllm_latent.Model(patch, drafts, dtype, parallel(ranks, 1))
        self.drafts, self.dtype = drafts, dtype
        config = self.model.builder.vllm_config
        config.model_config.dtype = BF16
        self.config: Any = config
        kind = BF16 if dtype == "auto" else E4M3
        cache = torch.empty(vllm_latent.PAGES, vllm_latent.PAGE, SIZES["RANK"] + SIZES["ROPE"], dtype=kind)
        self.cache = cache if dtype == "auto" else cache.view(torch.uint8)

    def build(self, lengths: list[tuple[int, int]]) -> tuple[Any, Any]:
        """With page tables that have room for the longest sequence, as vLLM's have."""
        told = vllm_latent.batch(lengths)
        pages = KEYS // vllm_latent.PAGE // self.ranks
        told.block_table_tensor = torch.zeros(len(lengths), pages, dtype=torch.int32)
        told.seq_lens_cpu_upper_bound = told._seq_lens_cpu = told.seq_lens  # type: ignore[attr-defined]
        told.dcp_local_seq_lens = told.seq_lens // 2 if self.ranks > 1 else None
        return told, self.model.builder.build(0, told)

    def step(self, rng: random.Random) -> None:
        """Decodes, then prompts without a context: the frame expands latents for these."""
        model, impl = self.model, self.model.impl
        decodes = [(rng.randint(1, 1 + self.drafts), rng.randint(8, 90)) for _ in range(rng.randint(1, 4))]
        prompts = [(n, n) for n in (rng.randint(4, 24) for _ in range(rng.randint(0, 2)))]
        told, metadata = self.build(decodes + prompts)
        tokens, first = told.num_actual_tokens, metadata.num_decode_tokens
        latents = torch.empty(tokens, SIZES["RANK"] + SIZES["ROPE"] + 1536, dtype=BF16)[:, 1536:]
        parts = latents[:, : SIZES["RANK"]], latents[:, None, SIZES["RANK"] :]
        impl.do_kv_cache_update(*parts, self.cache, told.slot_mapping, self.dtype, k_scale=LAYER._k_scale)
        if first:
            absorbed = torch.empty(first, self.ranks * SIZES["HEADS"], SIZES["RANK"] + SIZES["ROPE"], dtype=BF16)
            impl.forward_mqa(absorbed, self.cache, metadata, LAYER)
        new, dim = tokens - first, SIZES["NOPE"] + SIZES["ROPE"]
        if new:
            prefill: Any = model.builder._prefill_backend
            prefill.prepare_metadata(metadata.prefill)
            both = torch.empty(new, SIZES["HEADS"], SIZES["NOPE"] + SIZES["VALUE"], dtype=BF16)
            q, k = torch.empty(2, new, SIZES["HEADS"], dim, dtype=BF16)
            prefill.run_prefill_new_tokens(q, k, both[..., SIZES["NOPE"] :], rng.random() < 0.5)


def main() -> None:
    from paged_attn.integrations.vllm.ready import of_latents, steps_served

    keys.pose_as(H200)
    for name in sys.argv[1:]:
        with pytest.MonkeyPatch.context() as patch:
            layer, rng = Latent(patch, **LAYERS[name]), random.Random(0)
            most = layer.model.builder.reorder_batch_threshold or 1
            steps = steps_served(layer.config, SimpleNamespace(block_size=vllm_latent.PAGE))
            one = SimpleNamespace(impl=layer.model.impl)
            ready, asked = prepared([*of_latents(one, steps, most, layer.model.builder.shard)]), set()
            for _ in range(60):
                asked |= keys.asked(lambda: layer.step(rng))  # noqa: B023
        missing = [f"{kernel}: {key}" for kernel, key in sorted(asked - ready)]
        print(json.dumps(dict(name=name, ready=len(ready), asked=len(asked), missing=missing)), flush=True)


if __name__ == "__main__":
    main()
