"""nano-vllm, its source unmodified, over paged_attn: greedy tokens beside transformers', and throughput on a GPU.

    NANO_VLLM=/path/to/nano-vllm python -m tests.integrations.nano_vllm                     # tokens of a tiny model
    ... --model 0.6b --throughput                                                           # on a GPU
    ... --model 0.6b --throughput --attention flash_attn (or vllm_flash_attn)               # its peers there
    ... --model 0.6b --throughput --ranks 2                                                 # on two GPUs

Weights are random.  On a CPU the calls of torch.cuda that nano-vllm makes are replaced here, not in its source.
"""

from __future__ import annotations

import argparse
import atexit
import copy
import importlib.machinery
import os
import random
import sys
import tempfile
import time
import types
from typing import Any

import torch

CPU = not torch.cuda.is_available()
if CPU:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its layers are compiled ones, which takes a compiler of C++ there
    os.environ["TRITON_INTERPRET"] = "1"  # for a kernel of its own
# Qwen3-0.6B's shape, and one that the interpreter can run
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=64, tie_word_embeddings=False, initializer_range=0.08),
    "0.6b": dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                 num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
                 initializer_range=0.04),
}  # fmt: skip


def main() -> int:
    """Exit status 1 if a token differs by more than a tie."""
    options = _options()
    counts = _prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        return _run(options, folder, counts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(SHAPES), default="tiny")
    parser.add_argument("--attention", choices=["paged_attn", "flash_attn", "vllm_flash_attn"], default="paged_attn")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--throughput", action="store_true", help="also 256 requests of 100..1024 tokens in and out")
    parser.add_argument("--ranks", type=int, default=1, help="nano-vllm's tensor_parallel_size")
    parser.add_argument("--new", type=int, default=6 if CPU else 64, help="tokens to generate in the comparison")
    options = parser.parse_args()
    if not os.path.isdir(os.path.join(os.environ.get("NANO_VLLM", ""), "nanovllm")):
        parser.error("NANO_VLLM must name a checkout of nano-vllm")
    return options


def _prepare(options: argparse.Namespace) -> dict[str, int]:
    """Do what each rank's process needs before it imports nano-vllm; returns the process's counts of calls."""
    sys.path.insert(0, os.environ["NANO_VLLM"])
    if CPU:
        _without_cuda()
    return _provide(options.attention)


def _provide(attention: str) -> dict[str, int]:
    """Put the attention in place that nano-vllm imports as flash_attn; calls of each function are counted."""
    if attention == "paged_attn":
        from paged_attn.integrations import flash_attn

        module: Any = flash_attn.install()
    elif attention == "vllm_flash_attn":
        module = _of_vllm()
    else:
        import flash_attn as module
    counts = {"flash_attn_varlen_func": 0, "flash_attn_with_kvcache": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            counts[name] += 1
            return function(*args, **keywords)

        return call

    for name in counts:
        setattr(module, name, counted(name, getattr(module, name)))
    print(f"attention {attention} {getattr(module, '__version__', '')}, torch {torch.__version__}")
    return counts


def _of_vllm() -> types.ModuleType:
    """vLLM's FlashAttention-3 under the names that nano-vllm calls."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func as ragged

    def varlen(q: Any, k: Any, v: Any, cu_seqlens_k: Any, block_table: Any = None, **keywords: Any) -> Any:
        lens = {"cu_seqlens_k": cu_seqlens_k}
        if block_table is not None:
            lens = {"seqused_k": cu_seqlens_k[1:] - cu_seqlens_k[:-1], "block_table": block_table}
        return ragged(q, k, v, fa_version=3, **lens, **keywords)

    def kvcache(q: Any, k: Any, v: Any, cache_seqlens: Any, block_table: Any, **keywords: Any) -> Any:
        starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        bounds = dict(max_seqlen_q=1, max_seqlen_k=block_table.shape[1] * k.shape[1])
        return ragged(q[:, 0], k, v, cu_seqlens_q=starts, seqused_k=cache_seqlens, block_table=block_table,
                      fa_version=3, **bounds, **keywords)[:, None]  # fmt: skip

    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)  # which transformers asks for
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = varlen, kvcache  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = module
    return module


def _without_cuda() -> None:
    """What nano-vllm asks of torch.cuda, for a machine without it."""
    import torch.distributed

    start, device, tensor = torch.distributed.init_process_group, torch.set_default_device, torch.tensor
    patched: Any = torch
    patched.distributed.init_process_group = lambda backend, *a, **k: start("gloo", *a, **k)
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "synchronize"):
        setattr(torch.cuda, name, lambda *a, **k: None)
    patched.cuda.mem_get_info = lambda: (64 << 20, 64 << 20)
    patched.cuda.memory_stats = lambda: {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}
    patched.set_default_device = lambda of: device("cpu")
    patched.Tensor.cuda = lambda self, *a, **k: self
    patched.tensor = lambda *a, pin_memory=False, **k: tensor(*a, **k)


def _model(shape: str, folder: str) -> Any:
    """A Qwen3 of random weights, saved where nano-vllm reads it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[shape], max_position_embeddings=4096, bos_token_id=0, eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )  # fmt: skip
    config.dtype = torch.float16 if CPU else torch.bfloat16  # nano-vllm's RMSNorm works in place on x.float()
    model = Qwen3ForCausalLM(config).to(config.dtype).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", unk_token="w2").save_pretrained(folder)
    return model


