"""Machine code without a GPU: the library's own launches, compiled for a target and taken apart.

Run as a program (`python -m tests.machine_code sm90 "decode page"`): prints one JSON object per compiled kernel.  It
needs a process of its own, since Triton decides at import whether kernels are compiled or interpreted.
"""

import argparse
import contextlib
import gc
import hashlib
import importlib
import io
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import sass, warm

MULTIPROCESSORS = {"sm80": 108, "sm90": 132, "sm100": 148, "gfx942": 304}
# Bytes of shared memory that one program may have.
SHARED = {"sm80": 166912, "sm90": 232448, "sm100": 232448, "gfx942": 65536}
# Opcodes that decide the bits of a row in the loop over keys.  A decode's kernel must execute the same as a prefill's.
ARITHMETIC = ("FADD", "FMUL", "FFMA", "MUFU", "FMNMX", "SHFL", "F2FP", "HGMMA", "HMMA")
IN_FOURS = ("LDG.E.128", "STG.E.128")  # four words of each thread
INSTRUCTION = 16  # bytes, on sm_90
SAID: dict[int, str] = {}  # id of a kernel -> what ptxas printed; "" if the kernel was found on disk


def compile_calls(target: str, calls: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (variant, compiled kernel) of every launch that the calls would make on the target."""
    import triton

    from paged_attn.launching import platform
    from paged_attn.preparation import processes

    found: list[Any] = []
    said = io.StringIO()

    def keep(kernel: Any) -> None:
        found.append(kernel)
        SAID[id(kernel)] = said.getvalue()
        said.truncate(said.seek(0))

    triton.knobs.nvidia.dump_ptxas_log = True
    processes.compile_only(platform.Device(target, MULTIPROCESSORS[target]), keep)
    for variant, call in calls:
        try:
            with contextlib.redirect_stdout(said):
                call()
        except Exception as error:
            raise RuntimeError(f"{variant!r} does not compile for {target}") from error
        yield from ((variant, kernel) for kernel in found)
        found.clear()


def _tool(name: str, *args: str, source: bytes) -> str:
    """Run one of the NVIDIA programs in Triton's wheel on a file of these bytes; return its output."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile() as file:
        file.write(source)
        file.flush()
        done = subprocess.run([str(program), *args, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def resources(kernel: Any) -> dict[str, int]:
    """Return registers per thread, spilled bytes per thread and bytes of shared memory per program."""
    if "cubin" in kernel.asm:
        usage = _tool("cuobjdump", "--dump-resource-usage", source=kernel.asm["cubin"])
        number = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
        registers, spilled = number["REG"], number["STACK"] + number["LOCAL"]
    else:
        counts = re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", kernel.asm["amdgcn"])
        number = {name: int(n) for name, n in counts}
        registers, spilled = number["vgpr_count"], 4 * number["vgpr_spill_count"]
    return {"registers": registers, "spilled": spilled, "shared": kernel.metadata.shared}


def pipelines(kernel: Any) -> list[list[list[int]]]:
    """Return, for each loop with a matrix product, the shapes of the buffers that it fills asynchronously.

    A shape is [tiles in flight, N, D].
    """
    lines = kernel.asm["ttgir"].splitlines()
    shapes, buffer_of, found = {}, {}, []
    for line in lines:
        if alloc := re.search(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<((?:\d+x)+)", line):
            shapes[alloc[1]] = [int(n) for n in alloc[2].split("x")[:-1]]
        elif index := re.search(r"(%\S+) = ttg\.memdesc_index (%[^\s\[]+)\[", line):
            buffer_of[index[1]] = index[2]
    for begin, line in enumerate(lines):
        if loop := re.match(r"(\s*)(?:%\S+ = )?scf\.for ", line):
            end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith(loop[1] + "}"))
            body = "\n".join(lines[begin:end])
            if re.search(r"\b(tt\.dot|warp_group_dot|tc_gen5_mma) ", body):
                filled = re.findall(r"ttg\.async_copy_global_to_local %[^\s,]+, (%[^\s,]+)", body)
                found.append([shapes[name] for name in sorted({buffer_of[x] for x in filled})])
    return found


def instructions(kernel: Any) -> list[str]:
    """Return SASS without addresses and source lines: an entry for each instruction, and 'name:' for each label."""
    found = []
    for line in _tool("nvdisasm", "-c", source=kernel.asm["cubin"]).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            found.append(label[1] + ":")
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            found.append(instruction[1])
    return found


def _ptxas() -> str:
    """Return the name of the ptxas that Triton uses for sm_90: from 3.9 on, the one named after Blackwell."""
    from triton.backends.nvidia.compiler import get_ptxas

    return Path(get_ptxas(90).path).name


def wgmma_advice(kernel: Any) -> list[str]:
    """Return ptxas' remarks on warpgroup products, such as (C7510) on serialised ones."""
    said = SAID.get(id(kernel), "")
    if not said:
        ptx = kernel.asm["ptx"]
        arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
        said = _tool(_ptxas(), "-lineinfo", f"--gpu-name={arch}", "-o", os.devnull, source=ptx.encode())
    return re.findall(r"\(C75\d\d\).*", said)


def report(variant: str, kernel: Any, disassemble: bool = True) -> dict[str, Any]:
    """Return the facts about a kernel on which tests assert; `disassemble`: also those that need SASS."""
    facts = {"variant": variant, "kernel": kernel.metadata.name, **resources(kernel), "pipelines": pipelines(kernel)}
    if disassemble and "cubin" in kernel.asm:
        code = instructions(kernel)
        facts["sass"] = hashlib.sha256("\n".join(code).encode()).hexdigest()  # equal for equal code
        facts |= {"operations": sass.operations(code), "loops": sass.loops(code)}
        facts["in_fours"] = {name: sum(x == name for x in map(sass.whole_operation, code)) for name in IN_FOURS}
        facts["code_bytes"] = INSTRUCTION * facts["operations"].total()
        facts["innermost"] = [sass.operations(loop) for loop in sass.innermost(code)]
        facts["loops_in_turn"] = sass.loops_in_turn(code)
        facts["named_barriers"] = sorted(sass.named_barriers(code))
        facts["under_products"] = sass.under_products(code)
        facts["results_under_products"] = sass.results_under_products(code)
        facts["boxes_in_loops_of_their_own"] = sass.boxes_in_loops(code)
        facts["overtaken_readers"] = sass.overtaken_readers(code)
        facts["reused_barriers"] = sass.reused_barriers(code)
        facts["unwritten"] = sass.unwritten(code)
        facts["before_waiting"] = sass.before_waiting(code)
        facts["exits_before_waiting"] = sass.exits_before_waiting(code)
        facts["advice"] = wgmma_advice(kernel) if facts["operations"]["HGMMA"] + facts["operations"]["QGMMA"] else []
    return facts


def compiled(target: str, *args: str, **environment: str) -> list[dict[str, Any]]:
    """Run this module in a process in which kernels are compiled, and return its reports."""
    command = ["-m", "tests.machine_code", target, *args]
    environment = os.environ | {"TRITON_INTERPRET": "0"} | environment
    root = Path(__file__).parents[1]
    done = warm.run(command, environment, root)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr[-4000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile without a GPU and report; one JSON object per kernel.")
    parser.add_argument("target", choices=MULTIPROCESSORS)
    parser.add_argument("words", nargs="*", help="only variants whose names contain one of these")
    parser.add_argument("--exactly", action="store_true", help="only variants that are named by one of the words")
    parser.add_argument("--calls", default="tests.support.variants", help="the module whose calls() are compiled")
    parser.add_argument("--no-sass", action="store_true", help="resources only")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"
    calls = importlib.import_module(options.calls).calls(options.words)
    calls = [x for x in calls if x[0] in options.words or not options.exactly]
    gc.freeze()  # imports stay, and compilers make few reference cycles: collection would take a tenth of the time
    gc.set_threshold(50_000)
    for variant, kernel in compile_calls(options.target, calls):
        print(json.dumps(report(variant, kernel, not options.no_sass)), flush=True)


if __name__ == "__main__":
    main()
