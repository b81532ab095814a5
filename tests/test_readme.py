"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_quickstart_runs_and_agrees_with_the_reference() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(program, str(README), "exec"), {})
