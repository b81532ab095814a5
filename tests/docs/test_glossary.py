"""Other libraries' names are the same on the glossary's page and in what errors tell."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

import pytest

import paged_attn
from paged_attn.checks.keywords import OTHERS
from tests.support.documents import ROOT

TABLE = re.compile(r"^\| there \| `(\w+)` \| relation \|\n\|[-|]+\|\n((?:\|.*\n)+)", re.M)
NAME = re.compile(r"`(\w+)`")


class Row(NamedTuple):
    there: list[str]
    here: str


def rows_of(function: str) -> list[Row]:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    tables = [table for name, table in TABLE.findall(page) if name == function]
    cells = [line.strip("|").split(" | ") for table in tables for line in table.splitlines()]
    assert all(len(row) == 3 for row in cells)
    return [Row(NAME.findall(there), here.strip()) for there, here, _ in cells]


def own(function: str, text: str) -> set[str]:
    """Arguments of a function of ours that a text names; "nothing" is one."""
    return {*inspect.signature(getattr(paged_attn, function)).parameters, "nothing"} & set(re.findall(r"\w+", text))


@pytest.mark.parametrize("function", OTHERS)
def test_a_name_of_another_library_is_in_the_glossary_if_and_only_if_an_error_tells_ours(function: str) -> None:
    written = {name for row in rows_of(function) for name in row.there}
    assert written - own(function, " ".join(written)) == OTHERS[function].keys()


@pytest.mark.parametrize("function", OTHERS)
def test_the_glossary_and_the_error_call_it_alike(function: str) -> None:
    for row in rows_of(function):
        assert row.there
        here = own(function, row.here)
        assert here, row
        for name in row.there:
            assert here & own(function, OTHERS[function].get(name, name)), (name, row)
