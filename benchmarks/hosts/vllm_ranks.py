"""vLLM on two GPUs: tensor parallelism and decode context parallelism (DCP) over this library, beside FLASH_ATTN.

    python -m benchmarks.hosts.vllm_ranks --json ranks.json --logs logs

Part `tokens`: greedy tokens of tiny random models in engines on one GPU and on two, each in a process of its own.  A
line is printed for each comparison of two engines.

Part `rates`: new tokens/s of two models of random weights, each over CUSTOM and over FLASH_ATTN.  These engines load
beside those of part `tokens`.  They are measured in turns, after all of those have ended.

Under DCP both backends are measured with vLLM's model runner V1, which captures decodes with a context.  CUSTOM is
measured in V2, too.  The runs `dcp1-flash-graphs` (V2) and `dcp1-flash-graphs-v1` have wrong tokens.  By its source, V2
captures decodes of FLASH_ATTN with an empty context, and replays attend to no context; why V1 differs is not known.

All-reduce: NCCL without NVLink multicast.  vLLM's own all-reduce, and those of symmetric memory, are off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hosts.vllm_8b import MORE, Engine, agreement, answering

MODULE = "benchmarks.hosts.vllm_ranks"
QUIET = {  # no NVLink multicast in any process, and one way of all-reduce for all engines
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_USE_NCCL_SYMM_MEM": "0",
    "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": "paged_attn", "VLLM_LOGGING_LEVEL": "INFO",
}  # fmt: skip
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
WORKERS = {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
TWO = WORKERS | {"tensor_parallel_size": 2}


def dcp(stripe: int = 1) -> dict[str, Any]:
    """Options of vllm.LLM: two ranks share the keys of each KV head, in stripes of so many positions."""
    return TWO | {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": stripe}


# ---- tokens of tiny models -------------------------------------------------------------------------

TINY = {"gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 256 << 20}
GRAPHS = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 32, 64]}}
FP16, BF16 = {"dtype": "float16"}, {"dtype": "bfloat16"}
FORMATS = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")


class Run(NamedTuple):
    """An engine of a tiny model (tests/integrations/vllm_tiny.py), or the model in transformers."""

    gpus: str
    model: str
    attention: str  # paged_attn, a backend of vLLM's, or transformers: dense attention in float32 on the CPU
    options: Mapping[str, Any] = {}  # of vllm.LLM, beside TINY
    like: tuple[str, ...] = ()  # runs whose tokens are expected
    environment: Mapping[str, str] = {}


def short(kind: str) -> str:
    """Return int8, fp8 or int4."""
    return kind.partition("_")[0]


def of_formats(suffix: str, gpus: str, dtype: Mapping[str, Any], dense: Mapping[str, str]) -> dict[str, Run]:
    """Return runs over caches with scales by token: CUSTOM and vLLM's Triton kernels, on one GPU.

    dense: format -> run whose tokens both should have.
    """
    runs = {}
    for kind in FORMATS:
        name, options = short(kind) + suffix, WORKERS | {"kv_cache_dtype": kind} | {**dtype}
        like = tuple(dense[kind] for _ in range(kind in dense))
        runs[f"{name}-triton"] = Run(gpus, "llama_wide", "TRITON_ATTN", options, like)
        runs[name] = Run(gpus, "llama_wide", "paged_attn", options, (*like, f"{name}-triton"))
    return runs


# vLLM's rotation before int4 has no operator for CPUs
DENSE = {kind: f"dense-{short(kind)}" for kind in FORMATS if "int4" not in kind}
ONE_HEAD, LATENT = ("dense-one", "one-head"), ("dense-latent", "one-latent")
RUNS: dict[str, Run] = {
    "dense": Run("", "llama", "transformers"),
    "dense-one": Run("", "llama_one_head", "transformers"),
    "dense-latent": Run("", "deepseek", "transformers"),
    **{name: Run("", "llama_wide", "transformers", {"kv_cache_dtype": kind}) for kind, name in DENSE.items()},
    "one": Run("0", "llama", "paged_attn", WORKERS, ("dense",)),
    "one-head": Run("1", "llama_one_head", "paged_attn", WORKERS, ("dense-one",)),
    "one-latent": Run("0", "deepseek", "paged_attn", WORKERS | FP16, ("dense-latent",)),
    "one-head-bf16": Run("1", "llama_one_head", "paged_attn", WORKERS | BF16),
    "tp2-eager": Run("0,1", "llama", "paged_attn", TWO, ("dense", "one")),
    "tp2-graphs": Run("0,1", "llama", "paged_attn", TWO | GRAPHS, ("dense", "one")),
    "dcp1-eager": Run("0,1", "llama_one_head", "paged_attn", dcp(), ONE_HEAD),
    "dcp16-eager": Run("0,1", "llama_one_head", "paged_attn", dcp(16), ONE_HEAD),
    "dcp1-graphs": Run("0,1", "llama_one_head", "paged_attn", dcp() | GRAPHS, ONE_HEAD),
    "dcp16-graphs-v1": Run("0,1", "llama_one_head", "paged_attn", dcp(16) | GRAPHS, ONE_HEAD, V1),
    "latent-dcp1-eager": Run("0,1", "deepseek", "paged_attn", dcp() | FP16, LATENT, V1),
    "latent-dcp16-graphs": Run("0,1", "deepseek", "paged_attn", dcp(16) | FP16 | GRAPHS, LATENT, V1),
    **of_formats("", "0", {}, DENSE),
    **of_formats("-bf16", "1", BF16, {}),
    "dcp1-bf16-graphs": Run("0,1", "llama_one_head", "paged_attn", dcp() | BF16 | GRAPHS, ("one-head-bf16",)),
    "dcp1-flash-eager": Run("0,1", "llama_one_head", "FLASH_ATTN", dcp() | BF16, ("one-head-bf16",)),
    "dcp1-flash-graphs": Run("0,1", "llama_one_head", "FLASH_ATTN", dcp() | BF16 | GRAPHS, ("dcp1-flash-eager",)),
    "dcp1-flash-graphs-v1": Run(
        "0,1", "llama_one_head", "FLASH_ATTN", dcp() | BF16 | GRAPHS, ("dcp1-flash-eager",), V1
    ),
}


def one(name: str) -> None:
    """Make an engine, write a line of JSON with its tokens, and end at once: shutting down may take minutes."""
    answer = answering()
    from tests.integrations import vllm_tiny

    run, began = RUNS[name], time.perf_counter()
    try:
        if run.attention == "transformers":
            found = vllm_tiny.dense(run.model, run.options.get("kv_cache_dtype", "auto"))
        else:
            found = vllm_tiny.generate(run.model, run.attention, False, **TINY | {**run.options})
    except BaseException:
        found = dict(error=traceback.format_exc()[-1500:])
    answer(found | dict(seconds=round(time.perf_counter() - began, 1)))
    os._exit(0)


class Tokens:
    """Runs side by side, each in a process, and what is known so far."""

    def __init__(self, names: list[str], logs: Path, deadline: float, beside: int, write: Any) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.compared: dict[str, dict[str, Any]] = {}
        self._logs, self._deadline, self._write = logs, deadline, write
        self._lock, self._places = threading.Lock(), threading.Semaphore(beside)
        self._engines: list[Engine] = []
        self._threads = [threading.Thread(target=self._run, args=(name,), daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(max(self._deadline - time.monotonic(), 0) + 5)

    def _run(self, name: str) -> None:
        with self._places:
            left = self._deadline - time.monotonic()
            if left < 5:
                return self._tell(name, dict(error="not run"))
            log, run = self._logs / f"tokens-{name}.log", RUNS[name]
            process = Engine(name, [], log, MODULE, **environment(run.gpus, True, run.environment))
            self._engines.append(process)
            found = process.read(left)
            process.close()
        self._tell(name, found or dict(error="no answer"))

    def _tell(self, name: str, found: dict[str, Any]) -> None:
        with self._lock:
            self.found[name] = found
            if "error" in found:
                print(f"tokens {name}: FAILED: {found['error']}", flush=True)
            known = {run: of["tokens"] for run, of in self.found.items() if "tokens" in of}
            pairs = [(run, other) for run in known for other in RUNS[run].like if other in known]
            for run, other in (pair for pair in pairs if name in pair):
                self.compared[f"{run} like {other}"] = of = compared(known[run], known[other])
                print(f"tokens {run} like {other}: {of}", flush=True)
            self._write()

    def close(self) -> None:
        for x in self._engines:
            x.close()

    def summary(self) -> Iterator[str]:
        differing = {pair: of for pair, of in self.compared.items() if of["first_differing"]}
        failed = [name for name, of in self.found.items() if "error" in of]
        pairs = len(self.compared)
        yield f"tokens: {pairs - len(differing)} of {pairs} comparisons equal; failed: {failed}"
        for pair, of in differing.items():
            yield f"  {pair}: {of}"


def compared(mine: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Return how many prompts have equal tokens, and the first position that differs in each other prompt."""
    pairs = list(zip(mine, theirs, strict=True))
    differ = {i: next(p for p, (x, y) in enumerate(zip(a, b)) if x != y) for i, (a, b) in enumerate(pairs) if a != b}
    return dict(equal=f"{len(pairs) - len(differ)} of {len(pairs)}", first_differing=differ)


