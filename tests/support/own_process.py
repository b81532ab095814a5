"""Scripts that need a process of their own, for tests of imports, forks and threads.

A script may call `inputs(seed)`, which returns the arguments of a small call of attention, and `call(seed)`, which
makes this call and returns its largest difference from the reference.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import torch

from tests.support import warm

LIMIT = 3600  # seconds after which a script that hangs is ended
CALL = """
def inputs(seed=0):
    import torch

    device = "cuda" if torch.cuda.is_initialized() or torch.cuda.device_count() else "cpu"
    rng = torch.Generator(device).manual_seed(seed)
    q = torch.randn(2 + seed, 4, 32, generator=rng, device=device)
    k, v = torch.randn(2, 4, 16, 2, 32, generator=rng, device=device)
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=device).repeat(2 + seed, 1)
    lens = torch.full((2 + seed,), 20 + seed % 12, dtype=torch.int32, device=device)
    return q, k, v, table, lens


def call(seed=0):
    import paged_attn

    given = inputs(seed)
    out = paged_attn.paged_attention(*given)
    return float((out - paged_attn.reference.paged_attention(*given)).abs().max())
"""


def run(script: str, **environ: str) -> str:
    """Run a script, assert that it succeeds, and return what it prints."""
    done = ended(script, **environ)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def ended(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script and return how it ended.  TRITON_INTERPRET is not set, as users do not set it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if "TRITON_INTERPRET" not in environ and not torch.cuda.is_available():
        environment.setdefault("PAGED_ATTN_DIALECT", "interpreter")
    environment |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    # Kernels must be in a file, and so must what spawned processes import.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(CALL + script)
        return warm.run([str(path)], environment | environ, timeout=LIMIT)
