"""The library itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import paged_attn
from tests.cases import Case


def call(case: Case, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    """paged_attention on the case's own inputs."""
    return lambda: paged_attn.paged_attention(**inputs)  # type: ignore[return-value]
