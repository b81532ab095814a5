"""The library's messages about bad use, read from its source and from the catalogue in docs/errors.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CATALOGUE = ROOT / "docs" / "errors.md"
ANY = "{}"  # stands for the parts of a message that differ from call to call


class Said(NamedTuple):
    """A message, with {} for what differs from call to call, and where it is raised."""

    template: str
    error: str
    where: str


class Entry(NamedTuple):
    """An entry of the catalogue."""

    template: str
    error: str
    cause: str
    cure: str

    def matches(self, message: str) -> bool:
        parts = [re.escape(part) for part in self.template.split(ANY)]
        return re.fullmatch(".*?".join(parts), message, re.DOTALL) is not None


def said() -> Iterator[Said]:
    """Yield each message of an exception or a warning in the package's source.

    Adapters of hosts are left out, because their own pages have their messages; so are `__init__.py`, whose
    AttributeErrors are Python's own.
    """
    for path in sorted((ROOT / "paged_attn").rglob("*.py")):
        if "integrations" in path.parts or path.name == "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                name = ast.unparse(node.func).rpartition(".")[2]
                if name.endswith(("Error", "Exit", "ClickException", "OutOfPages")) or name == "warn":
                    error = "UserWarning" if name == "warn" else name
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield Said(_template(node.args[0]), error, where)
                elif name == "Refused":  # a row of the argument table, whose last field is the message
                    template = re.sub(r"\{[^}]*\}", ANY, _template(node.args[-1]))
                    yield Said(template, "ValueError", f"{path.relative_to(ROOT)}:{node.lineno}")


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return ANY


def catalogue() -> list[Entry]:
    """Return the catalogue's entries.  Each has the message as its heading, the error's type, `Cause:` and `Cure:`."""
    text = CATALOGUE.read_text(encoding="utf-8")
    pattern = re.compile(r"^### (`+)([^\n]+)\1\n\n([\w, ]+)\. Cause: ([^\n]+)\nCure: ([^\n]+)$", re.M)
    return [Entry(re.sub(r"\{[^}]*\}", ANY, name), *rest) for _, name, *rest in pattern.findall(text)]
