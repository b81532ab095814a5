"""Caches whose keys hold their values: the first dims of each key are its value (multi-head latent attention)."""

import torch

from .strides import same_steps

MAX_DIM = 512  # dims of queries, keys and values
MAX_LATENT_DIM = 576  # dims of keys that hold their values


def lies_in(values: object, keys: object) -> bool:
    """Whether values [..., value_dim] are the first dims of keys [..., head_dim], in one memory."""
    return (
        isinstance(values, torch.Tensor)
        and isinstance(keys, torch.Tensor)
        and looks_within(values, keys)
        and values.data_ptr() == keys.data_ptr()
    )


def looks_within(values: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether values would be the first dims of keys, if both had the same address."""
    return (
        values.ndim == keys.ndim == 4
        and 0 < values.shape[3] <= keys.shape[3]
        and keys.numel() > 0
        and values.dtype == keys.dtype
        and same_steps(values, keys, 3)
        and (values.shape[3] == 1 or values.stride(3) == keys.stride(3))
    )
