"""A few calls against the reference, for `paged-attn check`: each layout, kinds of batches, dtypes and common features.

The calls tell a broken installation from a sound one; the test suite tests the library itself.  Under an unknown
version of Triton, `launching/triton_trial.py` starts a process that makes larger calls by `try_kernels`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import paged_attn
from paged_attn import reference
from paged_attn.serving.demo import TOLERANCES
from paged_attn.serving.tensors import Caches

NO_PAGE = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """A ragged batch: sequence i has seq_lens[i] tokens, of which the last query_lens[i] are queries."""

    name: str
    query_lens: list[int]
    seq_lens: list[int]
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    layout: str = "NHD"
    page_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 48
    ragged: bool = False  # the page table is (indptr, indices)
    own_keys: bool = False  # pass the call's own keys and values as k_new, v_new, and do not write them to the cache
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("decode", [1, 1, 1], [1, 17, 40]),
    Case("decode, pages of 12, x-packed", [1, 1], [11, 30], layout="x-packed", page_size=12),
    Case("prefill", [19, 33], [19, 33]),
    Case("prefill, keys outside the cache", [9, 5], [25, 5], layout="x-packed", own_keys=True),
    Case("mixed batch", [1, 20, 7], [33, 20, 30], layout="HND"),
    Case("window and sinks", [1, 12], [40, 30], options=dict(window_size=(9, -1), sinks=True)),
    Case("ragged page table, pages of 1", [1, 12], [20, 30], page_size=1, ragged=True),
    Case("softcap and ALiBi", [1, 12], [20, 30], options=dict(softcap=2.0, alibi_slopes=True)),
    Case("float16", [1, 12], [20, 30], dtype=torch.float16),
    Case("bfloat16", [1, 12], [20, 30], dtype=torch.bfloat16),
    Case("fp8 cache", [1, 12], [20, 30], dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
]

# Calls that reach each kind of Hopper kernel: few queries, many, and both in one batch; caches of 16 bits and of 8.
# On other GPUs, portable kernels take these calls.
LARGE: dict[str, Any] = dict(dtype=torch.bfloat16, heads=8, kv_heads=2, head_dim=128)
E4M3 = LARGE | dict(kv_dtype=torch.float8_e4m3fn)
TRIED = [
    Case("decode", [1] * 4, [900, 2000, 700, 1300], **LARGE),
    Case("decode over e4m3", [1] * 4, [900, 2000, 700, 1300], **E4M3),
    Case("prefill", [300, 257], [300, 700], options=dict(window_size=(400, -1), softcap=20.0), **LARGE),
    Case("prefill over e4m3", [300, 257], [300, 700], **E4M3),
    Case("mixed batch", [1, 300, 1, 1, 257], [2000, 300, 900, 1300, 700], **LARGE),
]  # fmt: skip


def run(device: torch.device) -> Iterator[tuple[str, float, float]]:
    """Run every case; yield (name, largest absolute error, tolerance)."""
    for seed, case in enumerate(CASES):
        error = error_of(case, torch.Generator(device).manual_seed(seed), device)
        yield case.name, error, tolerance(case)


def tolerance(case: Case) -> float:
    """The largest absolute error that a case may have."""
    return TOLERANCES[case.dtype].max_abs


def error_of(case: Case, generator: torch.Generator, device: torch.device) -> float:
    """The largest absolute error of a case's call against the reference."""
    tokens = sum(case.query_lens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    def int32(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    # Pages are dealt from the last one down; page 0 belongs to no sequence and stays NaN.
    counts = [-(-seq_len // case.page_size) for seq_len in case.seq_lens]
    free = list(range(1, sum(counts) + 1))
    table = [[free.pop() for _ in range(count)] + [NO_PAGE] * (max(counts) - count) for count in counts]
    slots = []
    for pages, query_len, seq_len in zip(table, case.query_lens, case.seq_lens):
        held = seq_len - query_len if case.own_keys else seq_len
        slots += [pages[pos // case.page_size] * case.page_size + pos % case.page_size for pos in range(held)]

    kv_dtype = case.kv_dtype or case.dtype
    shape = (case.layout, sum(counts) + 1, case.page_size, case.kv_heads, case.head_dim, kv_dtype, device)
    ours, theirs = Caches.allocate(*shape), Caches.allocate(*shape)
    scale = None if case.kv_dtype is None else 1 / 32
    k, v = normal(len(slots), case.kv_heads, case.head_dim), normal(len(slots), case.kv_heads, case.head_dim)
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    for write_kv, caches in ((paged_attn.write_kv, ours), (reference.write_kv, theirs)):
        write_kv(k, v, caches.k, caches.v, mapping, kv_layout=caches.kv_layout, k_scale=scale, v_scale=scale)

    options = dict(case.options, kv_layout=ours.kv_layout, k_scale=scale, v_scale=scale)
    for per_head in ("sinks", "alibi_slopes"):
        if options.get(per_head):
            options[per_head] = torch.linspace(0.1, 0.5, case.heads, device=device)
    if case.own_keys:
        options |= dict(
            k_new=normal(tokens, case.kv_heads, case.head_dim), v_new=normal(tokens, case.kv_heads, case.head_dim)
        )
    offsets = [sum(case.query_lens[:i]) for i in range(len(case.query_lens) + 1)]
    q = normal(tokens, case.heads, case.head_dim)
    ragged = (
        int32([sum(counts[:i]) for i in range(len(counts) + 1)]),
        int32([x for row in table for x in row if x < NO_PAGE]),
    )
    batch = (ragged if case.ragged else int32(table), int32(case.seq_lens), int32(offsets))
    out = paged_attn.paged_attention(q, ours.k, ours.v, *batch, **options)
    wanted = reference.paged_attention(q, theirs.k, theirs.v, *batch, **options)
    assert isinstance(out, Tensor)
    assert isinstance(wanted, Tensor)
    return float((out.double() - wanted).abs().max())


SPILLED = 32  # registers of a thread that the compiler may spill; more means that a kernel is compiled badly
HOPPER = ("shares_kernel", "blocks_kernel", "mixed_kernel")
INSTRUCTIONS = ("wgmma.mma_async", "cp.async.bulk.tensor")  # a Hopper kernel that lacks one is slow, if not wrong


def try_kernels(arch: str, index: int) -> None:
    """Make all calls of TRIED on a GPU, and print the verdict as JSON.

    `keep` is false if the GPU ran out of memory, because the verdict then says nothing about the kernels.
    """
    from .launching import triton_trial

    triton_trial._verdicts[arch] = ""  # so that these calls do not start a trial
    keep = True
    try:
        torch.cuda.set_device(index)
        why = next(complaints(arch, torch.device("cuda", index)), "")
    except Exception as error:  # compilers and GPUs fail in many ways
        why = f"a call fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        keep = "out of memory" not in str(error)
    print(json.dumps({"why": why, "keep": keep}), flush=True)


def complaints(arch: str, device: torch.device) -> Iterator[str]:
    """Make each call of TRIED twice, the second time as a kept launch; yield what is wrong with results and kernels."""
    from .launching import launch

    compiled: list[Any] = []
    run = launch.run

    def noted(*args: Any, **options: Any) -> Any:
        compiled.append(run(*args, **options))
        return compiled[-1]

    launch.run = noted
    try:
        for case in TRIED:
            for seed, how in enumerate(("a call", "a kept launch")):
                error = error_of(case, torch.Generator(device).manual_seed(seed), device)
                if not error <= (most := tolerance(case)):  # also true for NaN
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
    """Yield what is wrong with the machine code of a kernel that gives right results."""
    if spilled > SPILLED:
        yield f"the compiler spills {spilled} registers of {name}"
    for instruction in INSTRUCTIONS if name in HOPPER else ():
        if instruction not in ptx:
            yield f"the compiler makes no {instruction} of {name}"
