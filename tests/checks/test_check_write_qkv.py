"""What write_qkv says of bad input, word for word; then its checked mode."""

from __future__ import annotations

import pytest
import torch

import paged_attn
from tests.support.bad_input import SCALE, Change, Inputs, gapped, like, refuses, shaped, to, value
from tests.support.cases import E4M3

FLOATS = "float16 | bfloat16 | float32"
PACKED, LATENT = "packed", "latent"


def inputs_of(kind: str, device: str, cache: torch.dtype = torch.float16) -> Inputs:
    """Four tokens, four query heads, two KV heads of 32 dims, in 3 pages of 8; or latents of 48 + 16 dims."""
    width, kv_heads = (64, 1) if kind == LATENT else (32, 2)
    inputs: Inputs = {
        name: torch.zeros(3, 8, kv_heads, width, device=device).to(cache) for name in ("k_cache", "v_cache")
    }
    half = dict(dtype=torch.float16, device=device)
    if kind == PACKED:
        inputs["qkv"] = torch.randn(4, 8 * 32, **half)
    elif kind == LATENT:
        inputs["qkv"] = torch.randn(4, 4, 16, **half), torch.randn(4, 1, 48, **half), torch.randn(4, 1, 16, **half)
        inputs["v_cache"] = None
    else:
        inputs["qkv"] = tuple(torch.randn(4, 8, 32, **half).split([4, 2, 2], dim=1))
    inputs |= dict(slot_mapping=torch.tensor([3, -1, 23, 0], device=device))
    inputs |= dict(positions=torch.tensor([0, 50, 3, 49], device=device), cos_sin=torch.randn(50, 16, device=device))
    if cache == E4M3:
        inputs["k_scale"] = 0.5
    if cache == E4M3 and kind != LATENT:
        inputs["v_scale"] = torch.full((2,), 2.0, device=device)
    return inputs


def part(index: int, *shape: int, dtype: torch.dtype = torch.float16) -> Change:
    """Another tensor in place of one of the three."""
    return lambda c: {"qkv": tuple(like(x, *shape, dtype=dtype) if i == index else x for i, x in enumerate(c["qkv"]))}


def norm(name: str, size: int, dtype: torch.dtype = torch.float16) -> Change:
    return lambda c: {name: like(c["k_cache"], size, dtype=dtype)}


