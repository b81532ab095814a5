"""torch's own varlen_attn over this library: results, what stays torch's own, and a scope that nothing outlives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_attn

pytest.importorskip("torch", "2.13.0", reason="needs torch 2.13, whose varlen_attn takes a block table")

import torch.nn.attention as host
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

from paged_attn.integrations import torch as adapter
from paged_attn.integrations.torch import registration, varlen

CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # float32 against float64: the order of sums
BAD = float("nan")


class Paged:
    """A chunk of 5 tokens behind 15 others, a decode, an empty sequence, a prefill: NaN in dead slots, -1 behind."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32, page: int = 8) -> None:
        torch.manual_seed(0)
        lens, queries = [20, 34, 0, 7], [5, 1, 0, 7]
        self.q = torch.randn(sum(queries), 4, 16)
        self.k, self.v = torch.full((2, 16, page, 2, 16), BAD)
        self.table = torch.full((len(lens), 6), -1, dtype=torch.int32)
        free = iter(torch.randperm(16).tolist())
        for s, n in enumerate(lens):
            for p in range(-(-n // page)):
                self.table[s, p] = at = next(free)
                live = min(page, n - p * page)
                self.k[at, :live], self.v[at, :live] = torch.randn(2, live, 2, 16)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.cu = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
        for name, x in list(vars(self).items()):
            setattr(self, name, x.to(device, dtype if x.is_floating_point() else None))
        self.max_q, self.max_k = max(queries), max(lens)

    def call(self, function: Any = varlen_attn, **options: Any) -> Any:
        given = {"window_size": (-1, 0), **options}
        return function(
            self.q, self.k, self.v, self.cu, None, self.max_q, self.max_k, enable_gqa=True, seqused_k=self.lens,
            block_table=self.table, **given,
        )  # fmt: skip

    def wanted(self, **options: Any) -> tuple[Tensor, Tensor]:
        given = {"window_size": (-1, 0), "causal": False, **options}
        return paged_attn.reference.paged_attention(
            self.q, self.k, self.v, self.table, self.lens, self.cu, return_lse=True, **given
        )  # type: ignore[return-value]


@pytest.fixture
def active() -> Iterator[str]:
    with adapter.activated() as name:
        yield name
    adapter.unregister()


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (6, 0), (3, 2)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_block_table_is_read_as_the_reference_reads_it(active: str, window: Any, scale: float | None) -> None:
    batch = Paged()
    out, lse = batch.call(window_size=window, scale=scale, return_aux=AuxRequest(lse=True))
    want, want_lse = batch.wanted(window_size=window, softmax_scale=scale)
    torch.testing.assert_close(out, want.float(), **CLOSE)
    torch.testing.assert_close(lse, want_lse.t().float(), **CLOSE)
    assert lse.is_contiguous()


def test_results_go_where_out_says(active: str) -> None:
    batch = Paged()
    out = torch.full_like(batch.q, BAD)
    got, lse = batch.call(lambda *a, **k: varlen_attn_out(out, *a, **k), return_aux=AuxRequest(lse=True))
    want, want_lse = batch.wanted()
    assert got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, want.float(), **CLOSE)
    torch.testing.assert_close(lse, want_lse.t().float(), **CLOSE)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's own attention of one sequence [n, heads, d] over [m, kv_heads, d], the last query beside the last key."""
    n, m = q.shape[0], k.shape[0]
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal else None
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1)


