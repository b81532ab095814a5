"""What was prepared, remembered on disk beside the kernels: to ask costs files' names, where planning takes seconds."""

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
from ..launching.backend import Device
from .engine_steps import Padded, Served
from .processes import read


class Asked(NamedTuple):
    """All that decides which kernels they are; `usual`: those of usual steps only."""

    served: tuple[Served | Padded, ...]
    device: Device
    local: bool  # the device is this machine's, whose launchers are built, too
    usual: bool = False

    @property
    def names(self) -> list[str]:
        """One of each kind of layers, the same for the same kernels: of the same Triton, and of these sources."""
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
        told = [repr((one, *others)).encode() for one in self.served]
        return sorted(f"{hashlib.sha256(one).hexdigest()[:32]}.{kind}" for one in told)


def found(asked: Asked) -> int | None:
    """How many kernels were prepared and are there; None: not all of them are."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        folders = {folder for name in asked.names for folder in json.loads(_file(name).read_text())["kernels"]}
        if all((_cache() / folder).is_dir() for folder in folders):
            return len(folders)
    return None


def keep(asked: Asked, folders: Iterable[str]) -> None:
    """A process that is reading meanwhile finds all of it or nothing."""
    text = json.dumps({"kernels": sorted(folders)})
    for file in map(_file, asked.names):
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(f".{os.getpid()}")
            new.write_text(text)
            new.replace(file)


class Held(NamedTuple):
    """A file that one process at a time holds: `held` may be handed to a child, which then holds it till its end."""

    held: int | None  # None: there are no such locks here, and everybody goes on


@contextlib.contextmanager
def turn(asked: Asked, wait: bool) -> Iterator[Held | None]:
    """Of the processes of a host that want the same, one; None: another has it, and this one does not wait."""
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
    except (ImportError, OSError):  # a system, or a file system, without
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
    """Variables that decide what Triton compiles, and which kernels ours are."""
    with contextlib.suppress(ImportError):
        from triton._C.libtriton import get_cache_invalidating_env_vars

        return sorted(get_cache_invalidating_env_vars().items()), os.environ.get("PAGED_ATTN_HOPPER")
    return os.environ.get("PAGED_ATTN_HOPPER")


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    """Of this package."""
    root, told = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        told.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return told.hexdigest()
