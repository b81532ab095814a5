"""Replay a slice of a trace through an engine with a random-weight model, over each attention backend in turn.

    python -m benchmarks serve --trace azure_llm_2023_conv.csv --output results
    paged-attn bench serve     # the same, from a checkout

Every backend gets the same engine, model, requests and cache; attention alone differs.  Without a GPU: --model tiny.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import paged_attn
from benchmarks import runner, traces
from benchmarks.serve import picture
from benchmarks.serve.backends import AGREE, BACKENDS, OURS, error_of
from benchmarks.serve.engine import Engine, Limits
from benchmarks.serve.model import SHAPES, Model
from benchmarks.serve.replay import figures, replay
from paged_attn.serving.trace import Request

WARM_REQUESTS, WARM_TOKENS = 32, 8
OF_FREE_MEMORY = 0.6  # the cache's share; the rest is for activations, graphs, and the keys that SDPA gathers


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; exit status 1 if the library itself failed."""
    options = parser().parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.model != "tiny":
        raise SystemExit("the benchmark needs a GPU: torch.cuda.is_available() is False")
    console = Console(highlight=False)
    output = options.output or runner.folder(runner.device_name())
    began = time.perf_counter()

    def say(text: str) -> None:
        console.print(f"{time.perf_counter() - began:6.1f} s  {text}", markup=False)

    report = run(options, device, say)
    runner.write(report, output)
    console.print(table(report))
    for name, reason in report["skipped"].items():
        console.print(f"{name}: {reason}", style="dim", markup=False)
    if report["engines"]:
        picture.draw(report, output / "serve.png")
        say(f"picture: {output / 'serve.png'}")
    if OURS in report["skipped"]:
        raise SystemExit(f"{OURS} failed")


