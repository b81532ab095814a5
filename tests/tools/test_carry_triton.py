"""Another Triton in pieces: what is needed arrives as it was, what is not needed stays behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "triton/__init__.py": b"__version__ = '3.9.0'\n",
    "triton/backends/nvidia/bin/ptxas": bytes(range(256)) * 40,
    "triton/backends/nvidia/lib/cupti/libcupti.so": b"not needed",
    "triton/backends/nvidia/bin/ptxas-blackwell": bytes(range(256)) * 20,
    "triton-3.9.0.dist-info/METADATA": b"Name: triton\n",
}


def carry(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/carry_triton.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "triton-3.9.0-cp312-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in FILES.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if "/bin/" in name else 0o644) << 16
            archive.writestr(info, data)
    return path


# Of the two assemblers 3.9 asks for the second, whatever it compiles for, and 3.8 for the first.
@pytest.mark.parametrize(
    "version, needed, other", [("3.9.0", "ptxas-blackwell", "ptxas"), ("3.8.0", "ptxas", "ptxas-blackwell")]
)
def test_what_is_needed_arrives_as_it_was(version: str, needed: str, other: str, wheel: Path, tmp_path: Path) -> None:
    wheel = wheel.rename(wheel.with_name(wheel.name.replace("3.9.0", version)))
    packed = carry("pack", wheel, tmp_path / "pieces")
    assert packed.returncode == 0, packed.stderr
    unpacked = carry("unpack", tmp_path / "pieces", tmp_path / "there")
    assert unpacked.returncode == 0, unpacked.stderr
    found = {str(x.relative_to(tmp_path / "there")): x for x in (tmp_path / "there").rglob("*") if x.is_file()}
    assert found.keys() == {n for n, data in FILES.items() if data != b"not needed" and not n.endswith(f"/{other}")}
    assert all(path.read_bytes() == FILES[name] for name, path in found.items())
    assert found[f"triton/backends/nvidia/bin/{needed}"].stat().st_mode & 0o111


def test_pieces_of_two_wheels_are_refused(wheel: Path, tmp_path: Path) -> None:
    other = wheel.with_name("triton-3.8.0-cp312-cp312-linux_x86_64.whl")
    shutil.copy(wheel, other)
    for path in (wheel, other):
        assert carry("pack", path, tmp_path / "pieces").returncode == 0
    refused = carry("unpack", tmp_path / "pieces", tmp_path / "there")
    assert refused.returncode != 0
    assert "must hold the pieces of one wheel" in refused.stderr


def test_no_piece_is_larger_than_asked_for(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import carry_triton
    finally:
        sys.path.pop(0)
    path = tmp_path / "triton-3.9.0-cp312-abi3-linux_x86_64.whl"
    noise = b"".join(str(i * i).encode() for i in range(4000))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("triton/noise.py", noise)
    pieces = [*carry_triton.pack(path, tmp_path / "pieces", 1000)]
    assert len(pieces) > 2
    assert all(piece.stat().st_size <= 1000 for piece in pieces)
    carry_triton.unpack(tmp_path / "pieces", tmp_path / "there")
    assert (tmp_path / "there" / "triton" / "noise.py").read_bytes() == noise
