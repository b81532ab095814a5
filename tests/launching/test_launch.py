"""Kept launches: what is passed to a compiled kernel is what Triton's own call would pass."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

import paged_attn
from paged_attn.calls import call_cache
from paged_attn.kernels.portable import launches as portable_plan
from paged_attn.launching import launch, scratch
from paged_attn.launching.template import Hole, fill, filler
from tests.calls.changed import BASES, FP16
from tests.calls.outcomes import outcome
from tests.support.cases import build

Cut = Callable[..., None]


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    call_cache.clear()


class Compiled(CompiledKernel):
    """Stands in for a compiled kernel: it notes what it is launched with."""

    module = None  # Triton 3.8 unloads that of one that is gone

    def __init__(self, notes: list[Any]) -> None:
        self.notes, self.function, self.packed_metadata = notes, 17, (4, 1, 0)

    @property
    def run(self) -> Callable[..., None]:
        return lambda *args: self.notes.append(args)


def plain(arg: Any) -> Any:
    """Records as tuples, tensors as addresses."""
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    return tuple(map(plain, arg)) if isinstance(arg, tuple) else arg


@pytest.mark.parametrize("segments, joins", [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("base", BASES)
def test_kept_launches_pass_what_tritons_call_would(
    base: str, segments: int, joins: bool, cut: Cut, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(segments)
    if not joins:
        monkeypatch.setattr(portable_plan, "MIN_JOIN_STEPS_WORTH_A_LAUNCH", 0)
    anew: list[Any] = []
    again: list[Any] = []

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Compiled:
        anew.append((*(*grid, 1, 1)[:3], plain(args)))
        return Compiled(again)

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "KEEPS", True)
    one, other = build(BASES[base], device), build(BASES[base], device)
    now = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    outcome(one)
    anew.clear()
    paged_attn.paged_attention(**other)  # through what was kept
    assert not anew
    call_cache.clear()
    paged_attn.paged_attention(**other)  # anew
    assert len(again) == len(anew) == (1 if joins else 2)
    for (x, y, z, stream, function, packed, metadata, enter, leave, out, _, _, *args), want in zip(again, anew):
        assert (x, y, z) == want[:3]
        assert (stream, function, packed, metadata, enter, leave) == (now, 17, (4, 1, 0), None, None, None)
        want_out, _, _, *wanted = want[3]  # log-sum-exp and scratch are made by each call
        assert out == want_out
        assert args == wanted


def test_launch_hooks_of_triton_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    notes: list[Any] = []
    kernel = Compiled(notes)
    monkeypatch.setattr(kernel.__class__, "launch_metadata", lambda self, grid, stream, *args: ("metadata", grid))
    step = launch.Step(None, (3,), (Hole(0), 5), {})
    launches = launch.Launches([step], torch.device("cpu"))
    launches.kept, launches.stream = [launch._kept(step, kernel, 4)], lambda _: 9
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    launches.again((4096,))
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    assert notes == [(3, 1, 1, 9, 17, (4, 1, 0), ("metadata", (3,)), enter, leave, 4096, 5)]


def test_steps_that_run_at_the_same_time_have_scratch_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time, and when they are kept; what needs none goes on with that of the step before in its room."""
    monkeypatch.setattr(launch, "KEEPS", True)
    monkeypatch.setattr(scratch, "_rooms", {})
    anew: list[Any] = []
    again: list[Any] = []

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Compiled:
        anew.append([x.data_ptr() for x in args])
        return Compiled(again)

    monkeypatch.setattr(launch, "run", run)
    kernel, args, need = SimpleNamespace(arg_names=["a", "b"]), (launch.STATES, launch.COUNTERS), scratch.Need(64, 4)
    steps = [launch.Step(kernel, (1,), args, {}, need, room=0), launch.Step(kernel, (1,), args, {})]
    steps += [launch.Step(kernel, (1,), args, {}, need, room=1), launch.Step(kernel, (1,), args, {}, room=0)]
    launches = launch.Launches(steps, torch.device("cpu"))
    launches.first(())
    launches.again(())
    assert anew[0] == anew[1] == anew[3]
    assert not set(anew[0]) & set(anew[2])
    assert [list(x[-2:]) for x in again] == anew


