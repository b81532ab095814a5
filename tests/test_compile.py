"""The public functions inside torch.compile and torch.export: whole, in place, at any lengths, with their errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn
from paged_attn import api, ops, reference
from paged_attn.calls import attend as attending
from paged_attn.calls import write as cache
from tests.cases import E4M3, Case, build

Inputs = dict[str, Any]
FP16 = torch.float16
HEADS, KV_HEADS, HEAD_DIM, PAGES, PAGE = 4, 2, 16, 8, 16
CASES = [
    Case("decode", (1, 1), (5, 9), dtype=FP16, decode_form=True),
    Case("mixed", (1, 3), (5, 9), dtype=FP16, window_size=(9, -1), sinks=True, alibi=True, bounds=True),
    Case("fp8 cache", (1, 3), (5, 9), dtype=FP16, cache_dtype=E4M3, scales="tensor", padding=1),
    Case("another width", (1, 3), (5, 9), dtype=FP16, value_dim=24, new=True),
    Case("ragged page table", (1, 3), (5, 9), dtype=FP16, table="views"),
    Case("windows by head", (1, 3), (5, 9), dtype=FP16, head_windows=((2, -1), (-1, -1))),
]

# torch's own, of its parts that are read when something is compiled first, and of copies of its records
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Nor known from an earlier run: graphs on disk are found by what is traced, not by what operators are made of."""
    import torch._functorch.config
    import torch._inductor.config

    torch.compiler.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


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

    def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference.merge_states(outs, lses)
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


def caches(how: str, device: str) -> tuple[Tensor, Tensor]:
    shape = (PAGES, PAGE, KV_HEADS, HEAD_DIM)
    make = dict(dtype=FP16, device=device)
    if how == "apart":
        return torch.zeros(shape, **make), torch.zeros(shape, **make)
    if how == "halves":
        k_cache, v_cache = torch.zeros(2, *shape, **make)
        return k_cache, v_cache
    if how == "pages in turn":
        k_cache, v_cache = torch.zeros(PAGES, 2, *shape[1:], **make).unbind(1)
        return k_cache, v_cache
    both = torch.zeros(*shape[:-1], 2 * HEAD_DIM, **make)
    return both[..., :HEAD_DIM], both[..., HEAD_DIM:]


CACHES = ["apart", "halves", "pages in turn", "dims side by side"]


def step(how: str, device: str, seqs: int = 2) -> tuple[Tensor, ...]:
    """The arguments of `layer`: one decode for each sequence."""
    generator = torch.Generator(device).manual_seed(seqs)
    q = torch.randn(seqs, HEADS, HEAD_DIM, generator=generator, device=device).to(FP16)
    k, v = torch.randn(2, seqs, KV_HEADS, HEAD_DIM, generator=generator, device=device).to(FP16)
    lens = torch.arange(1, seqs + 1, dtype=torch.int32, device=device)
    table = torch.arange(seqs, dtype=torch.int32, device=device)[:, None]
    return q, k, v, *caches(how, device), table.long()[:, 0] * PAGE + lens.long() - 1, table, lens


def layer(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, table: Tensor, lens: Tensor
) -> Tensor:
    """All three functions; nothing that a backend would have to compile."""
    paged_attn.write_kv(k, v, k_cache, v_cache, slots)
    out = paged_attn.paged_attention(q, k_cache, v_cache, table, lens)
    _, lse = paged_attn.paged_attention(q, k_cache, v_cache, table, lens, causal=False, return_lse=True)
    return paged_attn.merge_states(out[None], lse[None])[0]


def same(compiled: Any, how: str, device: str, seqs: int = 2) -> tuple[Tensor, ...]:
    """Assert that a compiled layer does what the layer does, to its caches as well; the arguments of the compiled."""
    got, want = step(how, device, seqs), step(how, device, seqs)
    assert torch.equal(compiled(*got), layer(*want))
    assert got[3].any()
    assert all(torch.equal(x, y) for x, y in zip(got, want))
    return got


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


# ---- arguments ---------------------------------------------------------------------------------------------------


def call_of(case: Case, device: str, **changes: Any) -> Inputs:
    return build(case, device) | {"out": None} | changes


def equal(one: Any, other: Any) -> bool:
    one, other = (x if isinstance(x, tuple) else (x,) for x in (one, other))
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(one, other, strict=True))


ARGUMENTS: dict[str, tuple[Case, Inputs]] = {
    **{case.name: (case, {}) for case in CASES},
    "window in a list": (CASES[1], {"window_size": [3, 0]}),
    "numbers": (CASES[1], {"softmax_scale": 1, "softcap": 30, "causal": False, "kv_layout": "NHD"}),
    "scales that are numbers": (CASES[2], {"k_scale": 0.5, "v_scale": 2}),
    "checked": (CASES[1], {"check": True}),
    "batch invariant, no log-sum-exp": (CASES[1], {"batch_invariant": True, "return_lse": False}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_compiled_call_takes_what_the_function_takes(name: str, device: str) -> None:
    case, changes = ARGUMENTS[name]
    inputs = call_of(case, device, **changes)
    compiled = torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)
    assert equal(compiled(**inputs), paged_attn.paged_attention(**inputs))


def test_a_compiled_call_writes_into_out_and_leaves_rows_alone(device: str) -> None:
    inputs = call_of(CASES[1], device, only="decode", return_lse=False)
    inputs["out"] = torch.full_like(inputs["q"], 7)
    given = inputs["out"]
    result = torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)(**inputs)
    assert result.data_ptr() == given.data_ptr()
    assert (given[1:] == 7).all()
    assert not (given[0] == 7).any()


