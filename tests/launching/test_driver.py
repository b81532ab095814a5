"""Kept launches through the driver: what it finds in memory is what Triton's launcher would pass."""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton.backends.nvidia.driver
from triton.tools.tensor_descriptor import TensorDescriptor

from paged_attn.launching import driver
from paged_attn.launching.driver import BOX
from paged_attn.launching.template import Hole
from tests.support import warm

COUNT = 5  # addresses: of two tensors, of scratch, and the stream
FIRST, SECOND = (1 << 40, 2 << 40, 3 << 40, 4 << 40, 7), (5 << 40, 6 << 40, 3 << 40, 4 << 40, 9)


class Record(NamedTuple):
    ptr: Any
    stride: Any
    absent: Any


class CudaLauncher:
    """Stands in for Triton's, which is known by its name."""

    global_scratch_size, profile_scratch_size = 0, 0

    def __init__(self, metas: list[Any], **changed: Any) -> None:
        def make(launcher: Any, tensordesc_meta: Any) -> Any:
            return lambda *args: (launcher, tensordesc_meta, args)

        self.launch = make(None, metas) if metas else len  # written in C
        self.launch_cooperative_grid, self.launch_pdl = False, False
        vars(self).update(changed)


class Driver:
    """Stands in for cuLaunchKernelEx: notes what it reads in the sizes that it is told."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.launches, self.attributes, self.fails = sizes, list[Any](), list[Any](), 0

    def __call__(self, config: int, function: int, pointers: int, extra: None) -> int:
        seen = driver.LaunchConfig.from_address(config)
        places = (ctypes.c_void_p * len(self.sizes)).from_address(pointers)
        self.attributes += [(x.id, x.value[0]) for x in seen.attributes[: seen.num_attributes]]
        bits = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes)]
        self.launches.append(((*seen.grid, *seen.block, seen.shared, seen.stream, seen.num_attributes), function, bits))
        return self.fails


SIGNATURE = {"x": Record("*fp32", "i64", "constexpr"), "room": ("*i32",), "n": "i32", "scale": "fp32", "S": "constexpr"}
ARGS = (Record(Hole(1), 1 << 33, None), (Hole(-3),), -3, 0.1, "shape")
BYTES = (8, 8, 8, 4, 4, 8, 8)
PACKED = (4, 1, 1000)


def ptx_of(sizes: tuple[int, ...]) -> str:
    """How the kernel declares parameters of so many bytes."""
    kinds = {BOX: ".align 64 .b8", 8: ".u64 .ptr .global .align 1", 4: ".f32", 1: ".u8"}
    lines = [f"\t.param {kinds[x]} kernel_param_{i}{'[128]' * (x == BOX)}" for i, x in enumerate(sizes)]
    return ".version 8.6\n.visible .entry kernel(\n" + ",\n".join(lines) + "\n)\n.reqntid 128\n{\n.param .b32 x;\n}"


def launch_of(
    monkeypatch: pytest.MonkeyPatch, *, packed: Any = PACKED, signature: Any = SIGNATURE, args: Any = ARGS,
    sizes: tuple[int, ...] = BYTES, metas: list[Any] | None = None, grid: tuple[int, ...] = (3, 2, 1),
    version: int = 13000, declared: tuple[int, ...] = (), **changed: Any,
) -> tuple[Any, Driver, list[Any]]:  # fmt: skip
    """A launch, the driver that it reaches, and the addresses that it leaves to Triton's launcher."""
    notes: list[Any] = []
    start = Driver(sizes)
    foreign = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(lambda *args: start(*args))
    monkeypatch.setattr(driver, "_start", lambda: foreign)
    monkeypatch.setattr(driver, "_version", lambda: version)
    src, asm = SimpleNamespace(signature=signature), {"ptx": ptx_of(declared or sizes)}
    compiled = SimpleNamespace(
        run=CudaLauncher(metas or [], **changed), packed_metadata=packed, function=17, src=src, asm=asm
    )
    return driver.direct_launch(compiled, grid, args, COUNT, notes.append), start, notes


