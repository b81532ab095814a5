"""Errors of cache formats: the page has those of the committed run, and the script computes them."""

from __future__ import annotations

import json
import re

import pytest
import torch

from benchmarks import accuracy, runner

RUN = runner.ROOT / "benchmarks" / "results" / "cpu" / "accuracy.json"


def test_the_page_has_the_errors_of_the_committed_run() -> None:
    found = json.loads(RUN.read_text())
    page = (runner.ROOT / "docs" / "cache-formats.md").read_text()
    assert list(found["errors"]) == list(accuracy.DATA)
    for name in accuracy.FORMATS:
        row = [f"{100 * found['errors'][data][name]:.3g}%" for data in accuracy.DATA]
        assert re.search(rf"^\| {re.escape(name)} \| {re.escape(' | '.join(row))} \|$", page, re.M), name
    assert f"{found['sizes']['seqs']} sequences of {found['sizes']['keys']} keys" in page


def test_errors_are_those_of_the_format_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "KEYS", 64)
    q, keys, values = accuracy.random_data(torch.Generator().manual_seed(0))
    wanted = accuracy.results(q, keys, values, torch.float32, None)
    rounded = [x.to(torch.bfloat16).float() for x in (keys, values)]
    assert torch.equal(
        accuracy.results(q, keys, values, torch.bfloat16, None), accuracy.results(q, *rounded, torch.float32, None)
    )
    int8 = accuracy.results(q, keys, values, torch.int8, torch.float32)
    assert 0.005 < (int8 - wanted).norm() / wanted.norm() < 0.02
