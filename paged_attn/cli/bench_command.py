"""`paged-attn bench`: the benchmarks of the clone in which the package lies."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import click

import paged_attn


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Measure against every installed peer, on a GPU; needs a clone, where `make bench` takes the same options."""
    if not {"-h", "--help"}.isdisjoint(arguments) and not _in_checkout():
        click.echo(context.get_help())
        return
    options = of_checkout("benchmarks.options").parse(arguments)  # parse exits after --help, before torch is imported
    of_checkout("benchmarks.__main__").run(options)


def of_checkout(module: str) -> ModuleType:
    """Import a module of the clone's benchmarks.  Wheels do not have them, because they use cases of the tests."""
    if not _in_checkout():
        raise click.UsageError(
            "benchmarks need a clone: they are part of the repository, not of the package; run `make bench` there"
        )
    if str(_checkout()) not in sys.path:
        sys.path.insert(0, str(_checkout()))
    return importlib.import_module(module)


def _checkout() -> Path:
    return Path(paged_attn.__file__).parents[1]


def _in_checkout() -> bool:
    return (_checkout() / "benchmarks" / "__main__.py").exists()
