"""vLLM with a model of Llama 8B's shape: tokens/s over this library, beside vLLM's own attention.

    python -m benchmarks.hosts.vllm_8b --graphs --trace azure_llm_2023_conv.csv --json graphs.json
    python -m benchmarks.hosts.vllm_8b --eager  --trace azure_llm_2023_conv.csv --json eager.json

Weights are random, in bfloat16.  Each attention has an engine in its own process.  All engines are loaded side by side
and take turns on one card, so the card's clocks affect all engines alike.

- `batch`: 64 requests of 128 new tokens each.
- `trace`: the first requests of a trace, with its lengths, all waiting from the start.

- `context`: 8 requests of 32768 prompt tokens and 8 new ones.
- `context-long`: these requests, with 256 more new tokens.

Figures leave out the first round, in which kernels are compiled.  `--shape` and `--options` change the model and the
engine; `vllm_ranks` does so for two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

ATTENTIONS = ["paged_attn", "FLASH_ATTN", "TRITON_ATTN"]
SHAPE = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, hidden_size=4096,
    intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu",
    tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2,
)  # fmt: skip
PROMPTS, NEW = [700, 33, 1, 250] * 16, 128
CONTEXTS, SOON, MORE = [32768] * 8, 8, 256  # prompt tokens, and new tokens of `context` and of `context-long` beyond it
WORKLOADS = ["batch", "trace", "context", "context-long"]
LONGEST = 8192
# Decode steps are captured whole, other steps in the parts between attention.
GRAPHS: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, 129, 16), 256, 512]}


# ---- an engine, in a process of its own ------------------------------------------------------------


def answering() -> Callable[[Any], None]:
    """Return a function that writes a line of JSON to standard output; all other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda what: print(json.dumps(what), file=answers, flush=True)


def engine(args: argparse.Namespace) -> None:
    """Load the model, then run each workload named on standard input; write a JSON line after the load and each run."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
                      VLLM_USE_FLASHINFER_SAMPLER="0", TOKENIZERS_PARALLELISM="false",
                      VLLM_PLUGINS="paged_attn")  # fmt: skip
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # one line of the log tells which kernels were prepared
    answer = answering()
    began = time.perf_counter()
    import torch
    from vllm import LLM, SamplingParams
    from vllm import __version__ as version

    backend = args.engine
    if backend == "paged_attn":
        from paged_attn.integrations.vllm import register

        backend = register()
    options: dict[str, Any] = {"enforce_eager": True}
    if args.graphs:
        options = {"compilation_config": GRAPHS | ({"mode": 0} if args.no_compile else {})}
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(**llm_options(folder, args, backend, options))
        llm.apply_model(reinitialise)
    work = workloads(args)
    answer(dict(vllm=version, torch=torch.__version__, device=torch.cuda.get_device_name(),
                loaded=round(time.perf_counter() - began, 1)))  # fmt: skip
    for line in sys.stdin:
        asked = work[line.strip()]
        prompts = [{"prompt_token_ids": tokens} for tokens, _ in asked]
        sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in asked]
        torch.cuda.synchronize()
        began = time.perf_counter()
        outs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        answer(dict(seconds=seconds, tokens=[list(out.outputs[0].token_ids) for out in outs]))


def llm_options(folder: str, args: argparse.Namespace, backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write the model's configuration into a folder; return keywords of vllm.LLM."""
    Path(folder, "config.json").write_text(json.dumps(SHAPE | args.shape))
    Path(folder, "generation_config.json").write_text(json.dumps(dict(bos_token_id=1, eos_token_id=2)))
    return dict(
        model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=LONGEST, dtype="bfloat16",
        max_num_seqs=args.seqs, max_num_batched_tokens=args.tokens, enable_prefix_caching=False, seed=0,
        gpu_memory_utilization=0.2, kv_cache_memory_bytes=int(args.kv_gib * 2**30), disable_log_stats=True,
        kv_cache_dtype=args.kv_dtype, attention_config={"backend": backend},
    ) | {**options} | args.options  # fmt: skip


