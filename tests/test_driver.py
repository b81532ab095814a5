"""Kept launches through the driver: what it finds in memory is what Triton's launcher would pass."""

from __future__ import annotations

import ctypes
import struct
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton.backends.nvidia.driver
from triton.tools.tensor_descriptor import TensorDescriptor

from paged_attn import driver
from paged_attn.template import Argument

COUNT = 5  # addresses: of two tensors, of scratch, and the stream
FIRST, SECOND = (1 << 40, 2 << 40, 3 << 40, 4 << 40, 7), (5 << 40, 6 << 40, 3 << 40, 4 << 40, 9)


class Record(NamedTuple):
    ptr: Any
    stride: Any
    absent: Any


class CudaLauncher:
    """Stands in for Triton's, which is known by its name."""

    global_scratch_size, profile_scratch_size = 0, 0

    def __init__(self, notes: list[Any], metas: list[Any], **changed: Any) -> None:
        def launcher(*args: Any) -> None:
            notes.append(args)

        def make(launcher: Any, tensordesc_meta: Any) -> Any:
            return lambda *args: (launcher, tensordesc_meta, args)

        self.launch = make(launcher, metas)
        self.launch_cooperative_grid, self.launch_pdl = False, False
        vars(self).update(changed)


class Driver:
    """Stands in for cuLaunchKernelEx: notes what it reads in the sizes that it is told."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.launches, self.attributes, self.fails = sizes, list[Any](), list[Any](), 0

    def __call__(self, config: int, function: int, pointers: int, extra: None) -> int:
        seen = driver.Config.from_address(config)
        places = (ctypes.c_void_p * len(self.sizes)).from_address(pointers)
        self.attributes += [(x.id, x.value[0]) for x in seen.attributes[: seen.num_attributes]]
        bits = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes)]
        self.launches.append(((*seen.grid, *seen.block, seen.shared, seen.stream, seen.num_attributes), function, bits))
        return self.fails


SIGNATURE = {"x": Record("*fp32", "i64", "constexpr"), "room": ("*i32",), "n": "i32", "scale": "fp32", "S": "constexpr"}
ARGS = (Record(Argument(1), 1 << 33, None), (Argument(-3),), -3, 0.1, "shape")
BYTES = (8, 8, 8, 4, 4, 8, 8)
PACKED = (4, 1, 1000)


def launch_of(
    monkeypatch: pytest.MonkeyPatch, *, packed: Any = PACKED, signature: Any = SIGNATURE, args: Any = ARGS,
    sizes: tuple[int, ...] = BYTES, metas: list[Any] | None = None, grid: tuple[int, ...] = (3, 2, 1),
    version: int = 13000, **changed: Any,
) -> tuple[Any, Driver, list[Any]]:  # fmt: skip
    """A launch, the driver that it reaches, and what it passes to Triton's launcher."""
    notes: list[Any] = []
    start = Driver(sizes)
    foreign = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(lambda *args: start(*args))
    monkeypatch.setattr(driver, "_start", lambda: foreign)
    monkeypatch.setattr(driver, "_version", lambda: version)
    run = CudaLauncher(notes, metas or [], **changed)
    compiled = SimpleNamespace(run=run, packed_metadata=packed, function=17, src=SimpleNamespace(signature=signature))
    return driver.launch_of(compiled, grid, args, COUNT), start, notes


def passed(addresses: tuple[int, ...]) -> tuple[Any, ...]:
    """The same through Triton's launcher."""
    args = ((addresses[1], 1 << 33, None), (addresses[2],), -3, 0.1, "shape")
    return (3, 2, 1, addresses[-1], 17, False, False, None, None, PACKED, None, None, None, *args)


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
    start.fails = 1
    launch(FIRST)
    assert notes[0][5:7] == (False, True), "Triton's launcher is told as well"


def test_a_driver_whose_graphs_know_no_such_launches_is_not_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, start, notes = launch_of(monkeypatch, launch_pdl=True, version=12020)
    launch(FIRST)
    assert start.launches[0][0][-1] == 0
    start.fails = 1
    launch(FIRST)
    assert notes[0][5:7] == (False, False)


class Written(driver.Places):
    """Descriptors that are their own text."""

    def __missing__(self, address: int) -> tuple[int, Any]:
        box = ctypes.create_string_buffer(repr(self.encoded(address)[0]).ljust(128).encode(), 128)
        self[address] = ctypes.addressof(box), box
        return self[address]


def test_descriptors_are_those_of_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(descriptor: Any, meta: Any) -> Any:
        return [(meta, descriptor.base.data_ptr()), *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(triton.backends.nvidia.driver, "make_tensordesc_arg", encode)
    monkeypatch.setattr(driver, "Places", Written)
    tensor = torch.zeros(8, 16, dtype=torch.float16)
    boxes = [TensorDescriptor(Argument(i, [tensor, tensor], tensor.dtype), [8, 16], [16, 1], [4, 16]) for i in (0, 1)]
    launch, start, notes = launch_of(
        monkeypatch, metas=["a", "b"], args=(*boxes, 5), sizes=(128, 4, 4, 8, 8) * 2 + (4, 8, 8),
        signature={"k": "tensordesc<fp16[4, 16]>", "v": "tensordesc<fp16[4, 16]>", "n": "i32"},
    )  # fmt: skip
    for addresses in (FIRST, SECOND):
        launch(addresses)
        *found, number, _, _ = start.launches[-1][2]
        for meta, address, (box, *sizes) in zip("ab", addresses, (found[:5], found[5:])):
            assert box.decode().strip() == repr((meta, address))
            assert struct.unpack("=iiqq", b"".join(sizes)) == (8, 16, 16, 1)
        assert struct.unpack("=i", number) == (5,)
    start.fails = 1
    launch(FIRST)
    assert notes[0][13:] == (("a", FIRST[0]), 8, 16, 16, 1, ("b", FIRST[1]), 8, 16, 16, 1, 5)


def test_a_descriptor_stays_where_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as that is known, and that of the latest address is."""

    class Box:
        pass

    monkeypatch.setattr(driver, "KNOWN", 2)
    box_at = driver.Places(lambda _: (Box(), 8, 16))
    for address in (*FIRST, *FIRST[::-1]):
        box = weakref.ref(box_at[address][1])
        assert box_at[address][0] == id(box()) + Box.__basicsize__ - driver.BOX
        assert len(box_at) <= 2


def test_what_the_driver_refuses_goes_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives a new thread its context, or raises the error."""
    launch, start, notes = launch_of(monkeypatch)
    start.fails = 201
    launch(FIRST)
    assert notes == [passed(FIRST)]


def test_a_launch_during_a_launch_goes_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread's would while the memory is in use."""
    launch, _, notes = launch_of(monkeypatch)
    monkeypatch.setattr(Driver, "__call__", lambda self, *_: launch(SECOND) or 0)
    launch(FIRST)
    assert notes == [passed(SECOND)]
    launch(FIRST)
    assert len(notes) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"packed": (4, 2, 1000)},
        {"launch_cooperative_grid": True},
        {"grid": (0, 1, 1)},
        {"metas": [None]},
        {"signature": SIGNATURE | {"n": "fp16"}},
        {"args": (*ARGS[:2], 1 << 40, *ARGS[3:])},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_kinds_of_launches_that_it_does_not_know_go_through_triton(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, start, notes = launch_of(monkeypatch, **changed)
    launch(FIRST)
    assert not start.launches
    assert len(notes) == 1


def test_other_launchers_are_left_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_of(monkeypatch, global_scratch_size=8)[0] is None
    assert launch_of(monkeypatch, launch=lambda *_: None)[0] is None
