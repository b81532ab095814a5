"""`paged-attn demo`: serve a traffic mix, and check every step."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from paged_attn.cli import command_options
from paged_attn.cli.command_options import FP8, HALF, LAYOUTS, positive, torch_dtype
from paged_attn.cli.printing import console, here, name_of, print_json

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from paged_attn.serving.demo import ServedStep, Sizes
    from paged_attn.serving.trace import Request

# Defaults: a few requests of a small model on a CPU, hundreds of requests on a GPU.  The cache has `cache` slots, or
# more if requests need them.  All lengths are scaled down to prompts of about `mean` tokens on average; None: unscaled.
CPU: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=64, dtype="float32", layers=1, requests=24, budget=64)
CPU |= dict(max_seqs=16, cache=512, mean=40, step_seconds=0.25, checked=0, bucket=1)
GPU: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", layers=2, requests=512, budget=4096)
GPU |= dict(max_seqs=256, cache=3 * 2**16, mean=None, step_seconds=0.2, checked=2, bucket=1024)
above_0 = click.FloatRange(0, min_open=True)


@click.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="An Azure CSV or Mooncake JSONL.")
@click.option("--requests", type=positive, help="How many requests to serve.  [GPU 512, CPU 24]")
@click.option("--scale", type=above_0, help="Divide all lengths by this.  [GPU 1, CPU: fits]")
@click.option("--step-seconds", type=above_0, help="Trace time of a step.  [GPU .2, CPU .25]")
@click.option("--heads", type=positive, help="Query heads.  [GPU 32, CPU 4]")
@click.option("--kv-heads", type=positive, help="Key and value heads.  [GPU 8, CPU 2]")
@click.option("--head-dim", type=click.IntRange(1, 512), help="[GPU 128, CPU 64]")
@click.option("--layers", type=positive, help="[GPU 2, CPU 1]")
@click.option("--dtype", type=command_options.Dtype(HALF), help="Of q, k, v.  [GPU bfloat16, CPU float32]")
@click.option("--kv-dtype", type=command_options.Dtype(FP8), help="Of the cache.  [as --dtype]")
@click.option("--layout", type=click.Choice(LAYOUTS), default="NHD", show_default=True, help="Of the cache.")
@click.option("--page-size", type=positive, default=16, show_default=True, help="Tokens in a page.")
@click.option("--pages", type=positive, help="Pages in the cache.  [room for 196608 tokens, CPU 512]")
@click.option("--budget", type=positive, help="Tokens in a step.  [GPU 4096, CPU 64]")
@click.option("--max-seqs", type=positive, help="Sequences in a step.  [GPU 256, CPU 16]")
@click.option(
    "--checked", type=click.IntRange(0), help="Sequences of a step to check, over all layers, 0 = all.  [GPU 2]"
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--processes", type=click.IntRange(0), help="Processes that compile first, 0 = none.  [one a core]")
@click.option("--output", type=click.Path(dir_okay=False), default="outputs/demo.png", show_default=True, help="A PNG.")
@command_options.as_json
def demo(as_json: bool, **given: Any) -> None:
    """Serve a traffic mix over a paged cache, and check every step against the reference.

    Requests arrive as in a trace, by default one drawn from the distributions of Azure's conversation trace.  Prompts
    are prefilled in chunks beside decodes of other requests.  Kernels are compiled first, in parallel.  Exit status 1
    if any step differs.
    """
    output = Path(given.pop("output"))
    _check_output(output)
    from paged_attn.serving import report
    from paged_attn.serving.demo import TOLERANCES, serve
    from paged_attn.serving.meter import measured_ceilings

    people = console(as_json)
    device = here()
    processes = given.pop("processes")
    chosen = (CPU if device.type == "cpu" else GPU) | {
        name: value for name, value in given.items() if value is not None
    }
    requests = _requests(chosen, people)
    sizes = _sizes(chosen, requests)
    _compile(requests, sizes, device, processes, people)
    steps = list(_watched(serve(requests, sizes, device), len(requests), people))
    tolerance = TOLERANCES[sizes.dtype]
    ceilings = measured_ceilings(device) if device.type == "cuda" else None
    report.plot(steps, sizes, f"{_describe(sizes)}, {name_of(device)}", output)
    wrong = [number for number, step in enumerate(steps, 1) if not step.outcome.within(tolerance)]
    if as_json:
        about = dict(device=name_of(device), served=_describe(sizes), requests=len(requests), picture=str(output))
        print_json(about | report.summary(steps, sizes, tolerance, ceilings) | dict(wrong_steps=wrong, ok=not wrong))
    else:
        people.print(report.table(steps, sizes, tolerance, ceilings))
        people.print(f"[bold]picture[/]             {output}")
    if wrong:
        people.print(
            f"[bold red]{len(wrong)} of {len(steps)} steps differ from the reference[/], first step {wrong[0]}"
        )
        sys.exit(1)
    people.print(f"[bold green]all {len(steps)} steps agree with the reference[/]")


def _check_output(path: Path) -> None:
    """Check that the picture can be written, before minutes are spent on the run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("the picture needs matplotlib: pip install matplotlib")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise click.UsageError(f"--output is {path}, but {folder} is no folder that can be written to")