def test_the_driver_finds_the_addresses_and_the_stream_of_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, start, notes = launch_of(monkeypatch)
    for addresses in (FIRST, SECOND, FIRST):
        launch(addresses)
    want = [
        struct.pack("=QqQifQQ", addresses[1], 1 << 33, addresses[2], -3, 0.1, 0, 0)
        for addresses in (FIRST, SECOND, FIRST)
    ]
    assert [b"".join(bits) for _, _, bits in start.launches] == want
    assert [config for config, _, _ in start.launches] == [
        (3, 2, 1, 128, 1, 1, 1000, stream, 0) for stream in (7, 9, 7)
    ]
    assert {function for _, function, _ in start.launches} == {17}
    assert not notes


def test_a_launch_that_need_not_wait_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, start, notes = launch_of(monkeypatch, launch_pdl=True)
    launch(FIRST)
    launch(SECOND)
    assert [config[-2:] for config, _, _ in start.launches] == [(7, 1), (9, 1)]
    assert start.attributes == [(driver.PROGRAMMATIC_STREAM_SERIALIZATION, 1)] * 2
    assert not notes


def test_a_driver_whose_graphs_know_no_such_launches_is_not_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, start, _ = launch_of(monkeypatch, launch_pdl=True, version=12020)
    launch(FIRST)
    assert start.launches[0][0][-1] == 0


class Written(driver.Places):
    """Descriptors that are their own text."""

    def __missing__(self, address: int) -> tuple[int, Any]:
        box = ctypes.create_string_buffer(repr(self.encoded(address)[0]).ljust(128).encode(), 128)
        self[address] = ctypes.addressof(box), box
        return self[address]


BOXES = tuple(
    TensorDescriptor(Hole(i, [torch.zeros(8, 16)] * 2, torch.float16), [8, 16], [16, 1], [4, 16]) for i in (0, 1)
)
DESCRIBED: dict[str, Any] = {
    "metas": ["a", "b"], "args": (*BOXES, 5), "sizes": (BOX, 4, 4, 8, 8) * 2 + (4, 8, 8),
    "signature": {"k": "tensordesc<fp16[4, 16]>", "v": "tensordesc<fp16[4, 16]>", "n": "i32"},
}  # fmt: skip


