"""What the process does that tries the kernels of a Triton that was not read; launching/trial.py starts it and asks."""

import json
from collections.abc import Iterator
from typing import Any

import torch

from . import selftest
from .launching import launch, trial

SPILLED = 32  # words of a thread that a compiler may put into memory; more says that a kernel is not what was meant
HOPPER = ("shares_kernel", "blocks_kernel", "mixed_kernel")
INSTRUCTIONS = ("wgmma.mma_async", "cp.async.bulk.tensor")  # without which one of them is slow, if not wrong


def main(arch: str, index: int) -> None:
    """Try all calls on a GPU; print the verdict as JSON."""
    trial._verdicts[arch] = ""  # these calls do not ask
    keep = True
    try:
        torch.cuda.set_device(index)
        why = next(complaints(arch, torch.device("cuda", index)), "")
    except Exception as error:  # a compiler fails in ways of its own, and a GPU in more
        why = f"a call fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        keep = "out of memory" not in str(error)
    print(json.dumps({"why": why, "keep": keep}), flush=True)


def complaints(arch: str, device: torch.device) -> Iterator[str]:
    """What is wrong with results of a few calls, made anew and kept, and with the kernels that these take."""
    compiled: list[Any] = []
    run = launch.run

    def noted(*args: Any, **options: Any) -> Any:
        compiled.append(run(*args, **options))
        return compiled[-1]

    launch.run = noted
    try:
        for case in selftest.TRIED:
            for seed, how in enumerate(("a call", "a kept launch")):
                error = selftest.error_of(case, torch.Generator(device).manual_seed(seed), device)
                if not error <= (most := selftest.tolerance(case)):  # NaN, too
                    yield f"{how} is wrong ({case.name}: error {error:.2g}, of which {most:.2g} is rounding)"
    finally:
        launch.run = run
    kernels = [kernel for kernel in compiled if kernel is not None]
    for kernel in kernels:
        yield from kernel_complaints(kernel.metadata.name, kernel.n_spills, kernel.asm["ptx"])
    if arch == "sm90" and kernels:
        missing = {"shares_kernel", "blocks_kernel"} - {kernel.metadata.name for kernel in kernels}
        if missing:
            yield f"the Hopper kernels were not taken ({', '.join(sorted(missing))})"


def kernel_complaints(name: str, spilled: int, ptx: str) -> Iterator[str]:
    """What is wrong with the machine code of a kernel that gives right results."""
    if spilled > SPILLED:
        yield f"the compiler spills {spilled} registers of {name}"
    for instruction in INSTRUCTIONS if name in HOPPER else ():
        if instruction not in ptx:
            yield f"the compiler makes no {instruction} of {name}"
