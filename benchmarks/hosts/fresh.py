"""First and later calls of transformers' `generate_batch` out of the box, with the host's own settings.

    python -m benchmarks.hosts.transformers_8b --fresh FILE.json

Each way of choosing the attention (WAYS) runs in its own process and changes no other setting.  The cache of kernels
is empty, except in the second process of `register()`.  A line is printed for each way.  FILE.json gets seconds, and
how many prompts have the same first token, and the same tokens, as over the host's own attention.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LATER = 3  # calls after the first; over the host's own attention there is one later call
# How the attention is chosen.  The second process of `register()` finds on disk what the first has compiled.
WAYS = ("register()", "register(), kernels on disk", "register(model)", "paged|sdpa")


def measure(way: str, folder: Path, count: int, new: int) -> dict[str, Any]:
    """Run the process of a way and return its report."""
    cache = folder / str(WAYS.index(way.partition(",")[0]))
    said = folder / "said.json"
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.hosts.fresh", way, str(said), str(count), str(new)]
    subprocess.run(command, env=environment, check=True)
    return json.loads(said.read_text()) | {"process": round(time.perf_counter() - began, 1)}


def table(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'':30}{'before':>9}{'first':>9}{'later calls':>24}{'process':>10}   s")
    for way, told in found.items():
        later = ", ".join(f"{x:.2f}" for x in told["later"])
        print(f"{way:30}{told['before']:9.2f}{told['first']:9.2f}{later:>24}{told['process']:10.1f}")


def equal(found: dict[str, dict[str, Any]], way: str) -> list[int]:
    """Return numbers of prompts: [first token as over the host's own attention, all tokens as over it, all prompts]."""
    pairs = [(a, b) for a, b in zip(found[way]["tokens"], found[WAYS[-1]]["tokens"], strict=True)]
    return [sum(a[:1] == b[:1] for a, b in pairs), sum(a == b for a, b in pairs), len(pairs)]


def run(path: Path, count: int, new: int, skip_base: bool) -> None:
    """Run all ways, one after another; write the file after each."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS[:-1] if skip_base else WAYS:
            found[way] = measure(way, Path(folder), count, new)
            facts = found[way].pop("facts")
            alike = {x: equal(found, x) for x in found} if WAYS[-1] in found else {}
            seconds = {x: {k: v for k, v in told.items() if k != "tokens"} for x, told in found.items()}
            path.write_text(json.dumps(facts | {"seconds": seconds, "tokens_equal": alike}, indent=1) + "\n")
    table(found)
    for way, (first, every, of) in alike.items():
        print(f"{way}: first tokens equal {first} of {of}, all tokens {every} of {of}")


# ---- the process of a way ---------------------------------------------------------------------------------------


def waits(began: list[float]) -> list[list[float]]:
    """Return a list that gets [seconds since the call began, seconds waited] whenever a layer waits for kernels.

    began: the list of times at which calls began; the last is that of the current call.
    """
    from paged_attn.integrations.transformers import continuous

    found: list[list[float]] = []
    real = continuous.ready.wait

    def wait() -> None:
        pending, at = bool(continuous.ready._begun), time.perf_counter()
        real()
        if pending:
            found.append([round(at - began[-1], 2), round(time.perf_counter() - at, 2)])

    continuous.ready.wait = wait
    return found


def call(model: Any, asked: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """Return tokens of each prompt, and seconds, under the host's own settings."""
    import torch
    from transformers import GenerationConfig

    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.no_grad():
        outs = model.generate_batch(asked, generation_config=greedy)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    by_prompt = {tuple(o.prompt_ids): list(o.generated_tokens) for o in outs.values()}
    return [by_prompt[tuple(p)] for p in asked], seconds


def main() -> None:
    way, path, count, new = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    import logging

    import torch
    import transformers

    from benchmarks.hosts.llama_8b import SHAPE, build, prompts
    from paged_attn.integrations.transformers import register

    began = time.perf_counter()
    model = build()
    torch.cuda.synchronize()
    print(f"--- {way}: model made in {time.perf_counter() - began:.1f} s", flush=True)
    logging.getLogger("transformers.paged_attn").setLevel(logging.INFO)
    asked = prompts(count, None, SHAPE["vocab_size"], 0)  # type: ignore[arg-type]
    began = time.perf_counter()
    name = {"register(model)": lambda: register(model), "paged|sdpa": lambda: way}.get(way, register)()
    model.set_attn_implementation(name)
    before, times, starts = time.perf_counter() - began, [], [0.0]
    waited = waits(starts)
    for number in range(1 + (1 if way == "paged|sdpa" else LATER)):
        starts.append(time.perf_counter())
        tokens, seconds = call(model, asked, new)
        times.append(round(seconds, 2))
        print(f"{way}: call {number + 1}: {seconds:.2f} s", flush=True)
    facts = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "processors": len(os.sched_getaffinity(0)),
        "model": "Llama 8B's shape, random weights, bfloat16",
        "prompts": len(asked), "prompt_tokens": sum(map(len, asked)), "new_tokens": new,
    }  # fmt: skip
    told = {"before": round(before, 2), "first": times[0], "later": times[1:], "waited": waited}
    path.write_text(json.dumps(told | {"tokens": tokens, "facts": facts}))


if __name__ == "__main__":
    main()