def _run(options: argparse.Namespace, folder: str, counts: dict[str, int]) -> int:
    model = _model(options.model, folder)
    from nanovllm import LLM, SamplingParams

    sizes = dict(max_model_len=512, max_num_batched_tokens=512, max_num_seqs=8) if CPU else dict(max_model_len=4096)
    llm = LLM(folder, enforce_eager=CPU or options.eager, tensor_parallel_size=options.ranks, **sizes)
    vocabulary = SHAPES[options.model]["vocab_size"]
    torch.set_default_device("cpu")
    prompts = [torch.randint(3, vocabulary, (n,)).tolist() for n in (5, 300, 17, 64)]
    prompts.append(prompts[1][:290] + [7, 8])  # of which a block of 256 tokens is cached by then
    greedy = SamplingParams(temperature=1e-5, max_tokens=options.new, ignore_eos=True)
    # in two runs: nano-vllm shares blocks of sequences that were prefilled before
    outs = [x["token_ids"] for part in (prompts[:4], prompts[4:]) for x in llm.generate(part, greedy, use_tqdm=False)]
    model = model.to("cpu" if CPU else "cuda")
    exact = copy.deepcopy(model).float()
    apart = sum(_differs(model, exact, prompt, out) for prompt, out in zip(prompts, outs))
    print(f"calls {counts}; {len(prompts) - apart} of {len(prompts)} prompts with transformers' tokens, ties included")
    del model, exact
    if options.throughput:
        torch.cuda.empty_cache()
        _throughput(llm, SamplingParams, vocabulary)
    return int(apart > 0)


def _differs(model: Any, exact: Any, prompt: list[int], out: list[int]) -> bool:
    """Whether a token falls behind the largest logit, in float32, by more than two models in 16 bits may differ.

    Each may be off by what transformers' own is, which is measured: where two logits are closer than twice that, either
    may come out as the larger one.
    """
    ids = torch.tensor([prompt + out[:-1]]).to(model.device)
    with torch.no_grad():
        rounded, logits = (m(ids).logits[0, len(prompt) - 1 :].float() for m in (model, exact))
    taken = torch.tensor(out).to(model.device)
    most = logits.amax(1)
    behind = most - logits.gather(1, taken[:, None])[:, 0]
    own = most - logits.gather(1, rounded.argmax(1)[:, None])[:, 0]
    error = float((rounded - logits).abs().max())
    equal = int((rounded.argmax(1) == taken).sum())
    print(
        f"  prompt of {len(prompt)}: {equal} of {len(out)} as transformers' in 16 bits; behind in float32 by up to "
        f"{float(behind.max()):.3f} (transformers' own {float(own.max()):.3f}, its logits off by up to {error:.3f})"
    )
    return float(behind.max()) > 2 * error


def _throughput(llm: Any, params: Any, vocabulary: int) -> None:
    """Tokens per second of nano-vllm's own benchmark: 256 requests, random lengths, three rounds."""
    draw = random.Random(0)
    lengths = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256)]
    llm.generate([[5] * 64], params(max_tokens=8, ignore_eos=True), use_tqdm=False)
    for _ in range(3):
        prompts = [[draw.randrange(3, vocabulary) for _ in range(n)] for n, _ in lengths]
        wanted = [params(temperature=0.6, ignore_eos=True, max_tokens=n) for _, n in lengths]
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, wanted, use_tqdm=False)
        seconds, tokens = time.perf_counter() - start, sum(n for _, n in lengths)
        print(f"  {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "__mp_main__":  # a rank's process, which multiprocessing spawns: it has main's sys.argv
    atexit.register(print, "calls in a spawned rank", _prepare(_options()))
