"""Hosts and their functions are tested on the CPU; on a GPU those tests are run that are marked so."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, device: str) -> None:
    if device != "cpu" and request.node.get_closest_marker("gpu") is None:
        pytest.skip("its tensors and models are on the CPU")