QKV = "[tokens, (heads + 2 * kv_heads) * head_dim]"
SECTIONS = "three ints >= 0 whose sum is rotary_dim / 2 = 8"
WRITE_QKV: list[tuple[str, Change, type[Exception], str]] = [
    ("", value(qkv=None), TypeError, f"qkv must be a tensor of {FLOATS}, got None"),
    ("", lambda c: {"qkv": c["qkv"][:2]}, ValueError, "qkv must be one tensor or (q, k, v), got a tuple of 2"),
    ("", value(qkv=()), ValueError, "qkv must be one tensor or (q, k, v), got a tuple of 0"),
    ("", value(qkv=[]), ValueError, "qkv must be one tensor or (q, k, v), got a tuple of 0"),
    (
        PACKED,
        lambda c: {"qkv": (c["qkv"], None, torch.zeros(4, 2, 32))},
        ValueError,
        "qkv must be one tensor or (q, k, v), got a tuple with None",
    ),
    (
        LATENT,
        lambda c: {"qkv": (*c["qkv"][:2], None)},
        ValueError,
        "qkv must be one tensor or (q, k, v), got a tuple with None",
    ),
    ("", part(0, 4, 4, 32, dtype=E4M3), TypeError, f"q must be {FLOATS}, got float8_e4m3fn: q.to(torch.float16)"),
    (
        "",
        part(0, 4, 3, 32),
        ValueError,
        "q must have heads a positive multiple of kv_heads = 2, got heads = 3: "
        "k_cache was read as NHD: [pages, page_size, kv_heads, head_dim] = [3, 8, 2, 32]",
    ),
    (
        "",
        part(1, 4, 2, 32, dtype=torch.float32),
        TypeError,
        "k must be float16, for q is float16, got float32: k.to(torch.float16)",
    ),
    (
        "",
        part(2, 5, 2, 32),
        ValueError,
        "v must be [tokens, kv_heads, value_dim] with tokens = 4 from q, got [5, 2, 32]",
    ),
    (PACKED, shaped("qkv", 4, 8, 32), ValueError, f"qkv must be {QKV} or (q, k, v), got [4, 8, 32]: qkv.flatten(1)"),
    (
        PACKED,
        shaped("qkv", 4, 7 * 32),
        ValueError,
        f"qkv must be {QKV} with heads a positive multiple of kv_heads = 2, head_dim = 32 from k_cache, got [4, 224]",
    ),
    (
        PACKED,
        shaped("v_cache", 3, 8, 2, 16),
        ValueError,
        "qkv must be (q, k, v) with head_dim = 32, value_dim = 16, got one tensor",
    ),
    (
        PACKED,
        value(v_cache=None),
        ValueError,
        "qkv must be (q_rope, latent, k_rope) with v_cache = None, got one tensor",
    ),
    (
        LATENT,
        part(2, 4, 1, 24),
        ValueError,
        "k_rope must be [tokens, kv_heads, rope_dim] with rope_dim = 16 from q_rope, got [4, 1, 24]",
    ),
    (
        LATENT,
        shaped("k_cache", 3, 8, 1, 60),
        ValueError,
        "k_cache must be [pages, page_size, kv_heads, head_dim] with head_dim = 64, got [3, 8, 1, 60]",
    ),
    (
        LATENT,
        shaped("k_cache", 3, 1, 8, 8, 8),
        ValueError,
        "k_cache must be 4-D with v_cache = None, in NHD, got [3, 1, 8, 8, 8]",
    ),
    (
        LATENT,
        norm("q_norm", 16),
        ValueError,
        "q_norm must be None with v_cache = None: of latents k_norm is the only norm",
    ),
    (LATENT, norm("k_norm", 64), ValueError, "k_norm must be [value_dim] with value_dim = 48 from latent, got [64]"),
    (
        "latent e4m3",
        value(v_scale=1.0),
        ValueError,
        "v_scale must be None with v_cache = None, for values are the first dims of keys",
    ),
    (
        "",
        to("k_cache", torch.bfloat16),
        TypeError,
        "k_cache must be float16 | float8_e4m3fn | float8_e5m2 | int8 | uint8, for q is float16, "
        "got bfloat16: q.to(torch.bfloat16), or a cache of float16",
    ),
    ("", value(kv_layout="HDN"), ValueError, "kv_layout must be 'NHD' or 'HND', got 'HDN': 'NHD'?"),
    ("", lambda c: {"v_cache": c["k_cache"]}, ValueError, "v_cache must share no memory with k_cache"),
    (
        "",
        lambda c: {"k_cache": like(c["k_cache"], 1, 8, 2, 32).expand(3, 8, 2, 32)},
        ValueError,
        "k_cache must not overlap itself, got [3, 8, 2, 32] strides [0, 64, 32, 1]",
    ),
    (
        "",
        to("slot_mapping", torch.int16),
        TypeError,
        "slot_mapping must be int32 | int64, got int16: slot_mapping.to(torch.int32)",
    ),
    ("", shaped("slot_mapping", 3), ValueError, "slot_mapping must be [tokens] with tokens = 4 from q, got [3]"),
    (
        "e4m3",
        value(k_scale=None),
        ValueError,
        "k_scale is required, for k_cache is float8_e4m3fn: 1.0 if what is stored is not scaled",
    ),
    ("", value(v_scale=1.0), ValueError, "v_scale must be None, for v_cache is float16 and not fp8 or int8"),
    ("", value(q_scale=1.0), ValueError, "q_scale must be None, for q_out is float16 and not fp8"),
    (
        "",
        lambda c: {"q_out": like(c["k_cache"], 4, 4, 32, dtype=E4M3)},
        ValueError,
        "q_scale is required, for q_out is float8_e4m3fn: 1.0 if what is stored is not scaled",
    ),
    (
        "",
        lambda c: {"q_out": like(c["k_cache"], 4, 4, 32, dtype=E4M3), "q_scale": -1.0},
        ValueError,
        f"q_scale must be {SCALE}, got -1.0",
    ),
    (
        "",
        lambda c: {"q_out": like(c["k_cache"], 4, 2, 32)},
        ValueError,
        "q_out must be [tokens, heads, head_dim] with heads = 4 from q, got [4, 2, 32]",
    ),
    (
        PACKED,
        lambda c: {"q_out": like(c["k_cache"], 4, 4, 32, dtype=torch.float32)},
        TypeError,
        "q_out must be float16 | float8_e4m3fn | float8_e5m2, for qkv is float16, got float32: q_out.to(torch.float16)",
    ),
    (
        PACKED,
        lambda c: {"q_out": c["qkv"][:, 32:160].unflatten(1, (4, 32))},
        ValueError,
        "q_out must share no memory with qkv",
    ),
    (
        "",
        lambda c: {"q_out": c["qkv"][1].as_strided((4, 4, 32), c["qkv"][1].stride())},
        ValueError,
        "q_out must share no memory with k",
    ),
    (
        "",
        lambda c: {"q_out": c["k_cache"].flatten()[:512].view(4, 4, 32)},
        ValueError,
        "q_out must share no memory with k_cache",
    ),
    ("", value(cos_sin=None), ValueError, "positions must be None without cos_sin, for nothing is rotated"),
    (
        "",
        value(cos_sin=None, positions=None, mrope_sections=(4, 2, 2)),
        ValueError,
        "mrope_sections must be None without cos_sin, for nothing is rotated",
    ),
    (
        "",
        shaped("cos_sin", 50, 15),
        ValueError,
        "cos_sin must be [max_positions, rotary_dim] with rotary_dim even and at most 32, the dims of q, got [50, 15]",
    ),
    (
        LATENT,
        shaped("cos_sin", 50, 32),
        ValueError,
        "cos_sin must be [max_positions, rotary_dim] with rotary_dim even and at most 16, the dims of q, got [50, 32]",
    ),
    (
        "",
        shaped("cos_sin", 0, 16),
        ValueError,
        "cos_sin must be [max_positions, rotary_dim] with max_positions >= 1, got [0, 16]",
    ),
    (
        "",
        value(positions=None),
        ValueError,
        "cos_sin must be [tokens, rotary_dim] with tokens = 4 from q, got [50, 16]",
    ),
    ("", to("cos_sin", E4M3), TypeError, f"cos_sin must be {FLOATS}, got float8_e4m3fn: cos_sin.to(torch.float16)"),
    (
        "",
        gapped("cos_sin"),
        ValueError,
        "cos_sin must be contiguous along rotary_dim, got strides [32, 2]: cos_sin.contiguous()",
    ),
    ("", shaped("positions", 3), ValueError, "positions must be [tokens] with tokens = 4 from q, got [3]"),
    (
        "",
        value(mrope_sections=(4, 2, 2)),
        ValueError,
        "positions must be [sections, tokens] with sections = 3, tokens = 4 from q, got [4]",
    ),
    (
        "",
        lambda c: {"mrope_sections": (4, 2, 3), "positions": c["positions"].expand(3, 4)},
        ValueError,
        f"mrope_sections must be {SECTIONS}, got [4, 2, 3]",
    ),
    (
        "",
        lambda c: {"mrope_sections": 8, "positions": c["positions"].expand(3, 4)},
        TypeError,
        f"mrope_sections must be {SECTIONS}, got int",
    ),
    (
        "",
        lambda c: {"mrope_sections": (4.0, 2, 2), "positions": c["positions"].expand(3, 4)},
        TypeError,
        "mrope_sections[0] must be an int >= 0, got float: int(mrope_sections[0])",
    ),
    (
        "",
        lambda c: {"mrope_sections": (4, 2, 2), "positions": None, "cos_sin": c["cos_sin"][:4]},
        ValueError,
        "mrope_sections needs positions [3, tokens]: without them, rows of cos_sin are of tokens",
    ),
    ("", norm("k_norm", 16), ValueError, "k_norm must be [head_dim] with head_dim = 32 from q, got [16]"),
    ("", norm("q_norm", 32, E4M3), TypeError, f"q_norm must be {FLOATS}, got float8_e4m3fn: q_norm.to(torch.float16)"),
    ("", value(eps=-1.0), ValueError, "eps must be a finite number >= 0, got -1.0"),
    ("", value(norm_offset=True), TypeError, "norm_offset must be a finite number, got bool"),
    ("", value(interleaved=1), TypeError, "interleaved must be True or False, got int: bool(interleaved)"),
    ("", value(check="yes"), TypeError, "check must be True, False or None, got str"),
    *(
        (f"{kind} e4m3", change, error, text)
        for kind in ("", LATENT)
        for change, error, text in (
            (
                lambda c: {
                    "k_scale": torch.zeros(c["k_cache"].shape[:3], dtype=torch.float64, device=c["k_cache"].device)
                },
                TypeError,
                "k_scale must be float32 | float16, got float64: k_scale.to(torch.float32)",
            ),
        )
    ),
    (
        " e4m3",
        lambda c: {"k_scale": torch.zeros(3, 4, 2, device=c["k_cache"].device)},
        ValueError,
        "k_scale must be [pages, page_size, kv_heads] with page_size = 8 from k_cache, got [3, 4, 2]",
    ),
    (
        " e4m3",
        lambda c: dict.fromkeys(("k_scale", "v_scale"), torch.zeros(3, 8, 2, device=c["k_cache"].device)),
        ValueError,
        "k_scale must share no memory with v_scale",
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("kind, change, error, text", WRITE_QKV, ids=[text for *_, text in WRITE_QKV])
def test_write_qkv_refuses(kind: str, change: Change, error: type[Exception], text: str, device: str) -> None:
    inputs = inputs_of(kind.removesuffix(" e4m3"), device, E4M3 if kind.endswith("e4m3") else torch.float16)
    refuses(paged_attn.write_qkv, inputs | change(inputs), error, text)


CONTENTS_OF_WRITES: list[tuple[Inputs, str]] = [
    (dict(slot_mapping=[3, -1, 24, 0]), "slot_mapping[2] = 24 (token 2), but the cache has 3 pages of 8 slots"),
    (dict(slot_mapping=[3, -1, 0, 3]), "slot_mapping[3] = 3 (token 3), but token 0 has the same slot"),
    (dict(positions=[0, 99, 50, 1]), "positions[2] = 50, but cos_sin has 50 rows"),
    (dict(positions=[0, 99, 3, -1]), "positions[3] = -1, but cos_sin has 50 rows"),
    (
        dict(positions=[[0, 0, 0, 0], [0, 99, 3, 4], [5, -7, 0, 77]], mrope_sections=(4, 2, 2)),
        "positions[2, 3] = 77, but cos_sin has 50 rows",
    ),
]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("change, text", CONTENTS_OF_WRITES)
def test_the_checked_write_refuses(change: Inputs, text: str, checked: Inputs, device: str) -> None:
    lists = {name: torch.tensor(x, device=device) if isinstance(x, list) else x for name, x in change.items()}
    refuses(paged_attn.write_qkv, inputs_of("", device) | lists | checked, ValueError, text)


def test_the_checked_write_minds_no_skipped_token(checked: Inputs, device: str) -> None:
    """Token 1 has no slot, and a position outside the table: it takes the last row."""
    inputs = inputs_of("", device)
    got = paged_attn.write_qkv(**inputs, **checked)
    want = paged_attn.write_qkv(**inputs | {"positions": inputs["positions"].clamp(max=49)})
    assert torch.equal(got, want)
