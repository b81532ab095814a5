"""Calls with two widths, wide heads or latents, whose Hopper kernels are compiled in addition to `variants`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import paged_attn
from tests.support.cases import E4M3, Case, build
from tests.support.variants import DECODE, FEATURES, LATENT, LONG, OF_512

LONE = DECODE | dict(query_lens=(1,), seq_lens=LONG)
DRAFT_OF_4 = DECODE | dict(query_lens=(4,) * 64, seq_lens=(4096,) * 64, decode_form=False, bounds=True)
MIMO: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=192, value_dim=128)
GROUP_16: dict[str, Any] = dict(heads=64, kv_heads=4, head_dim=192, value_dim=128)
GEMMA: dict[str, Any] = dict(heads=16, kv_heads=4, head_dim=512)
OF_E4M3: dict[str, Any] = dict(cache_dtype=E4M3, scales="float")
SHARES: dict[str, dict[str, Any]] = {
    "decode 192 and 128": OF_512 | MIMO,
    "decode split 192 and 128": LONE | MIMO,
    "decode 192 and 128 features": OF_512 | MIMO | FEATURES,
    "draft 192 and 128": DRAFT_OF_4 | MIMO,
    "decode 192 and 128 group 16": OF_512 | GROUP_16,
    "decode split 192 and 128 group 16": LONE | GROUP_16,
    "decode 64 and 256": OF_512 | dict(head_dim=64, value_dim=256),
    "decode 64 and 256 group 16": OF_512 | GROUP_16 | dict(head_dim=64, value_dim=256),
    "decode 256 and 64 group 16 fp16": OF_512 | GROUP_16 | dict(head_dim=256, value_dim=64, dtype=torch.float16),
    "decode 64 and 128": OF_512 | dict(head_dim=64, value_dim=128),
    "decode 512": OF_512 | GEMMA,
    "decode split 512": LONE | GEMMA,
    "decode 512 features": OF_512 | GEMMA | FEATURES,
    "decode 512 page 64": OF_512 | GEMMA | dict(page_size=64),
    "draft 512": DRAFT_OF_4 | GEMMA,
    "draft 512 group 8": DRAFT_OF_4 | GEMMA | dict(heads=32),
    "draft 512 group 8 features": DRAFT_OF_4 | GEMMA | FEATURES | dict(heads=32),
    "decode split 512 group 16": LONE | GEMMA | dict(heads=64),
    "decode 512 and 256": OF_512 | GEMMA | dict(value_dim=256),
    "decode 128 and 512": OF_512 | GEMMA | dict(head_dim=128, value_dim=512),
    "decode latent": OF_512 | LATENT,
    "decode split latent": LONE | LATENT,
    "decode latent 8 heads": OF_512 | LATENT | dict(heads=8),
    "decode latent 32 heads": OF_512 | LATENT | dict(heads=32),
    "decode latent 32 heads features": OF_512 | LATENT | FEATURES | dict(heads=32),
    "decode split latent 32 heads": LONE | LATENT | dict(heads=32),
    "decode latent of 512": OF_512 | LATENT | dict(head_dim=512),
    "decode latent of 320": OF_512 | LATENT | dict(head_dim=320, value_dim=256),
    "draft latent 8 heads": DRAFT_OF_4 | LATENT | dict(heads=8),
    "decode latent 64 heads": OF_512 | LATENT | dict(heads=64),
    "decode split latent 64 heads": LONE | LATENT | dict(heads=64),
    "decode latent of 512 64 heads": OF_512 | LATENT | dict(heads=64, head_dim=512),
    "draft latent": DRAFT_OF_4 | LATENT,
    "decode latent 128 heads": OF_512 | LATENT | dict(heads=128),
    "decode e4m3 latent": OF_512 | LATENT | OF_E4M3,
    "decode split e4m3 latent": LONE | LATENT | OF_E4M3,
    "decode e4m3 latent 8 heads features": OF_512 | LATENT | FEATURES | OF_E4M3 | dict(heads=8),
    "decode e4m3 latent 32 heads": OF_512 | LATENT | OF_E4M3 | dict(heads=32),
    "decode e4m3 latent 32 heads fp16": OF_512 | LATENT | OF_E4M3 | dict(heads=32, dtype=torch.float16),
    "decode e4m3 latent of 512": OF_512 | LATENT | OF_E4M3 | dict(head_dim=512),
    "decode e4m3 latent of 320": OF_512 | LATENT | OF_E4M3 | dict(head_dim=320, value_dim=256),
    "decode e4m3 latent 64 heads": OF_512 | LATENT | OF_E4M3 | dict(heads=64),
}


def _attention(name: str, fields: dict[str, Any]) -> None:
    paged_attn.paged_attention(**build(Case(name, **fields), filled=False))


def calls(wanted: Sequence[str] = ()) -> list[tuple[str, Callable[[], None]]]:
    """Return (name, call) of each variant whose name contains one of the wanted words; all if none is given."""
    return [
        (name, functools.partial(_attention, name, fields))
        for name, fields in SHARES.items()
        if not wanted or any(word in name for word in wanted)
    ]
