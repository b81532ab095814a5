from __future__ import annotations

from pathlib import Path

import pytest
import triton


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of Triton's of this test alone."""
    monkeypatch.setitem(vars(triton.knobs.cache), "dir", str(tmp_path))
    return tmp_path
