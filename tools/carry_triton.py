"""Bring another Triton to a machine without a network: pack a wheel into small pieces, and unpack them there.

    pip download --no-deps --python-version 3.12 --only-binary=:all: -d wheels triton==3.9.0
    python tools/carry_triton.py pack wheels/triton-3.9.0-*.whl pieces          # needs binutils' strip
    python tools/carry_triton.py unpack pieces build/triton-3.9.0                # needs Python alone
    PYTHONPATH=build/triton-3.9.0 python -m pytest tests

The wheel has to be one for that machine's Python.  Profilers, disassemblers, files for other chips and the symbols of
libtriton.so are left out, so the pieces of 3.9.0 have some 40 MB instead of 1,040.
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# Files whose paths contain one of these are not needed to import Triton, nor to compile and launch for Hopper.
LEFT_OUT = (
    *("/cupti", "libproton", "/instrumentation/", "/plugins/", "FileCheck", "nvdisasm", "cuobjdump"),
    *("/backends/amd/include", "/backends/amd/lib/", "/profiler/"),
)
# A wheel has two assemblers.  For Hopper, Triton uses the first before 3.9, and the second from 3.9 on.
ASSEMBLERS = ("ptxas", "ptxas-blackwell")
STRIPPED = "libtriton.so"  # symbols are most of its bytes
MEGABYTE = 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="a wheel into pieces")
    packing.add_argument("wheel", type=Path)
    packing.add_argument("pieces", type=Path, help="a folder")
    packing.add_argument("--limit", type=int, default=55, help="megabytes of a piece  [55]")
    unpacking = verbs.add_parser("unpack", help="pieces into a folder to be put in front of PYTHONPATH")
    unpacking.add_argument("pieces", type=Path)
    unpacking.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.verb == "pack":
        for piece in pack(options.wheel, options.pieces, options.limit * MEGABYTE):
            print(f"{piece}  {piece.stat().st_size / MEGABYTE:.1f} MB")
    else:
        unpack(options.pieces, options.folder)


def pack(wheel: Path, pieces: Path, limit: int) -> Iterator[Path]:
    """Compress the needed files of a wheel into pieces of at most `limit` bytes; yield the path of each piece."""
    packed = io.BytesIO()
    newer = tuple(map(int, re.findall(r"\d+", wheel.name)[:2])) >= (3, 9)
    other = "/bin/" + ASSEMBLERS[not newer]
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive, zipfile.ZipFile(wheel) as files:
        for info in files.infolist():
            if info.is_dir() or any(part in info.filename for part in LEFT_OUT) or info.filename.endswith(other):
                continue
            data = files.read(info)
            if info.filename.endswith(STRIPPED):
                data = stripped(data)
            member = tarfile.TarInfo(info.filename)
            member.size, member.mode = len(data), info.external_attr >> 16 & 0o777
            archive.addfile(member, io.BytesIO(data))
    pieces.mkdir(parents=True, exist_ok=True)
    data = packed.getvalue()
    for number, begin in enumerate(range(0, len(data), limit)):
        piece = pieces / f"{wheel.name.split('-cp')[0]}.tar.xz.{number:02}"
        piece.write_bytes(data[begin : begin + limit])
        yield piece


def stripped(library: bytes) -> bytes:
    """Return a shared library without the symbols that its loading does not need."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "library.so"
        file.write_bytes(library)
        subprocess.run(["strip", "--strip-unneeded", str(file)], check=True)
        return file.read_bytes()


def unpack(pieces: Path, folder: Path) -> None:
    """Unpack what `pack` has packed, from a folder that holds all pieces of one wheel and of no other."""
    found = sorted(pieces.glob("*.tar.xz.[0-9][0-9]"))
    if not found or len({piece.name[:-3] for piece in found}) > 1:
        raise SystemExit(f"{pieces} must hold the pieces of one wheel, found {[piece.name for piece in found]}")
    data = lzma.decompress(b"".join(piece.read_bytes() for piece in found))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")


if __name__ == "__main__":
    main()
