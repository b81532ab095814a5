"""The verb `bench`: the benchmark of a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import paged_attn
from paged_attn.cli import main


def test_the_verb_is_the_same_runner() -> None:
    result = CliRunner().invoke(main, ["bench", "--help"])
    assert result.exit_code == 0
    assert "--cliffs" in result.output
    assert CliRunner().invoke(main, ["bench", "nonsense"]).exit_code == 2


def test_without_a_checkout_the_verb_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attn, "__file__", str(tmp_path / "paged_attn" / "__init__.py"))
    result = CliRunner().invoke(main, ["bench"])
    assert result.exit_code == 2
    assert "benchmarks need a clone" in result.output
    for word in ("--help", "-h"):
        result = CliRunner().invoke(main, ["bench", word])
        assert result.exit_code == 0
        assert "needs a clone" in result.output