def reinitialise(model: Any) -> None:
    """Give the model weights of a usual initialisation, equal for all engines; vLLM's random weights are smaller."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(1)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.02, generator=generator)
        else:
            weight.data.fill_(1.0)


def workloads(args: argparse.Namespace) -> dict[str, list[tuple[list[int], int]]]:
    """Return (prompt, number of new tokens) of each request, by workload."""
    import torch

    from benchmarks.traces import requests

    generator = torch.Generator().manual_seed(0)
    vocabulary = (SHAPE | args.shape)["vocab_size"]

    def prompt(length: int) -> list[int]:
        return torch.randint(10, vocabulary, (length,), generator=generator).tolist()

    cut = itertools.islice(requests(args.trace), args.requests)
    lengths = [(max(1, min(r.prompt, LONGEST - 1024)), max(1, min(r.output, 512))) for r in cut]
    found = {
        "batch": [(prompt(length), NEW) for length in PROMPTS],
        "trace": [(prompt(length), new) for length, new in lengths],
        "context": [(prompt(length), SOON) for length in CONTEXTS],
    }
    return found | {"context-long": [(tokens, new + MORE) for tokens, new in found["context"]]}


# ---- all engines -----------------------------------------------------------------------------------


class Engine:
    """An engine's process, and the lines that it answers."""

    def __init__(
        self, attention: str, arguments: list[str], log: Path, module: str = "benchmarks.hosts.vllm_8b",
        **environment: str,
    ) -> None:  # fmt: skip
        self.attention, self.log = attention, log
        command = [sys.executable, "-m", module, "--engine", attention, *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
            env=os.environ | environment, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """End the process and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def read(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer.  If it is late, end the process and return None."""
        stream: IO[str] = self.process.stdout  # type: ignore[assignment]
        got: list[str] = []
        reader = threading.Thread(target=lambda: got.append(stream.readline()), daemon=True)
        reader.start()
        reader.join(max(seconds, 1.0))
        if got and got[0].strip():
            return dict(json.loads(got[0]))
        self.close()
        print(f"{self.attention}: no answer; its log ends in\n{self.log.read_text()[-3000:]}", flush=True)
        return None

    def ask(self, workload: str, seconds: float) -> dict[str, Any] | None:
        stream: IO[str] = self.process.stdin  # type: ignore[assignment]
        print(workload, file=stream, flush=True)
        return self.read(seconds)


def room(engines: int) -> float:
    """Return GiB of cache for each of several engines side by side."""
    import torch

    free = torch.cuda.mem_get_info()[0] / 2**30
    return max(1.0, min(24.0, 0.92 * free / engines - 22))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=ATTENTIONS, help="paged_attn, or a backend of vLLM's")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--eager", dest="graphs", action="store_false", default=True)
    kind.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs, as vLLM does by itself")
    parser.add_argument("--no-compile", action="store_true", help="with --graphs: graphs of decodes alone, uncompiled")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["batch", "trace"])
    parser.add_argument("--trace", type=Path, help="default: lengths as in Azure's conversation trace")
    parser.add_argument("--requests", type=int, default=128, help="of the trace")
    parser.add_argument("--rounds", type=int, default=3, help="counted ones")
    parser.add_argument("--seqs", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step, at most")
    parser.add_argument("--kv-gib", type=float, default=0.0, help="of each engine's cache; 0: what there is room for")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--shape", type=json.loads, default={}, help="changes of the model's configuration, as JSON")
    parser.add_argument("--options", type=json.loads, default={}, help="more keywords of vllm.LLM, as JSON")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which what is known is written")
    parser.add_argument("--loading", type=float, default=300.0, help="seconds after which an engine is left out")
    parser.add_argument("--logs", type=Path, help="a folder for what engines print; by default a temporary one")
    parser.add_argument("--json", type=Path, help="written anew after every workload")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.no_compile:
        GRAPHS["cudagraph_mode"] = "FULL_DECODE_ONLY"
    if args.engine:
        return engine(args)
    began = time.monotonic()

    def left() -> float:
        return args.seconds - (time.monotonic() - began)

    passed = sys.argv[1:]
    if not args.kv_gib:
        passed += ["--kv-gib", f"{room(len(args.attention)):.1f}"]
    folder = args.logs or Path(tempfile.mkdtemp())
    os.makedirs(folder, exist_ok=True)
    engines = [Engine(name, passed, folder / f"{name}.log") for name in args.attention]
    loaded = {x.attention: x.read(min(left(), left() - args.seconds + args.loading)) for x in engines}
    ready = {x.attention: [y for y in x.log.read_text().splitlines() if "paged_attn: " in y] for x in engines}
    print(json.dumps(dict(loaded=loaded, ready=ready)), flush=True)
    engines = [x for x in engines if loaded[x.attention]]
    results: dict[str, dict[str, list[float]]] = {name: {} for name in args.workloads}
    tokens: dict[str, dict[str, Any]] = {name: {} for name in args.workloads}

    def known() -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
        """Return (median rates, shares of equal tokens) so far; also write them to the file, for a stopped run."""
        median = {name: {x: sorted(rates)[len(rates) // 2] for x, rates in of.items()} for name, of in results.items()}
        equal = {name: agreement(of) for name, of in tokens.items()}
        if args.json:
            setting = {key: str(value) for key, value in vars(args).items()}
            said = dict(setting=setting, loaded=loaded, ready=ready, rates=results, median=median, equal=equal)
            args.json.write_text(json.dumps(said, indent=1))
        return median, equal

    for turn, name in itertools.product(range(args.rounds + 1), args.workloads):
        for x in list(engines) if left() > 10 else ():
            if (got := x.ask(name, max(left(), 1.0))) is None:
                engines.remove(x)
                continue
            tokens[name][x.attention] = got["tokens"]
            if turn:
                made = sum(map(len, got["tokens"]))
                results[name].setdefault(x.attention, []).append(made / got["seconds"])
            print(f"{name} round {turn} {x.attention:12} {got['seconds']:7.2f} s", flush=True)
        known()
    summary, equal = known()
    for name, of in summary.items():
        for attention, rate in of.items():
            print(f"{name:6} {'graphs' if args.graphs else 'eager':6} {attention:12} {rate:8.0f} new tokens/s")
        print(f"{name:6} tokens as paged_attn's, and requests that begin so: {equal[name]}")
    for x in engines:
        x.close()


def agreement(of: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return, for each other attention, the share of equal tokens and of requests with an equal first token."""
    ours = of.get("paged_attn")
    if ours is None:
        return {}
    flat = list(itertools.chain(*ours))

    def same(theirs: list[list[int]]) -> tuple[float, float]:
        equal = sum(a == b for a, b in zip(flat, itertools.chain(*theirs), strict=True))
        first = sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))
        return round(equal / len(flat), 4), round(first / len(ours), 4)

    return {name: same(tokens) for name, tokens in of.items() if name != "paged_attn"}


if __name__ == "__main__":
    main()
