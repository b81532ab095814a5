"""nano-vllm unmodified, where its source and transformers are: NANO_VLLM names the former (nano_vllm.py)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

MISSING = [x for x in ("transformers", "tokenizers", "safetensors", "xxhash") if importlib.util.find_spec(x) is None]


@pytest.mark.skipif(not os.environ.get("NANO_VLLM"), reason="needs NANO_VLLM, a checkout of nano-vllm")
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_nano_vllm_gives_the_tokens_of_transformers() -> None:
    """Prefill, decode and a cached prefix, through both functions, on one rank and on two.

    One test for both, because nano-vllm's ranks meet at a fixed port: two runs at a time would disturb each other.
    """
    for ranks in (1, 2) if torch.cuda.device_count() != 1 else (1,):
        command = [sys.executable, "-m", "tests.integrations.nano_vllm", "--eager", "--ranks", str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "5 of 5 prompts" in done.stdout
        assert done.stdout.count("calls in a spawned rank") == ranks - 1
        assert "'flash_attn_varlen_func': 0" not in done.stdout
        assert "'flash_attn_with_kvcache': 0" not in done.stdout
