from __future__ import annotations

from collections.abc import Iterator

import pytest

from paged_attn.calls import call_cache, pages
from paged_attn.launching.platform import Device


@pytest.fixture
def nothing_kept() -> None:
    call_cache.clear()


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways of a call that copies or gathers whole pages."""
    call_cache.clear()
    if request.param == "torch":
        monkeypatch.setattr(pages, "device_of", lambda device: Device("cpu", 1))
    yield request.param
    call_cache.clear()
