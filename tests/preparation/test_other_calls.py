"""write_qkv, and copies and gathers of whole pages, ask for no kernel that was not prepared."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import paged_attn
from paged_attn.launching.platform import Device
from tests.preparation.models import E4M3
from tests.preparation.other_calls_asked import MODELS
from tests.support import warm

pytestmark = pytest.mark.skipif(
    "nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia"
)
SIZES: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=64, device=Device("cpu", 1))


def asked(*names: str) -> list[dict[str, Any]]:
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = warm.run(["-m", "tests.preparation.other_calls_asked", *names], os.environ | environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]


def test_no_write_and_no_call_over_pages_asks_for_a_kernel_that_was_not_prepared() -> None:
    found = asked(*MODELS)
    assert [told["name"] for told in found] == [*MODELS]
    for told in found:
        assert told["missing"] == [], told["name"]
        assert {*told["kernels"]} >= {"write_qkv_kernel", "move_pages_kernel", "gather_pages_kernel"}


def test_kernels_of_another_model_are_missed() -> None:
    norms, sections, fp8 = asked("packed as norms", "sections as packed", "fp8 as packed")
    for told, kernels in ((norms, ["write"]), (sections, ["write"]), (fp8, ["gather", "write"])):
        assert sorted({x.split("_")[0] for x in told["missing"]}) == kernels


def refused(error: type[Exception], text: str, **options: Any) -> None:
    with pytest.raises(error) as raised:
        paged_attn.prepare(**SIZES | options)
    assert text in str(raised.value)


def test_what_no_call_of_write_qkv_would_take_is_refused_before_anything_is_compiled() -> None:
    """Plain torch has no kernels, so arguments are checked and nothing is compiled."""
    assert paged_attn.prepare(**SIZES, qkv="packed", qk_norm=torch.bfloat16).kernels == 0
    refused(ValueError, "qkv must be None, 'packed' or 'separate', got 'split'", qkv="split")
    refused(ValueError, "rotary_dim even and at most 64, the dims of q", qkv="packed", rotary_dim=66)
    refused(ValueError, "three ints >= 0 whose sum is rotary_dim / 2 = 32", qkv="packed", mrope_sections=(8, 8, 8))
    refused(ValueError, "got one tensor", qkv="packed", value_dim=32)
    refused(ValueError, "qkv must be (q_rope, latent, k_rope)", qkv="packed", kv_heads=1, value_dim=32, latent=True)
    int4: dict[str, Any] = dict(qkv="packed", cache_dtype=torch.uint8, scales="per_token")
    refused(ValueError, "a multiple of 4 over int4, unless interleaved", **int4, rotary_dim=6)
    refused(TypeError, "cos_sin must be a torch.dtype, got str", qkv="packed", cos_sin="float32")
    for name, value in dict(rotary_dim=64, interleaved=True, cos_sin=E4M3, qk_norm=torch.float32).items():
        default = value is not True and None
        refused(ValueError, f"{name} must be {default} without qkv, for no call of write_qkv", **{name: value})
