"""A few launches of every kind, for tools that watch a program: `python -m tests.sanitized --part 0/4`.

Inputs are made and results are compared on the host, so nearly all kernels on the device are this library's.  With
PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor has its own allocation, so the tools see every access beyond it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

import torch
from torch import Tensor

import paged_attn
from tests.support import cases, other_calls
from tests.support.cases import E4M3, Case
from tests.support.fuzzing import WAYS
from tests.support.hopper_cases import BLOCKS, SMALL, ragged

FEW_HEADS = dict(heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
MIXED = ragged((1, 300), (70, 130), (1, 0), (9, 9), (0, 20))
# Cases for the portable kernels, which take every call.
PORTABLE: dict[str, dict[str, Any]] = {
    "decodes": ragged((1, 300), (1, 0), (1, 17)) | dict(decode_form=True),
    "decodes, x-packed": ragged((1, 300), (1, 0), (1, 17)) | dict(decode_form=True, layout="x", page_size=12),
    "mixed": MIXED | dict(padding=3),
    "mixed, page 1, float32": MIXED | dict(page_size=1, dtype=torch.float32),
    "mixed, hnd, head_dim 80, features": MIXED
    | dict(layout="HND", head_dim=80, window_size=(40, -1), softcap=20.0, alibi=True, sinks=True),
    "mixed, new, trees": MIXED | dict(new=True, qq_bias=8, tree=True),
    "mixed over e4m3": MIXED | dict(cache_dtype=E4M3, scales="per_head"),
    "mixed, all e4m3": MIXED | dict(dtype=E4M3, cache_dtype=E4M3, out_dtype=E4M3, scales="tensor"),
    "invariant": MIXED | dict(batch_invariant=True),
}
PORTABLE_WAYS = ("portable_plans.portable()", "portable_plans.cut(3, 16)")
HOPPER_WAYS = ("hopper_plans.mixed()", "hopper_plans.long()", "hopper_plans.apart()")


def listed() -> list[tuple[str, tuple[str, ...], Case, str]]:
    """Return (name, plans, case, function) of each launch or pair of launches to watch."""
    found = []
    for way in PORTABLE_WAYS:
        for name, fields in PORTABLE.items():
            found.append((f"portable {name}", (way,), Case(name, **{**FEW_HEADS, **fields}), "attention"))
    small = SMALL | {name: fields for name, fields in BLOCKS.items() if name.startswith("small")}
    for i, (name, fields) in enumerate(small.items()):
        ways = ("hopper_plans.anywhere()", HOPPER_WAYS[i % len(HOPPER_WAYS)])
        found.append((f"hopper {name}", ways, Case(name, **{**FEW_HEADS, **fields}), "attention"))
    for layout in ("NHD", "HND", "x"):
        case = Case(layout, **{**FEW_HEADS, **MIXED}, layout=layout, cache_dtype=E4M3, scales="per_head")
        found.append((f"write_kv {layout}", (), case, "write_kv"))
    found.append(("merge_states", (), Case("merge", **FEW_HEADS, **MIXED), "merge_states"))
    return found


def moved(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """Copy tensors to a device, with their strides and whole storages; views of one storage stay views of one."""
    there: dict[int, Any] = {}

    def tensor(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in there:
            whole = torch.empty(0, dtype=torch.uint8).set_(memory)
            there[memory.data_ptr()] = whole.to(device).untyped_storage()
        empty = torch.empty(0, dtype=x.dtype, device=device)
        return empty.set_(there[memory.data_ptr()], x.storage_offset(), x.shape, x.stride())

    return {name: tensor(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def attend(case: Case) -> None:
    host = cases.build(case)
    inputs = moved(host, "cuda")
    for _ in range(2):  # the second call meets the counters as the first has left them
        result = paged_attn.paged_attention(**inputs)
        out, lse = result if case.lse else (result, None)
        cases.compare(case, out, lse, inputs, on="cpu")


RUN = {"attention": attend}
RUN["write_kv"] = lambda case: other_calls.run_write(case, "cuda")
RUN["merge_states"] = lambda case: other_calls.run_merge(case, "cuda")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitized", description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="0/1", help="i/n: every n-th case from the i-th on")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    given = parser.parse_args()
    first, step = map(int, given.part.split("/"))
    wanted = [x for x in listed() if given.only in x[0]][first::step]
    failed = 0
    for name, ways, case, function in wanted:
        print(f"begin {name}", flush=True)
        with contextlib.ExitStack() as stack:
            for way in ways:
                stack.enter_context(WAYS[way]())
            try:
                RUN[function](case)
            except AssertionError as error:
                failed += 1
                print(f"wrong {name}: {error}", flush=True)
        torch.cuda.synchronize()
        print(f"end {name}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
