"""`paged-attn check`: it tells an installation that is right from one that is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import paged_attn
from paged_attn import reference, selftest
from paged_attn.cli import main


def test_check_passes_here() -> None:
    result = CliRunner().invoke(main, ["check"])
    assert result.exit_code == 0, result.output
    assert "fp8 cache" in result.output


def _one_nan(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    out = reference.paged_attention(q, *args, **options)
    assert isinstance(out, torch.Tensor)
    out[0, -1, -1] = torch.nan
    return out.to(q.dtype)


def test_check_fails_if_a_call_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attn, "paged_attention", _one_nan)
    monkeypatch.setattr(paged_attn, "write_kv", reference.write_kv)
    result = CliRunner().invoke(main, ["check"])
    assert result.exit_code == 1
    assert "differs" in result.output
    told = json.loads(CliRunner().invoke(main, ["check", "--json"]).stdout)
    assert told["ok"] is False
    assert [call["error"] for call in told["calls"]] == [None] * len(selftest.CASES)
