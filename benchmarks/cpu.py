"""Times of calls on a CPU, in plain torch, beside torch's own attention over contiguous keys.

    python -m benchmarks.cpu [--rounds 15] [--threads N] [--busy] [--output FILE]

--busy is for a machine that runs other programs: cases are timed in processor time of one thread, and `generate_batch`
and the interpreter are left out.

Calls take turns, so other programs slow all calls alike; a figure is the median of a call's rounds.  Pages have 16
tokens and lie in random order.  Calls are unchecked, as in a server.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

os.environ["PAGED_ATTN_CHECK"] = "0"  # before the package is imported

import torch
from torch.nn.functional import scaled_dot_product_attention

import paged_attn
from benchmarks import runner

Calls = Mapping[str, Callable[[], object]]
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SMALL = dict(queries=[1, 1], keys=[256, 256])  # a call for Triton's interpreter, which takes seconds
# Case -> upper bound of its time divided by the time with which `against` compares it.
TARGETS = {"decode 8 x 2048": 1.5, "prefill 1 x 1024": 1.3, "mixed 16": 1.5}
MIXED = dict(queries=[1] * 12 + [64, 128, 200, 256], keys=[*range(300, 1500, 100), 64, 700, 1000, 256])


class Call:
    """A batch over a paged cache."""

    def __init__(self, queries: list[int], keys: list[int], dtype: torch.dtype) -> None:
        self.queries, self.keys, self.dtype = queries, keys, dtype
        counts = [-(-n // PAGE) for n in keys]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
        self.caches = [torch.randn(sum(counts), PAGE, KV_HEADS, DIM).to(dtype) for _ in range(2)]
        self.table = torch.zeros(len(keys), max(counts), dtype=torch.int32)
        for row, count, ids in zip(self.table, counts, order.split(counts)):
            row[:count] = ids
        self.q = torch.randn(sum(queries), HEADS, DIM).to(dtype)
        self.lens = torch.tensor(keys, dtype=torch.int32)
        self.starts = torch.tensor([0, *queries]).cumsum(0).int()
        self.out = torch.empty_like(self.q)
        self.given: tuple[Any, ...] = (self.q, *self.caches, self.table, self.lens, self.starts)

    def paged(self) -> object:
        return paged_attn.paged_attention(*self.given, out=self.out)

    def alone(self, seq: int) -> Callable[[], object]:
        """Return a call of one sequence of the batch."""
        begin, end = self.starts[seq : seq + 2].tolist()
        starts = torch.tensor([0, end - begin], dtype=torch.int32)
        tensors: tuple[Any, ...] = (
            self.q[begin:end],
            *self.caches,
            self.table[seq : seq + 1],
            self.lens[seq : seq + 1],
            starts,
        )
        out = self.out[begin:end]
        return lambda: paged_attn.paged_attention(*tensors, out=out)

    def gathered(self) -> list[torch.Tensor]:
        """Return contiguous keys and values [B, kv_heads, N, D] of a batch with equal lengths."""
        rows = [x[self.table.long()].flatten(1, 2)[:, : self.keys[0]] for x in self.caches]
        return [x.transpose(1, 2).contiguous() for x in rows]


def decode(dtype: torch.dtype) -> Calls:
    """Return calls: decodes, SDPA over contiguous keys, and the copy of pages into contiguous memory."""
    call = Call([1] * 8, [2048] * 8, dtype)
    keys, values = call.gathered()
    query = call.q.view(8, KV_HEADS, HEADS // KV_HEADS, DIM)  # heads of a group as rows: the fastest way in torch
    pages, room = call.table.flatten(), torch.empty(2, call.table.numel(), PAGE * KV_HEADS * DIM, dtype=dtype)

    def gather() -> None:
        for cache, into in zip(call.caches, room):
            torch.index_select(cache.flatten(1), 0, pages, out=into)

    def heads() -> torch.Tensor:
        return scaled_dot_product_attention(call.q.view(8, HEADS, 1, DIM), keys, values, enable_gqa=True)

    return {
        "paged": call.paged,
        "SDPA, contiguous": lambda: scaled_dot_product_attention(query, keys, values),
        "SDPA, contiguous, enable_gqa": heads,
        "gather": gather,
    }


def prefill(dtype: torch.dtype) -> Calls:
    """Return calls: a prefill, and SDPA over the same keys, contiguous."""
    call = Call([1024], [1024], dtype)
    keys, values = call.gathered()
    query = call.q.transpose(0, 1)[None].contiguous()
    group = HEADS // KV_HEADS
    wide_keys, wide_values = (x.repeat_interleave(group, 1) for x in (keys, values))
    return {
        "paged": call.paged,
        "SDPA, contiguous": lambda: scaled_dot_product_attention(query, wide_keys, wide_values, is_causal=True),
        "SDPA, contiguous, enable_gqa": lambda: scaled_dot_product_attention(
            query, keys, values, is_causal=True, enable_gqa=True
        ),
    }


def mixed(dtype: torch.dtype) -> Calls:
    """Return calls: a mixed batch, and each of its sequences alone."""
    call = Call(MIXED["queries"], MIXED["keys"], dtype)
    return {"paged": call.paged} | {f"part {i}": call.alone(i) for i in range(len(call.keys))}


def timed(calls: Calls, rounds: int, clock: Callable[[], float] = perf_counter) -> dict[str, float]:
    """Return median seconds of each call; the calls take turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):  # round 0 warms memory and caches
        for name, call in calls.items():
            started = clock()
            call()
            if number:
                taken[name].append(clock() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def against(case: str, seconds: dict[str, float]) -> float:
    """Return the seconds with which a case is compared.

    A prefill is compared with the faster of two calls of SDPA, decodes with the faster one plus the copy, and a mixed
    batch with the sum of its sequences alone.
    """
    if case.startswith("decode"):
        return min(seconds["SDPA, contiguous"], seconds["SDPA, contiguous, enable_gqa"]) + seconds["gather"]
    if case.startswith("prefill"):
        return min(seconds["SDPA, contiguous"], seconds["SDPA, contiguous, enable_gqa"])
    return sum(time for name, time in seconds.items() if name.startswith("part"))


def long_context(dtype: torch.dtype) -> dict[str, Any]:
    """Return seconds and growth of memory of 16 queries at 100k keys with a softcap, which torch's SDPA lacks."""
    call = Call([16], [100_000], dtype)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = perf_counter()
    paged_attn.paged_attention(*call.given, softcap=20.0, out=call.out)
    seconds, after = perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scores = 16 * 100_000 * HEADS * 4
    return {"seconds": seconds, "MiB more": (after - before) >> 10, "MiB of all scores in float32": scores >> 20}


def interpreted() -> float:
    """Return seconds of the call SMALL in Triton's interpreter, in a new process."""
    script = f"from benchmarks.cpu import Call, timed, torch; call = Call(**{SMALL}, dtype=torch.float32)\n"
    script += "print(timed({'paged': call.paged}, 1)['paged'])"
    environment = os.environ | {"PAGED_ATTN_DIALECT": "interpreter"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def generate_batch(dtype: torch.dtype) -> dict[str, Any] | None:
    """Compare transformers' `generate_batch` over paged-attn and "paged|sdpa"; None without transformers.

    The model is a Llama of 88M parameters with random weights.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from paged_attn.integrations import transformers as ours

    name = ours.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 8000, (n,), generator=rng).tolist() for n in (30, 200, 77, 120, 300, 11, 64, 150)]
    asked = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    seconds: dict[str, list[float]] = {"paged|sdpa": [], name: []}
    tokens = {}
    for _ in range(4):  # the first round also does what is done once, and is not counted
        for implementation, taken in seconds.items():
            model.set_attn_implementation(implementation)
            started = perf_counter()
            done = model.generate_batch(inputs=prompts, generation_config=asked, progress_bar=False)
            taken.append(perf_counter() - started)
            tokens[implementation] = sorted((x.prompt_ids, x.generated_tokens) for x in done.values())
    medians = {implementation: statistics.median(taken[1:]) for implementation, taken in seconds.items()}
    same = tokens["paged|sdpa"] == tokens[name]
    return dict(seconds=medians, ratio=medians[name] / medians["paged|sdpa"], same_tokens=same)


def run(rounds: int, busy: bool) -> dict[str, Any]:
    """Measure all cases, in float32 and in bfloat16."""
    report: dict[str, Any] = {"cases": []}
    for dtype in (torch.float32, torch.bfloat16):
        report[f"long context, {str(dtype).removeprefix('torch.')}"] = long_context(dtype)
        for case, made in {"decode 8 x 2048": decode, "prefill 1 x 1024": prefill, "mixed 16": mixed}.items():
            seconds = timed(made(dtype), rounds, process_time if busy else perf_counter)
            ratio = seconds["paged"] / against(case, seconds)
            told = {name: time for name, time in seconds.items() if not name.startswith("part")}
            told |= {"sum of its parts": against(case, seconds)} if case.startswith("mixed") else {}
            row = dict(case=case, dtype=str(dtype).removeprefix("torch."), ratio=ratio, at_most=TARGETS[case])
            report["cases"].append(row | {"milliseconds": {name: 1e3 * time for name, time in told.items()}})
            print(f"{row['dtype']:9} {case:17} {ratio:5.2f} (at most {TARGETS[case]})", flush=True)
    if busy:
        return report
    for dtype in (torch.float32, torch.bfloat16):
        if (found := generate_batch(dtype)) is not None:
            report[f"generate_batch, {str(dtype).removeprefix('torch.')}"] = found
            print(f"generate_batch: {found['ratio']:.2f} of paged|sdpa's time", flush=True)
    small = Call(**SMALL, dtype=torch.float32)
    ours, theirs = timed({"paged": small.paged}, rounds)["paged"], interpreted()
    report["interpreter"] = dict(**SMALL, torch_seconds=ours, interpreter_seconds=theirs, times=theirs / ours)
    print(f"interpreter: {theirs / ours:.0f} times as long")
    return report


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--output", type=Path, default=runner.ROOT / "benchmarks" / "results" / "cpu" / "calls.json")
    options.add_argument("--busy", action="store_true")
    asked = options.parse_args()
    threads = 1 if asked.busy else asked.threads
    torch.set_num_threads(threads)
    about = dict(torch=torch.__version__, processor=_processor(), threads=threads, rounds=asked.rounds, busy=asked.busy)
    report = about | {"load": os.getloadavg()[0]} | run(asked.rounds, asked.busy)
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
