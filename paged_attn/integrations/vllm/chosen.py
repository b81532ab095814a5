"""The backend with the name CUSTOM: latent attention (MLA) if the model has it, otherwise the ordinary backend."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    module = ".latent" if model is not None and getattr(model, "use_mla", False) else ".backend"
    return importlib.import_module(module, __package__).Backend
