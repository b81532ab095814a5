"""`paged-attn demo`: it serves and agrees, it notices what is wrong, and it says what it needs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import paged_attn
from paged_attn import reference
from paged_attn.cli import main
from paged_attn.launching.platform import Device
from paged_attn.preparation.model import Lengths, distinct
from paged_attn.serving import trace
from paged_attn.serving.demo import Sizes, batches, model_of, serve

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
        "--layout x-packed --dtype bfloat16 --kv-dtype e4m3",
        "--page-size 544 --pages 2 --kv-dtype e5m2",
        "--checked 1",
        "--scale 20 --pages 14",
    ],
)
def test_demo_takes_every_size(tmp_path: Path, options: str) -> None:
    result = _demo(tmp_path, options)
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("quick")
def test_demo_reads_an_azure_trace(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    result = _demo(tmp_path, f"--trace {file}")
    assert result.exit_code == 0, result.output
    assert f"2 requests of {file}" in result.output.replace("\n", "")


@pytest.mark.usefixtures("quick")
def test_demo_reads_a_mooncake_trace(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 1030, "output_length": 90, "hash_ids": [0, 1, 2]}\n' * 3)
    result = _demo(tmp_path, f"--trace {file} --scale 30")
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
        ("--heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads = 2, got 3"),
        ("--head-dim 600", "600 is not in the range"),
        ("--kv-dtype float8", "'float8' is not one of 'e4m3', 'e5m2'"),
        ("--output /dev/null/demo.png", "no folder that can be written to"),
    ):
        result = _demo(tmp_path, options)
        assert result.exit_code == 2
        assert message in result.output
        assert "serving" not in result.output  # no bar was drawn


@pytest.mark.usefixtures("quick")
def test_with_json_standard_output_is_an_object_of_the_totals(tmp_path: Path) -> None:
    result = _demo(tmp_path, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["ok"] is True
    assert told["finished"] == told["requests"] == 5
    assert told["worst_error"] <= told["tolerance"]
    assert told["wrong_steps"] == []
    assert "steps agree with the reference" in result.stderr


@pytest.mark.usefixtures("quick")
def test_json_names_the_steps_that_differ_and_has_no_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attn, "paged_attention", _one_nan)
    result = _demo(tmp_path, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(word))
    assert told["wrong_steps"] == list(range(1, told["steps"] + 1))
    assert told["worst_error"] is None


def test_what_is_compiled_ahead_are_the_batches_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that are made, seen where they are made."""
    sizes = Sizes(2, 1, 16, 8, 8, 1, torch.float32, torch.float32, "NHD", 24, 4, 0.5, None, 0)
    requests = list(trace.shrink(list(itertools.islice(trace.CONVERSATION.requests(0), 5)), 60))
    made = []

    def attention(q: torch.Tensor, k: Any, v: Any, table: Any, lens: torch.Tensor, starts: Any, **options: Any) -> Any:
        made.append(Lengths(True, len(lens), len(q), options["max_seqlen_q"], options["max_seqlen_k"]))
        return reference.paged_attention(q, k, v, table, lens, starts, **options).to(q.dtype)

    monkeypatch.setattr(paged_attn, "paged_attention", attention)
    monkeypatch.setattr(paged_attn, "write_kv", reference.write_kv)
    steps = list(serve(requests, sizes, torch.device("cpu")))
    assert steps[-1].finished == 5
    assert made == list(batches(requests, sizes))


@pytest.mark.host
def test_the_default_mix_on_an_h200_takes_few_kernels() -> None:
    """The mix has 1,600 steps; the first run waits until their kernels are compiled."""
    sizes = Sizes(32, 8, 128, 16, 12288, 4, torch.bfloat16, torch.bfloat16, "NHD", 4096, 256, 0.2, 8, 0)
    requests = list(itertools.islice(trace.CONVERSATION.requests(0), 512))
    assert len(distinct(model_of(sizes), batches(requests, sizes), Device("sm90", 132))) <= 20
