from __future__ import annotations

import pytest

from paged_attn.calls import call_cache


@pytest.fixture
def nothing_kept() -> None:
    call_cache.clear()