def test_steps_hand_over_in_memory_of_the_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps find the same tensors there, in boxes and out of them; the first time, and when they are kept."""
    monkeypatch.setattr(launch, "KEEPS", True)
    monkeypatch.setattr(scratch, "_rooms", {})
    held, anew, again = list[Tensor](), list[Any](), list[Any]()

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held.append(torch.empty(count, dtype=dtype, device=device))
        return held[-1]

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Compiled:
        anew.append(args)
        return Compiled(again)

    monkeypatch.setattr(scratch, "_empty", empty)
    monkeypatch.setattr(launch, "run", run)
    likes = tuple(torch.empty(*shape, dtype=FP16, device="meta") for shape in ((3, 8, 16), (5, 7)))
    first, second = launch.own(likes)
    assert (first.shape, first.stride(), first.dtype, first.element_size()) == ((3, 8, 16), (128, 16, 1), FP16, 2)
    box = TensorDescriptor(first.view(torch.bfloat16), [24, 16], [16, 1], [4, 16])
    args = (first, (second, 3), box, launch.STATES)
    kernel = SimpleNamespace(arg_names=["a", "b", "c", "d"])
    need = scratch.Need(64, 0, two=True)
    steps = [launch.Step(kernel, (1,), args[:2], {}, own=likes), launch.Step(kernel, (1,), args, {}, need)]
    steps[0] = steps[0]._replace(kernel=SimpleNamespace(arg_names=["a", "b"]))
    launches = launch.Launches(steps, torch.device("cpu"))
    launches.first(())
    memory, *_, states = held
    assert memory.numel() == 1024 + 512
    (one, (other, _)), (same, (too, _), boxed, room) = anew
    assert (one.shape, other.shape, one.dtype) == ((3, 8, 16), (5, 7), FP16)
    assert memory.data_ptr() == one.data_ptr() == same.data_ptr() == boxed.base.data_ptr() == other.data_ptr() - 1024
    assert other.data_ptr() == too.data_ptr()
    assert boxed.base.dtype == torch.bfloat16
    assert room.data_ptr() == states.data_ptr()
    seen = len(held)
    launches.again(())
    memory, *_, states = held[seen:]
    begin = memory.data_ptr()
    assert [x[-2:] for x in again[:1]] == [(begin, (begin + 1024, 3))]
    *_, at, in_record, box, room = again[1]
    assert (at, in_record, box.base.data_ptr(), room) == (begin, (begin + 1024, 3), begin, states.data_ptr())


def test_descriptors_describe_the_memory_of_the_call() -> None:
    first, second = torch.zeros(2, 8, 16, dtype=FP16)
    args = (TensorDescriptor(Hole(0, [first], FP16), [8, 16], [16, 1], [4, 16]), 3)
    (filled, _), (kept, _) = fill(args, (second,)), filler(args)((second.data_ptr(),))
    assert filled.base is second
    assert kept.base.data_ptr() == second.data_ptr()
    assert (kept.shape, kept.strides, kept.block_shape) == ([8, 16], [16, 1], [4, 16])
    assert args[0].base.data_ptr() == first.data_ptr()


def test_boxes_have_the_sizes_that_they_ask_for_before_a_kernel_first_runs() -> None:
    """Through Triton's own launcher too, which reads the metadata at each launch."""
    x = torch.zeros(8, 6, 64, dtype=FP16)
    whole = TensorDescriptor(x, [8, 6, 64], [384, 64, 1], [16, 1, 64])
    part = TensorDescriptor(x, [8, 6, 64], [384, 64, 1], [16, 1, 64])
    part.sizes = (5, 3)  # type: ignore[attr-defined]
    done: list[Any] = []
    metas = [{"block_size": [16, 1, 64], "elem_size": 2} for _ in range(2)]

    class Kernel:
        def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
            done.append(("compiled", grid, options))
            return SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=metas))

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: done.append([meta["block_size"] for meta in metas])

    launch.run(Kernel(), (3,), x, whole, None, part, num_warps=4)
    assert done == [("compiled", (3,), {"num_warps": 4}), [[16, 1, 64], [5, 3, 64]]]
    launch.run(Kernel(), (3,), x, whole, None)
    assert done[2:] == [("compiled", (3,), {}), [[16, 1, 64], [5, 3, 64]]], "nothing to resize"
    metas.clear()
    with pytest.raises(RuntimeError, match="keeps sizes of boxes elsewhere: set PAGED_ATTN_HOPPER=0"):
        launch.run(Kernel(), (3,), x, whole, part)
    assert done[4:] == [("compiled", (3,), {})], "and not launched"
