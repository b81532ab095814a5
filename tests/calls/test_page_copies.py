"""copy_pages, move_pages: bytes of any layout, by kernels and in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import paged_attn
from paged_attn import reference
from paged_attn.calls import call_cache
from paged_attn.strides import runs_of
from tests.support.bad_input import refuses
from tests.support.cases import E4M3, E5M2
from tests.support.whole_pages import CACHE, ID, PAGES, RARE, as_bytes, batch, ids, noise

HALF, BF16, F32, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.int8


class Made(NamedTuple):
    """Caches, and the memory that holds them, so that a test sees every byte."""

    memory: list[Tensor]
    caches: Any  # a tensor or a list
    page_axis: int = 0


def plain(dtype: torch.dtype, *shape: int) -> Callable[[str], Made]:
    def make(device: str) -> Made:
        whole = noise(device, dtype, *shape)
        return Made([whole], whole)

    return make


def both_first(device: str) -> Made:
    """[2, pages, ...] as two views."""
    whole = noise(device, BF16, 2, PAGES, 4, 2, 24)
    return Made([whole], [*whole.unbind()])


def both_second(device: str) -> Made:
    """[pages, 2, ...] as two views, whose pages are two strides apart."""
    whole = noise(device, BF16, PAGES, 2, 4, 2, 24)
    return Made([whole], [*whole.unbind(1)])


def layers(device: str) -> Made:
    whole = noise(device, HALF, 3, PAGES, 2, 4, 16)
    return Made([whole], whole, 1)


def layers_of_both(device: str) -> Made:
    """[layers, 2, pages, ...] with pages of 3 bytes a head."""
    whole = noise(device, INT8, 2, 2, PAGES, 4, 3)
    return Made([whole], whole, 2)


def with_scales(device: str) -> Made:
    """Keys and values of two layers in int8, each beside the scales of its tokens; one list, several shapes."""
    caches = [noise(device, INT8, PAGES, 8, 2, 32) for _ in range(4)]
    scales = [noise(device, F32, PAGES, 8, 2) for _ in range(3)] + [noise(device, HALF, PAGES, 8, 2)]
    return Made(caches + scales, caches + scales)


def tails(device: str) -> Made:
    """Rows of a head with four bytes of scale behind them: views of both."""
    whole = noise(device, torch.uint8, PAGES, 8, 2, 36)
    return Made([whole], [whole[..., :32].view(E4M3), whole[..., 32:].view(F32)])


def scattered(device: str) -> Made:
    """No two axes of a page merge."""
    whole = noise(device, HALF, PAGES, 3, 4, 5, 6, 7)
    return Made([whole], [whole[:, :2, :3, ::2, :5, ::3]])


LAYOUTS: dict[str, Callable[[str], Made]] = {
    "NHD": plain(BF16, PAGES, 16, 2, 64),
    "heads of odd sizes": plain(INT8, PAGES, 5, 3, 7),
    "HND in memory of NHD": lambda device: Made([x := noise(device, HALF, PAGES, 4, 3, 24)], x.transpose(1, 2)),
    "x-packed keys": plain(HALF, PAGES, 2, 3, 4, 8),
    "x-packed values": plain(F32, PAGES, 2, 12, 4),
    "latents": plain(E4M3, PAGES, 16, 1, 576),
    "a part of each page": lambda device: Made([x := noise(device, E5M2, PAGES, 4, 2, 16)], x[:, 1:3]),
    "[2, pages, ...]": both_first,
    "[pages, 2, ...]": both_second,
    "a layer axis": layers,
    "axes of layers and of both": layers_of_both,
    "scales of tokens": with_scales,
    "tails": tails,
    "scattered": scattered,
}


def twins(name: str, device: str) -> tuple[Made, Made]:
    """Two of a kind with the same bytes."""
    one, other = LAYOUTS[name](device), LAYOUTS[name](device)
    for x, y in zip(one.memory, other.memory, strict=True):
        y.view(torch.uint8).copy_(x.view(torch.uint8))
    return one, other


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_change_these_pages_and_no_other_byte(name: str, way: str, device: str) -> None:
    for round, dtype in enumerate((torch.int64, torch.int32)):  # the second time in memory of another address
        got, want = twins(name, device)
        src, dst = ids(device, 3, -1, 0, 5, 3), ids(device, 1, 2, -1, 6, 4).to(dtype)
        before = as_bytes(want.memory)
        reference.copy_pages(want.caches, src, dst, page_axis=want.page_axis)
        for _ in range(1 + round):
            paged_attn.copy_pages(got.caches, src, dst, page_axis=got.page_axis)
        assert as_bytes(got.memory) == as_bytes(want.memory) != before


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_go_to_other_caches_of_any_strides_and_come_back(name: str, way: str, device: str) -> None:
    made, want = twins(name, device)
    axis = made.page_axis
    caches, wanted = ([x.caches] if isinstance(x.caches, Tensor) else x.caches for x in (made, want))
    # a host's pool has more pages, which lie dense behind its layers
    host = [noise("cpu", x.dtype, 11, *x.select(axis, 0).shape).movedim(0, axis) for x in caches]
    host = [x.pin_memory() if device != "cpu" else x for x in host]
    before = [x.clone() for x in host]
    out, back = (ids(device, 6, 2, 0, -1), ids(device, 0, 10, 4, 3)), (ids(device, 10, 0, 5), ids(device, 1, 3, -7))
    paged_attn.move_pages(caches, host, *out, page_axis=axis)
    if device != "cpu":
        torch.cuda.synchronize()
    reference.move_pages(caches, before, *out, page_axis=axis)
    assert as_bytes(host) == as_bytes(before)
    paged_attn.move_pages(host, caches, *back, page_axis=axis)
    reference.move_pages(before, wanted, *back, page_axis=axis)
    assert as_bytes(made.memory) == as_bytes(want.memory)


def test_no_pairs_and_no_bytes_are_no_work(way: str, device: str) -> None:
    cache = noise(device, HALF, 3, 4, 2, 8)
    none = torch.empty(0, dtype=torch.int64, device=device)
    before = as_bytes([cache])
    paged_attn.copy_pages(cache, none, none)
    paged_attn.copy_pages(cache[:, :0], ids(device, 0), ids(device, 1))
    paged_attn.copy_pages([cache[:0]], ids(device, -1), ids(device, -1))
    assert as_bytes([cache]) == before


@pytest.mark.kernels
def test_tasks_are_shared_by_programs_however_few(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.calls import page_launches as launches

    monkeypatch.setattr(launches, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(launches, "LANES", 8)
    monkeypatch.setattr(launches, "LIMIT", 0)  # the table goes with the call
    monkeypatch.setattr(launches, "_tables", {})
    call_cache.clear()
    got, want = twins("scales of tokens", device)
    src, dst = ids(device, 0, 5), ids(device, 4, 1)
    paged_attn.copy_pages(got.caches, src, dst)
    call_cache.clear()
    reference.copy_pages(want.caches, src, dst)
    assert as_bytes(got.memory) == as_bytes(want.memory)


@pytest.mark.kernels
def test_kernels_reach_host_memory_by_the_address_that_the_driver_maps(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paged_attn.calls import page_launches as launches

    asked: list[int] = []
    monkeypatch.setattr(launches, "_on_the_host", lambda *_: [(1, "targets[0]")])
    monkeypatch.setattr(launches.driver, "mapped", lambda address: asked.append(address) or address)
    call_cache.clear()
    cache, host = noise(device, HALF, 3, 4, 2, 8), noise(device, HALF, 5, 4, 2, 8)
    paged_attn.move_pages(cache, host, ids(device, 2), ids(device, 4))
    assert asked == [host.data_ptr()]
    assert as_bytes([host[4]]) == as_bytes([cache[2]])
    monkeypatch.setattr(launches.driver, "mapped", lambda address: None)
    with pytest.raises(
        ValueError, match=r"^targets\[0\] must be in pinned host memory, got memory that kernels do not"
    ):
        paged_attn.move_pages(cache, host.clone(), ids(device, 2), ids(device, 4))
    call_cache.clear()


@pytest.mark.parametrize(
    "name, runs, unit",
    [
        ("NHD", [(16 * 2 * 64 * 2, 1, 1)], 16),
        ("HND in memory of NHD", [(4 * 3 * 24 * 2, 1, 1)], 16),
        ("a layer axis", [(2 * 4 * 16 * 2, 3, 1)], 16),
        ("axes of layers and of both", [(12, 4, 1)], 4),
        ("tails", [(32, 16, 1), (4, 16, 1)], 4),
        ("a part of each page", [(2 * 2 * 16, 1, 1)], 16),
        ("heads of odd sizes", [(105, 1, 1)], 1),
        ("scattered", [(2, 3, 5)] * 18, 2),
    ],
)
def test_a_page_is_few_runs_of_wide_units(name: str, runs: list[tuple[int, int, int]], unit: int) -> None:
    made = LAYOUTS[name]("cpu")
    caches = [made.caches] if isinstance(made.caches, Tensor) else made.caches
    found = [x for cache in caches for x in runs_of(cache, cache, made.page_axis)]
    assert [(x.run, x.inner[0], x.outer[0]) for x in found] == runs
    assert min(x.unit for x in found) == unit


@pytest.mark.parametrize("dtype", RARE, ids=str)
def test_rare_dtypes_are_bytes_too(dtype: torch.dtype, way: str, device: str) -> None:
    memory = noise(device, torch.uint8, PAGES, 5, 3, 24 * dtype.itemsize)
    other, cache = torch.zeros_like(memory), memory.view(dtype)
    paged_attn.move_pages(cache, other.view(dtype), ids(device, 4, 1), ids(device, 2, 6))
    paged_attn.copy_pages(cache, ids(device, 4), ids(device, 0))
    assert torch.equal(other[[2, 6]], memory[[4, 1]])
    assert torch.equal(memory[0], memory[4])


# ---- what is refused ---------------------------------------------------------------------------------------------

COPY: dict[str, Any] = dict(caches=[CACHE, CACHE.half()], src=ID, dst=ID)
MOVE: dict[str, Any] = dict(sources=CACHE, targets=torch.zeros(9, 8, 2, 16), src=ID, dst=ID)
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("copy", dict(caches=3), TypeError, "caches must be a tensor or a list of tensors, got int"),
    ("copy", dict(caches=[]), ValueError, "caches must be at least one tensor, got an empty list"),
    ("copy", dict(caches=[CACHE, None]), TypeError, "caches[1] must be a tensor, got None"),
    ("copy", dict(caches=[CACHE, CACHE[1:]]), ValueError,
     "caches[1] must be pages = 4 along axis 0, like caches[0], got [3, 8, 2, 16]: page_axis says which axis has the "
     "pages"),
    ("copy", dict(page_axis=4), ValueError, "caches[0] must be a tensor with page_axis = 4, got [4, 8, 2, 16]"),
    ("copy", dict(page_axis=-1), ValueError, "page_axis must be an int >= 0 and < 2^31, got -1"),
    ("copy", dict(caches=CACHE[:1].expand(4, 8, 2, 16)), ValueError,
     "caches must not overlap itself, got [4, 8, 2, 16] strides [0, 32, 16, 1]"),
    ("copy", dict(caches=[CACHE, CACHE.clone().requires_grad_()]), ValueError,
     "caches[1] requires grad, but paged attention has no backward pass: call it under torch.no_grad()"),
    ("copy", dict(src=ID.float()), TypeError, "src must be int32 | int64, got float32: src.to(torch.int32)"),
    ("copy", dict(dst=ID[:2]), ValueError, "dst must be [pairs] with pairs = 3 from src, got [2]"),
    ("copy", dict(dst=[1, 2, 3]), TypeError,
     "dst must be a tensor of int32 | int64, got list: torch.tensor(dst, dtype=torch.int32, device=...)"),
    ("copy", dict(src=ID.to("meta")), ValueError, "src must be on cpu like caches[0], got meta"),
    ("move", dict(targets=[CACHE] * 2), ValueError, "targets must be 1 tensors, as many as sources, got 2"),
    ("move", dict(targets=torch.zeros(9, 8, 2, 24)), ValueError,
     "targets must be [pages, 8, 2, 16] like sources, got [9, 8, 2, 24]"),
    ("move", dict(targets=CACHE.half()), TypeError,
     "targets must be float32 like sources, got float16: targets.view(torch.float32), for bytes are copied"),
    ("move", dict(targets=CACHE), ValueError,
     "targets must share no memory with sources: copy_pages copies within caches"),
    ("copy", dict(caches=[CACHE[:3], CACHE[1:]]), ValueError, "caches[1] must share no memory with caches[0]"),
    ("move", dict(sources=[CACHE, CACHE + 1], targets=[MOVE["targets"]] * 2), ValueError,
     "targets[1] must share no memory with targets[0]"),
    ("move", dict(sources=[CACHE, CACHE + 1], targets=[MOVE["targets"][:5], MOVE["targets"][4:]]), ValueError,
     "targets[1] must share no memory with targets[0]"),
]  # fmt: skip
FUNCTIONS = {
    "copy": (paged_attn.copy_pages, COPY),
    "move": (paged_attn.move_pages, MOVE),
}


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("name, change, error, text", REFUSED, ids=[text for *_, text in REFUSED])
def test_a_wrong_call_is_refused(name: str, change: dict[str, Any], error: type[Exception], text: str) -> None:
    function, given = FUNCTIONS[name]
    refuses(function, given | change, error, text)


def test_layers_may_share_a_cache(way: str, device: str) -> None:
    """The same pages are copied twice; keys and values are views of one tensor."""
    whole = noise(device, HALF, 2, PAGES, 4, 8)
    want = whole.clone()
    keys, values = whole
    paged_attn.copy_pages([keys, values, keys], ids(device, 1), ids(device, 2))
    want[:, 2] = want[:, 1]
    assert as_bytes([whole]) == as_bytes([want])
    target = torch.zeros_like(keys)
    paged_attn.move_pages([keys, keys], [target, target], ids(device, 1), ids(device, 2))
    assert as_bytes([target[2]]) == as_bytes([keys[1]])


def test_lazily_conjugated_views_are_refused(way: str) -> None:
    with pytest.raises(ValueError, match=r"got a lazily conjugated view: pass caches\.resolve_conj\(\)"):
        paged_attn.copy_pages(CACHE.to(torch.complex64).conj(), ID, ID)


@pytest.mark.parametrize("number", [True, 1.0])
def test_a_kept_call_refuses_what_merely_equals_its_axis(number: Any, way: str, device: str) -> None:
    cache, pairs = noise(device, HALF, 2, 3, 4), (ids(device, 0), ids(device, 1))
    for _ in range(2):
        paged_attn.copy_pages(cache, *pairs, page_axis=1, check=False)
    with pytest.raises(TypeError, match="page_axis must be an int >= 0"):
        paged_attn.copy_pages(cache, *pairs, page_axis=number, check=False)


CONVERTED: list[tuple[str, dict[str, Any], str]] = [
    ("copy", dict(page_axis=True), "page_axis must be an int >= 0, got bool"),
    ("copy", dict(page_axis=1.0), "page_axis must be an int >= 0, got float"),
    ("move", dict(page_axis=True), "page_axis must be an int >= 0, got bool"),
    ("move", dict(check=1), "check must be True, False or None, got int"),
]


@pytest.mark.parametrize("name, change, text", CONVERTED, ids=[f"{name}: {text}" for name, _, text in CONVERTED])
def test_a_trace_refuses_what_a_schema_would_convert(name: str, change: dict[str, Any], text: str) -> None:
    function, given = FUNCTIONS[name]
    with pytest.raises((TypeError, ValueError), match=text):
        torch.compile(function, backend="eager")(**given | change)


CHECKED: list[tuple[str, dict[str, Any], str]] = [
    ("copy", dict(src=ids("cpu", 0, 4, 1), dst=ids("cpu", 2, 3, -1)), "src[1] = 4, but the cache has 4 pages"),
    ("copy", dict(src=ids("cpu", 0, 1, 1), dst=ids("cpu", 2, 9, -1)), "dst[1] = 9, but the cache has 4 pages"),
    ("copy", dict(src=ids("cpu", 0, -1, 1), dst=ids("cpu", 2, 2, 2)), "dst[2] = 2, but dst[0] is the same page"),
    ("copy", dict(src=ids("cpu", -1, 0, 3), dst=ids("cpu", 3, 3, 2)),
     "dst[1] = 3, but src[2] is the same page, and copies have no order"),
    ("move", dict(src=ids("cpu", 0, 1, 1), dst=ids("cpu", 2, 9, 3)), "dst[1] = 9, but the cache has 9 pages"),
]  # fmt: skip


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("name, change, text", CHECKED, ids=[text for *_, text in CHECKED])
def test_the_checked_call_refuses(name: str, change: dict[str, Any], text: str) -> None:
    function, given = FUNCTIONS[name]
    refuses(function, given | change | dict(check=True), ValueError, text)


def test_the_checked_call_minds_no_skipped_pair_and_takes_what_is_right(way: str, device: str) -> None:
    got, want = twins("scales of tokens", device)
    src, dst = ids(device, 99, 2, -1, 2), ids(device, -1, 3, 3, 4)
    paged_attn.copy_pages(got.caches, src, dst, check=True)
    reference.copy_pages(want.caches, src, dst)
    assert as_bytes(got.memory) == as_bytes(want.memory)
    other = [x.clone() for x in got.memory]
    paged_attn.move_pages(got.caches, other, ids(device, 1), ids(device, 1), check=True)


@pytest.mark.kernels
def test_a_graph_needs_a_call_before_it(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    from paged_attn.calls import page_launches as launches

    monkeypatch.setattr(launches, "_capturing", lambda device: True)
    monkeypatch.setattr(launches, "_tables", {})
    call_cache.clear()
    cache = noise(device, HALF, 3, 4, 2, 8)
    with pytest.raises(RuntimeError, match="make the call once before it is captured"):
        paged_attn.copy_pages(cache, ids(device, 0), ids(device, 1))


# ---- operators and graphs ----------------------------------------------------------------------------------------


def test_opcheck_finds_nothing_of_copied_pages(device: str) -> None:
    caches = [torch.randn(4, 8, 2, 16, device=device) for _ in range(2)]
    pairs = ids(device, 0, -1), ids(device, 2, 3)
    torch.library.opcheck(torch.ops.paged_attn.copy_pages.default, (caches, *pairs))
    other = [torch.zeros_like(x) for x in caches]
    torch.library.opcheck(torch.ops.paged_attn.move_pages.default, (caches, other, *pairs))


def test_a_trace_refuses_a_gradient_of_one_of_many() -> None:
    mode = FakeTensorMode()
    *caches, ids = [mode.from_tensor(x) for x in (CACHE, CACHE.clone().requires_grad_(), ID)]
    with mode, pytest.raises(ValueError, match="caches requires grad"):
        torch.ops.paged_attn.copy_pages(caches, ids, ids)


def test_a_compiled_graph_copies_in_place(device: str) -> None:
    def step(caches: list[Tensor], src: Tensor, dst: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        paged_attn.copy_pages(caches, src, dst)
        return paged_attn.gather_pages(caches[0], table, lengths, tokens=11, dtype=F32, scale=0.5) + 1

    got, want = twins("scales of tokens", device)
    pairs, table, lengths = (ids(device, 0, -1), ids(device, 2, 3)), ids(device, 2, 0)[:, None], ids(device, 8, 3)
    addresses = [x.data_ptr() for x in got.caches]
    rows = torch.compile(step, backend="aot_eager", fullgraph=True)(got.caches, *pairs, table, lengths)
    assert torch.equal(rows, step(want.caches, *pairs, table, lengths))
    assert as_bytes(got.memory) == as_bytes(want.memory)
    assert addresses == [x.data_ptr() for x in got.caches]


@pytest.mark.gpu
def test_a_cuda_graph_takes_new_ids_and_new_bytes(device: str) -> None:
    got, want = twins("scales of tokens", device)
    host = [torch.zeros_like(x, device="cpu").pin_memory() for x in got.caches]
    src, dst = ids(device, 0, -1), ids(device, 1, 2)
    table, lengths = batch(device, False)
    out = torch.zeros(17, 2, 32, dtype=INT8, device=device)

    def step() -> None:
        paged_attn.copy_pages(got.caches, src, dst)
        paged_attn.move_pages(got.caches, host, dst, src)
        paged_attn.gather_pages(got.caches[0], table, lengths // 2, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for x, y in zip(got.memory, want.memory):
        x.view(torch.uint8).random_()
        y.view(torch.uint8).copy_(x.view(torch.uint8))
    src.copy_(ids(device, 3, 5))
    dst.copy_(ids(device, 4, 6))
    graph.replay()
    torch.cuda.synchronize()
    reference.copy_pages(want.caches, src, dst)
    assert as_bytes(got.memory) == as_bytes(want.memory)
    moved = [torch.zeros_like(x) for x in host]
    reference.move_pages(want.caches, moved, dst, src)
    for x, y in zip(host, moved):
        assert torch.equal(x[[3, 5]].view(torch.uint8), y[[3, 5]].view(torch.uint8))
    assert torch.equal(out, reference.gather_pages(want.caches[0], table, lengths // 2, tokens=17))


@pytest.mark.gpu
def test_host_memory_must_be_pinned(device: str) -> None:
    cache = torch.zeros(4, 8, 2, 16, device=device)
    with pytest.raises(ValueError, match=r"targets\[0\] must be in pinned host memory, got pageable memory"):
        paged_attn.move_pages(cache, torch.zeros(4, 8, 2, 16), ids(device, 0), ids(device, 0))
