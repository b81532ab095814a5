"""transformers' generate_batch with a model of Llama 8B's shape: this library beside the host's own attention.

    python -m benchmarks.hosts.transformers_8b [--trace azure_llm_2023_conv.csv] [--skip-base]
    python -m benchmarks.hosts.transformers_8b --fresh FILE.json   out of the box, in fresh processes: fresh.py

Random bf16 weights, 64 prompts of a trace's lengths, 64 new tokens each, greedy, all in one process.  Each run prints
seconds and tokens/s.  Then follow the time by kind of kernel over this library and, where tokens of the two attentions
first differ, the logits of both tokens.  By default each call of generate_batch captures graphs before its first
request, and drops them at its end.  Calls with warmup=False, and with persistent_manager=True over new prompts, are
timed, too.
"""

from __future__ import annotations

import argparse
import inspect
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.hosts import fresh
from benchmarks.hosts.llama_8b import SHAPE, build, prompts
from paged_attn.integrations.transformers import register

CLASSES = {
    "attention": ("attention", "merge", "write_kv", "fmha", "flash", "shares_kernel", "blocks_kernel", "mixed_kernel"),
    "GEMMs": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "gemv", "splitk"),
}


@torch.no_grad()
def run(
    model: Any, name: str, asked: list[list[int]], new: int, args: argparse.Namespace, **how: bool
) -> tuple[list[Any], float]:
    """Return (tokens of each prompt, seconds from the call to the last token); `how`: options of generate_batch."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    options = {"num_blocks": args.blocks, "max_batch_tokens": args.batch_tokens, "use_cuda_graph": (False, args.graphs)}
    if "auto_switch_to_flash" in ContinuousBatchingConfig.__dataclass_fields__:
        options["auto_switch_to_flash"] = False
    model.config._attn_implementation = name
    torch.cuda.synchronize()
    began = time.perf_counter()
    outs = model.generate_batch(
        asked,
        generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**options),
        progress_bar=False,
        **how,
    )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    by_prompt = {tuple(o.prompt_ids): list(o.generated_tokens) for o in outs.values()}
    return [by_prompt[tuple(p)] for p in asked], seconds


def say(name: str, asked: list[list[int]], tokens: list[Any], seconds: float) -> None:
    made, read = sum(map(len, tokens)), sum(map(len, asked))
    print(f"{name:34} {seconds:7.2f} s  {made / seconds:8.0f} new tokens/s, {read} tokens of prompts", flush=True)


def kept(model: Any, name: str, args: argparse.Namespace) -> None:
    """Time the second of two calls with a persistent manager."""
    for seed in (1, 2):
        asked = prompts(args.prompts, args.trace, SHAPE["vocab_size"], seed)  # type: ignore[arg-type]
        tokens, seconds = run(model, name, asked, args.new, args, persistent_manager=True)
    say(f"{name}, manager kept", asked, tokens, seconds)
    model.destroy_cached_continuous_batching_manager()


def profile(model: Any, name: str, asked: list[list[int]], new: int, args: argparse.Namespace) -> None:
    """Print time on the GPU by purpose; in the rest of the wall time the GPU is idle."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _, seconds = run(model, name, asked, new, args)
    sums: dict[str, float] = {}
    rows = [(e.key, e.self_device_time_total / 1e6, e.count) for e in profiler.key_averages()]
    for key, took, _ in rows:
        kind = next((k for k, words in CLASSES.items() if any(w in key.lower() for w in words)), "other")
        sums[kind] = sums.get(kind, 0.0) + took
    busy = sum(sums.values())
    print(f"profiled: {seconds:.2f} s; GPU busy {busy:.2f} s; idle, waiting for the host {seconds - busy:.2f} s")
    print("  " + ", ".join(f"{kind} {took:.2f} s" for kind, took in sorted(sums.items(), key=lambda x: -x[1])))
    for key, took, count in sorted(rows, key=lambda x: -x[1])[:12]:
        print(f"  {took:7.3f} s  {count:6} x  {key[:90]}")


@torch.no_grad()
def explain(model: Any, asked: list[list[int]], ours: list[Any], theirs: list[Any]) -> None:
    """Print, where tokens first differ, the logits of both choices and the bfloat16 step at their size."""
    model.set_attn_implementation("sdpa")
    apart = [(i, a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    same = sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))
    print(f"first tokens equal: {same} of {len(asked)}; all tokens: {len(asked) - len(apart)} of {len(asked)}")
    for i, a, b in apart[:8]:
        at = next(k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        ids = torch.tensor([asked[i] + a[:at]], device="cuda")
        logits = model(ids, logits_to_keep=1).logits[0, -1].float()
        x, y = logits[a[at]].item(), logits[b[at]].item()
        step = 2.0 ** (torch.tensor(max(abs(x), abs(y))).log2().floor().item() - 7)
        rank = int((logits > max(x, y)).sum())
        print(
            f"  prompt {i} ({len(asked[i])} tokens), new token {at}: {x:.4f} beside {y:.4f}, bf16 step {step:.4f}; "
            f"{rank} logits are above both"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    parser.add_argument("--skip-base", action="store_true")
    parser.add_argument("--fresh", type=Path, metavar="FILE.json", help="first and later calls by the host's settings")
    args = parser.parse_args()
    if args.fresh:
        return fresh.run(args.fresh, args.prompts, args.new, args.skip_base)

    import transformers

    name = register()
    # The legal name of the host's own attention depends on whether its attention functions call `update` of the cache.
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    theirs_name = "paged|sdpa" if "read_index" in inspect.signature(PagedAttentionCache.update).parameters else "sdpa"
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    began = time.perf_counter()
    model = build()
    asked = prompts(args.prompts, args.trace, SHAPE["vocab_size"])  # type: ignore[arg-type]
    print(f"model made in {time.perf_counter() - began:.0f} s", flush=True)

    tokens, seconds = run(model, name, asked, args.new, args)
    say(f"{name}, first run, compiles", asked, tokens, seconds)
    for _ in range(2):
        tokens, seconds = run(model, name, asked, args.new, args)
        say(name, asked, tokens, seconds)
    if args.graphs:
        for _ in range(2):
            _, seconds = run(model, name, asked, args.new, args, warmup=False)
            say(f"{name}, no warm-up", asked, tokens, seconds)
    kept(model, name, args)
    profile(model, name, asked, args.new, args)
    if not args.skip_base:
        args.graphs = False
        run(model, theirs_name, asked[:2], 2, args)
        theirs, seconds = run(model, theirs_name, asked, args.new, args)
        say(theirs_name, asked, theirs, seconds)
        kept(model, theirs_name, args)
        explain(model, asked, tokens, theirs)


if __name__ == "__main__":
    main()
