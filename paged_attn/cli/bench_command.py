"""`paged-attn bench`: the benchmark of the checkout that the package lies in."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import click

import paged_attn


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure against every peer installed, from a checkout, on a GPU: what `make bench` runs, with its options."""
    options = of_checkout("benchmarks.options").parse(arguments)  # in which --help ends, without torch
    of_checkout("benchmarks.__main__").run(options)


def of_checkout(module: str) -> ModuleType:
    """A module of the benchmark: its cases are those of the tests, which no wheel has."""
    checkout = Path(paged_attn.__file__).parents[1]
    if not (checkout / "benchmarks" / "__main__.py").exists():
        raise click.UsageError(
            "the benchmark is part of the repository, not of the package: run `make bench` in a clone"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(module)
