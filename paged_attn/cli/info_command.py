"""`paged-attn info`: installed versions, the device, kernels in use, and hosts.

Most answers take milliseconds.  The command imports torch, which takes seconds, in two cases only: to find a ROCm GPU,
and to tell whether a Triton newer than those known has been tried.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import click

from paged_attn import __version__
from paged_attn.cli.command_options import as_json
from paged_attn.cli.printing import console, print_json, print_rows
from paged_attn.integrations.probes import PROBES
from paged_attn.launching import triton_version

VARIABLES = {
    "PAGED_ATTN_CHECK": "1: every call is checked on the device, as by check=True; without a GPU, unless 0",
    "PAGED_ATTN_DIALECT": "torch: every call in plain torch; interpreter: Triton's kernels, interpreted",
    "PAGED_ATTN_HOPPER": "0: no Hopper kernels; 1: Hopper kernels, also under a Triton that is not known",
    "PAGED_ATTN_PREPARE": "0: an engine's kernels are compiled when a call first needs them, not before any",
    "TRITON_INTERPRET": "1: as PAGED_ATTN_DIALECT=interpreter; 0: kernels are compiled, also without a GPU",
    "TRITON_CACHE_DIR": "where compiled kernels are kept, instead of ~/.triton/cache",
    "CUDA_VISIBLE_DEVICES": "which GPUs this process sees",
}


class DialectState(NamedTuple):
    """A dialect or plain torch, whether calls use it on this machine, and why."""

    name: str
    on: bool
    why: str


@click.command()
@as_json
def info(as_json: bool) -> None:
    """Versions, the device, which kernels calls get and why, environment variables, and hosts."""
    build = torch_build()
    found = gpu(build)
    packages = {name: _version(name) for name in ("torch", "triton", "numpy")}
    known = dialects(found, packages["triton"])
    hosts = [probe() for probe in PROBES]
    if as_json:
        print_json(
            dict(
                paged_attn=__version__,
                python=platform.python_version(),
                system=f"{platform.system()} {platform.machine()}",
                packages=packages,
                torch_build=build._asdict(),
                triton_known=packages["triton"] is not None and triton_version.known(packages["triton"]),
                device=None if found is None else found._asdict(),
                interpreted=interpreted(packages["triton"] is not None),
                dialects=[dialect._asdict() for dialect in known],
                environment={name: os.environ.get(name) for name in VARIABLES},
                hosts=[host._asdict() for host in hosts],
            )
        )
        return
    rows: list[tuple[str, str]] = [(name, version or "not installed") for name, version in packages.items()]
    rows[0] = ("torch", f"{packages['torch'] or 'not installed'}{_built(build)}")
    rows[1] = ("triton", _triton(packages["triton"]))
    rows += [("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")]
    rows += [("device", _device(found, build))]
    rows += [
        ("plain torch" if d.name == "torch" else f"{d.name} kernels", f"{'on' if d.on else 'off'}: {d.why}")
        for d in known
    ]
    rows += [(name, f"{os.environ.get(name, 'not set')}   ({what})") for name, what in VARIABLES.items()]
    rows += [(host.host, f"{_mark(host.fits)}{host.says}") for host in hosts]
    console(False).print(f"[bold]paged-attn[/] {__version__}")
    print_rows(rows, console(False))


def dialects(found: Found | None, triton: str | None) -> list[DialectState]:
    """State of each dialect and of plain torch, by the rules that the library applies at the first call."""
    has_triton = triton is not None
    plain = in_torch(found, has_triton)
    torch = DialectState("torch", plain, _why_in_torch(found, has_triton))
    if plain or triton is None:
        why = "calls are made in plain torch" if has_triton else "Triton is not installed"
        return [DialectState("Hopper", False, why), DialectState("portable", False, why), torch]
    if interpreted(has_triton):
        why = "Triton's interpreter does not know them"
        return [
            DialectState("Hopper", False, why),
            DialectState("portable", True, "interpreted by Triton on the CPU: slow"),
            torch,
        ]
    arch = "no GPU" if found is None else found.arch
    hopper = _why_no_hopper(found, triton)
    return [
        DialectState(
            "Hopper", hopper is None, hopper or f"compiled for {arch}; calls that they do not take go to portable"
        ),
        DialectState("portable", True, f"compiled by Triton for {arch}"),
        torch._replace(on=True),
    ]


def _why_in_torch(found: Found | None, triton: bool) -> str:
    """Reason why plain torch serves all calls, some or none."""
    if dialect_asked() == "torch":
        return "PAGED_ATTN_DIALECT asks for it"
    if interpreted(triton):
        return "the interpreter is asked for"
    if not triton:
        return "all calls, since Triton is not installed"
    return "all calls, at the speed of torch: no GPU is seen" if found is None else "calls whose tensors are on the CPU"


def _why_no_hopper(found: Found | None, triton: str) -> str | None:
    asked = os.environ.get("PAGED_ATTN_HOPPER")
    if found is None or found.arch != "sm90":
        return "they are for sm90"
    if asked == "0":
        return "PAGED_ATTN_HOPPER is 0"
    if asked == "1" or triton_version.known(triton):
        return None
    if triton_version.older(triton):
        return f"they know Triton {triton_version.in_words()}, and this is {triton}"
    from paged_attn.launching import triton_trial  # imports torch and Triton, and tries nothing

    kept = triton_trial.on_disk(found.arch)
    return f"Triton {triton} is not known, and will be tried at the first call" if kept is None else kept or None


def _triton(version: str | None) -> str:
    if version is None:
        return "not installed"
    if triton_version.known(version):
        return f"{version}, one of those known"
    then = (
        "is older: Triton launches the portable kernels"
        if triton_version.older(version)
        else "is tried at the first call"
    )
    return f"{version}, which is not known ({triton_version.in_words()} are) and {then}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _built(build: Torch) -> str:
    return f", for CUDA {build.cuda}" if build.cuda else f", for ROCm {build.hip}" if build.hip else ", for the CPU"


def _device(found: Found | None, build: Torch) -> str:
    if found is not None:
        return f"{found.name}, {found.arch}, {found.multiprocessors} multiprocessors"
    return "the CPU" + (": no GPU is seen" if build.cuda or build.hip else ": torch is built for no other")


def _mark(fits: bool | None) -> str:
    return "" if fits is None else "fits: " if fits else "does not fit: "


# ---- the GPU and torch's build, found without importing torch, which takes seconds ---------------

MULTIPROCESSORS, MAJOR, MINOR = 16, 75, 76  # numbers of CUdevice_attribute


class Torch(NamedTuple):
    """CUDA or HIP version for which torch was built, from torch's version.py.  Both are None in a build for CPUs."""

    cuda: str | None
    hip: str | None


