"""Registration with torch: a name in torch's list, and kernels that replace torch's own while that name is active."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import varlen

NAME = "paged_attn"
FORWARD, INTO = "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace"
ORDER = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
)  # fmt: skip
NEEDED = ("scale", "window_size_left", "window_size_right", "seqused_k", "alibi_slopes", "block_table", "num_splits")


def register() -> str:
    """Add this library to torch's flash attention implementations; return the name that activates it.

    No call changes before `torch.nn.attention.activate_flash_attention_impl(name)` or `activated()`.

    Raises: RuntimeError naming what this torch lacks, or orders differently, compared with torch 2.13.
    """
    import torch.nn.attention as host

    for name in ("register_flash_attention_impl", "activate_flash_attention_impl", "restore_flash_attention_impl",
                 "current_flash_attention_impl", "list_flash_attention_impls"):  # fmt: skip
        if not hasattr(host, name):
            raise _unknown(f"torch.nn.attention has no {name}")
    _check(FORWARD, ORDER)
    _check(INTO, ("out", *ORDER))
    if NAME not in host.list_flash_attention_impls():
        host.register_flash_attention_impl(NAME, register_fn=_activate)
    return NAME


def unregister() -> None:
    """Take the name off torch's list; if this library is active, first activate torch's own kernels."""
    import torch.nn.attention as host

    if host.current_flash_attention_impl() == NAME:
        host.restore_flash_attention_impl()
    listed = getattr(getattr(host, "_registry", None), "_FLASH_ATTENTION_IMPLS", {})  # torch has no function for this
    listed.pop(NAME, None)


@contextlib.contextmanager
def activated() -> Iterator[str]:
    """A scope in which torch's varlen_attn calls this library; at its end torch is as before.

    From 2.15 on, torch tries cuDNN first if cuDNN supports a call, unless an order of kernels is set.  The scope sets
    one: flash attention first, then the other kernels as before.  Order and implementation hold for all threads.
    """
    import torch.nn.attention as host

    name = register()
    before = host.current_flash_attention_impl()
    with _kept_order(), host.sdpa_kernel(_order(), set_priority=True):
        host.activate_flash_attention_impl(name)
        try:
            yield name
        finally:
            if before is None:
                host.restore_flash_attention_impl()
            else:
                host.activate_flash_attention_impl(before)


def _check(name: str, order: tuple[str, ...]) -> None:
    overload = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if overload is None:
        raise _unknown(f"there is no aten::{name}")
    places = [x.name for x in overload._schema.arguments if not x.kwarg_only]
    if tuple(places) != order:
        raise _unknown(f"aten::{name} takes {', '.join(places)}")
    keywords = {x.name for x in overload._schema.arguments if x.kwarg_only}
    for needed in NEEDED:
        if needed not in keywords:
            raise _unknown(f"aten::{name} has no {needed}")


def _unknown(what: str) -> RuntimeError:
    return RuntimeError(
        f"paged_attn needs the varlen_attn of torch 2.13 or later, got torch {torch.__version__}: {what}"
    )


def _order() -> list[Any]:
    """Flash attention, enabled or not, then all other enabled kernels in torch's order."""
    from torch.nn.attention import SDPBackend

    enabled = {
        SDPBackend.FLASH_ATTENTION: True,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
    }
    if hasattr(SDPBackend, "OVERRIDEABLE"):
        enabled[SDPBackend.OVERRIDEABLE] = getattr(torch._C, "_get_overrideable_sdp_enabled", bool)()
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    place = {number: i for i, number in enumerate(order)}
    first = SDPBackend.FLASH_ATTENTION
    return sorted((x for x, on in enabled.items() if on), key=lambda x: (x is not first, place.get(int(x), len(order))))


@contextlib.contextmanager
def _kept_order() -> Iterator[None]:
    """A scope that restores torch's order of kernels at its end; sdpa_kernel alone would put disabled kernels last."""
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    try:
        yield
    finally:
        if order:
            torch._C._set_sdp_priority_order(order)


class _Handle:
    """Keeps this library's kernels registered; torch calls remove() before another implementation takes their place."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        self.library = None


def _activate() -> _Handle:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # replacing torch's kernels is intended
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        for key in ("CPU", "CUDA"):
            library.impl(FORWARD, _forward(_own(FORWARD, key)), key, with_keyset=True)
            library.impl(INTO, _into(_own(INTO, key)), key, with_keyset=True)
    return _Handle(library)


def _own(name: str, key: str) -> Any:
    """torch's own kernel for a dispatch key; None if torch has none, as for a CPU."""
    try:
        return torch.library.get_kernel(getattr(torch.ops.aten, name).default, key)
    except RuntimeError:
        return None


def _forward(own: Any) -> Callable[..., Any]:
    def forward(keyset: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> Any:
        if _is_torchs(query, key, value, args, keywords):
            return _call(own, keyset, query, key, value, *args, **keywords)
        return (*varlen.attend(query, key, value, *args, **keywords), *varlen.rest(query))

    return forward


def _into(own: Any) -> Callable[..., Any]:
    def into(keyset: Any, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> Any:
        if _is_torchs(query, key, value, args, keywords):
            return _call(own, keyset, out, query, key, value, *args, **keywords)
        return varlen.attend(query, key, value, *args, **keywords, out=out)[1]

    return into


def _is_torchs(query: Tensor, key: Tensor, value: Tensor, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether a call stays with torch's own kernel.

    A call stays if it has no cum_seq_q, as in scaled_dot_product_attention.  A call without block_table also stays if
    its query, key or value requires grad.
    """
    if args[0] is None:
        return True
    return keywords.get("block_table") is None and any(x.requires_grad for x in (query, key, value))


def _call(own: Any, keyset: Any, *args: Any, **keywords: Any) -> Any:
    if own is None:
        raise NotImplementedError(
            "paged_attn as torch's flash attention: dense batches and tensors that require grad stay with torch's own "
            "kernel, and this device has none"
        )
    return own.call_boxed(keyset, *args, **keywords)