def test_numbers_that_change_from_call_to_call_are_followed(device: str) -> None:
    compiled = torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)
    for scale, bound in ((0.5, 9), (0.25, 10), (0.125, 11)):
        inputs = call_of(CASES[1], device, softmax_scale=scale, max_seqlen_k=bound)
        assert equal(compiled(**inputs), paged_attn.paged_attention(**inputs))


def test_autocast_changes_no_call(device: str) -> None:
    inputs = call_of(CASES[1], device)
    want = paged_attn.paged_attention(**inputs)
    compiled = torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        for call in (paged_attn.paged_attention, compiled):
            got = call(**inputs)
            assert [x.dtype for x in got] == [FP16, torch.float32]
            assert equal(got, want)


BAD: dict[str, tuple[Case, Inputs]] = {
    "causal": (CASES[1], {"causal": 1}),
    "softcap": (CASES[1], {"softcap": -1.0}),
    "window_size": (CASES[1], {"window_size": [1.5, 0]}),
    "only": (CASES[1], {"only": "both"}),
    "kv_layout": (CASES[1], {"kv_layout": None}),
    "check": (CASES[1], {"check": "yes"}),
    "k_scale": (CASES[2], {"k_scale": 0.0}),
    "v_scale": (CASES[2], {"v_scale": None}),
    "seq_lens": (CASES[1], {"seq_lens": torch.ones(1, dtype=torch.int32)}),
    "sinks": (CASES[1], {"sinks": torch.ones(2, dtype=torch.float64)}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_the_functions_error(name: str, device: str) -> None:
    """Of a whole graph, what is found while it is traced is an error of torch that holds the function's words."""
    case, changes = BAD[name]
    changes = {x: y.to(device) if isinstance(y, Tensor) else y for x, y in changes.items()}
    inputs = call_of(case, device, **changes)
    with pytest.raises((TypeError, ValueError)) as eager:
        paged_attn.paged_attention(**inputs)
    with pytest.raises((TypeError, ValueError)) as raised:
        torch.compile(paged_attn.paged_attention, backend="aot_eager")(**inputs)
    assert (type(raised.value), str(raised.value)) == (type(eager.value), str(eager.value))
    torch.compiler.reset()
    with pytest.raises((TypeError, ValueError, RuntimeError)) as whole:
        torch.compile(paged_attn.paged_attention, backend="aot_eager", fullgraph=True)(**inputs)
    assert str(eager.value) in str(whole.value).replace("\\'", "'")


def test_compiled_calls_are_checked_if_asked(checked: Inputs, device: str) -> None:
    """Each time the graph runs: what the device holds is not known when it is traced."""
    given = step("halves", device)

    def layer(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        paged_attn.write_kv(k, v, k_cache, v_cache, slots, **checked)

    compiled = torch.compile(layer, fullgraph=True)
    compiled(*given[1:6])
    given[5][1] = PAGES * PAGE
    before = given[3].clone()
    with pytest.raises(ValueError, match=f"slot_mapping.1. = {PAGES * PAGE} .token 1., but the cache has"):
        compiled(*given[1:6])
    assert torch.equal(given[3], before)


# ---- CUDA graphs -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("how", CACHES)
def test_a_captured_layer_follows_lengths_that_change_in_place(how: str, device: str) -> None:
    """mode="reduce-overhead" captures CUDA graphs and minds memory of its pool that others keep."""
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    given = step(how, device, 4)
    for shorter in range(6):
        lens = given[-1]
        lens.fill_(1 + shorter)
        want = layer(*[x.clone() if i not in (3, 4) else x for i, x in enumerate(given)])
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(*given), want)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [40, 4000])
def test_captured_calls_whose_keys_are_cut_are_right_beside_eager_ones(keys: int, device: str) -> None:
    """Scratch of a call that torch captures is the graph's, and what eager calls share is not."""
    shape = (300, PAGE, KV_HEADS, 64)
    q = torch.randn(1, HEADS, 64, dtype=FP16, device=device)
    k_cache, v_cache = torch.randn(2, *shape, dtype=FP16, device=device)
    table = torch.arange(300, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([keys], dtype=torch.int32, device=device)
    compiled = torch.compile(paged_attn.paged_attention, mode="reduce-overhead", fullgraph=True)
    for length in (keys, keys // 2, keys - 1, 3, keys):
        lens.fill_(length)
        want = paged_attn.paged_attention(q, k_cache, v_cache, table, lens)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(q, k_cache, v_cache, table, lens), want)
