"""What write_kv and merge_states say of bad input, word for word; then the checked mode of write_kv."""

from __future__ import annotations

import pytest
import torch

import paged_attn
from tests.support.bad_input import (
    HND_VALUES,
    NHD,
    NHD_VALUES,
    PACKED_K,
    SCALE,
    Change,
    Inputs,
    gapped,
    like,
    refuses,
    shaped,
    to,
    value,
)
from tests.support.cases import E4M3, E5M2, is_scaled

KV = "[tokens, kv_heads, head_dim]"
VALUES_OF = "[tokens, kv_heads, value_dim]"


def write_inputs(device: str, cache_dtype: torch.dtype = torch.float16, layout: str = "NHD") -> Inputs:
    """Four tokens, two heads, 32 dims into 3 pages of 8; random bytes in the caches."""
    shapes = {"NHD": [(3, 8, 2, 32)] * 2, "HND": [(3, 2, 8, 32)] * 2, "x": [(3, 2, 4, 8, 8), (3, 2, 32, 8)]}[layout]
    caches = [torch.randint(0, 100, shape, device=device).to(cache_dtype) for shape in shapes]
    inputs: Inputs = {name: torch.randn(4, 2, 32, device=device).half() for name in ("k", "v")}
    inputs |= dict(zip(("k_cache", "v_cache"), caches, strict=True))
    inputs["slot_mapping"] = torch.tensor([3, -1, 23, 0], device=device)
    inputs["kv_layout"] = "HND" if layout == "HND" else "NHD"
    if is_scaled(cache_dtype):
        inputs |= {"k_scale": 0.5, "v_scale": torch.full((2,), 2.0, device=device)}
    return inputs


