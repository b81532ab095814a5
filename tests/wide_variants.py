"""The calls of `PAGED_ATTN_WIDE=1` whose Hopper kernels are compiled, as `tests.variants` has those of all others."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import paged_attn
from tests.cases import Case, build
from tests.variants import DECODE, FEATURES, LONG, OF_512

LONE = DECODE | dict(query_lens=(1,), seq_lens=LONG)
DRAFT_OF_4 = DECODE | dict(query_lens=(4,) * 64, seq_lens=(4096,) * 64, decode_form=False, bounds=True)
MIMO: dict[str, Any] = dict(heads=32, kv_heads=8, head_dim=192, value_dim=128)
GROUP_16: dict[str, Any] = dict(heads=64, kv_heads=4, head_dim=192, value_dim=128)
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
}


def _attention(name: str, fields: dict[str, Any]) -> None:
    paged_attn.paged_attention(**build(Case(name, **fields), filled=False))


def calls(wanted: Sequence[str] = ()) -> list[tuple[str, Callable[[], None]]]:
    """(name, call) of every variant whose name contains one of the wanted words; all if none is given."""
    return [
        (name, functools.partial(_attention, name, fields))
        for name, fields in SHARES.items()
        if not wanted or any(word in name for word in wanted)
    ]
