"""A module named flash_attn, which install() puts into sys.modules and uninstall() removes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import types

from .kvcache import flash_attn_with_kvcache
from .varlen import flash_attn_func, flash_attn_varlen_func

VERSION = "2.8.3+paged.attn"  # a release of FlashAttention-2, for hosts that look at the version
MODULES = ("flash_attn", "flash_attn.flash_attn_interface")
FUNCTIONS = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
log = logging.getLogger(__name__)
_replaced: dict[str, types.ModuleType] = {}


def install(*, force: bool = False) -> types.ModuleType:
    """Make `import flash_attn` find these functions in this process from now on.

    If another flash_attn is installed, it is hidden, and the log says so.

    The module has flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, __version__ and the submodule
    flash_attn_interface.  Modules that have already imported another flash_attn keep its functions.

    Args:
        force: replace a real flash_attn that has been imported; uninstall() brings it back.

    Returns: the module.
    Raises: RuntimeError where a real flash_attn has been imported, without `force`.
    """
    present = sys.modules.get(MODULES[0])
    if present is not None and is_ours(present):
        return present
    if present is not None:
        said = f"flash_attn {getattr(present, '__version__', '')} of {getattr(present, '__file__', None)}"
        if not force:
            raise RuntimeError(f"{said} has been imported already: install() earlier, or install(force=True)")
        log.warning("paged_attn replaces %s, which has been imported", said)
    elif (spec := importlib.util.find_spec(MODULES[0])) is not None:
        log.warning("paged_attn hides the flash_attn of %s", spec.origin)
    else:
        log.info("paged_attn stands in for flash_attn, which is not installed")
    for name in [name for name in sys.modules if name.split(".")[0] == MODULES[0]]:
        _replaced[name] = sys.modules.pop(name)
    package, interface = (_module(name) for name in MODULES)
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    return package


def uninstall() -> None:
    """Undo install(): `import flash_attn` again finds what it found before.  Without install() nothing happens."""
    present = sys.modules.get(MODULES[0])
    if present is None or not is_ours(present):
        return
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(_replaced)
    _replaced.clear()


def is_ours(module: types.ModuleType) -> bool:
    """Whether this is the module that install() makes."""
    return getattr(module, "flash_attn_varlen_func", None) is flash_attn_varlen_func


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name, "FlashAttention's functions over paged_attn.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == MODULES[0])
    module.__version__ = VERSION  # type: ignore[attr-defined]
    for function in FUNCTIONS:
        setattr(module, function.__name__, function)
    sys.modules[name] = module
    return module
