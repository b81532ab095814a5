"""The Python of a wheel alone, without what it has compiled, which may be gigabytes for a GPU that is not here.

python -m tests.integrations.fetch vllm==0.33.0 build/hosts/vllm-0.33.0
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35)]


def main() -> None:
    wanted, folder = sys.argv[1], Path(sys.argv[2])
    if folder.exists():
        return
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.12", *[x for p in PLATFORMS for x in ("--platform", p)]]
        subprocess.run([*command, "--dest", place, wanted], check=True)
        unpacked = Path(place, "unpacked")
        with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
            wheel.extractall(unpacked, [name for name in wheel.namelist() if not name.endswith(".so")])
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", str(unpacked), str(folder)], check=True)


if __name__ == "__main__":
    main()
