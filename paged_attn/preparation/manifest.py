"""Manifests on disk, which list the folders of prepared kernels and save later processes seconds of planning."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..launching import triton_version
from ..launching.locks import write_whole
from ..launching.platform import Device
from .engine_steps import Padded, Served
from .model import Model
from .processes import read


class Asked(NamedTuple):
    """A request for kernels, with everything that decides which kernels are meant."""

    served: tuple[Served | Padded, ...]
    device: Device
    local: bool  # the device is this machine's, so launchers are built, too
    usual: bool = False  # only kernels of usual steps (`Served.batches`)

    @property
    def names(self) -> list[str]:
        """A name for each kind of layers; equal names mean equal kernels from equal sources by an equal Triton."""
        read(self.device)
        from triton.runtime.cache import triton_key

        others = (
            triton_key(),
            _environment(),
            _sources(),
            self.device,
            self.local and triton_version.builds_launchers(),
        )
        kind = "usual" if self.usual else "all"
        told = [repr((_of_any_rank(one), *others)).encode() for one in self.served]
        return sorted(f"{hashlib.sha256(one).hexdigest()[:32]}.{kind}" for one in told)


def found(asked: Asked) -> int | None:
    """Number of kernels prepared for a request; None if a name has no manifest, or a kernel is no longer on disk."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        folders = {folder for name in asked.names for folder in json.loads(_file(name).read_text())["kernels"]}
        if all((_cache() / folder).is_dir() for folder in folders):
            return len(folders)
    return None


def _of_any_rank(served: Served | Padded) -> Served | Padded:
    """Layers as rank 0 has them: all ranks that share keys have the same kernels, and one rank compiles for all."""
    options = served.model._asdict()
    if options["shard"] is None:
        return served
    return served._replace(model=Model(**options | dict(shard=(0, *options["shard"][1:]))))


def keep(asked: Asked, folders: Iterable[str]) -> None:
    """Write the manifest of a request whose kernels are in these folders."""
    text = json.dumps({"kernels": sorted(folders)})
    for file in map(_file, asked.names):
        with contextlib.suppress(OSError):
            write_whole(file, text)


class Held(NamedTuple):
    """A lock file, held by one process at a time.  A child that gets the descriptor holds the file until it ends."""

    held: int | None  # file descriptor; None: no lock file is open, so no process waits


@contextlib.contextmanager
def turn(asked: Asked, wait: bool) -> Iterator[Held | None]:
    """Let one process at a time prepare a request; yield None if another process is doing so and `wait` is false."""
    held = None
    try:
        import fcntl

        file = _file(hashlib.sha256(repr(asked.names).encode()).hexdigest()[:32]).with_suffix(".lock")
        file.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(held)  # type: ignore[arg-type]
        yield None
        return
    except (ImportError, OSError):  # no process waits: there are no locks here, or the file cannot be opened
        pass
    try:
        yield Held(held)
    finally:
        if held is not None:
            os.close(held)


def _cache() -> Path:
    import triton

    return Path(triton.knobs.cache.dir)


def _file(name: str) -> Path:
    return _cache() / "paged_attn" / f"{name}.json"


def _environment() -> Any:
    """Environment variables that decide what Triton compiles and which kernels a call takes."""
    with contextlib.suppress(ImportError):
        from triton._C.libtriton import get_cache_invalidating_env_vars

        return sorted(get_cache_invalidating_env_vars().items()), os.environ.get("PAGED_ATTN_HOPPER")
    return os.environ.get("PAGED_ATTN_HOPPER")


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    """Hash of this package's source files."""
    root, told = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        told.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return told.hexdigest()
