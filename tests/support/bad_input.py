"""Valid calls, changes that make them invalid, and the assertion of a refusal, for all tests of bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_attn.arguments import bound
from paged_attn.checks import argument_rows as check
from tests.support.cases import E4M3, E5M2, Case, build

Inputs = dict[str, Any]
Change = Callable[[Inputs], Inputs]

# Each axis has another size: tokens 5, seqs 3, heads 6, kv_heads 2, head_dim 32, pages 12, page_size 8, max_pages 7.
PLAIN = Case(
    "plain", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=torch.bfloat16, sinks=True, alibi=True
)
CALLS: dict[str, Case] = {
    "plain": PLAIN,
    "hnd": Case("hnd", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=torch.bfloat16, layout="HND"),
    "packed": Case("packed", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=torch.float16, layout="x"),
    "new": Case("new", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=torch.float16, new=True),
    "fp8 cache": Case(
        "fp8 cache", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, cache_dtype=E4M3, scales="float"
    ),
    "fp8": Case(
        "fp8", (1, 3, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, dtype=E4M3, out_dtype=E5M2, scales="float"
    ),
    "fp8 new": Case(
        "fp8 new", (1, 3), (20, 3), heads=6, kv_heads=2, dtype=E5M2, cache_dtype=E4M3, scales="float", new=True
    ),
    "latent": Case(
        "latent",
        (1, 3, 1),
        (20, 3, 33),
        heads=6,
        head_dim=576,
        value_dim=512,
        dtype=torch.float16,
        latent=True,
        new=True,
    ),
    "decode": Case("decode", (1, 1, 1), (20, 3, 33), heads=6, kv_heads=2, page_size=8, decode_form=True),
}


def call_of(name: str, device: str) -> Inputs:
    return build(CALLS[name], device)


def strided(tensor: Tensor) -> Tensor:
    """Return zeros of the same shape, with a gap after each element of the last axis."""
    return torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)[..., 0]


def like(tensor: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(shape, dtype=dtype or tensor.dtype, device=tensor.device)


def to(name: str, dtype: torch.dtype) -> Change:
    return lambda c: {name: like(c[name], *c[name].shape, dtype=dtype)}


def shaped(name: str, *shape: int) -> Change:
    return lambda c: {name: like(c[name], *shape)}


def gapped(name: str) -> Change:
    return lambda c: {name: strided(c[name])}


def value(**changes: Any) -> Change:
    return lambda c: changes


def tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Change:
    return lambda c: {name: like(c["q"], *shape, dtype=dtype)}


QUERY = "float16 | bfloat16 | float32 | float8_e4m3fn | float8_e5m2"
NHD = "[pages, page_size, kv_heads, head_dim]"
HND = "[pages, kv_heads, page_size, head_dim]"
PACKED_K = "[pages, kv_heads, head_dim // x, page_size, x]"
NHD_VALUES = "[pages, page_size, kv_heads, value_dim]"
HND_VALUES = "[pages, kv_heads, page_size, value_dim]"
PACKED_V = "[pages, kv_heads, value_dim, page_size]"
SCALE = "a finite number > 0, or a float32 tensor"


def refuses(function: Callable[..., Any], inputs: Inputs, error: type[Exception], text: str) -> None:
    """Assert that the call raises exactly this error and text, and changes none of its tensors."""
    tensors = {
        name: given for name, given in inputs.items() if isinstance(given, Tensor) and given.device.type != "meta"
    }
    before = {name: given.detach().clone() for name, given in tensors.items()}
    with pytest.raises(error) as raised:
        function(**inputs)
    assert type(raised.value) is error
    assert str(raised.value) == text
    for name, given in tensors.items():
        assert torch.equal(as_bytes(given), as_bytes(before[name])), f"{name} was written"


def as_bytes(given: Tensor) -> Tensor:
    return given.detach().contiguous().flatten().view(torch.uint8)


def accept(inputs: Inputs) -> check.Axes:
    """Run the host's checks alone, with the defaults of the public call."""
    given, options = bound(inputs)
    return check.check_attention(given, options)