def run(options: argparse.Namespace, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all backends; return the report: settings, figures of each backend, reasons why backends were left out."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = replace(SHAPES[options.model], **({"layers": options.layers} if options.layers else {}))
    requests = chosen(options.trace, options.first, options.seconds, options.rate, options.requests)
    longest = max(request.prompt + request.output for request in requests)
    say(f"{len(requests)} requests in {requests[-1].arrival:.0f} s, {longest} tokens at most")
    if device.type == "cuda":
        # Between steps the host copies some thousand integers, which took several threads 20 times as long as one.
        torch.set_num_threads(1)
    if device.type == "cuda" and OURS in options.backends:
        done = paged_attn.prepare(
            heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, page_size=options.page_size,
            dtype=dtype, max_seqs=options.max_seqs, max_tokens=options.budget, max_seqlen=longest,
        )  # fmt: skip
        say(f"{done.kernels} kernels prepared, {done.compiled} of them compiled")
    model = Model(shape, dtype, device, longest, compiled=device.type == "cuda" and not options.eager)
    say(f"model of {shape.parameters / 1e9:.2f}e9 parameters")
    tokens = options.cache_tokens or _room(shape.bytes_per_token(dtype), device)
    prompts = _prompts(requests, shape.vocab)

    report: dict[str, Any] = {
        "suite": "serve", **runner.versions(), "model": {"name": options.model, **asdict(shape)},
        "dtype": str(dtype).removeprefix("torch."), "trace": traces.source(options.trace), "first": options.first,
        "trace_seconds": options.seconds, "rate": options.rate, "limit": options.limit, "budget": options.budget,
        "max_seqs": options.max_seqs, "page_size": options.page_size, "cache_tokens": tokens,
        "graphs": not options.no_graphs, "engines": {}, "skipped": {},
    }  # fmt: skip
    ours: list[list[int]] | None = None
    for name in options.backends:
        try:
            backend = BACKENDS[name](options.page_size, dtype)
            page_size = backend.page_size(options.page_size)
            error = error_of(backend, shape, page_size, dtype, device)
            if not error <= AGREE:  # true of NaN, too
                raise ValueError(f"differs from the reference: relative error {error:.2g}")
            limits = Limits(page_size, tokens // page_size, options.max_seqs, options.budget, longest, len(requests))
            engine = Engine(model, backend, limits, graphs=not options.no_graphs)
            say(f"{name}: {len(engine.graphs)} graphs")
            warm = [replace(r, arrival=0.0, output=min(r.output, WARM_TOKENS)) for r in requests[:WARM_REQUESTS]]
            engine.start(prompts[: len(warm)])
            replay(engine, warm, options.limit)
            engine.start(prompts)
            say(f"{name}: warm")
            record = replay(engine, requests, options.limit)
            made = engine.tokens([r.prompt for r in requests], [len(times) for times in record.times])
            ours = made if name == OURS else ours
            report["engines"][name] = {
                **figures(record), "page_size": page_size, "error": error, "graphs": len(engine.graphs),
                **(_agreement(made, ours) if ours is not None else {}),
            }  # fmt: skip
            say(f"{name}: {report['engines'][name]['new_tokens_per_second']:.0f} new tokens/s")
        except Exception as reason:  # a peer may fail in any way; the run goes on with the others
            text = "not installed" if isinstance(reason, ImportError) else type(reason).__name__
            report["skipped"][name] = f"{text}: {runner.first_line(reason)}"
            say(f"{name}: {report['skipped'][name]}")
        engine = None  # type: ignore[assignment]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return report


def chosen(path: Path | None, first: float, seconds: float, rate: float, most: int | None) -> list[Request]:
    """Return at most `most` requests of the trace, arriving `rate` times as fast as recorded.

    The requests are those from second `first` on, for `seconds` seconds of the trace.
    """
    reached = itertools.dropwhile(lambda r: r.arrival < first, traces.requests(path))
    some = itertools.takewhile(lambda r: r.arrival < first + seconds, reached)
    found = [replace(r, arrival=(r.arrival - first) / rate) for r in itertools.islice(some, most)]
    if not found:
        raise SystemExit(f"no request arrives between second {first:g} and {first + seconds:g} of the trace")
    return found


def table(report: dict[str, Any]) -> Table:
    """Return a table with a row for each backend."""
    columns = ("", "new tokens/s", "finished", "first token p50", "p99 ms", "between tokens p50", "p99 ms", "steps")
    rows = Table(*columns, box=None, pad_edge=False, padding=(0, 3, 0, 0), title=picture.title(report))
    for name, got in report["engines"].items():
        times = [1e3 * got[which][share] for which in ("first_token", "between_tokens") for share in ("p50", "p99")]
        shown = [f"{t:.1f}" for t in times]
        finished = f"{got['finished']} of {got['requests']}"
        rows.add_row(name, f"{got['new_tokens_per_second']:.0f}", finished, *shown, str(got["steps"]))
    return rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--trace", type=Path, help="Azure CSV or Mooncake JSON lines  [synthetic]")
    made.add_argument("--first", type=float, default=0.0, help="second of the trace to begin at  [0]")
    made.add_argument("--seconds", type=float, default=120.0, help="of the trace  [120]")
    made.add_argument("--rate", type=float, default=3.0, help="how much faster than in the trace requests come  [3]")
    made.add_argument("--requests", type=int, help="at most so many  [all of them]")
    made.add_argument("--limit", type=float, default=50.0, help="seconds for each backend  [50]")
    made.add_argument("--backends", type=_names, default=["paged_attn", "sdpa", "torch_varlen"], help=(
        f"some of {', '.join(BACKENDS)}, by commas  [paged_attn,sdpa,torch_varlen]"
    ))  # fmt: skip
    made.add_argument("--model", choices=list(SHAPES), default="llama-3.1-8b")
    made.add_argument("--layers", type=int, help="fewer or more than the model's")
    made.add_argument(
        "--budget", type=int, default=2048, help="tokens in a step: decodes and chunks of prompts  [2048]"
    )
    made.add_argument("--max-seqs", type=int, default=256, help="sequences in a step  [256]")
    made.add_argument("--page-size", type=int, default=16, help="where the backend takes it  [16]")
    made.add_argument("--cache-tokens", type=int, help="room for so many  [0.6 of what is free]")
    made.add_argument("--no-graphs", action="store_true", help="decodes without CUDA graphs")
    made.add_argument("--eager", action="store_true", help="nothing through torch.compile")
    made.add_argument("--output", type=Path, help="folder of serve.json and serve.png  [benchmarks/results/<gpu>]")
    return made


def _names(words: str) -> list[str]:
    names = [word.strip() for word in words.split(",") if word.strip()]
    for name in names:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"no backend {name!r}, only {', '.join(BACKENDS)}")
    return names


def _room(bytes_per_token: int, device: torch.device) -> int:
    if device.type == "cpu":
        return 4096
    torch.cuda.empty_cache()
    return int(OF_FREE_MEMORY * torch.cuda.mem_get_info()[0]) // bytes_per_token


def _prompts(requests: Sequence[Request], vocab: int) -> list[torch.Tensor]:
    """Return random tokens, with the trace's lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab, (request.prompt,), generator=generator) for request in requests]


def _agreement(made: list[list[int]], ours: list[list[int]]) -> dict[str, float]:
    """Return the share of first tokens equal to the library's; 16-bit logits may tie.

    Only requests count for which both backends have made a token; {} if there are none.
    """
    both = [(a[0], b[0]) for a, b in zip(made, ours) if a and b]
    return {"first_tokens_as_ours": sum(a == b for a, b in both) / len(both)} if both else {}


if __name__ == "__main__":
    main()
