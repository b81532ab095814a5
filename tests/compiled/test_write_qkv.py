"""write_qkv in torch's graphs: its operators, where it writes, and what it refuses there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from paged_attn import ops, reference, write_qkv
from paged_attn.calls import call_cache
from paged_attn.calls.writes import fused_write, write
from tests.support.compiled_layer import COMPILES, FP16, HEAD_DIM, HEADS, KV_HEADS, caches

pytestmark = COMPILES
OPERATORS = ("write_qkv", "write_projections", "write_queries_keys")


def inputs_of(how: str, device: str) -> dict[str, Any]:
    """A call of three tokens, one of them skipped."""
    k_cache, v_cache = caches(how, device)
    generator = torch.Generator(device).manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    return dict(
        qkv=random(3, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(FP16), k_cache=k_cache, v_cache=v_cache,
        slot_mapping=torch.tensor([3, -1, 40], device=device), positions=torch.tensor([1, 2, 9], device=device),
        cos_sin=random(10, HEAD_DIM), q_norm=random(HEAD_DIM), k_norm=random(HEAD_DIM).to(FP16),
    )  # fmt: skip


def operator(name: str, inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of an operator."""
    first = ("qkv", "k_cache", "v_cache", "slot_mapping")
    qkv, *others = (inputs[x] for x in first)
    q_out = torch.zeros(3, HEADS, HEAD_DIM, dtype=FP16, device=qkv.device)
    return ([qkv], *others, q_out), {x: y for x, y in inputs.items() if x not in first}


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_finds_nothing(name: str, device: str) -> None:
    args, named = operator(name, inputs_of("apart", device))
    torch.library.opcheck(getattr(torch.ops.paged_attn, name).default, args, named)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_take_tensors_without_memory(name: str, device: str) -> None:
    args, named = operator(name, inputs_of("apart", device))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [[mode.from_tensor(x[0])] if isinstance(x, list) else mode.from_tensor(x) for x in args]
        assert getattr(torch.ops.paged_attn, name)(*fake, **named) is None


