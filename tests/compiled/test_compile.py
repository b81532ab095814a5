"""The public functions inside torch.compile and torch.export: whole, in place, at any lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import api, ops, reference
from paged_attn.calls import attend as attending
from paged_attn.calls import call_cache
from paged_attn.calls import writes as cache
from tests.support.cases import INT4, INT8, Case, build
from tests.support.compiled_layer import (
    CACHES,
    COMPILES,
    FP16,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    layer,
    same,
    step,
)

pytestmark = COMPILES


@pytest.fixture
def quick_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Writes and attention: without a GPU the reference's, for tests of what graphs do around kernels."""

    def write(k: Any, v: Any, k_cache: Tensor, v_cache: Tensor, slots: Any, *others: Any) -> None:
        part = others[4] if len(others) > 4 else None
        keys = k_cache if part != "values" else k_cache.clone()
        values = v_cache if part != "keys" else v_cache.clone()
        reference.write_kv(k, v, keys, values, slots)

    def attend(*args: Any) -> Any:
        *tensors, out, _, options, _ = args
        named = dict(zip(attending.Options._fields, options), return_lse=True)
        named = {name: named[name] for name in ("causal", "window_size", "return_lse")}
        result, lse = reference.paged_attention(*tensors, **named)
        out = torch.empty_like(args[0]) if out is None else out
        out.copy_(result)
        return (out, lse.float()) if options[attending.RETURN_LSE] else out

    def merge(outs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = reference.merge_states(outs, lses, sinks=sinks)
        return out.to(outs.dtype), lse.float()

    if device != "cpu":
        return cache.write, attending.attend
    for module in (api, ops):
        for function in (write, attend, merge):
            monkeypatch.setattr(module, function.__name__, function)
    return write, attend


@pytest.fixture
def launched(quick_kernels: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What operators were given when a graph ran: which, and where K and V lay."""
    found: list[tuple[str, int, int]] = []
    write, attend = quick_kernels  # the first call of an operator would put its own into their places

    def noted_write(k: Any, v: Any, k_cache: Tensor, v_cache: Tensor, *others: Any) -> None:
        found.append((f"write {others[-1]}", k_cache.data_ptr(), v_cache.data_ptr()))
        write(k, v, k_cache, v_cache, *others)

    def noted_attend(q: Any, k_cache: Tensor, v_cache: Tensor, *others: Any) -> Any:
        found.append(("attend", k_cache.data_ptr(), v_cache.data_ptr()))
        return attend(q, k_cache, v_cache, *others)

    monkeypatch.setattr(ops, "write", noted_write)
    monkeypatch.setattr(ops, "attend", noted_attend)
    return found


@pytest.mark.parametrize("how", CACHES)
def test_inductor_writes_and_reads_the_caches_where_they_lie(
    how: str, device: str, launched: list[tuple[str, int, int]]
) -> None:
    """K and V may be views of one buffer: a graph that copies one of them copies all of a server's memory."""
    compiled = torch.compile(layer, fullgraph=True)
    for _ in range(2):
        given = same(compiled, how, device)
        at = given[3].data_ptr(), given[4].data_ptr()
        assert launched == [(x, *at) for x in ("write keys", "write values", "attend", "attend")]
        launched.clear()


def test_inductor_writes_into_views_made_inside_where_they_lie(
    device: str, launched: list[tuple[str, int, int]]
) -> None:
    def inside(both: Tensor, *others: Tensor) -> Tensor:
        k_cache, v_cache = both.unbind(1)
        return layer(*others[:3], k_cache, v_cache, *others[3:])

    q, k, v, *_, slots, table, lens = step("apart", device)
    both = torch.zeros(PAGES, 2, PAGE, KV_HEADS, HEAD_DIM, dtype=FP16, device=device)
    torch.compile(inside, fullgraph=True)(both, q, k, v, slots, table, lens)
    assert {x[1:] for x in launched} == {(both[:, 0].data_ptr(), both[:, 1].data_ptr())}
    assert both[:, 0].any()
    assert both[:, 1].any()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_do_the_same(backend: str, device: str) -> None:
    same(torch.compile(layer, backend=backend, fullgraph=True), "halves", device)


Buffers = tuple[Tensor, Tensor]  # of caches, and of queries beside results


def latents(k: Tensor, v_cache: Tensor | None, of: Buffers, slots: Tensor, q: Tensor, *call: Tensor) -> Tensor:
    """Written, and attended to as they lie then."""
    cache = of[0]
    paged_attn.write_kv(k, None, cache, v_cache, slots)
    out = paged_attn.paged_attention(q, cache, cache[..., :HEAD_DIM], *call)
    assert isinstance(out, Tensor)
    return out


def twice(k: Tensor, _: Any, of: Buffers, slots: Tensor, q: Tensor, *call: Tensor) -> Tensor:
    """Keys that are values, and a cache of both."""
    cache = of[0]
    paged_attn.write_kv(k, k, cache, cache, slots)
    out = paged_attn.paged_attention(q, cache, cache, *call)
    assert isinstance(out, Tensor)
    return out


def over_queries(k: Tensor, _: Any, of: Buffers, slots: Tensor, q: Tensor, *call: Tensor) -> Tensor:
    cache = of[0]
    paged_attn.write_kv(k, None, cache, None, slots)
    out = paged_attn.paged_attention(of[1], cache, cache, *call, out=of[1])
    assert isinstance(out, Tensor)
    return out + of[1]


def beside_queries(k: Tensor, _: Any, of: Buffers, slots: Tensor, q: Tensor, *call: Tensor) -> Tensor:
    """Results of two calls, each into a part of what holds the queries, too."""
    cache = of[0]
    paged_attn.write_kv(k, None, cache, None, slots)
    some = of[1].view(len(q), 2, -1, of[1].shape[-1]).unbind(1)
    paged_attn.paged_attention(some[0], cache, cache, *call, out=some[1])
    paged_attn.paged_attention(q[:, :2], cache, cache, *call, out=some[0])
    return of[1] * 2


ALIASING = {x.__name__: x for x in (latents, twice, over_queries, beside_queries)}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    "name, views",
    [("latents", "given"), ("latents", "made inside"), *[(name, "none") for name in ALIASING]],
)
def test_arguments_that_share_memory_are_changed_as_they_are_outside_of_graphs(
    name: str, backend: str, views: str, device: str
) -> None:
    """A graph without changes in place has copies of what is changed, and other views lie elsewhere then."""
    wide = HEAD_DIM + (name == "latents") * 8
    torch.manual_seed(0)
    q, k = torch.randn(2, HEADS, wide, device=device), torch.randn(2, 1, wide, device=device)
    slots = torch.tensor([3, PAGE + 5], device=device)
    table = torch.arange(2, dtype=torch.int32, device=device)[:, None]
    lens = torch.tensor([4, 6], dtype=torch.int32, device=device)

    def run(function: Any) -> tuple[Tensor, ...]:
        memory = torch.ones(PAGES, PAGE, 1, wide, device=device)
        beside = torch.arange(2.0 * HEADS * wide, device=device).view(2, HEADS, wide).sin()
        given = memory[..., :HEAD_DIM] if views == "given" else None

        def call(k: Tensor, v_cache: Tensor | None, memory: Tensor, beside: Tensor, *others: Tensor) -> Tensor:
            inside = memory[..., :HEAD_DIM] if views == "made inside" else v_cache
            return function[0](k, inside, (memory, beside), *others)

        return function[1](call)(k, given, memory, beside, slots, q, table, lens), memory, beside

    want = run((ALIASING[name], lambda call: call))
    call_cache.clear()  # kept calls are not checked
    got = run((ALIASING[name], lambda call: torch.compile(call, backend=backend, fullgraph=True)))
    assert (want[1] != 1).any()
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_values_elsewhere_are_refused_where_a_graph_is_traced(backend: str, device: str) -> None:
    def write(k: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        paged_attn.write_kv(k, None, k_cache, v_cache, slots)

    k, slots = torch.randn(2, 1, 24, device=device), torch.tensor([3, 5], device=device)
    k_cache, other = torch.zeros(2, PAGES, PAGE, 1, 24, device=device)
    for v_cache in (other[..., :HEAD_DIM], k_cache[..., 8:], k_cache[..., :HEAD_DIM].clone()):
        torch.compiler.reset()
        compiled = torch.compile(write, backend=backend, fullgraph=True)
        with pytest.raises((ValueError, RuntimeError), match="v_cache must be None, or k_cache"):
            compiled(k, k_cache, v_cache, slots)
        assert not k_cache.any()


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_of_inductor_do_the_same(mode: str, device: str) -> None:
    compiled = torch.compile(layer, mode=mode, fullgraph=True)
    for _ in range(3):  # warmed up, captured, replayed, where there are CUDA graphs
        same(compiled, "halves", device)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("dynamic", [None, True])
def test_batches_of_other_sizes_compile_once_more_at_most(dynamic: bool | None, device: str) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=backend, dynamic=dynamic, fullgraph=True)
    for seqs in (2, 3, 4, 6):
        same(compiled, "halves", device, seqs)
    assert len(graphs) <= 2


def test_inductor_takes_batches_of_any_size(device: str, launched: list[tuple[str, int, int]]) -> None:
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    for seqs in (3, 5):
        given = same(compiled, "halves", device, seqs)
    assert launched[-1][1:] == (given[3].data_ptr(), given[4].data_ptr())


@pytest.mark.parametrize("dtype, value_dim", [(INT8, 32), (INT4, 16)], ids=["int8", "int4"])
def test_a_graph_writes_scales_by_token_in_place_and_reads_them(
    dtype: torch.dtype, value_dim: int, device: str
) -> None:
    case = Case("compiled", (1, 4), (20, 33), heads=4, kv_heads=2, cache_dtype=dtype, scales="per_token", lse=False)
    inputs = build(replace(case, own_out=True, value_dim=value_dim), device)
    written_to = ("k_cache", "v_cache", "k_scale", "v_scale")
    k, v = torch.randn(2, 2, 2, 32, device=device)
    slots = torch.tensor([3, 40], device=device)

    def scaled(k: Tensor, v: Tensor, q: Tensor, given: dict[str, Any]) -> Any:
        scales = {name: given[name] for name in ("k_scale", "v_scale")}
        paged_attn.write_kv(k, v, given["k_cache"], given["v_cache"], slots, **scales)
        return paged_attn.paged_attention(q, **given)

    q = inputs.pop("q")
    given = {name: x for name, x in inputs.items() if name != "out"}
    other = given | {name: given[name].clone() for name in written_to}
    wanted = scaled(k, v[..., :value_dim], q, other)
    assert wanted.shape == (5, 4, value_dim)
    got = torch.compile(scaled, backend="aot_eager", fullgraph=True)(k, v[..., :value_dim], q, given)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    for name in written_to:
        torch.testing.assert_close(given[name], other[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("quick_kernels")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_the_operators_and_runs(strict: bool, device: str) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.zeros(HEADS, device=device))

        def forward(self, *tensors: Tensor) -> Tensor:
            q, _, _, k_cache, v_cache, _, table, lens = tensors
            return layer(*tensors) + paged_attn.paged_attention(q, k_cache, v_cache, table, lens, sinks=self.sinks)

    module = Layer()
    given, want = step("halves", device), step("halves", device)
    seqs = torch.export.Dim("seqs", min=2)
    shapes = ({0: seqs}, {0: seqs}, {0: seqs}, None, None, {0: seqs}, {0: seqs}, {0: seqs})
    with torch.no_grad():
        program = torch.export.export(module, given, strict=strict, dynamic_shapes={"tensors": shapes})
        names = {str(x.target) for x in program.graph.nodes if "paged_attn" in str(x.target)}
        assert names == {f"paged_attn.{x}.default" for x in ("write_kv", "attention", "attention_lse", "merge_states")}
        assert torch.equal(program.module()(*given), module(*want))
        assert torch.equal(given[3], want[3])
        other = step("halves", device, 3)
        assert torch.equal(program.module()(*other), module(*step("halves", device, 3)))
