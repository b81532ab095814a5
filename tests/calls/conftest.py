from __future__ import annotations

import pytest

from paged_attn.calls import memo


@pytest.fixture
def nothing_kept() -> None:
    memo.clear()
