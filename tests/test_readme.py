"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from paged_attn.cli import main

README = Path(__file__).parents[1] / "README.md"


def test_the_quickstart_runs_and_agrees_with_the_reference() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(program, str(README), "exec"), {})


def test_what_explain_prints_there_is_what_it_prints() -> None:
    ((words, wanted),) = re.findall(r"\$ paged-attn (explain .*)\n([\s\S]*?)```", README.read_text(encoding="utf-8"))
    got = CliRunner().invoke(main, words.split()).output
    assert [line.rstrip() for line in got.splitlines()] == wanted.splitlines()