WRITE: list[tuple[torch.dtype, str, Change, type[Exception], str]] = [
    (torch.float16, "NHD", value(k=None), TypeError, "k must be a tensor of float16 | bfloat16 | float32, got None"),
    (
        torch.float16,
        "NHD",
        to("k", E4M3),
        TypeError,
        "k must be float16 | bfloat16 | float32, got float8_e4m3fn: k.to(torch.float16)",
    ),
    (
        torch.float16,
        "NHD",
        shaped("k", 4, 64),
        ValueError,
        f"k must be {KV}, got [4, 64]: k.unflatten(-1, (kv_heads, head_dim))",
    ),
    (
        torch.float16,
        "NHD",
        gapped("k"),
        ValueError,
        "k must be contiguous along head_dim, got strides [128, 64, 2]: k.contiguous()",
    ),
    (
        torch.float16,
        "NHD",
        to("v", torch.float32),
        TypeError,
        "v must be float16, for k is float16, got float32: v.to(torch.float16)",
    ),
    (
        torch.float16,
        "NHD",
        shaped("v", 5, 2, 32),
        ValueError,
        f"v must be {VALUES_OF} with tokens = 4 from k, got [5, 2, 32]",
    ),
    (
        torch.float16,
        "NHD",
        shaped("v", 4, 2, 16),
        ValueError,
        f"v_cache must be {NHD_VALUES} with value_dim = 16 from v, got [3, 8, 2, 32]",
    ),
    (
        torch.float16,
        "NHD",
        gapped("v"),
        ValueError,
        "v must be contiguous along value_dim, got strides [128, 64, 2]: v.contiguous()",
    ),
    (
        torch.float16,
        "NHD",
        to("k_cache", torch.bfloat16),
        TypeError,
        "k_cache must be float16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for k is float16, "
        "got bfloat16: k.to(torch.bfloat16), or a cache of float16",
    ),
    (
        torch.float16,
        "NHD",
        to("v_cache", torch.bfloat16),
        TypeError,
        "v_cache must be float16, for k_cache is float16, got bfloat16: v_cache.to(torch.float16)",
    ),
    (
        torch.float16,
        "NHD",
        shaped("k_cache", 3, 8, 4, 32),
        ValueError,
        f"k_cache must be {NHD} with kv_heads = 2 from k, "
        "got [3, 8, 4, 32]: k.transpose(0, 1), and v, if their heads come first",
    ),
    (
        torch.float16,
        "HND",
        shaped("v_cache", 3, 2, 4, 32),
        ValueError,
        f"v_cache must be {HND_VALUES} with page_size = 8 from k_cache, got [3, 2, 4, 32]",
    ),
    (
        torch.float16,
        "x",
        shaped("k_cache", 3, 2, 4, 8, 4),
        ValueError,
        f"k_cache must be {PACKED_K} with head_dim = 32 from k, got [3, 2, 4, 8, 4]",
    ),
    (
        torch.float16,
        "NHD",
        lambda c: {"k_cache": like(c["k"], 1, 8, 2, 32).expand(3, 8, 2, 32)},
        ValueError,
        "k_cache must not overlap itself, got [3, 8, 2, 32] strides [0, 64, 32, 1]",
    ),
    (
        torch.float16,
        "NHD",
        lambda c: {"v_cache": like(c["k"], 3, 8, 1, 32).expand(3, 8, 2, 32)},
        ValueError,
        "v_cache must not overlap itself, got [3, 8, 2, 32] strides [256, 32, 0, 1]",
    ),
    (
        torch.float16,
        "NHD",
        value(v=None),
        ValueError,
        "v_cache must be None, or k_cache[..., :value_dim], with v = None, got [3, 8, 2, 32]: pass v, too",
    ),
    (
        E4M3,
        "NHD",
        value(v=None, v_cache=None),
        ValueError,
        "v_scale must be None with v = None, for values are the first dims of keys",
    ),
    (
        torch.float16,
        "NHD",
        lambda c: {"v": None, "v_cache": None, "k": like(c["k"], 4, 2, 577), "k_cache": like(c["k"], 3, 8, 2, 577)},
        ValueError,
        "head_dim must be between 1 and 576, got 577",
    ),
    (
        torch.float16,
        "NHD",
        value(v_cache=None),
        TypeError,
        "v_cache must be a tensor of float16, for k_cache is float16, "
        "got None: k_cache[..., :value_dim] where keys hold their values",
    ),
    (
        torch.float16,
        "NHD",
        to("slot_mapping", torch.int16),
        TypeError,
        "slot_mapping must be int32 | int64, got int16: slot_mapping.to(torch.int32)",
    ),
    (
        torch.float16,
        "NHD",
        shaped("slot_mapping", 3),
        ValueError,
        "slot_mapping must be [tokens] with tokens = 4 from k, got [3]",
    ),
    (
        torch.float16,
        "NHD",
        gapped("slot_mapping"),
        ValueError,
        "slot_mapping must be contiguous along tokens, got strides [2]: slot_mapping.contiguous()",
    ),
    (torch.float16, "NHD", value(kv_layout="HDN"), ValueError, "kv_layout must be 'NHD' or 'HND', got 'HDN': 'NHD'?"),
    (
        E4M3,
        "NHD",
        value(k_scale=None),
        ValueError,
        "k_scale is required, for k_cache is float8_e4m3fn: 1.0 if what is stored is not scaled",
    ),
    (
        E5M2,
        "NHD",
        value(v_scale=None),
        ValueError,
        "v_scale is required, for v_cache is float8_e5m2: 1.0 if what is stored is not scaled",
    ),
    (torch.float16, "NHD", value(check="yes"), TypeError, "check must be True, False or None, got str"),
    (E4M3, "NHD", value(k_scale=0.0), ValueError, f"k_scale must be {SCALE}, got 0.0"),
    (
        torch.float16,
        "NHD",
        value(k_scale=1.0),
        ValueError,
        "k_scale must be None, for k_cache is float16 and not fp8 or int8",
    ),
    (
        torch.float16,
        "NHD",
        value(v_scale=1.0),
        ValueError,
        "v_scale must be None, for v_cache is float16 and not fp8 or int8",
    ),
    (
        E4M3,
        "NHD",
        lambda c: {"v_scale": like(c["k"], 3, dtype=torch.float32)},
        ValueError,
        "v_scale must be [], [1], [kv_heads] or [1, kv_heads], or by token [pages, page_size, kv_heads] with "
        "kv_heads = 2, got [3]",
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("dtype, layout, change, error, text", WRITE, ids=[text for *_, text in WRITE])
def test_write_kv_refuses(
    dtype: torch.dtype, layout: str, change: Change, error: type[Exception], text: str, device: str
) -> None:
    inputs = write_inputs(device, dtype, layout)
    refuses(paged_attn.write_kv, inputs | change(inputs), error, text)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("name", ["v", "k_cache", "v_cache", "slot_mapping", "v_scale"])
def test_everything_written_must_be_on_the_device_of_k(name: str, device: str) -> None:
    inputs = write_inputs(device, E4M3)
    inputs[name] = torch.empty_like(inputs[name], device="meta")
    refuses(paged_attn.write_kv, inputs, ValueError, f"{name} must be on {inputs['k'].device} like k, got meta")


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "slots, text",
    [
        ([3, -1, 24, 0], "slot_mapping[2] = 24 (token 2), but the cache has 3 pages of 8 slots"),
        ([2**62, -1, 23, 0], f"slot_mapping[0] = {2**62} (token 0), but the cache has 3 pages of 8 slots"),
        ([3, -1, 0, 3], "slot_mapping[3] = 3 (token 3), but token 0 has the same slot"),
    ],
)
def test_the_checked_write_refuses(slots: list[int], text: str, checked: Inputs, device: str) -> None:
    inputs = write_inputs(device) | {"slot_mapping": torch.tensor(slots, device=device)} | checked
    refuses(paged_attn.write_kv, inputs, ValueError, text)


def test_the_checked_write_minds_no_skipped_token(checked: Inputs, device: str) -> None:
    inputs = write_inputs(device) | {"slot_mapping": torch.tensor([-1, -1, -(2**40), 5], device=device)} | checked
    paged_attn.write_kv(**inputs)
    assert torch.equal(inputs["k_cache"][0, 5], inputs["k"][3])


# ---- merge_states

MERGE: list[tuple[Change, type[Exception], str]] = [
    (value(outs=None), TypeError, "outs must be a tensor of float16 | bfloat16 | float32, got None"),
    (
        to("outs", E4M3),
        TypeError,
        "outs must be float16 | bfloat16 | float32, got float8_e4m3fn: outs.to(torch.float16)",
    ),
    (
        shaped("outs", 4, 5, 32),
        ValueError,
        "outs must be [n, tokens, heads, head_dim], got [4, 5, 32]: outs.unsqueeze(0), if this is one set of keys",
    ),
    (
        lambda c: {"outs": c["outs"][:0], "lses": c["lses"][:0]},
        ValueError,
        "outs must be [n, tokens, heads, head_dim] with n >= 1, got [0, 5, 6, 32]",
    ),
    (value(lses=None), TypeError, "lses must be a tensor of float32, got None"),
    (to("lses", torch.bfloat16), TypeError, "lses must be float32, got bfloat16: lses.to(torch.float32)"),
    (
        shaped("lses", 4, 5),
        ValueError,
        "lses must be [n, tokens, heads] with n = 4, tokens = 5, heads = 6 from outs, got [4, 5]",
    ),
    (shaped("lses", 3, 5, 6), ValueError, "lses must be [n, tokens, heads] with n = 4 from outs, got [3, 5, 6]"),
    (
        shaped("lses", 4, 6, 5),
        ValueError,
        "lses must be [n, tokens, heads] with tokens = 5, heads = 6 from outs, got [4, 6, 5]: lses.transpose(1, 2)",
    ),
    (
        lambda c: {"lses": torch.empty(4, 5, 6, device="meta")},
        ValueError,
        "lses must be on {device} like outs, got meta",
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("change, error, text", MERGE, ids=[text for *_, text in MERGE])
def test_merge_states_refuses(change: Change, error: type[Exception], text: str, device: str) -> None:
    inputs: Inputs = {"outs": torch.zeros(4, 5, 6, 32, device=device), "lses": torch.zeros(4, 5, 6, device=device)}
    text = text.format(device=inputs["lses"].device)
    refuses(paged_attn.merge_states, inputs | change(inputs), error, text)