@pytest.mark.parametrize("how, parts", [("apart", [None]), ("halves", ["keys", "values"])])
def test_inductor_writes_the_caches_where_they_lie(
    how: str, parts: list[str | None], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch; two for halves of one buffer, for torch copies one of two views that an operator changes."""
    theirs, inputs = (inputs_of(how, device) for _ in range(2))
    want = write_qkv(**theirs)
    found: list[tuple[Any, ...]] = []

    def fused(qkv: Any, k_cache: Tensor, v_cache: Tensor, *others: Any) -> Any:
        found.append((others[-1], k_cache.data_ptr(), v_cache.data_ptr()))
        return fused_write(qkv, k_cache, v_cache, *others)

    def written(k: Any, v: Any, k_cache: Tensor, v_cache: Tensor, *others: Any) -> None:
        found.append((others[-1], k_cache.data_ptr(), v_cache.data_ptr()))
        write(k, v, k_cache, v_cache, *others)

    monkeypatch.setattr(ops, "fused_write", fused)
    monkeypatch.setattr(ops, "write", written)
    compiled = torch.compile(write_qkv, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(**inputs), want)
    at = inputs["k_cache"].data_ptr(), inputs["v_cache"].data_ptr()
    assert found == [(part, *at) for part in parts] * 2
    assert all(torch.equal(inputs[x], theirs[x]) for x in ("k_cache", "v_cache"))
    assert inputs["v_cache"].any()


@pytest.mark.parametrize("dtype, dims", [(torch.int8, HEAD_DIM), (torch.uint8, HEAD_DIM // 2)], ids=["int8", "int4"])
@pytest.mark.parametrize("how", ["apart", "halves"])
def test_a_graph_writes_scales_by_token(how: str, dtype: torch.dtype, dims: int, device: str) -> None:
    """Of caches apart, and of halves of one buffer, which two operators write."""
    theirs, inputs = (inputs_of("apart", device) for _ in range(2))
    for given in (theirs, inputs):
        shape = given["k_cache"].shape
        both = torch.zeros(2, *shape[:3], dims, dtype=dtype, device=device)
        given["k_cache"], given["v_cache"] = both if how == "halves" else (both[0].clone(), both[1].clone())
        given["k_scale"], given["v_scale"] = torch.zeros(2, *shape[:3], device=device).unbind()
        given["k_scale"], given["v_scale"] = given["k_scale"].clone(), given["v_scale"].clone()
    want = write_qkv(**theirs)
    got = torch.compile(write_qkv, backend="aot_eager", fullgraph=True)(**inputs)
    assert torch.equal(got, want)
    written = ("k_cache", "v_cache", "k_scale", "v_scale")
    assert all(torch.equal(inputs[x], theirs[x]) for x in written)
    assert all(inputs[x].any() for x in written)


def test_a_graph_rotates_queries_in_place(device: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return write_qkv((q, k, v), **given, q_out=q)

    inputs = inputs_of("apart", device)
    q, k, v = inputs.pop("qkv").view(3, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    want = write_qkv((q, k, v), **inputs)
    q = q.clone()
    got = torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v, **inputs)
    assert torch.equal(got, want)
    assert torch.equal(q, want)


@pytest.mark.parametrize("name", ["qkv", "k_cache", "cos_sin", "k_norm"])
def test_what_requires_grad_is_named(name: str, device: str) -> None:
    inputs = inputs_of("apart", device)
    call_cache.clear()
    for _ in range(2):  # the same call without a gradient is kept
        write_qkv(**inputs)
    inputs[name] = inputs[name].detach().requires_grad_()
    args, named = operator("write_qkv", inputs)
    text = f"{name} requires grad, but paged attention has no backward pass"
    with pytest.raises(ValueError, match=text):
        write_qkv(**inputs)
    with pytest.raises(ValueError, match=text):
        torch.ops.paged_attn.write_qkv(*args, **named)
    with pytest.raises(RuntimeError, match=text):
        torch.compile(write_qkv, backend="aot_eager", fullgraph=True)(**inputs)
    with torch.no_grad():
        write_qkv(**inputs)


@pytest.mark.gpu
def test_a_captured_call_follows_what_changes_in_place(device: str) -> None:
    inputs = inputs_of("apart", device)
    write_qkv(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = write_qkv(**inputs)
    for _ in range(3):
        inputs["qkv"].normal_()
        inputs["positions"].random_(0, 10)
        inputs["slot_mapping"].copy_(torch.randperm(100, device=device)[:3])
        graph.replay()
        exact = [torch.zeros_like(inputs[x], dtype=torch.float64) for x in ("k_cache", "v_cache")]
        want = reference.write_qkv(**inputs | dict(zip(("k_cache", "v_cache"), exact)))
        torch.testing.assert_close(q.double(), want, atol=2e-2, rtol=2e-3)
        at = inputs["slot_mapping"]
        torch.testing.assert_close(
            inputs["k_cache"].flatten(0, 1)[at].double(), exact[0].flatten(0, 1)[at], atol=2e-2, rtol=2e-3
        )


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda c: {"qkv": ()}, ValueError, "got a tuple of 0"),
        (lambda c: {"qkv": (c["qkv"],)}, ValueError, "got a tuple of 1"),
        (lambda c: {"qkv": (c["qkv"], None, None)}, ValueError, "got a tuple with None"),
        (lambda c: {"qkv": c["qkv"][0]}, ValueError, r"or \(q, k, v\), got \["),
        (lambda c: {"qkv": c["qkv"].view(3, -1, HEAD_DIM)}, ValueError, r"qkv\.flatten\(1\)"),
        (lambda c: {"k_cache": c["k_cache"].flatten(2)}, ValueError, "k_cache must be"),
        (lambda c: {"mrope_sections": (True, 1, HEAD_DIM // 2 - 2)}, TypeError, r"mrope_sections\[0\] must be an int"),
        (lambda c: {"mrope_sections": (1.0, 1, HEAD_DIM // 2 - 2)}, TypeError, r"mrope_sections\[0\] must be an int"),
    ],
)
def test_a_wrong_call_is_refused_as_outside_of_a_graph(change: Any, error: type[Exception], text: str) -> None:
    inputs = inputs_of("apart", "cpu")
    inputs["positions"] = inputs["positions"].expand(3, 3).contiguous()
    inputs["mrope_sections"] = (1, 1, HEAD_DIM // 2 - 2)
    with pytest.raises(error, match=text):
        torch.compile(write_qkv, backend="eager")(**inputs | change(inputs))