# ---- rates -----------------------------------------------------------------------------------------

DECODES = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # no torch.compile, graphs of decodes alone
SHAPE_70B = dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=8)
SHAPE_ONE_HEAD = dict(
    hidden_size=4096, intermediate_size=8192, num_attention_heads=64, num_key_value_heads=1, num_hidden_layers=16,
    vocab_size=32768,
)  # fmt: skip


class Rate(NamedTuple):
    """A model whose new tokens/s are measured."""

    shape: dict[str, Any]
    options: dict[str, Any]
    workloads: tuple[str, ...]
    kv_gib: float  # of each GPU's cache
    seqs: int
    tokens: int  # of a step, at most
    sizes: tuple[int, ...]  # captured batches
    engines: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, Any]]]  # -> (attention, environment, options)


RATES = {
    "tp2": Rate(
        SHAPE_70B, TWO, ("batch",), 8, 64, 4096, (1, 2, 4, 8, 16, 32, 48, 64),
        {"CUSTOM": ("paged_attn", {}, {}), "FLASH_ATTN": ("FLASH_ATTN", {}, {})},
    ),
    "dcp2": Rate(
        SHAPE_ONE_HEAD, dcp() | {"max_model_len": 33280, "enable_prefix_caching": True}, ("context", "context-long"),
        4, 8, 8192, (1, 2, 4, 8),
        {
            "CUSTOM": ("paged_attn", V1, {}),
            "FLASH_ATTN": ("FLASH_ATTN", V1, {}),
            "FLASH_ATTN, a2a": ("FLASH_ATTN", V1, {"dcp_comm_backend": "a2a"}),
            "CUSTOM, runner V2": ("paged_attn", {}, {}),
        },
    ),
}  # fmt: skip


