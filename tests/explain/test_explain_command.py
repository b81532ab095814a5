"""`paged-attn explain`: what it takes, what it refuses, and its lines as text and as JSON."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from paged_attn.cli import main
from paged_attn.explain import explain, question
from paged_attn.explain.question import lengths
from tests.explain.asked import ask, printed


def test_lengths_are_said_in_groups() -> None:
    assert lengths("1x2048,3x1", "keys") == [2048, 1, 1, 1]
    assert lengths("7", "keys") == [7]


def test_the_command_tells_a_line_per_fact() -> None:
    output = printed("--batch 64 --device sm90")
    names = [line[:12].strip() for line in output.splitlines()]
    assert names == [
        *(
            "call",
            "device",
            "kernels",
            "regime",
            "launch",
            "tiles",
            "work",
            "pieces",
            "scratch",
            "memory",
            "operations",
        ),
        "at best",
    ]
    assert "64 x 1 query at 4096 keys; 32 heads on 8 of 128, bfloat16, pages of 16 (NHD)" in output


@pytest.mark.parametrize(
    "words",
    [
        "--queries 1x2048,63x1 --keys 1x2048,63x4096",
        "--queries 1x2048,63x1 --keys 1x2048,63x4096 --device sm80",
        "--queries 300 --not-causal --window 20 30 --softcap 30 --alibi --sinks --gate --qq-bias 8 --layout HND",
        "--layout x-packed --dtype fp8 --new --page-size 544 --head-dim 80",
        "--dtype float32 --batch 3 --batch-invariant --device gfx942",
        "--queries 8 --max-queries 64 --max-keys 131072 --device sm89:142",
        "--queries 8 --keys 4096 --shard 3 4 16 --window 1000 -1 --alibi --softcap 30",
    ],
)
def test_the_command_takes_every_option(words: str) -> None:
    assert "at best" in printed(words)


@pytest.mark.parametrize(
    "words, text",
    [
        ("--keys many", "keys must be lengths like 4096 or 1x2048,63x1, got 'many'"),
        ("--queries 0", "queries must be lengths like"),
        ("--batch 3 --keys 4,5", "queries and keys must pair up"),
        (
            "--queries 5 --keys 4",
            "keys must be at least queries, for they count the call's own, got 4 keys of 5 queries",
        ),
        ("--heads 9", "heads must be a multiple of kv_heads = 8, got 9"),
        (
            "--kv-dtype float32",
            "kv_dtype must be bfloat16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for dtype is bfloat16, "
            "got float32",
        ),
        ("--layout x-packed --head-dim 20", "wants a head_dim divisible by 8"),
        ("--shard 2 2 16", "rank must be less than world, got (2, 2, 16)"),
        ("--shard 0 2 16 --sinks", "a shard is without sinks, gate, new keys and batch_invariant"),
        ("--new --batch-invariant", "batch_invariant is not to be had"),
        ("--device sm86", "or with its multiprocessors, like sm89:142, got 'sm86'"),
    ],
)
def test_the_command_says_what_is_wrong(words: str, text: str) -> None:
    result = CliRunner().invoke(main, ["explain", *words.split()])
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_json_has_the_lines_and_their_numbers() -> None:
    words = "--queries 1x1024,31x1 --keys 1x4096,31x2048 --heads 71 --kv-heads 1 --head-dim 64 --device h200"
    asked = ask(queries="1x1024,31x1", keys="1x4096,31x2048", heads=71, kv_heads=1, head_dim=64, device="h200")
    told = json.loads(printed(f"{words} --json"))
    assert [x["launch"] for x in told["launches"]] == [t for n, t in explain.explain(asked) if n.startswith("launch")]
    assert told["memory_bytes"] == question.memory(asked)
    assert told["useful_operations"] == question.operations(asked)
    assert told["least_seconds"]["memory"] == pytest.approx(sum(told["memory_bytes"].values()) / 4.54e12)
    mixed = json.loads(printed("--queries 1x2048,63x1 --keys 1x2048,63x4096 --device h200 --json"))
    assert {"warps", "tiles", "work"} <= mixed["launches"][0]["beside"].keys()


@pytest.mark.parametrize("words", ["--window 127 -1", "--window -1 0"])
def test_a_window_is_two_numbers(words: str) -> None:
    assert "Hopper" in printed(f"{words} --device h200")


@pytest.mark.parametrize("name, arch", [("b200", "sm100"), ("H200", "sm90"), ("a100", "sm80"), ("mi300x", "gfx942")])
def test_a_device_has_the_name_that_people_have_for_it(name: str, arch: str) -> None:
    assert json.loads(printed(f"--device {name} --json"))["device"].startswith(f"{arch}, ")


def test_a_question_about_a_latent_cache_that_cannot_be_is_refused() -> None:
    for wrong in (dict(layout="x-packed"), dict(value_dim=80)):
        with pytest.raises(ValueError, match="are the first dims of its keys, which are not x-packed"):
            ask(**dict(kv_heads=1, head_dim=64, latent=True) | wrong)
    with pytest.raises(ValueError, match="head_dim must be between 1 and 512, got 576"):
        ask(head_dim=576)
