"""Machine code without a GPU: the library's own launches, compiled for a target and taken apart.

Run as a program (`python -m tests.machine_code sm90`): prints one JSON object per compiled kernel.  It needs a process
of its own, since Triton decides at import whether kernels are compiled or interpreted.
"""

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
MULTIPROCESSORS = {"sm80": 108, "sm90": 132, "sm100": 148, "gfx942": 304}


class CompileOnly:
    """Stands in for Triton's driver: it knows a target, and has no device."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target, self.name = GPUTarget(*TARGETS[target]), target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0


def compile_calls(target: str, calls: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(name, compiled kernel) of every launch that the calls would make on the target."""
    import triton

    from paged_attn import api, backend, launch

    assert not backend.INTERPRET, "kernels are interpreted in this process: start it with TRITON_INTERPRET=0"
    found: list[tuple[str, Any]] = []
    name = ""

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        found.append((f"{kernel.fn.__name__} {name}", kernel.warmup(*args, grid=grid, **options)))

    device = backend.Device(target, MULTIPROCESSORS[target])
    triton.runtime.driver.set_active(CompileOnly(target))
    launch.run, api.device_of = run, lambda _: device
    for name, call in calls:  # noqa: B007 (run reads it)
        call()
        yield from found
        found.clear()


def _tool(name: str, *args: str, binary: bytes) -> str:
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([str(folder / name), *args, file.name], capture_output=True, text=True, check=True).stdout


def resources(kernel: Any) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of one program."""
    if "cubin" not in kernel.asm:
        number = {x: int(n) for x, n in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", kernel.asm["amdgcn"])}
        return {
            "registers": number["vgpr_count"],
            "spilled": 4 * number["vgpr_spill_count"],
            "shared": kernel.metadata.shared,
        }
    usage = _tool("cuobjdump", "--dump-resource-usage", binary=kernel.asm["cubin"])
    registers, _, local = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage).groups()
    stack = re.search(r"STACK:(\d+)", usage)[1]
    return {"registers": int(registers), "spilled": int(stack) + int(local), "shared": kernel.metadata.shared}


def instructions(kernel: Any) -> list[str]:
    """SASS, one instruction per entry, labels included as 'name:'."""
    found = []
    for line in _tool("nvdisasm", "-c", binary=kernel.asm["cubin"]).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            found.append(label[1] + ":")
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            found.append(instruction[1])
    return found


def operation(instruction: str) -> str:
    """HGMMA of '@P0 HGMMA.64x64x16.F32 ...'."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def loops(code: list[str]) -> list[collections.Counter]:
    """Operations of each loop that holds a matrix instruction, innermost first."""
    at = {x[:-1]: i for i, x in enumerate(code) if x.endswith(":")}
    spans = []
    for i, x in enumerate(code):
        target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", x)
        if target and at.get(target[1], i) < i:
            spans.append((at[target[1]], i))
    counts = []
    for begin, end in sorted(spans, key=lambda span: span[1] - span[0]):
        count = collections.Counter(operation(x) for x in code[begin : end + 1] if not x.endswith(":"))
        if count["HMMA"] + count["HGMMA"] + count["QGMMA"]:
            counts.append(count)
    return counts


def buffers(kernel: Any) -> list[list[int]]:
    """Shapes of the shared-memory buffers of pipelined loads: [tiles in flight, N, D]."""
    allocs = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x(\d+)x(\d+)x", kernel.asm.get("ttgir", ""))
    return [[int(n) for n in x] for x in allocs]


def report(name: str, kernel: Any) -> dict[str, Any]:
    """What the tests assert on."""
    facts: dict[str, Any] = {"name": name, **resources(kernel), "buffers": buffers(kernel)}
    if "cubin" in kernel.asm:
        code = instructions(kernel)
        facts["operations"] = collections.Counter(operation(x) for x in code if not x.endswith(":"))
        facts["loops"] = loops(code)
    return facts


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    from tests.variants import calls

    for name, kernel in compile_calls(sys.argv[1], calls(sys.argv[2:])):
        print(json.dumps(report(name, kernel)), flush=True)


if __name__ == "__main__":
    main()
