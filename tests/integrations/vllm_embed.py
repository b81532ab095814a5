"""Embeddings of a tiny random BERT in vLLM's own engine on a CPU, over its own attention or over paged_attn.

    python -m tests.integrations.vllm_embed --attention paged_attn

Prints a line of JSON: by which class attention was computed, and an embedding of each prompt.
"""

from __future__ import annotations

import argparse
import json
import tempfile

from .vllm_tiny import PROMPTS, implementation  # which sets vLLM's environment

SIZES = dict(
    vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=512, initializer_range=0.3,
)  # fmt: skip


def save(folder: str) -> None:
    """Random weights, and a tokenizer of numbers, which vLLM wants of such models whatever it is given."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    words = models.WordLevel({str(i): i for i in range(SIZES["vocab_size"])}, unk_token="0")
    names = dict(pad_token="0", cls_token="1", sep_token="2")
    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **names).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=["paged_attn", "default"], default="paged_attn")
    args = parser.parse_args()
    from vllm import LLM

    if args.attention == "paged_attn":
        from paged_attn.integrations.vllm import register

        register("CPU_ATTN")
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        engine = LLM(
            model=folder, runner="pooling", max_model_len=256, max_num_seqs=8, dtype="float32", seed=0, block_size=32,
            max_num_batched_tokens=512, disable_log_stats=True, enforce_eager=True, kv_cache_memory_bytes=64 << 20,
        )  # fmt: skip
        outs = engine.embed([{"prompt_token_ids": p} for p in PROMPTS], use_tqdm=False)
        said = dict(attention=engine.apply_model(implementation)[0], embeddings=[x.outputs.embedding for x in outs])
    print("RESULT " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
