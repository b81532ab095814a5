"""The report on the newest Triton: it knows its variants, survives a compiler that dies, and gives reasons."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import newest, variants
from tests.hopper_cases import SMALL


def child(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("dialect", newest.VARIANTS)
def test_every_variant_exists_under_its_name(dialect: str) -> None:
    named = newest.VARIANTS[dialect]
    assert set(named) <= (SMALL if dialect == "simulated" else dict(variants.calls(named))).keys()


def test_a_compiler_that_dies_costs_its_variant_and_those_after_it() -> None:
    first, second, *others = newest.VARIANTS["hopper"]
    said = [{"variant": first}, {"variant": first, "why": ""}, {"variant": second}]
    program = "\n".join([f"print({json.dumps(line)!r}, flush=True)" for line in said] + ["import os", "os.abort()"])
    rows = list(newest._rows("hopper", child(program)))
    assert rows[0] == ("hopper", first, "")
    assert rows[1] == ("hopper", second, "the compiler died, status -6")
    assert [why for *_, why in rows[2:]] == ["not tried: the compiler died, status -6"] * len(others)


def test_a_report_about_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no such module"):
        list(newest._rows("hopper", child("raise SystemExit('no such module')")))


def test_the_reason_is_the_first_error_of_a_chain_in_a_line() -> None:
    error, cause = RuntimeError("does not compile"), TypeError("    x.y\n    ^\nhas been\n  removed")
    error.__cause__ = cause
    assert newest._reason(error) == "TypeError: has been removed"
