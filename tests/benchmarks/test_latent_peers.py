"""Peers that read latents get what their interfaces ask for, and decline what they have no kernel for."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.inputs import inputs_of
from benchmarks.peers import flashinfer, flashmla
from benchmarks.peers.cannot import Cannot
from paged_attn import reference
from tests.support.cases import Case

LATENT: dict[str, Any] = dict(heads=4, kv_heads=1, head_dim=576, value_dim=512, page_size=64, latent=True, lse=False)
CASE = Case("drafts", (2, 2), (130, 64), dtype=torch.bfloat16, **LATENT)
CLOSE: dict[str, float] = dict(atol=2**-7, rtol=2**-7)  # two roundings to bfloat16


def truth(inputs: dict[str, Any]) -> Tensor:
    out = reference.paged_attention(**inputs | {"out": None})
    return out.float()


class Wrapper:
    """FlashInfer's, by dense attention."""

    def __init__(self, workspace: Any, backend: str) -> None:
        assert backend in ("fa2", "fa3")

    def plan(self, *given: Any) -> None:
        self.given = given

    def run(self, q: Tensor, q_rest: Tensor, keys: Tensor, rest: Tensor) -> Tensor:
        starts, indptr, indices, lengths, heads, width, rest_width, page, causal, scale, *dtypes = self.given
        assert (heads, width, rest_width, page, causal, dtypes) == (4, 512, 64, 64, True, [torch.bfloat16] * 2)
        cache = torch.cat([keys, rest], dim=-1).unsqueeze(2)
        out = reference.paged_attention(
            torch.cat([q, q_rest], dim=-1), cache, cache[..., :512], (indptr, indices), lengths, starts,
            softmax_scale=scale,
        )  # fmt: skip
        return out.to(q.dtype)


def test_flashinfer_gets_both_parts_of_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setattr(flashinfer, "_workspace", lambda: None)
    inputs = inputs_of(CASE, "cpu")
    torch.testing.assert_close(flashinfer.fa2(CASE, inputs)().float(), truth(inputs), **CLOSE)


def test_flashmla_gets_queries_by_sequence_and_keys_that_hold_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(
        q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, width: int, schedule: Any, softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert (q.shape, width, causal, schedule.mine) == ((2, 2, 4, 576), 512, True, True)
        starts = torch.arange(len(q) + 1) * q.shape[1]
        out = reference.paged_attention(
            q.flatten(0, 1), cache, cache[..., :width], table, lengths, starts, softmax_scale=softmax_scale
        )
        return out.to(q.dtype).unflatten(0, q.shape[:2]), None

    name = "vllm.third_party.flashmla.flash_mla_interface"
    module = ModuleType(name)
    vars(module).update(
        flash_mla_with_kvcache=attend, get_mla_metadata=lambda: (SimpleNamespace(mine=True), None)
    )  # fmt: skip
    for parent in ("vllm", "vllm.third_party", "vllm.third_party.flashmla"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    inputs = inputs_of(CASE, "cpu")
    torch.testing.assert_close(flashmla.call(CASE, inputs)().float(), truth(inputs), **CLOSE)


@pytest.mark.parametrize(
    "changes, why",
    [
        (dict(page_size=16), "pages of 64"),
        (dict(head_dim=512), "latents of 512 and 64 dims"),
        (dict(query_lens=(1, 2)), "as many queries"),
        (dict(window_size=(9, -1)), "no window"),
        (dict(latent=False, head_dim=128, value_dim=None), "only latents"),
    ],
    ids=str,
)
def test_flashmla_declines_what_it_has_no_kernel_for(changes: dict[str, Any], why: str) -> None:
    case = replace(CASE, **changes)
    with pytest.raises(Cannot, match=why):
        flashmla.call(case, {})


@pytest.mark.parametrize("changes", [dict(head_dim=512), dict(layout="HND"), dict(sinks=True)], ids=str)
def test_flashinfer_declines_other_latents(changes: dict[str, Any]) -> None:
    with pytest.raises(Cannot):
        flashinfer.fa2(replace(CASE, **changes), {})
