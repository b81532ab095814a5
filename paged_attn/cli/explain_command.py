"""`paged-attn explain`: what the library does for a call, without making the call."""

from __future__ import annotations

from typing import Any

import click

from paged_attn.cli import command_options
from paged_attn.cli.command_options import positive, torch_dtype
from paged_attn.cli.printing import print_json, print_rows


@click.command(cls=command_options.OfModel)
@click.option("--batch", type=positive, help="Sequences, where --queries and --keys name one length each.")
@click.option("--queries", default="1", show_default=True, help="Query tokens of each sequence: 1, or 1x2048,63x1.")
@click.option("--keys", default="4096", show_default=True, help="Keys of each sequence, new ones included: 64x4096.")
@command_options.of_model
@click.option("--sinks", is_flag=True, help="sinks are given.")
@click.option("--gate", is_flag=True, help="gate is given.")
@click.option("--max-queries", type=positive, help="max_seqlen_q.  [the longest]")
@click.option("--max-keys", type=positive, help="max_seqlen_k, or what the page table holds.  [the longest]")
@command_options.device("[this machine's]", "cpu")
@command_options.as_json
def explain(as_json: bool, **given: Any) -> None:
    """What the library does for a call: kernels, tiles, cuts, and the least bytes, operations and time it can cost.

    Windows, chunks, causality and shards are counted exactly.  Contents of tensors other than lengths are unknown: the
    line `assumed` tells what the counts take for granted, for example that qq_mask hides no key.
    """
    from paged_attn.explain.explain import explain as explained
    from paged_attn.explain.question import question_of

    given |= dict(dtype=torch_dtype(given["dtype"]), kv_dtype=torch_dtype(given["kv_dtype"] or given["dtype"]))
    try:
        question = question_of(**given)
        lines = list(explained(question))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        print_json(_sorted(lines) | _numbers(question))
    else:
        print_rows(lines)


def _sorted(lines: list[tuple[str, str]]) -> dict[str, Any]:
    """Return lines as a dict.

    Lines of a launch, or of a group of sequences in plain torch, are a dict in the list "launches".  Lines of work
    beside a launch are nested in it under "beside".
    """
    found: dict[str, Any] = {"launches": []}
    part: dict[str, Any] = found
    for name, text in lines:
        if name.startswith(("launch", "group")):
            part = {name.split()[0]: text}
            found["launches"].append(part)
        elif name == "  beside":
            part["beside"] = part = {"warps": text}
        elif name.startswith("  "):
            part[name.strip()] = text
        else:
            found[name] = text
    return found


def _numbers(question: Any) -> dict[str, Any]:
    """Return counted bytes, operations and seconds as numbers, beside the lines that tell them in words."""
    from paged_attn.explain.question import memory, operations, seconds

    moved, useful = memory(question), operations(question)
    known = seconds(question, sum(moved.values()), useful)
    least = None if known is None else dict(memory=known[2], arithmetic=known[3], of=known[0])
    return {"memory_bytes": moved, "useful_operations": useful, "least_seconds": least}
