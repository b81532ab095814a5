"""Kernels ahead of time: what is compiled is found again, by another process and by a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import paged_attn
from paged_attn.arguments import SCALES
from paged_attn.launching.platform import Device
from paged_attn.serving.tensors import batch_of
from tests.preparation.models import BF16, E4M3
from tests.preparation.traffic import SEQS, TOKENS, steps
from tests.support import warm

HANGS = 3600  # seconds after which a process is taken for one that never ends, on however loaded a machine
PREPARE = """
import json, sys
import torch
import paged_attn
from paged_attn.launching.platform import Device
from tests.support.score_mods import relative

if __name__ == "__main__":
    for options in ({}, dict(score_mod=relative, score_mod_args=(torch.empty(1), 37))):
        print(json.dumps(paged_attn.prepare(
            heads=2, kv_heads=1, head_dim=16, max_seqs=1, max_tokens=1, max_seqlen=16, device=Device("sm90", 132),
            processes=int(sys.argv[1]), qkv="packed", pages=True, **options,
        )))
"""


@pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton does not compile for nvidia")
@pytest.mark.thorough
def test_what_was_compiled_for_another_machine_is_found_on_disk(tmp_path: Path) -> None:
    script = tmp_path / "prepare_ahead.py"
    script.write_text(PREPARE)
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }

    def prepare(processes: int) -> list[list[int]]:
        done = warm.run([str(script), str(processes)], environment, timeout=HANGS)
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line)[:2] for line in done.stdout.splitlines()[-2:]]

    (kernels, compiled), (with_function, more) = prepare(2)
    # attention, a write of both caches and one of each, two of write_qkv, pages moved and gathered
    assert kernels == compiled > 7
    assert with_function > more > 0  # attention alone: other calls know of no function
    assert prepare(1) == [[kernels, 0], [with_function, 0]]


@pytest.mark.parametrize("scales", SCALES)
def test_all_scales_of_the_command_are_taken(scales: str) -> None:
    """Plain torch has no kernels, so arguments are checked and nothing is compiled."""
    sizes: dict[str, Any] = dict(heads=2, kv_heads=1, head_dim=16, cache_dtype=E4M3, device=Device("cpu", 1))
    assert paged_attn.prepare(**sizes, scales=scales).kernels == 0
    with pytest.raises(ValueError, match="scales must be 'number'"):
        paged_attn.prepare(**sizes, scales=scales + "s")


# ---- on a GPU ----------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=128, page_size=16)
SERVE = """
import torch
import triton
import paged_attn

compiled = []
triton.knobs.compilation.listener = lambda *, metadata, cache_hit, **_: compiled.extend([metadata["name"]][cache_hit:])

if __name__ == "__main__":
    q = torch.randn(4, 32, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 64, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(64, dtype=torch.int32, device="cuda").view(4, 16)
    lens = torch.tensor([256, 100, 1, 30], dtype=torch.int32, device="cuda")
    paged_attn.paged_attention(q, k, v, table, lens, out=torch.empty_like(q), max_seqlen_k=256)
    torch.cuda.synchronize()
    print(compiled)
"""


@pytest.fixture(scope="module")
def prepared_here() -> paged_attn.preparation.prepare.Summary:
    """Kernels of the sizes below on disk, for the GPU of this machine."""
    return paged_attn.prepare(**SIZES, max_seqs=SEQS, max_tokens=TOKENS, max_seqlen=16384, processes=4)


@pytest.mark.gpu
@pytest.mark.long
def test_nothing_is_compiled_while_a_trace_is_served(
    prepared_here: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def listener(*, metadata: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(metadata["name"])

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    k, v = torch.zeros(2, 30_000, 16, 8, 128, dtype=BF16, device=device)
    for number, parts in enumerate(steps(requests=300)):
        batch = batch_of(parts, 16, torch.device(device))
        tokens = batch.slot_mapping.shape[0]
        q = torch.zeros(tokens, 32, 128, dtype=BF16, device=device)
        new = torch.zeros(tokens, 8, 128, dtype=BF16, device=device)
        write = torch.ops.paged_attn
        for written in (paged_attn.write_kv, write.write_keys, write.write_values):
            written(new, new, k, v, batch.slot_mapping)
        bounds = dict(max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=batch.max_seqlen_k) if number % 2 else {}
        paged_attn.paged_attention(q, k, v, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, **bounds)
        decodes = sum(part.decode for part in parts)
        if decodes:
            paged_attn.paged_attention(q[:decodes], k, v, batch.page_table[:decodes], batch.seq_lens[:decodes])
    torch.cuda.synchronize()
    assert compiled == []


@pytest.mark.gpu
@pytest.mark.long
def test_the_first_call_of_a_process_compiles_nothing_where_kernels_lie_on_disk(
    prepared_here: Any, tmp_path: Path
) -> None:
    """How long it takes is a benchmark's to say."""
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "[]"
