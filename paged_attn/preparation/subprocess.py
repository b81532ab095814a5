"""Preparing in another process, for an engine's worker, which has threads and a GPU, or may not use multiprocessing.

The other process imports torch once, finds out which kernels are needed, and forks to compile them.  It ends when the
worker ends.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from time import monotonic
from typing import Any

from ..launching import triton_version
from ..launching.platform import child_environment
from .manifest import Asked, Held, keep
from .prepare import Summary
from .processes import Pool, processors

SECONDS = 1800  # the longest wait: a hundred times what a host of many processors needs
PROGRAM = "from paged_attn.preparation import subprocess; subprocess.main()"


def prepare(asked: Asked) -> Summary:
    """Prepare in another process and wait; raises RuntimeError with the last line of output if it fails."""
    process = _begin(asked, None)
    late = threading.Timer(SECONDS, os.killpg, (process.pid, signal.SIGKILL))
    late.daemon = True  # if this process is interrupted while it waits, the timer does not keep it alive
    late.start()
    try:
        said = process.stdout.read().splitlines()
    finally:
        late.cancel()
    status = _end(process)
    if status:
        raise RuntimeError(f"the process that compiles ended with status {status}: {' '.join(said[-1:])[:300]}")
    return Summary(*json.loads(next(line for line in reversed(said) if line.startswith("["))))


def prepare_meanwhile(asked: Asked, turn: Held) -> None:
    """Prepare in another process of low priority without waiting; that process holds the turn until it ends."""
    process = _begin(asked, turn)
    threading.Thread(target=_end, args=(process,), name="paged_attn.prepare", daemon=True).start()


def _begin(asked: Asked, turn: Held | None) -> Any:
    """Start the other process.  Its stdin stays empty, and closes when this process ends."""
    held = [] if turn is None or turn.held is None else [turn.held]
    without = [triton_version.ASSEMBLER] if triton_version.assembler_was_another(asked.device.capability) else []
    task = base64.b64encode(pickle.dumps((asked, turn is not None))).decode()
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, task],
        env=child_environment(*without), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, pass_fds=held,
    )  # fmt: skip


def _end(process: Any) -> int:
    with process:
        process.stdout.read()
        return int(process.wait())


# ---- the other process ---------------------------------------------------------------------------


def main() -> None:
    """Compile the request in the first argument, write its manifest, and print a Summary as JSON."""
    from .. import api  # noqa: F401, for processes that are forked

    asked, meanwhile = pickle.loads(base64.b64decode(sys.argv[1]))
    os.setpgid(0, 0)
    if meanwhile:
        os.nice(19)
    began = monotonic()
    work = [one.work(asked.usual) for one in asked.served]
    with Pool(asked.device, asked.local, max(1, processors() // (1 + meanwhile)), forked=True) as pool:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        kernels = pool.compile(work, lambda items, what, total=0: items)
    keep(asked, {kernel.folder for kernel in kernels.values()})
    print(json.dumps(Summary(len(kernels), sum(x.now for x in kernels.values()), monotonic() - began)), flush=True)


def _end_with_parent() -> None:
    """Kill this process group when stdin closes: the parent has ended, and nobody wants the kernels."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
