"""Kernels that vLLM's steps ask for and that were not made ready, for an H200, with vLLM's own classes on the CPU.

Run as a program, since kernels are compiled ones there: `python -m tests.integrations.vllm_asked llama` prints as JSON
how many kernels are prepared, how many the steps ask for, and which of these are missing; `"llama as fp8 cache"`
does so of kernels that are prepared for another layer.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged_attn.distributed import groups
from paged_attn.launching.platform import Device
from paged_attn.preparation.engine_steps import Served
from paged_attn.preparation.model import distinct
from paged_attn.preparation.processes import compile_call
from tests.preparation import keys

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import CUDAGraphMode
    from vllm.distributed import parallel_state
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from paged_attn.integrations.vllm.backend import DiffKVBackend, DiffKVImpl
    from paged_attn.integrations.vllm.cache_formats import row_of
    from paged_attn.integrations.vllm.impl import Impl
    from paged_attn.integrations.vllm.metadata import Builder
    from paged_attn.integrations.vllm.ready import of_layer, steps_served

    try:
        from vllm.v1.kv_cache_interface import KVCacheLayout as LAYOUTS
    except ImportError:  # up to 0.31 or so
        LAYOUTS = None
        from vllm.v1.attention.backends.utils import set_kv_cache_layout
    from vllm.utils import torch_utils

    torch_utils.PIN_MEMORY = False  # there is nothing to pin memory for

H200 = Device("sm90", 132)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SEQS, TOKENS, KEYS, PAGE = 64, 2048, 9000, 16
HEADS, KV_HEADS, DIM = 32, 8, 128
# Layers: options of the implementation, and further facts of a layer, a batch or the config.
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, NHD": dict(order="NHD"),
    "llama, drafts": dict(drafts=3),
    "llama, invariant": dict(invariant=True),
    "gemma2": dict(options=dict(logits_soft_cap=50.0)),
    "gemma2, sliding": dict(options=dict(logits_soft_cap=50.0, sliding_window=4096)),
    "gemma3, images": dict(options=dict(sliding_window=1024), images=True),
    "gpt-oss": dict(options=dict(sinks=True)),
    "gpt-oss, sliding": dict(options=dict(sinks=True, sliding_window=128)),
    "bloom": dict(options=dict(alibi_slopes=[0.5] * HEADS)),
    "step": dict(options=dict(alibi_slopes=[0.5] * HEADS, use_alibi_sqrt=True)),
    "fp8 cache": dict(options=dict(kv_cache_dtype="fp8")),
    "fp8 cache, a scale for each head": dict(options=dict(kv_cache_dtype="fp8"), scale=[0.5] * KV_HEADS),
    "fp8 cache and queries": dict(options=dict(kv_cache_dtype="fp8"), quantises=True),
    "fp8 results": dict(results=E4M3),
    "fp8 all": dict(options=dict(kv_cache_dtype="fp8"), quantises=True, results=E4M3),
    "e5m2 cache": dict(options=dict(kv_cache_dtype="fp8_e5m2")),
    "int8 by token": dict(options=dict(kv_cache_dtype="int8_per_token_head")),
    "int4 by token": dict(options=dict(kv_cache_dtype="int4_per_token_head"), drafts=3),
    "mimo": dict(value_dim=64, options=dict(sinks=True, sliding_window=128)),
    "llama 4, chunked": dict(chunk=512),
    "encoder": dict(options=dict(attn_type="encoder_only"), causal=False),
    "encoder, slopes": dict(options=dict(attn_type="encoder_only", alibi_slopes=[0.5] * HEADS), causal=False),
    "decoder to an encoder": dict(options=dict(attn_type="encoder_decoder"), causal=False),
    "unlimited-ocr": dict(rswa=256),
    "llama, 2 ranks": dict(ranks=2),
    "gpt-oss, sliding, 4 ranks": dict(ranks=4, options=dict(sinks=True, sliding_window=128)),
}


def config(drafts: int = 0, mode: Any = CUDAGraphMode.NONE, results: Any = None, rswa: Any = None,
           images: bool = False, order: str = "HND", context: Any = None) -> Any:  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=KEYS, dtype=BF16, rswa_window=rswa, is_mm_prefix_lm=images,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=SEQS, max_num_batched_tokens=TOKENS),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        cache_config=SimpleNamespace(block_size=PAGE, **({} if LAYOUTS is None else dict(
            get_resolved_kv_cache_layout=lambda: LAYOUTS["LBHNC" if order == "HND" else "LBNHC"]))),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, static_forward_context=context or {},
            pass_config=SimpleNamespace(fuse_attn_quant=results is not None),
        ),
    )  # fmt: skip


def lengths(rng: random.Random, most: int, drafts: int) -> tuple[int, int, int, int]:
    """(sequences, query tokens, the most of a sequence, the most keys) of a step."""
    seqs = rng.randint(1, SEQS)
    kind = rng.choice(["decode", "drafts", "prompts", "prompt"])
    longest = {"decode": 1, "drafts": 1 + drafts}.get(kind) or max(1, round((TOKENS - SEQS) ** rng.random()))
    tokens = min(TOKENS, rng.randint(longest + seqs - 1, max(longest + seqs - 1, seqs * longest)))
    if kind == "prompt":
        seqs, tokens = 1, longest
    return seqs, tokens, longest, rng.randint(min(longest, most), most)


class Layer:
    """A layer of vLLM's with our implementation, its cache, and steps over it."""

    def __init__(self, options: Any = (), order: str = "HND", drafts: int = 0, invariant: bool = False,
                 images: bool = False, scale: Any = 0.5, quantises: bool = False, results: Any = None,
                 value_dim: int = DIM, chunk: int | None = None, causal: bool = True,
                 rswa: int | None = None, ranks: int = 1) -> None:  # fmt: skip
        self.heads, self.kv_heads = (HEADS, KV_HEADS) if ranks == 1 else (4, 1)
        self.drafts, self.images, self.results, self.causal, self.chunk = drafts, images, results, causal, chunk
        self.query_quant = object() if quantises else None
        for name in ("_q_scale", "_k_scale", "_v_scale"):
            setattr(self, name, torch.tensor(scale))
        given = dict(num_heads=self.heads, head_size=DIM, scale=DIM**-0.5, num_kv_heads=self.kv_heads) | dict(options)
        if given.get("sinks"):
            given["sinks"] = torch.empty(self.heads, dtype=BF16)
        DiffKVBackend.set_head_size_v(value_dim)
        self.impl: Any = (Impl if value_dim == DIM else DiffKVImpl)(**given)
        self.impl.batch_invariant = invariant
        width = row_of(self.impl.kv_cache_dtype, DIM, value_dim)
        shape = dict(HND=(2, 64, self.kv_heads, PAGE, width), NHD=(2, 64, PAGE, self.kv_heads, width))[order]
        memory = torch.empty(shape, dtype=self.impl.fp8 or BF16)
        self.cache = memory[-1] if order == "HND" else memory[-1].transpose(1, 2)
        if self.impl.fp8 is not None:
            self.cache = self.cache.view(torch.uint8)
        self.config = config(drafts, results=results, rswa=rswa, images=images, order=order, context={"layer": self})
        if LAYOUTS is None:
            set_kv_cache_layout(order)
        self.spec = SimpleNamespace(block_size=PAGE, **({} if chunk is None else dict(attention_chunk_size=chunk)))
        self.builder = Builder(self.spec, ["layer"], self.config, torch.device("cpu"))

    def served(self) -> list[Served]:
        return [*of_layer(self, steps_served(self.config, self.spec), self.spec, self.config)]

    def step(self, rng: random.Random) -> None:
        """A random one, eager or captured."""
        most = KEYS if self.chunk is None else self.chunk
        seqs, tokens, longest, held = lengths(rng, most, self.drafts)
        mode = rng.choice(["eager", "eager", "captured", "one graph for all"])
        batch: Any = CommonAttentionMetadata(
            query_start_loc=torch.zeros(seqs + 1, dtype=torch.int32), query_start_loc_cpu=None,  # type: ignore[arg-type]
            seq_lens=torch.zeros(seqs, dtype=torch.int32), num_reqs=seqs, num_actual_tokens=tokens,
            max_query_len=longest, max_seq_len=held, slot_mapping=torch.zeros(tokens, dtype=torch.int64),
            block_table_tensor=torch.zeros(seqs, -(-most // PAGE), dtype=torch.int32), causal=self.causal,
        )  # fmt: skip
        if self.images and rng.random() < 0.5:
            batch.mm_req_doc_ranges = {0: [(0, 3)] * rng.randint(1, 2)}
        mode = "eager" if self.images or self.impl.encodes or (self.builder.prompts and longest > 1) else mode
        mode = "captured" if self.builder.prompts and mode == "one graph for all" else mode
        modes = CUDAGraphMode.FULL if mode == "one graph for all" else CUDAGraphMode.FULL_AND_PIECEWISE
        self.config.compilation_config.cudagraph_mode = modes
        made = self.builder.build(0, batch) if mode == "eager" else self.builder.build_for_cudagraph_capture(batch)
        # as a projection of all three has them
        heads, kv_heads = self.heads, self.kv_heads
        widths = heads * DIM, kv_heads * DIM, kv_heads * self.impl.head_size_v
        q, k, v = torch.empty(tokens, sum(widths), dtype=BF16).split(widths, -1)
        q, k, v = (x.view(tokens, n, -1) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        if self.query_quant is not None:
            q = q.to(E4M3)
        out = torch.empty(tokens, heads * self.impl.head_size_v, dtype=self.results or BF16)
        self.impl.do_kv_cache_update(self, k, v, self.cache, made.slot_mapping)
        scale = torch.ones(1) if self.results is not None else None
        self.impl.forward(self, q, k, v, self.cache, made, out, output_scale=scale)


def prepared(served: list[Served]) -> set[keys.Key]:
    """What is compiled, as compiling processes do it."""
    found: set[keys.Key] = set()
    for one in served:
        model, batches, writes = one.work()
        for batch in distinct(model, batches, H200):
            found |= keys.asked(functools.partial(compile_call, model, batch, writes))
    return found


def pose_as_rank(world: int, patch: pytest.MonkeyPatch) -> None:
    """Rank 1 of a group of vLLM's without other processes; merges, which prepare no kernels, are left out."""
    group = SimpleNamespace(world_size=world, rank_in_group=1, device_group="ranks")
    patch.setattr(parallel_state, "_DCP", group if world > 1 else None)
    patch.setattr(groups, "process_group", lambda group: group)
    patch.setattr(groups, "rank_and_world", lambda _: (1, world))
    patch.setattr(groups, "gather", lambda x, _: torch.stack([x] * world))
    patch.setattr("paged_attn.distributed.attention.merge", lambda *_, into, **__: into)


def main() -> None:
    keys.pose_as(H200)
    for name in sys.argv[1:]:
        name, _, other = name.partition(" as ")
        with pytest.MonkeyPatch.context() as patch:
            pose_as_rank(LAYERS[name].get("ranks", 1), patch)
            layer, rng = Layer(**LAYERS[name]), random.Random(0)
            ready, asked = prepared((Layer(**LAYERS[other]) if other else layer).served()), set()
            for _ in range(120):
                asked |= keys.asked(lambda: layer.step(rng))  # noqa: B023
        missing = [f"{kernel}: {key}" for kernel, key in sorted(asked - ready)]
        print(json.dumps(dict(name=name, ready=len(ready), asked=len(asked), missing=missing)), flush=True)


if __name__ == "__main__":
    main()
