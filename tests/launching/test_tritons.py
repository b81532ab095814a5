"""The reduced suite of other Tritons: it knows its variants, survives a compiler that dies, and gives reasons."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import triton

from paged_attn.launching import triton_version
from tests import tritons
from tests.support import variants, wide_variants
from tests.support.hopper_cases import SMALL


def child(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_every_known_version_is_tried_once() -> None:
    tested = {triton_version.number(version) for version in tritons.VERSIONS}
    assert tested | {triton_version.number(triton.__version__)} >= set(triton_version.KNOWN)
    assert len(tested) == len(tritons.VERSIONS)
    assert tested <= set(triton_version.KNOWN)


def test_known_complaints_are_about_what_is_tried() -> None:
    named = {*tritons.VARIANTS["portable"], *tritons.VARIANTS["hopper"]}
    assert all(version in tritons.VERSIONS and variant in named for version, variant in tritons.KNOWN_COMPLAINTS)


@pytest.mark.parametrize("dialect", ["portable", "hopper", "wide", "simulated"])
def test_every_variant_exists_under_its_name(dialect: str) -> None:
    named = tritons.VARIANTS[dialect]
    there = SMALL if dialect == "simulated" else dict(variants.calls(named))
    assert set(named) <= {*there, *(wide_variants.SHARES if dialect == "wide" else ())}


def test_a_compiler_that_dies_costs_its_variant_and_those_after_it() -> None:
    first, second, *others = tritons.VARIANTS["hopper"]
    said = [{"variant": first}, {"variant": first, "why": ""}, {"variant": second}]
    program = "\n".join([f"print({json.dumps(line)!r}, flush=True)" for line in said] + ["import os", "os.abort()"])
    rows = tritons.rows("hopper", *tritons.ended(child(program)))
    assert rows[0] == ("hopper", first, "")
    assert rows[1] == ("hopper", second, "the compiler died, status -6")
    assert [why for *_, why in rows[2:]] == ["not tried: the compiler died, status -6"] * len(others)


def test_a_report_about_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no such module"):
        tritons.rows("hopper", *tritons.ended(child("raise SystemExit('no such module')")))


def test_the_reason_is_the_first_error_of_a_chain_in_a_line() -> None:
    error, cause = RuntimeError("does not compile"), TypeError("    x.y\n    ^\nhas been\n  removed")
    error.__cause__ = cause
    assert tritons._reason(error) == "TypeError: has been removed"
