"""Progress of the demo's steps."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from paged_attn.serving.demo import ServedStep


def watched(steps: Iterator[ServedStep], requests: int, console: Console) -> Iterator[ServedStep]:
    """Pass steps on, and show a live bar on a terminal, or elsewhere a line every few seconds."""
    tokens = 0
    shown = monotonic()
    columns = ("{task.description}", "{task.completed} of {task.total} requests", "{task.fields[made]}")
    with Progress(
        TextColumn(columns[0]), BarColumn(), *map(TextColumn, columns[1:]), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("serving", total=requests, made="")
        for count, step in enumerate(steps, 1):
            tokens += step.prefill_tokens + step.decode_tokens
            made = f"{tokens:,} tokens in {count:,} steps"
            bar.update(task, completed=step.finished, made=made)
            if not console.is_terminal and monotonic() - shown > 5:
                shown = monotonic()
                console.print(f"serving: {step.finished} of {requests} requests, {made}")
            yield step