def arguments(rate: Rate, label: str, compile: bool) -> list[str]:
    """Return the command line of an engine, for benchmarks.hosts.vllm_8b."""
    graphs = {"cudagraph_capture_sizes": list(rate.sizes)} | ({} if compile else DECODES)
    options = rate.options | {"compilation_config": graphs, "gpu_memory_utilization": 0.05, **rate.engines[label][2]}
    return [
        "--graphs", "--shape", json.dumps(rate.shape), "--options", json.dumps(options), "--kv-gib", str(rate.kv_gib),
        "--seqs", str(rate.seqs), "--tokens", str(rate.tokens), "--requests", "1",
    ]  # fmt: skip


class Rates:
    """Engines that load side by side and are measured in turns."""

    def __init__(self, names: list[str], logs: Path, compile: bool, write: Any) -> None:
        self.seconds: dict[str, dict[str, list[float]]] = {}  # model -> engine and workload -> seconds of each round
        self.rates: dict[str, dict[str, list[float]]] = {}  # model -> engine -> new tokens/s of each counted round
        self.equal: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}
        self._write, self._began = write, time.monotonic()
        self._engines: dict[str, dict[str, Engine]] = {}
        for name in names:
            for label, (attention, more, _) in RATES[name].engines.items():
                log = logs / f"rate-{name}-{label.replace(', ', '-').replace(' ', '-')}.log"
                words = arguments(RATES[name], label, compile)
                made = Engine(attention, words, log, **environment("0,1", False, more))
                self._engines.setdefault(name, {})[label] = made

    def load(self, limit: float) -> None:
        """Wait for all engines; leave out those that are not ready `limit` seconds after their start."""
        for name, engines in self._engines.items():
            for label, x in list(engines.items()):
                got = x.read(limit - (time.monotonic() - self._began))
                told = [y for y in x.log.read_text().splitlines() if "paged_attn: " in y or "Model Runner" in y]
                self.loaded[f"{name} {label}"] = (got or {}) | dict(log=told)
                print(f"rates {name} {label}: {got}", *told, sep="\n  ", flush=True)
                if got is None:
                    del engines[label]

    def measure(self, rounds: int, deadline: float) -> None:
        """Run every workload of every engine in turns.  The first round is not counted."""
        for name, engines in self._engines.items():
            tokens: dict[str, dict[str, Any]] = {}
            for turn, (label, x) in itertools.product(range(rounds + 1), list(engines.items())):
                if label not in engines:
                    continue
                took: dict[str, float] = {}
                made = requests = 0
                for workload in RATES[name].workloads:
                    left = deadline - time.monotonic()
                    got = x.ask(workload, min(left, 120)) if left > 3 else None
                    if got is None:
                        engines.pop(label, None)
                        break
                    took[workload] = got["seconds"]
                    self.seconds.setdefault(name, {}).setdefault(f"{label} {workload}", []).append(got["seconds"])
                    made, requests = sum(map(len, got["tokens"])), len(got["tokens"])
                    tokens.setdefault(workload, {})["paged_attn" if label == "CUSTOM" else label] = got["tokens"]
                else:
                    rate = made / took["batch"] if "batch" in took else decode_rate(took, requests)
                    if turn:
                        self.rates.setdefault(name, {}).setdefault(label, []).append(rate)
                    print(f"rates {name} round {turn} {label:20} {rate:8.0f} new tokens/s {took}", flush=True)
                self._write()
            self.equal[name] = {workload: agreement(of) for workload, of in tokens.items()}
            print(f"rates {name}: tokens as CUSTOM's, and requests that begin so: {self.equal[name]}", flush=True)
            for x in engines.values():
                x.close()
            self._write()

    def summary(self) -> Iterator[str]:
        for name, of in self.rates.items():
            median = {label: sorted(rates)[len(rates) // 2] for label, rates in of.items()}
            base = median.get("FLASH_ATTN")
            for label, rate in median.items():
                over = f"{rate / base:5.2f}x FLASH_ATTN" if base else ""
                yield f"{name:5} {label:20} {rate:8.0f} new tokens/s {over}"

    def close(self) -> None:
        for engines in self._engines.values():
            for x in engines.values():
                x.close()


def decode_rate(took: Mapping[str, float], requests: int) -> float:
    """Return new tokens/s of decodes: both workloads read cached prompts, and one has MORE tokens a request."""
    return requests * MORE / (took["context-long"] - took["context"])


# ---- both ------------------------------------------------------------------------------------------


def environment(gpus: str, tiny: bool, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine.  Engines of tiny models do not compile kernels ahead."""
    return QUIET | {"CUDA_VISIBLE_DEVICES": gpus} | ({"PAGED_ATTN_PREPARE": "0"} if tiny else {}) | {**more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["tokens", "rates"], default=["tokens", "rates"])
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), default=list(RUNS), help="of part tokens")
    parser.add_argument("--beside", type=int, default=16, help="engines of part tokens at a time")
    parser.add_argument("--models", nargs="*", choices=list(RATES), default=list(RATES), help="of part rates")
    parser.add_argument("--compile", action="store_true", help="torch.compile and graphs of all steps, in part rates")
    parser.add_argument("--rounds", type=int, default=3, help="counted ones")
    parser.add_argument("--seconds", type=float, default=420.0, help="after which what is known is written")
    parser.add_argument("--tokens-seconds", type=float, default=240.0, help="after which part tokens ends")
    parser.add_argument("--loading", type=float, default=240.0, help="seconds of loading engines of part rates")
    parser.add_argument("--logs", type=Path, help="a folder for what engines print; by default a temporary one")
    parser.add_argument("--json", type=Path, help="written anew after every result")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return one(args.engine)
    began = time.monotonic()
    logs = args.logs or Path(tempfile.mkdtemp())
    os.makedirs(logs, exist_ok=True)
    told: dict[str, Any] = dict(setting={key: str(value) for key, value in vars(args).items()})

    def write() -> None:
        if args.json:
            args.json.write_text(json.dumps(told, indent=1))

    rates = Rates(args.models if "rates" in args.parts else [], logs, args.compile, write)
    told |= dict(rates=rates.rates, seconds=rates.seconds, equal=rates.equal, loaded=rates.loaded)
    closed: list[Any] = [rates]
    try:
        limit = min(args.seconds, args.tokens_seconds)
        tokens = Tokens(args.runs if "tokens" in args.parts else [], logs, began + limit, args.beside, write)
        closed.append(tokens)
        told |= dict(compared=tokens.compared, tokens=tokens.found)
        tokens.join()
        print(f"tokens: done after {time.monotonic() - began:.0f} s", flush=True)
        rates.load(args.loading)
        rates.measure(args.rounds, began + args.seconds)
        print(*rates.summary(), *tokens.summary(), sep="\n", flush=True)
    finally:
        for part in closed:
            part.close()
        write()
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