class Found(NamedTuple):
    """A GPU: its name, then the fields of platform.Device."""

    name: str
    arch: str
    multiprocessors: int


def torch_build() -> Torch:
    spec = importlib.util.find_spec("torch")
    path = Path((spec and spec.origin) or ".").parent / "version.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = {name: re.search(rf"^{name}\b[^=\n]*= *'([^']*)'", text, re.M) for name in ("cuda", "hip")}
    return Torch(*(match and match[1] for match in found.values()))


def gpu(build: Torch) -> Found | None:
    """The first GPU that torch would see."""
    if build.hip:  # ROCm's driver has no short way to ask
        return _asked_of_torch()
    return _asked_of_cuda() if build.cuda else None


def dialect_asked() -> str:
    """PAGED_ATTN_DIALECT in lower case.  If it is not set, "interpreter" if TRITON_INTERPRET is on, else ""."""
    said = os.environ.get("PAGED_ATTN_DIALECT", "").lower()
    interpret = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    return said or ("interpreter" if interpret else "")


def interpreted(triton: bool) -> bool:
    """Whether calls run in Triton's interpreter."""
    return triton and dialect_asked() == "interpreter"


def in_torch(found: Found | None, triton: bool) -> bool:
    """Whether all calls run in plain torch, as asked, or because there is no GPU or no Triton."""
    return dialect_asked() == "torch" or (not interpreted(triton) and (found is None or not triton))


def _asked_of_torch() -> Found | None:
    import torch

    from paged_attn.launching.platform import INTERPRET, device_of

    if INTERPRET or not torch.cuda.is_available():
        return None
    return Found(torch.cuda.get_device_name(), *device_of(torch.device("cuda")))


def _asked_of_cuda() -> Found | None:
    """The first GPU of CUDA's driver, which obeys CUDA_VISIBLE_DEVICES as torch does."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    device, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetName(name, 256, device):
        return None
    facts = []
    for attribute in (MAJOR, MINOR, MULTIPROCESSORS):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        facts.append(number.value)
    return Found(name.value.decode(), f"sm{facts[0]}{facts[1]}", facts[2])
