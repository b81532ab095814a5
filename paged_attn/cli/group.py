"""The command `paged-attn`: its verbs, and their common settings."""

from __future__ import annotations

try:
    import click
    import rich  # noqa: F401
except ModuleNotFoundError as missing:
    raise SystemExit(f"the paged-attn command needs {missing.name}: pip install click rich matplotlib") from None

from paged_attn import __version__
from paged_attn.cli.bench_command import bench
from paged_attn.cli.check_command import check
from paged_attn.cli.demo_command import demo
from paged_attn.cli.explain_command import explain
from paged_attn.cli.info_command import info
from paged_attn.cli.prepare_command import prepare

VERBS = (demo, check, info, explain, prepare, bench)
COMPLETION = 'Completion of words in a shell: eval "$(_PAGED_ATTN_COMPLETE=bash_source paged-attn)", or zsh_source.'


class Verbs(click.Group):
    """A group whose help lists the verbs in the order of VERBS, each with the whole first sentence of its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(limit=1000)) for name, verb in self.commands.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]}, epilog=COMPLETION)
@click.version_option(__version__, package_name="paged-attn")
def main() -> None:
    """Paged attention for LLM serving."""


for verb in VERBS:
    main.add_command(verb)
