"""nano-vllm unmodified, where its source and transformers are: NANO_VLLM names the former (nano_vllm.py)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

MISSING = [x for x in ("transformers", "tokenizers", "safetensors", "xxhash") if importlib.util.find_spec(x) is None]


@pytest.mark.skipif(not os.environ.get("NANO_VLLM"), reason="needs NANO_VLLM, a checkout of nano-vllm")
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_nano_vllm_gives_the_tokens_of_transformers() -> None:
    """Prefill, decode and a cached prefix, through both functions."""
    command = [sys.executable, "-m", "tests.integrations.nano_vllm", "--eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 prompts" in done.stdout
    assert "'flash_attn_varlen_func': 0" not in done.stdout
    assert "'flash_attn_with_kvcache': 0" not in done.stdout
