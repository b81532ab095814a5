"""Whether this Triton makes right kernels for an architecture, by its version or by a trial with a verdict on disk.

A wrong kernel can hang, or leave a process without its GPU, so calls are tried in another process.  A trial may begin
even during capture of a CUDA graph, because the other process touches neither the capturing stream nor its memory.
"""

import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import triton

from . import platform, triton_version
from .locks import write_whole

SECONDS = 600  # limit of a trial; most of its time is compiling

_verdicts: dict[str, str] = {}  # what is wrong, by architecture, as far as this process knows; "": nothing


def why_not(arch: str) -> str | None:
    """What is wrong with the kernels that this Triton makes for an architecture; None if nothing.  Warns once.

    A verdict of this process or on disk decides, if there is one.  Otherwise, a process that has such a GPU starts a
    trial.  Without such a GPU, the result is that nobody has tried them.
    """
    why = _verdicts.get(arch)
    if why is None:
        kept = on_disk(arch)
        if kept is None:
            if (index := _device(arch)) is None:
                return "nobody has tried them on such a GPU"
            kept = _ask(arch, index)
        why = _verdicts.setdefault(arch, kept)
        if why:
            warnings.warn(
                f"paged-attn was not written for Triton {triton.__version__}, and {why}: all calls go to the portable "
                "kernels, launched by Triton",
                stacklevel=2,
            )
    return why or None


def _device(arch: str) -> int | None:
    """Index of the first GPU of this architecture; None if there is none."""
    if platform.INTERPRET or not torch.cuda.is_available() or torch.version.hip:
        return None
    facts = (torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return next((i for i, (major, minor) in enumerate(facts) if f"sm{major}{minor}" == arch), None)


def _file(arch: str) -> Path:
    """File of the verdict, in Triton's cache."""
    ours = sys.modules[__name__.partition(".")[0]].__version__
    name = f"triton {triton.__version__}, paged-attn {ours}, {arch}.json"
    return Path(triton.knobs.cache.dir) / "paged_attn" / name.replace("/", "_")


def on_disk(arch: str) -> str | None:
    """The verdict that this or another process left on disk; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads(_file(arch).read_text())["why"])
    return None


def _keep(arch: str, why: str) -> None:
    """Write a verdict on disk."""
    with contextlib.suppress(OSError):
        write_whole(_file(arch), json.dumps({"why": why}))


def _ask(arch: str, index: int) -> str:
    """Return the verdict of a trial in another process.

    The verdict is kept on disk, unless the trial may have failed for reasons other than wrong kernels.
    """
    command = [sys.executable, "-c", f"from paged_attn import selftest; selftest.try_kernels({arch!r}, {index})"]
    try:
        environment = platform.child_environment("PAGED_ATTN_HOPPER")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        why = f"a few calls, tried in a process of their own, took more than {SECONDS} s"
        _keep(arch, why)
        return why
    except OSError as error:
        return f"no process could be started to try them ({error})"
    with contextlib.suppress(ValueError, IndexError, TypeError, KeyError):
        said = json.loads(done.stdout.splitlines()[-1])
        if said["keep"]:
            _keep(arch, said["why"])
        return str(said["why"])
    last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    why = f"the process that tried them ended with status {done.returncode}: {last}"
    if done.returncode < 0:  # a signal: it crashed
        _keep(arch, why)
    return why


ASKED = os.environ.get("PAGED_ATTN_HOPPER")


def why_untrusted(arch: str) -> str | None:
    """Why launches are left to Triton: its version is unknown, and was either not tried or found wrong.  None: trusted.

    An unknown version is tried for CUDA, unless it is older than all known ones or PAGED_ATTN_HOPPER is 0 or 1.
    """
    if triton_version.known():
        return None
    if triton_version.older() or ASKED in ("0", "1") or not arch.startswith("sm"):
        return f"they know Triton {triton_version.in_words()}, and this is {triton.__version__}"
    return why_not(arch)