# Equal lengths in one tensor, in two, and other lengths: keys are the call's own, or pages of one token.
@pytest.mark.parametrize("lens_k, shared", [((9, 1, 4), True), ((9, 1, 4), False), ((12, 30, 4), False)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("splits", [None, 1])
def test_ragged_keys_give_what_torchs_own_attention_gives_of_each_sequence(
    active: str, lens_k: tuple[int, ...], shared: bool, causal: bool, splits: int | None
) -> None:
    torch.manual_seed(0)
    lens_q = (9, 1, 4)
    q = torch.randn(14, 4, 16)
    k, v = torch.randn(2, sum(lens_k), 2, 16)
    cu_q = torch.tensor([0, 9, 10, 14], dtype=torch.int32)
    cu_k = cu_q if shared else torch.tensor([0, *torch.tensor(lens_k).cumsum(0)], dtype=torch.int32)
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(
        q, k, v, cu_q, cu_k, 9, max(lens_k), window_size=window, enable_gqa=True, num_splits=splits
    )  # fmt: skip
    parts = zip(q.split(lens_q), k.split(lens_k), v.split(lens_k))
    want = torch.cat([sdpa(*part, causal) for part in parts])
    torch.testing.assert_close(out, want, **CLOSE)


def test_a_sequence_sees_no_more_ragged_keys_than_seqused_k_says(active: str) -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(3, 4, 16), torch.randn(2, 20, 2, 16)
    k[6:10] = v[6:10] = BAD
    cu_q, cu_k = torch.tensor([[0, 2, 3], [0, 10, 20]], dtype=torch.int32)
    used = torch.tensor([6, 10], dtype=torch.int32)
    out = varlen_attn(q, k, v, cu_q, cu_k, 2, 10, window_size=(-1, 0), enable_gqa=True, seqused_k=used)
    want = torch.cat([sdpa(q[:2], k[:6], v[:6], True), sdpa(q[2:], k[10:], v[10:], True)])
    torch.testing.assert_close(out, want, **CLOSE)


def test_one_split_asks_for_the_same_bits_in_any_batch(active: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = varlen.paged_attention
    monkeypatch.setattr(varlen, "paged_attention", lambda *a, **k: asked.append(k["batch_invariant"]) or real(*a, **k))
    for splits in (None, 1, 4):
        Paged().call(num_splits=splits)
    assert asked == [False, True, False]


def test_it_compiles_whole(active: str) -> None:
    batch = Paged()
    compiled = torch.compile(lambda: batch.call() * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), 2 * batch.wanted()[0].float(), **CLOSE)


def state() -> list[Any]:
    return [
        host.current_flash_attention_impl(),
        host.list_flash_attention_impls(),
        torch._C._get_sdp_priority_order(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch._C._get_overrideable_sdp_enabled(),
    ]


def test_behind_a_scope_torch_is_as_it_was(device: str) -> None:
    before = state()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with adapter.activated() as name:
            assert host.current_flash_attention_impl() == name
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before[3])
    adapter.unregister()
    assert state() == before
    if device == "cpu":
        with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
            Paged().call()


def test_a_scope_asks_for_this_kernel_before_cudnns() -> None:
    with host.sdpa_kernel([host.SDPBackend.CUDNN_ATTENTION, host.SDPBackend.FLASH_ATTENTION], set_priority=True):
        before = torch._C._get_sdp_priority_order()
        with adapter.activated():
            flash, *others = torch._C._get_sdp_priority_order()
        assert torch._C._get_sdp_priority_order() == before
    adapter.unregister()
    assert flash == int(host.SDPBackend.FLASH_ATTENTION)
    assert others == [x for x in before if x != flash]


def test_another_implementation_comes_back_behind_a_scope() -> None:
    class Handle:
        def remove(self) -> None: ...

    host.register_flash_attention_impl("another", register_fn=Handle)
    host.activate_flash_attention_impl("another")
    try:
        with adapter.activated():
            pass
        assert host.current_flash_attention_impl() == "another"
    finally:
        host.restore_flash_attention_impl()
        host._registry._FLASH_ATTENTION_IMPLS.pop("another")
        adapter.unregister()


def test_registering_activates_nothing_and_unregistering_restores() -> None:
    before = state()
    name = adapter.register()
    assert adapter.register() == name
    assert name in host.list_flash_attention_impls()
    assert host.current_flash_attention_impl() == before[0]
    host.activate_flash_attention_impl(name)
    Paged().call()
    adapter.unregister()
    assert state() == before


def test_importing_the_adapter_registers_nothing() -> None:
    code = (
        "import torch.nn.attention as host; before = host.list_flash_attention_impls()\n"
        "import paged_attn.integrations.torch; assert host.list_flash_attention_impls() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dense_batches_stay_torchs_own(active: str) -> None:
    q = torch.randn(1, 2, 5, 16)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(out, sdpa(*[q[0].transpose(0, 1)] * 3, False).transpose(0, 1)[None])


class Own:
    """Stands for a kernel of torch's."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def call_boxed(self, keyset: Any, *args: Any, **keywords: Any) -> str:
        self.calls.append((keyset, args, keywords))
        return "torch's"


def test_what_torch_may_ask_gradients_of_goes_to_torchs_own_kernel_and_paged_calls_do_not() -> None:
    own, batch = Own(), Paged()
    forward = registration._forward(own)
    k = torch.randn(13, 2, 16, requires_grad=True)
    args = (batch.q, k, k, batch.cu, batch.cu, 7, 7, 0.0, True, False)
    assert forward("keys", *args, scale=0.5) == "torch's"
    assert own.calls == [("keys", args, {"scale": 0.5})]
    dense = (batch.q[None], k[None], k[None], None, None, 13, 13, 0.0, True, False)
    assert forward("keys", *dense) == "torch's"
    assert registration._into(own)("keys", batch.q[None], *dense) == "torch's"
    with torch.no_grad():
        batch.q.requires_grad_()
        paged = (batch.q, batch.k, batch.v, batch.cu, None, 7, 34, 0.0, True, False)
        out = forward("keys", *paged, seqused_k=batch.lens, block_table=batch.table)[0]
    assert len(own.calls) == 3
    torch.testing.assert_close(out, batch.wanted()[0].float(), **CLOSE)


def test_gradients_are_refused_where_torch_has_no_kernel(active: str) -> None:
    x = torch.randn(4, 2, 16, requires_grad=True)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="require grad"):
        varlen_attn(x, x, x, cu, cu, 4, 4)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"dropout_p": 0.1}, "dropout_p = 0.1"),
        ({"return_debug_mask": True}, "return_debug_mask"),
        ({"seqused_k": None}, "seqused_k"),
        ({"block_table": None}, "cum_seq_k"),
        ({"learnable_bias": torch.zeros(1)}, "learnable_bias"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change: dict[str, Any], word: str) -> None:
    batch = Paged()
    given: dict[str, Any] = {"dropout_p": 0.0, "seqused_k": batch.lens, "block_table": batch.table, **change}
    with pytest.raises(NotImplementedError, match=word):
        varlen.attend(batch.q, batch.k, batch.v, batch.cu, None, batch.max_q, batch.max_k, **given)


def test_slopes_lower_keys_on_both_sides_of_a_query() -> None:
    batch, slopes = Paged(), torch.rand(4)
    given = (batch.q, batch.k, batch.v, batch.cu, None, batch.max_q, batch.max_k)
    rest: dict[str, Any] = {"seqused_k": batch.lens, "block_table": batch.table, "alibi_slopes": slopes}
    out, _ = varlen.attend(*given, window_size_right=0, **rest)
    torch.testing.assert_close(out, batch.wanted(alibi_slopes=slopes)[0].float(), **CLOSE)
    out, _ = varlen.attend(*given, **rest)
    both = batch.wanted(alibi_slopes=slopes, alibi_symmetric=True, window_size=(-1, -1))
    torch.testing.assert_close(out, both[0].float(), **CLOSE)


def test_a_torch_of_another_shape_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "NEEDED", (*registration.NEEDED, "another"))
    with pytest.raises(RuntimeError, match="has no another"):
        adapter.register()
    monkeypatch.undo()
    monkeypatch.setattr(registration, "ORDER", registration.ORDER[::-1])
    with pytest.raises(RuntimeError, match="takes query, key"):
        adapter.register()
    assert registration.NAME not in host.list_flash_attention_impls()


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu_paged_calls_are_this_librarys(active: str, graph: bool) -> None:
    batch = Paged("cuda", torch.bfloat16)
    out = batch.call()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = batch.call()
        captured.replay()
    torch.testing.assert_close(out.double(), batch.wanted()[0], atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_on_a_gpu_dense_batches_and_training_stay_torchs_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu = torch.tensor([0, 64, 128], dtype=torch.int32, device="cuda")

    def both() -> list[Tensor]:
        y = x.transpose(1, 2)
        with host.sdpa_kernel(host.SDPBackend.FLASH_ATTENTION):
            dense = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
        rows = x.flatten(0, 1)
        ragged = varlen_attn(rows, rows, rows, cu, cu, 64, 64, window_size=(-1, 0))
        return [dense, ragged, *torch.autograd.grad(ragged.float().square().sum(), x)]

    want = both()
    with adapter.activated():
        got = both()
    adapter.unregister()
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
