"""Plain torch with small pieces and tiles, so that short sequences meet every path; and whether tests run on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from tests.simulator import SIMULATES

# Whether tests run on plain torch, as `make test` asks for in a run of its own, and tests/without_triton.py, too.
IN_TORCH = not torch.cuda.is_available() and not SIMULATES and os.environ.get("PAGED_ATTN_DIALECT") == "torch"


@contextlib.contextmanager
def cut(segments: int, tile: int = 32) -> Iterator[None]:
    """Use tiles of `tile` keys; if `segments` > 1, also pieces of `tile` keys, joined by their log-sum-exps."""
    from paged_attn.kernels.torch import attention, blocks, plain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "TILE", tile)
        if segments > 1:
            patch.setattr(blocks, "SCORES", 1 << 12)
            patch.setattr(plain, "PIECE_BYTES", 0)
            patch.setattr(plain, "FEWEST_KEYS", tile)
            patch.setattr(plain, "MOST_KEYS", tile)
            patch.setattr(attention, "TOGETHER", 4 * tile)
        yield
