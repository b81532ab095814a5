"""The command as a whole: it starts at once, lists all that it can do, and says what it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import paged_attn
from paged_attn.arguments import OF_MODELS
from paged_attn.cli import main, prepare_command
from paged_attn.launching.platform import Device
from paged_attn.preparation import prepare as preparation
from tests.support import score_mods

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "triton", "numpy", "matplotlib")


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])} | environ
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.host
@pytest.mark.parametrize("words", ["--help", "--version", "info", "info --json", "demo --help", "bench --help"])
def test_nothing_heavy_is_imported_to_say_what_there_is(words: str) -> None:
    """Without heavy imports a verb takes less than half a second.  The script is the one that pip installs."""
    script = (
        f"import sys\nsys.argv = ['/usr/bin/paged-attn', *{words.split()!r}]\nfrom paged_attn.cli import main\n"
        f"try: main()\nfinally: print(*[x for x in {HEAVY!r} if x in sys.modules], file=sys.stderr)"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""
    assert len(done.stdout.strip()) > 10


@pytest.mark.host
def test_the_package_run_as_a_module_is_the_command() -> None:
    done = python("-X", "importtime", "-m", "paged_attn", "--help")
    assert done.stdout.startswith("Usage: paged-attn")
    assert not [line for line in done.stderr.splitlines() if line.split("|")[-1].strip() in HEAVY]


def test_in_the_command_the_package_has_all_its_names() -> None:
    script = "import sys\nsys.argv = ['paged-attn']\nimport paged_attn\nassert 'torch' not in sys.modules\n"
    script += "from paged_attn import *\nassert paged_attention is paged_attn.api.paged_attention\n"
    script += "import torch\nassert reference.paged_attention and prepare and torch.ops.paged_attn.attention"
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


def test_each_verb_is_listed_with_its_whole_sentence() -> None:
    listed = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    for name, verb in main.commands.items():
        sentence = " ".join((verb.help or "").split("\n\n")[0].split()).removesuffix(".")
        assert f"{name} {sentence}" in listed
    assert "..." not in listed.split("Commands:")[1]


@pytest.mark.parametrize("name", [name for name in main.commands if name != "bench"])
def test_every_verb_has_json(name: str) -> None:
    assert "--json" in {word for option in main.commands[name].params for word in option.opts}


def test_help_of_prepare_says_nothing_of_counting() -> None:
    """Options that it shares with explain are told in words that hold of both."""
    told = CliRunner().invoke(main, ["prepare", "--help"]).output
    assert "--prefix-lens" in told
    for word in ("count", "here all"):
        assert word not in told


def test_without_its_extra_the_command_says_how_to_get_it() -> None:
    done = python("-c", "import sys; sys.modules['rich'] = None; import paged_attn.cli")
    assert done.returncode == 1
    assert "pip install click rich matplotlib" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_shell_completes_verbs_and_values() -> None:
    def completed(words: str, number: int) -> list[str]:
        asked = dict(_PAGED_ATTN_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(number))
        done = python("-c", "from paged_attn.cli import main; main(prog_name='paged-attn')", **asked)
        return [line.rpartition(",")[2] for line in done.stdout.splitlines()]

    assert completed("paged-attn pre", 1) == ["prepare"]
    assert completed("paged-attn explain --kv-dtype e", 3) == ["e4m3", "e5m2"]
    assert completed("paged-attn explain --device h", 3) == ["h20", "h100", "h200"]


# prepare


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the library is asked to prepare."""
    calls: list[dict[str, Any]] = []

    def noted(**options: Any) -> preparation.Summary:
        calls.append(options)
        return preparation.Summary(7, 5, 1.5)

    monkeypatch.setattr(paged_attn, "prepare", noted)
    return calls


