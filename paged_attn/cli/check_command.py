"""`paged-attn check`: a self-test of an installation."""

from __future__ import annotations

import sys
from typing import Any

import click

from paged_attn.cli.command_options import as_json
from paged_attn.cli.printing import console, here, name_of, print_json


@click.command()
@as_json
def check(as_json: bool) -> None:
    """Test this installation on this device: a few calls against the reference.

    Exit status 1 if a call differs.
    """
    from paged_attn import selftest

    device = here()
    calls: list[dict[str, Any]] = [
        dict(call=name, error=error if error == error else None, tolerance=tolerance, ok=error <= tolerance)
        for name, error, tolerance in selftest.run(device)
    ]
    passed = all(call["ok"] for call in calls)
    if as_json:
        print_json(dict(device=name_of(device), ok=passed, calls=calls))
    else:
        from rich.table import Table

        table = Table("call", "largest error", "tolerance", "", box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for call in calls:
            verdict = "[green]ok[/]" if call["ok"] else "[bold red]differs[/]"
            table.add_row(call["call"], _short(call["error"]), f"{call['tolerance']:.0e}", verdict)
        console(False).print(f"on {name_of(device)}")
        console(False).print(table)
    if not passed:
        sys.exit(1)


def _short(error: float | None) -> str:
    return "nan" if error is None else f"{error:.1e}"
