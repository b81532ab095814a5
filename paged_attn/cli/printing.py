"""Output of verbs: tables of names and texts for people, JSON for programs.

Functions that print tables import rich, which takes time that `--help` does not need.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch
    from rich.console import Console


def console(as_json: bool) -> Console:
    """Console for people: on standard output, or on standard error if standard output is for JSON."""
    from rich.console import Console

    return Console(soft_wrap=True, stderr=as_json, highlight=False)


def print_json(value: Any) -> None:
    """Print JSON on standard output, on which the verb prints nothing else."""
    click.echo(json.dumps(value, indent=2))


def print_rows(rows: Iterable[tuple[str, str]], to: Console | None = None) -> None:
    """Print rows (name, text).  A long text wraps inside its own column.  to: None is standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(name, text)
    wide = None if sys.stdout.isatty() else 200  # columns: a file has no width of its own
    (to or Console(width=wide, highlight=False)).print(table)


def here() -> torch.device:
    """The device on which verbs of this process make calls."""
    import torch

    from paged_attn.launching.platform import INTERPRET

    return torch.device("cpu" if INTERPRET or not torch.cuda.is_available() else "cuda")


def name_of(device: torch.device) -> str:
    """A device's name for people."""
    import torch

    from paged_attn.launching.platform import device_of

    if device.type != "cuda":
        return "the CPU, " + ("in plain torch" if device_of(device).in_torch else "through Triton's interpreter")

    return torch.cuda.get_device_name(device)