def test_prepare_hands_every_option_on(asked: list[dict[str, Any]]) -> None:
    words = "--heads 64 --kv-heads 4 --head-dim 64 --value-dim 48 --latent --page-size 32 --dtype bf16 "
    words += "--side-by-side --page-stride 64 --kv-dtype e4m3 --layout x-packed "
    words += "--token-scales --causal-seqs --head-windows --prefix-lens --spans 3 "
    words += "--window 127 -1 --not-causal --alibi --sinks bfloat16 --qq-bias 4 --query-positions --new "
    words += "--score-mod tests.support.score_mods:alibi --score-mod-args float32,37 "
    words += "--gate float32 --qq-mask 2 "
    words += "--lse --scales tensor --integers int64 --page-indices int32 --max-seqs 8 --max-tokens 64 "
    words += "--max-seqlen 512 --processes 2 "
    words += "--qkv separate --rotary-dim 16 --interleaved --mrope-sections 2 3 3 --cos-sin fp32 --qk-norm bf16 "
    words += "--pages "
    from_rows = {x.name: x.others[0] for x in OF_MODELS if x.help}
    for name, value in from_rows.items():
        said = " ".join(map(str, value if isinstance(value, tuple) else (value,)))
        words += f"--{name.replace('_', '-')} " + ("" if value is True else f"{said} ")
    result = CliRunner().invoke(main, ["prepare", *words.split(), "--device", "b200", "--json"])
    assert result.exit_code == 0, result.output
    tensor, number = asked[0].pop("score_mod_args")
    assert (tensor.dtype, number) == (torch.float32, 37)
    assert asked == [
        dict(
            heads=64, kv_heads=4, head_dim=64, value_dim=48, latent=True, page_size=32, side_by_side=True,
            page_stride=64, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn,
            out_dtype=torch.float32, kv_layout="x", new=True, causal_seqs=True, head_windows=True,
            prefix_lens=True, spans=3, token_scales=True, causal=False, window_size=(127, -1), **from_rows,
            alibi=True, sinks=torch.bfloat16, qq_bias=4, query_positions=True, scales="tensor", integers=torch.int64,
            score_mod=score_mods.alibi, gate=torch.float32, qq_mask=2,
            page_indices=torch.int32, return_lse=True, max_seqs=8, max_tokens=64, max_seqlen=512,
            device=Device("sm100", 148), processes=2, qkv="separate", rotary_dim=16, interleaved=True,
            mrope_sections=(2, 3, 3), cos_sin=torch.float32, qk_norm=torch.bfloat16, pages=True,
        )
    ]  # fmt: skip
    keywords = preparation.prepare.__kwdefaults__.keys() | {"heads", "kv_heads", "head_dim"}
    assert asked[0].keys() == keywords - {"score_mod_args"}
    told = json.loads(result.stdout)
    assert told == dict(device="sm100, 148 multiprocessors", kernels=7, compiled=5, seconds=1.5)


def test_prepare_refuses_before_it_begins(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for words, message in (
        ("--heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads = 2, got 3"),
        ("--layout x-packed --head-dim 20 --device h200", "divisible by 8, got 20"),
        (
            "--dtype float16 --kv-dtype bfloat16 --device h200",
            "--kv-dtype must be float16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for --dtype is float16, "
            "got bfloat16",
        ),
        ("--device h900", "a device must be one of a100"),
        ("--window 3 -2 --device h200", "-2 is not in the range"),
        ("--window 3", "--window must be LEFT RIGHT, two numbers, got 3: --window 2 -1 is a sliding window of 3 keys"),
        ("--score-mod alibi --device h200", "must be like package.module:function"),
        ("--processes 0", "0 is not in the range"),
        ("--drafts 3 --device h200", "name it by --host"),
    ):
        result = CliRunner().invoke(main, ["prepare", *words.split()])
        assert result.exit_code == 2, words
        assert message in " ".join(result.output.split())
    monkeypatch.setattr("paged_attn.launching.platform.INTERPRET", True)
    assert "name a --device to compile for" in CliRunner().invoke(main, ["prepare"]).output
    assert not asked


def test_names_of_types_are_those_of_the_readme_and_others_are_known() -> None:
    dtype = next(option.type for option in prepare_command.prepare.params if option.name == "kv_dtype")
    assert [dtype.convert(x, None, None) for x in ("e4m3", "fp8", "fp8_e5m2", "float8_e4m3fn", "bf16")] == [
        "e4m3", "e4m3", "e5m2", "e4m3", "bfloat16",
    ]  # fmt: skip
