"""vLLM over this library: an attention backend, chosen as CUSTOM.

vLLM finds `plugin` by its entry point and calls it in each vLLM process.  Where entry points are not loaded, call
`register`.
"""

from __future__ import annotations

import importlib
from typing import Any

from .registration import plugin, plugin_diffkv, register, unregister

__all__ = ["plugin", "plugin_diffkv", "register", "unregister"]


def __getattr__(name: str) -> Any:
    """Backend, the class that vLLM finds as CUSTOM.

    The class is in latent.py if the model has latent attention (MLA), else in backend.py.
    """
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    module = ".latent" if model is not None and getattr(model, "use_mla", False) else ".backend"
    return importlib.import_module(module, __name__).Backend