def _requests(chosen: dict[str, Any], people: Console) -> list[Request]:
    """Return the first requests of the trace, with lengths scaled as asked or to suit the device; print a line."""
    from paged_attn.serving import trace

    path, wanted = chosen.get("trace"), chosen["requests"]
    try:
        source = trace.read(path) if path else trace.CONVERSATION.requests(chosen["seed"])
        requests = list(itertools.islice(source, wanted))
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    mean = sum(request.prompt for request in requests) / len(requests)
    scale = chosen.get("scale") or max(1.0, round(mean / chosen["mean"]) if chosen["mean"] else 1.0)
    divided = f", all lengths divided by {scale:g}" if scale != 1 else ""
    people.print(f"{len(requests)} requests of {path or 'a synthetic conversation trace'}{divided}")
    return list(trace.shrink(requests, scale))


def _sizes(chosen: dict[str, Any], requests: list[Request]) -> Sizes:
    """Return the sizes that the options ask for.

    Raises UsageError if heads do not fit each other or the layout, or if the scheduler cannot serve the requests.
    """
    from paged_attn.serving.demo import Sizes

    dtype = torch_dtype(chosen["dtype"])
    kv_dtype = torch_dtype(chosen["kv_dtype"]) if "kv_dtype" in chosen else dtype
    command_options.check_heads(chosen["heads"], chosen["kv_heads"])
    command_options.check_packed(chosen["layout"], chosen["head_dim"], kv_dtype)
    page_size = chosen["page_size"]
    longest = max(request.prompt + request.output - 1 for request in requests)
    pages = max(-(-chosen["cache"] // page_size), -(-longest // page_size), chosen["max_seqs"])
    sizes = Sizes(
        heads=chosen["heads"],
        kv_heads=chosen["kv_heads"],
        head_dim=chosen["head_dim"],
        page_size=page_size,
        pages=chosen.get("pages") or pages,
        layers=chosen["layers"],
        dtype=dtype,
        kv_dtype=kv_dtype,
        layout=chosen["layout"],
        budget=chosen["budget"],
        max_seqs=chosen["max_seqs"],
        step_seconds=chosen["step_seconds"],
        checked=chosen["checked"] or None,
        seed=chosen["seed"],
        bucket=chosen["bucket"],
    )
    try:  # run the scheduler alone, so that it refuses sizes before anything is computed
        for step in sizes.planned(requests):
            step.scheduler.complete(step.parts)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return sizes


def _compile(
    requests: Iterable[Request], sizes: Sizes, device: torch.device, processes: int | None, people: Console
) -> None:
    """Compile the kernels of all steps in parallel processes, unless calls run on the CPU or `processes` is 0."""
    if device.type == "cpu" or processes == 0:
        return
    from paged_attn.serving.demo import prepare

    done = prepare(list(requests), sizes, device, processes)
    people.print(f"{done.kernels} kernels, {done.compiled} of them compiled now, in {done.seconds:.1f} s")


def _watched(steps: Iterator[ServedStep], requests: int, people: Console) -> Iterator[ServedStep]:
    """Yield the steps, and show progress: a live bar on a terminal, elsewhere a line every few seconds."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    tokens = 0
    shown = monotonic()
    columns = ("{task.description}", "{task.completed} of {task.total} requests", "{task.fields[made]}")
    with Progress(
        TextColumn(columns[0]), BarColumn(), *map(TextColumn, columns[1:]), TimeElapsedColumn(), console=people
    ) as bar:
        task = bar.add_task("serving", total=requests, made="")
        for count, step in enumerate(steps, 1):
            tokens += step.prefill_tokens + step.decode_tokens
            made = f"{tokens:,} tokens in {count:,} steps"
            bar.update(task, completed=step.finished, made=made)
            if not people.is_terminal and monotonic() - shown > 5:
                shown = monotonic()
                people.print(f"serving: {step.finished} of {requests} requests, {made}")
            yield step


def _describe(sizes: Sizes) -> str:
    dtype, kv_dtype = (str(t).removeprefix("torch.") for t in (sizes.dtype, sizes.kv_dtype))
    cache = f" over a {kv_dtype} cache" if kv_dtype != dtype else ""
    return (
        f"{sizes.heads} heads on {sizes.kv_heads} of {sizes.head_dim}, {dtype}{cache}, "
        f"pages of {sizes.page_size} ({sizes.layout}), {sizes.layers} layer{'s' * (sizes.layers > 1)}"
    )
