"""The command as a user meets it: it serves and agrees, it notices what is wrong, and it says what it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import paged_attn
from paged_attn import reference
from paged_attn.cli import main

# Small enough for the interpreter: seconds.  Eight pages do not hold all five requests, so some wait for others to end.
SMALL = "--requests 5 --scale 60 --heads 2 --kv-heads 1 --head-dim 16 --layers 1 --budget 24 --max-seqs 4 --checked 0"
SMALL += " --dtype float32 --page-size 8 --pages 8 --step-seconds 0.5"


def _demo(folder: Path, options: str = "") -> Result:
    output = folder / "out" / "demo.png"
    return CliRunner().invoke(main, ["demo", *SMALL.split(), "--output", str(output), *options.split()])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference in the library's place: what the command does around it needs no kernels."""

    def attention(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out = reference.paged_attention(q, *args, **options)
        assert isinstance(out, torch.Tensor)
        return out.to(q.dtype)

    monkeypatch.setattr(paged_attn, "paged_attention", attention)
    monkeypatch.setattr(paged_attn, "write_kv", reference.write_kv)


def test_demo_serves_through_the_library_and_draws(tmp_path: Path) -> None:
    result = _demo(tmp_path)
    assert result.exit_code == 0, result.output
    assert "5 requests of a synthetic conversation trace, all lengths divided by 60" in result.output
    assert "steps agree with the reference" in result.output
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "options",
    [
        "--layout HND --dtype float16 --layers 2",
        "--layout x-packed --dtype bfloat16 --kv-dtype fp8",
        "--page-size 544 --pages 2 --kv-dtype fp8_e5m2",
        "--checked 1",
        "--scale 20 --pages 14",
    ],
)
def test_demo_takes_every_size(tmp_path: Path, options: str) -> None:
    result = _demo(tmp_path, options)
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("quick")
def test_demo_reads_an_azure_trace(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    result = _demo(tmp_path, f"--trace {trace}")
    assert result.exit_code == 0, result.output
    assert f"2 requests of {trace}" in result.output.replace("\n", "")


@pytest.mark.usefixtures("quick")
def test_demo_reads_a_mooncake_trace(tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1030, "output_length": 90, "hash_ids": [0, 1, 2]}\n' * 3)
    result = _demo(tmp_path, f"--trace {trace} --scale 30")
    assert result.exit_code == 0, result.output
    assert re.search(r"requests finished\s+3\b", result.output)


def _one_element_off(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    out = reference.paged_attention(q, *args, **options)
    assert isinstance(out, torch.Tensor)
    out[-1, 0, 0] += 1e-3
    return out.to(q.dtype)


def _one_nan(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    out = reference.paged_attention(q, *args, **options)
    assert isinstance(out, torch.Tensor)
    out[0, -1, -1] = torch.nan
    return out.to(q.dtype)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("wrong", [_one_element_off, _one_nan])
def test_demo_fails_if_one_element_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., torch.Tensor]
) -> None:
    monkeypatch.setattr(paged_attn, "paged_attention", wrong)
    result = _demo(tmp_path)
    assert result.exit_code == 1
    assert "steps differ from the reference, first step 1" in result.output


@pytest.mark.usefixtures("quick")
def test_demo_fails_if_two_keys_are_swapped_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(k: torch.Tensor, *args: Any, **options: Any) -> None:
        reference.write_kv(torch.cat([k[1:2], k[:1], k[2:]]) if len(k) > 1 else k, *args, **options)

    monkeypatch.setattr(paged_attn, "write_kv", swapped)
    assert _demo(tmp_path).exit_code == 1


def test_demo_says_what_is_wrong_with_its_options(tmp_path: Path) -> None:
    for options, message in (
        ("--budget 2", "a step of 2 tokens cannot decode 4 sequences"),
        ("--pages 1", "the cache has 1"),
        ("--layout x-packed --head-dim 18", "divisible by 4, got 18"),
        ("--scale 0", "0.0 is not in the range"),
    ):
        result = _demo(tmp_path, options)
        assert result.exit_code == 2
        assert message in result.output


def test_check_passes_here() -> None:
    result = CliRunner().invoke(main, ["check"])
    assert result.exit_code == 0, result.output
    assert "fp8 cache" in result.output


@pytest.mark.usefixtures("quick")
def test_check_fails_if_a_call_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attn, "paged_attention", _one_nan)
    result = CliRunner().invoke(main, ["check"])
    assert result.exit_code == 1
    assert "differs" in result.output


def test_info_names_versions_and_device() -> None:
    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 0, result.output
    assert metadata.version("torch") in result.output
    assert "kernels" in result.output


def test_without_its_extra_the_command_says_how_to_get_it() -> None:
    program = "import sys; sys.modules['rich'] = None; import paged_attn.cli"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'paged-attn[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