def held_in(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Objects of Triton's that hold a descriptor are of this size."""
    monkeypatch.setattr(triton.backends.nvidia.driver, "PyCUtensorMap", SimpleNamespace(__basicsize__=size))


def encode_of_3_6(descriptor: Any, meta: Any) -> Any:
    return [(meta, descriptor.base.data_ptr()), *descriptor.shape, *descriptor.strides]


def encode_of_3_8(descriptor: Any, meta: Any, _: Any) -> Any:
    return encode_of_3_6(descriptor, meta)


@pytest.mark.parametrize("encode", [encode_of_3_6, encode_of_3_8])
def test_descriptors_are_those_of_each_address(encode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.backends.nvidia.driver, "make_tensordesc_arg", encode)
    monkeypatch.setattr(driver, "Places", Written)
    held_in(monkeypatch, 256)
    launch, start, notes = launch_of(monkeypatch, **DESCRIBED)
    for addresses in (FIRST, SECOND):
        launch(addresses)
        *found, number, _, _ = start.launches[-1][2]
        for meta, address, (box, *sizes) in zip("ab", addresses, (found[:5], found[5:])):
            assert box.decode().strip() == repr((meta, address))
            assert struct.unpack("=iiqq", b"".join(sizes)) == (8, 16, 16, 1)
        assert struct.unpack("=i", number) == (5,)
    assert not notes


@pytest.mark.parametrize("size, kept", [(128, False), (192, True), (256, True), (384, False)])
def test_objects_that_hold_descriptors_are_of_a_size_that_says_where(
    size: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_in(monkeypatch, size)
    assert (launch_of(monkeypatch, **DESCRIBED)[0] is not None) is kept


def test_a_descriptor_stays_where_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor stays while its address is known, and the latest address is always known."""

    class Box:
        pass

    monkeypatch.setattr(driver, "KNOWN", 2)
    box_at = driver.Places(lambda _: (Box(), 8, 16))
    for address in (*FIRST, *FIRST[::-1]):
        box = weakref.ref(box_at[address][1])
        assert box_at[address][0] == id(box()) + Box.__basicsize__ - driver.BOX
        assert len(box_at) <= 2


def test_what_the_driver_refuses_goes_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's launch gives a new thread its context, or raises the error."""
    launch, start, notes = launch_of(monkeypatch)
    start.fails = 201
    launch(FIRST)
    assert notes == [FIRST]


def test_a_launch_during_a_launch_goes_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch by another thread, while the memory is in use, would do so as well."""
    launch, _, notes = launch_of(monkeypatch)
    monkeypatch.setattr(Driver, "__call__", lambda self, *_: launch(SECOND) or 0)
    launch(FIRST)
    assert notes == [SECOND]
    launch(FIRST)
    assert len(notes) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"packed": (4, 2, 1000)},
        {"launch_cooperative_grid": True},
        {"grid": (0, 1, 1)},
        {"metas": [None]},
        {"metas": ["one", "too many"]},
        {"declared": BYTES[:-1]},
        {"declared": (*BYTES, 8)},
        {"declared": (8, 8, 8, 8, 4, 8, 8)},
        {"packed": (4, 1, 1000, 0)},
        {"signature": SIGNATURE | {"n": "fp16"}},
        {"args": (*ARGS[:2], 1 << 40, *ARGS[3:])},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_kinds_of_launches_that_it_does_not_know_are_left_to_triton(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch_of(monkeypatch, **changed)[0] is None


def test_other_launchers_are_left_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_of(monkeypatch)[0] is not None
    assert launch_of(monkeypatch, global_scratch_size=8)[0] is None
    assert launch_of(monkeypatch, launch=lambda *_: None)[0] is None
    assert launch_of(monkeypatch, launch=object())[0] is None


PROGRAM = """
from paged_attn.launching import platform, driver, launch
from paged_attn.preparation import processes
from tests.support.variants import calls

kept = []
processes.compile_only(platform.Device("sm90", 132), lambda _: None)
launch.KEEPS, launch.run = True, lambda kernel, grid, *args, **options: kernel.warmup(*args, grid=grid, **options)
launch._kept = lambda step, compiled, count: kept.append((step, compiled))
chosen = {variants!r}
for variant, call in calls(chosen):
    if variant in chosen:
        call()
for step, compiled in kept:
    kinds = tuple(compiled.src.signature.values())
    given = driver.sizes_of([*driver._parameters(kinds, step.args), *driver.SCRATCH])
    declared = driver.sizes_in(compiled.asm["ptx"])
    metadata = compiled.metadata
    print(metadata.name, given == declared, declared.count(driver.BOX), len(metadata.tensordesc_meta or ()))
    print(metadata.global_scratch_size, metadata.profile_scratch_size, *compiled.packed_metadata)
"""


@pytest.mark.parametrize(
    "asked, variants, names",
    [
        ("0", ["decode split features", "write e4m3", "merge"], "attention_kernel write_kv_kernel merge_states_kernel"),
        ("0", ["moved pages", "gathered e4m3"], "move_pages_kernel gather_pages_kernel"),
        ("1", ["decode split e4m3", "prefill window sinks", "mixed"], "shares_kernel blocks_kernel mixed_kernel"),
    ],
    ids=["portable", "pages", "hopper"],
)
def test_kernels_take_what_the_driver_is_told(asked: str, variants: list[str], names: str) -> None:
    """Whatever Triton this is: each parameter has the size that the PTX declares, those of Triton's own included."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PAGED_ATTN_HOPPER": asked}
    done = warm.run(["-c", PROGRAM.format(variants=variants)], environment, Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    kernels, scratch = (done.stdout.splitlines()[i::2] for i in (0, 1))
    assert set(names.split()) <= {line.split()[0] for line in kernels}
    for line in kernels:
        _, same, boxes, metas = line.split()
        assert same == "True"
        assert boxes == metas
    assert all(line.split()[:2] == ["0", "0"] and len(line.split()) == 5 for line in scratch)
