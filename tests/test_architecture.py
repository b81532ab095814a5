"""The map of the house is the house."""

from __future__ import annotations

import re

from tests.documents import ROOT

PACKAGE = ROOT / "paged_attn"
# whose files the map does not name one by one
WHOLE = {"integrations", "serving"}


def test_the_map_names_every_file_where_it_lies_and_no_other() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", page, re.M)
    drawn = {folder.removeprefix("paged_attn"): set(re.findall(r"`(\w+\.py)`", text)) for folder, text in rows}
    there: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        folder = path.parent.relative_to(PACKAGE)
        if folder.parts[:1] and folder.parts[0] in WHOLE:
            continue
        if not path.name.startswith("__"):
            there.setdefault("" if folder.as_posix() == "." else folder.as_posix(), set()).add(path.name)
    assert drawn == there


def test_the_pages_of_design_keep_to_their_length() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 250
