"""The `paged-attn` command.  A verb is a function under `@main.command()`."""

from __future__ import annotations

import itertools
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any

try:
    import click
    import matplotlib  # noqa: F401  so that its absence is told here, too
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as missing:
    raise SystemExit(f"the paged-attn command needs {missing.name}: pip install 'paged-attn[cli]'") from None

import torch

import paged_attn
from paged_attn import selftest
from paged_attn.explain.explain import explain as explanation
from paged_attn.explain.question import question_of
from paged_attn.launching.backend import INTERPRET, device_of
from paged_attn.serving import report, trace
from paged_attn.serving.caches import LAYOUTS
from paged_attn.serving.demo import TOLERANCES, Sizes, Step, serve
from paged_attn.serving.meter import measured_ceilings

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

# What suits the device: a few requests of a small model in the interpreter, a traffic of hundreds on a GPU.
# cache: tokens that the cache holds.  mean: the mean prompt that the lengths are divided down to; None = as they are.
CPU = dict(heads=4, kv_heads=2, head_dim=64, dtype="float32", layers=1, requests=24, budget=64, max_seqs=16)
CPU |= dict(cache=512, mean=40, step_seconds=0.25, checked=0)
GPU = dict(heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", layers=4, requests=512, budget=4096, max_seqs=256)
GPU |= dict(cache=3 * 2**16, mean=None, step_seconds=0.2, checked=8)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(paged_attn.__version__, package_name="paged-attn")
def main() -> None:
    """Paged attention for LLM serving."""


@main.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="An Azure CSV or Mooncake JSONL.")
@click.option("--requests", type=click.IntRange(1), help="How many requests to serve.  [GPU 512, CPU 24]")
@click.option(
    "--scale", type=click.FloatRange(0, min_open=True), help="Divide all lengths by this.  [GPU 1, CPU: fits]"
)
@click.option(
    "--step-seconds", type=click.FloatRange(0, min_open=True), help="Trace time of a step.  [GPU .2, CPU .25]"
)
@click.option("--heads", type=click.IntRange(1), help="Query heads.  [GPU 32, CPU 4]")
@click.option("--kv-heads", type=click.IntRange(1), help="Key and value heads.  [GPU 8, CPU 2]")
@click.option("--head-dim", type=click.IntRange(1), help="[GPU 128, CPU 64]")
@click.option("--layers", type=click.IntRange(1), help="[GPU 4, CPU 1]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Of q, k, v.  [GPU bfloat16, CPU float32]")
@click.option("--kv-dtype", type=click.Choice(list(FP8)), help="Of the cache.  [as --dtype]")
@click.option("--layout", type=click.Choice(LAYOUTS), default="NHD", show_default=True, help="Of the cache.")
@click.option("--page-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens in a page.")
@click.option("--pages", type=click.IntRange(1), help="Pages in the cache.  [room for 196608 tokens, CPU 512]")
@click.option("--budget", type=click.IntRange(1), help="Tokens in a step.  [GPU 4096, CPU 64]")
@click.option("--max-seqs", type=click.IntRange(1), help="Sequences in a step.  [GPU 256, CPU 16]")
@click.option("--checked", type=click.IntRange(0), help="Sequences of a step to check, 0 = all.  [GPU 8, CPU 0]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False), default="outputs/demo.png", show_default=True, help="A PNG.")
def demo(**given: Any) -> None:
    """Serve a traffic mix over a paged cache, and check every step against the reference.

    Requests arrive as in a trace, by default one drawn from the distributions of Azure's conversation trace.  Prompts
    are prefilled in chunks beside the decodes of others.  Exit status 1 if any step differs.
    """
    console = Console(soft_wrap=True)
    device = _device()
    options = {
        **(CPU if device.type == "cpu" else GPU),
        **{name: value for name, value in given.items() if value is not None},
    }
    requests = _requests(options, console)
    try:
        sizes = _sizes(options, requests)
        steps = list(_watched(serve(requests, sizes, device), requests, console))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    tolerance = TOLERANCES[sizes.dtype]
    ceilings = measured_ceilings(device) if device.type == "cuda" else None
    console.print(report.table(steps, sizes, tolerance, ceilings))

    title = f"{_describe(sizes)}, {_name(device)}"
    report.plot(steps, sizes, title, Path(options["output"]))
    console.print(f"[bold]picture[/]             {options['output']}")
    wrong = [number for number, step in enumerate(steps, 1) if not step.outcome.within(tolerance)]
    if wrong:
        console.print(
            f"[bold red]{len(wrong)} of {len(steps)} steps differ from the reference[/], first step {wrong[0]}"
        )
        sys.exit(1)
    console.print(f"[bold green]all {len(steps)} steps agree with the reference[/]")


@main.command()
def check() -> None:
    """Test this installation on this device: a few calls against the reference.  Exit status 1 if one differs."""
    device = _device()
    table = Table("call", "largest error", "tolerance", "", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    failed = 0
    for name, error, tolerance in selftest.run(device):
        good = error <= tolerance
        failed += not good
        table.add_row(name, f"{error:.1e}", f"{tolerance:.0e}", "[green]ok[/]" if good else "[bold red]differs[/]")
    console = Console(soft_wrap=True)
    console.print(f"on {_name(device)}")
    console.print(table)
    if failed:
        sys.exit(1)


@main.command()
@click.option("--batch", type=click.IntRange(1), help="Sequences, where --queries and --keys name one length each.")
@click.option("--queries", default="1", show_default=True, help="Query tokens of each sequence: 1, or 1x2048,63x1.")
@click.option("--keys", default="4096", show_default=True, help="Keys of each, the call's own with them: 64x4096.")
@click.option("--heads", type=click.IntRange(1), default=32, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True, help="Key and value heads.")
@click.option("--head-dim", type=click.IntRange(1, 256), default=128, show_default=True)
@click.option("--page-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens in a page.")
@click.option("--dtype", type=click.Choice(list(DTYPES | FP8)), default="bfloat16", show_default=True, help="Of q.")
@click.option("--kv-dtype", type=click.Choice(list(DTYPES | FP8)), help="Of the cache.  [as --dtype]")
@click.option("--layout", type=click.Choice(LAYOUTS), default="NHD", show_default=True, help="Of the cache.")
@click.option("--window", type=(int, int), default=(-1, -1), help="Keys to the left and right; -1 = all.")
@click.option("--causal/--not-causal", default=True, show_default=True)
@click.option("--softcap", type=click.FloatRange(0), default=0.0)
@click.option("--alibi", is_flag=True, help="alibi_slopes are given.")
@click.option("--sinks", is_flag=True, help="sinks are given.")
@click.option("--qq-bias", type=click.IntRange(0), default=0, help="n of an [n, n] query-query bias.")
@click.option("--query-positions", is_flag=True, help="query_positions are given.")
@click.option("--score-mod", help="A user's function: package.module:function.")
@click.option("--score-mod-args", default="", help="Its arguments: float32,37 is a tensor and a number.")
@click.option("--new", is_flag=True, help="k_new and v_new are given.")
@click.option("--lse", is_flag=True, help="return_lse.")
@click.option("--batch-invariant", is_flag=True)
@click.option("--max-queries", type=click.IntRange(1), help="max_seqlen_q.  [the longest]")
@click.option("--max-keys", type=click.IntRange(1), help="max_seqlen_k, or what the page table holds.  [the longest]")
@click.option("--device", help="sm90, sm90:132 with its multiprocessors, or h100.  [this GPU, else h200]")
def explain(**given: Any) -> None:
    """What the library does for a call: kernels, tiles, cuts, and the least bytes, operations and time it can cost."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    types = DTYPES | FP8
    given |= dict(dtype=types[given["dtype"]], kv_dtype=types[given["kv_dtype"] or given["dtype"]])
    try:
        for name, text in explanation(question_of(**given)):
            table.add_row(name, text)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)  # a file has no width


@main.command()
def info() -> None:
    """Versions, the device, and what runs the kernels here."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold")
    for package in ("torch", "triton", "numpy"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "not installed"
        table.add_row(package, version)
    table.add_row("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    device = _device()
    facts = device_of(device)
    table.add_row("device", _name(device))
    if INTERPRET:
        table.add_row("kernels", "interpreted by Triton on the CPU: right, and slow")
    else:
        table.add_row("kernels", f"compiled by Triton for {facts.arch}, {facts.multiprocessors} multiprocessors")
    console = Console(soft_wrap=True)
    console.print(f"[bold]paged-attn[/] {paged_attn.__version__}")
    console.print(table)


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure against every peer installed, from a checkout, on a GPU: what `make bench` runs, with its options."""
    _benchmarks()(arguments)


def _benchmarks() -> Callable[[Sequence[str]], None]:
    """The benchmark of the checkout that this package lies in: its cases are those of the tests, which no wheel has."""
    checkout = Path(paged_attn.__file__).parents[1]
    if not (checkout / "benchmarks" / "__main__.py").exists():
        raise click.UsageError(
            "the benchmark is part of the repository, not of the package: run `make bench` in a clone"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    from benchmarks.__main__ import main as run

    return run


def _device() -> torch.device:
    """Where the kernels of this process run."""
    return torch.device("cpu" if INTERPRET else "cuda")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU, through Triton's interpreter"


def _requests(options: dict[str, Any], console: Console) -> list[trace.Request]:
    """The first requests of the trace, at the scale that was asked for or suits the device; says what they are."""
    path, wanted = options.get("trace"), options["requests"]
    try:
        source = trace.read(path) if path else trace.CONVERSATION.requests(options["seed"])
        requests = list(itertools.islice(source, wanted))
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    mean = sum(request.prompt for request in requests) / len(requests)
    scale = options.get("scale") or max(1.0, round(mean / options["mean"]) if options["mean"] else 1.0)
    divided = f", all lengths divided by {scale:g}" if scale != 1 else ""
    console.print(f"{len(requests)} requests of {path or 'a synthetic conversation trace'}{divided}")
    return list(trace.shrink(requests, scale))


def _sizes(options: dict[str, Any], requests: list[trace.Request]) -> Sizes:
    """The sizes that the options ask for, with a cache that holds the longest request."""
    page_size = options["page_size"]
    longest = max(request.prompt + request.output - 1 for request in requests)
    pages = max(-(-options["cache"] // page_size), -(-longest // page_size), options["max_seqs"])
    return Sizes(
        heads=options["heads"],
        kv_heads=options["kv_heads"],
        head_dim=options["head_dim"],
        page_size=page_size,
        pages=options.get("pages") or pages,
        layers=options["layers"],
        dtype=DTYPES[options["dtype"]],
        kv_dtype=FP8[options["kv_dtype"]] if "kv_dtype" in options else DTYPES[options["dtype"]],
        layout=options["layout"],
        budget=options["budget"],
        max_seqs=options["max_seqs"],
        step_seconds=options["step_seconds"],
        checked=options["checked"] or None,
        seed=options["seed"],
    )


def _describe(sizes: Sizes) -> str:
    dtype, kv_dtype = (str(t).removeprefix("torch.") for t in (sizes.dtype, sizes.kv_dtype))
    cache = f" over a {kv_dtype} cache" if kv_dtype != dtype else ""
    return (
        f"{sizes.heads} heads on {sizes.kv_heads} of {sizes.head_dim}, {dtype}{cache}, "
        f"pages of {sizes.page_size} ({sizes.layout}), {sizes.layers} layer{'s' * (sizes.layers > 1)}"
    )


def _watched(steps: Iterator[Step], requests: list[trace.Request], console: Console) -> Iterator[Step]:
    """The same steps, shown as they pass: a live bar on a terminal, a line now and then elsewhere."""
    tokens = finished = count = 0
    shown = monotonic()
    columns = ("{task.description}", "{task.completed} of {task.total} requests", "{task.fields[made]}")
    with Progress(
        TextColumn(columns[0]), BarColumn(), *map(TextColumn, columns[1:]), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("serving", total=len(requests), made="")
        for count, step in enumerate(steps, 1):
            tokens += step.prefill_tokens + step.decode_tokens
            finished = step.finished
            made = f"{tokens:,} tokens in {count:,} steps"
            bar.update(task, completed=finished, made=made)
            if not console.is_terminal and monotonic() - shown > 5:
                shown = monotonic()
                console.print(f"serving: {finished} of {len(requests)} requests, {made}")
            yield step
