"""Host time of a call: microseconds until the call returns, while the launch queue is never full.

    python -m benchmarks.host [--calls 1000] [--stub] [--output FILE]

Calls follow one another; now and then the host waits for the device, outside the clock.

Without a GPU, --stub measures all but the driver's part, which takes 3 to 4 us.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

BATCH, KEYS = 64, 4096
BETWEEN = 100  # calls between two waits: the launch queue holds some 1000
TARGETS = {"eager": 10.0, "operator": 5.0, "launch": 5.0}  # first word of a call's name -> most us wanted


def measure(calls: Mapping[str, Callable[[], object]], count: int, wait: Callable[[], None]) -> dict[str, float]:
    """Return median microseconds of each call, timed in turns, because a host's speed changes with time."""
    for call in calls.values():
        for _ in range(10):
            call()
    wait()
    nanoseconds: dict[str, list[int]] = {name: [] for name in calls}
    for done in range(0, count, BETWEEN):
        for name, call in calls.items():
            taken = nanoseconds[name]
            for _ in range(min(BETWEEN, count - done)):
                started = perf_counter_ns()
                call()
                taken.append(perf_counter_ns() - started)
            wait()
    return {name: statistics.median(taken) / 1e3 for name, taken in nanoseconds.items()}


def calls_of(device: str) -> dict[str, Callable[[], object]]:
    """Return calls by name: decode and ragged, eager and through the operator, with and without bounds; also writes.

    "launch" is the part of a kept call that follows the recognition of its signature.
    """
    import torch

    import paged_attn
    from paged_attn.calls import call_cache

    def int32(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    q = torch.zeros(BATCH, 32, 128, dtype=torch.bfloat16, device=device)
    k, v = torch.zeros(2, 256, 16, 8, 128, dtype=torch.bfloat16, device=device)
    batch = (q, k, v, int32(BATCH, KEYS // 16), int32(BATCH, value=1))  # one key each: the device keeps up
    table = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * (KEYS // 16), batch[3].flatten()
    starts, out = torch.arange(BATCH + 1, dtype=torch.int32, device=device), torch.empty_like(q)
    new_k, new_v = torch.zeros(2, BATCH, 8, 128, dtype=torch.bfloat16, device=device)
    qkv = torch.zeros(BATCH, 48 * 128, dtype=torch.bfloat16, device=device)
    weights = torch.ones(2, 128, device=device).unbind()
    angles = torch.zeros(BATCH, 128, device=device)
    rotary: dict[str, Any] = dict(positions=torch.arange(BATCH, device=device), cos_sin=angles)
    rotary |= dict(zip(("q_norm", "k_norm"), weights))
    slots, bounds = torch.arange(BATCH, device=device), {"max_seqlen_q": 1, "max_seqlen_k": KEYS}
    attend: Callable[..., object] = paged_attn.paged_attention
    operator = torch.ops.paged_attn.attention.default
    for _ in range(2):
        attend(*batch, out=out)
    launches, addresses = [*call_cache._latest.values()][-1].launches, [x.data_ptr() for x in (*batch, out)]
    return {
        "eager decode": lambda: attend(*batch, out=out),
        "eager decode, bounds": lambda: attend(*batch, out=out, **bounds),
        "eager decode, allocates out": lambda: attend(*batch),
        "eager decode, ragged table": lambda: attend(*batch[:3], table, batch[4], out=out),
        "eager ragged": lambda: attend(*batch, starts, out=out),
        "eager ragged, bounds": lambda: attend(*batch, starts, out=out, **bounds),
        "launch decode": lambda: launches.again(addresses),
        "operator decode": lambda: operator(*batch, None, out),
        "operator ragged": lambda: operator(*batch, starts, out),
        "write_kv": lambda: paged_attn.write_kv(new_k, new_v, k, v, slots),
        "write_qkv": lambda: paged_attn.write_qkv(qkv, k, v, slots, **rotary, q_out=out),
    }


class CudaLauncher:
    """Stand-in for Triton's launcher, which `launching.driver` recognises by the name of its class."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, boxes: int) -> None:
        def around(launcher: Any, tensordesc_meta: Any) -> Any:
            return lambda *_: (launcher, tensordesc_meta)

        self.launch = around(lambda *_: None, [()] * boxes)


def pretend() -> None:
    """Plan as for an H200 and launch nothing: a C function that returns 0 stands in for the driver's launch."""
    from triton.compiler import CompiledKernel

    from paged_attn.launching import driver, launch, platform
    from paged_attn.launching.template import Descriptors

    def kinds(arg: Any) -> Any:
        """Return Triton's type names of a kernel's argument, of the right sizes."""
        if isinstance(arg, tuple):
            return tuple(map(kinds, arg))
        if isinstance(arg, Descriptors):
            return "box"
        return {int: "i64", float: "fp32"}.get(type(arg), "*" if hasattr(arg, "data_ptr") else "constexpr")

    def boxes(kind: Any) -> int:
        return sum(map(boxes, kind)) if isinstance(kind, tuple) else int(kind == "box")

    class Nothing(CompiledKernel):
        function, packed_metadata, asm, module, run = 1, (4, 1, 0), {"ptx": ""}, None, None

        def __init__(self, args: tuple[Any, ...]) -> None:
            taken = tuple(map(kinds, args))
            self.src, self.run = SimpleNamespace(signature=dict(enumerate(taken))), CudaLauncher(boxes(taken))

    class Boxes(driver.Places):
        def __missing__(self, address: int) -> tuple[int, Any]:
            return self.setdefault(address, (address, None))

    platform.pretend(platform.Device("sm90", 132))
    # pthread_equal(configuration, kernel, ...) returns 0, which means success in the driver
    start = ctypes.CDLL(None)["pthread_equal"]
    # the check of a kernel's parameters against its PTX is left out, because there is no PTX
    vars(driver).update(Places=Boxes, _start=lambda: start, _end_with_a_box=lambda: True)
    vars(driver).update(sizes_in=lambda _: [], sizes_of=lambda _: [])
    launch.run = lambda _kernel, _grid, *args, **_: Nothing(args)


def report(calls: int, stub: bool) -> dict[str, Any]:
    """Return microseconds by name, with versions and device."""
    import torch
    import triton

    if stub:
        pretend()
    device = "cpu" if stub else "cuda"
    wait = (lambda: None) if stub else torch.cuda.synchronize
    found = measure(calls_of(device), calls, wait)
    return {
        "device": "no device, launches are stubs" if stub else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "calls": calls,
        "host_us": {name: round(us, 2) for name, us in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time per call.")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--stub", action="store_true", help="without a GPU: all but the driver")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"  # before the package is imported
    found = report(options.calls, options.stub)
    for name, us in found["host_us"].items():
        target = TARGETS.get(name.split()[0])
        print(f"{name:30}{us:8.2f} us" + (f"   at most {target:g} wanted" if target else ""))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
