"""The attention backends as vLLM sees them: supported features, layouts of caches, and the classes of a backend."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from vllm import envs
from vllm.v1.attention.backend import AttentionBackend, AttentionType

from . import host
from .cache_formats import BY_TOKEN, row_of
from .impl import SERVED, Impl
from .metadata import Builder

MOST_DIMS = 512


class Backend(host.Common, AttentionBackend):
    """The backend CUSTOM: attention on a GPU in decoders, in encoders and from decoders to encoders."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    impl: ClassVar[type] = Impl
    builder: ClassVar[type] = Builder
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", *BY_TOKEN,
    ]  # fmt: skip

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= MOST_DIMS

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in SERVED

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    # ---- layouts of caches, for vLLM up to about 0.31 -----------------------------------------------

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, row_of(cache_dtype_str, head_size, head_size))

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "HND":
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        """HND, in which the tokens of one head are contiguous in a page.  None: the user has chosen a layout."""
        return None if envs.VLLM_KV_CACHE_LAYOUT is not None else "HND"

    # ---- layouts of caches, for later vLLM ----------------------------------------------------------

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec; with scales by token, a slot also has bytes for a scale after each key and value."""
        kind = spec.kv_quant_mode.name.lower()
        if kind not in BY_TOKEN or spec.state_content_bytes is not None:
            return spec
        return dataclasses.replace(spec, state_content_bytes=row_of(kind, spec.head_size, spec.head_size_v))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        """All layouts, best first: contiguous pages before others, then contiguous tokens of a head before others."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return tuple(sorted(KVCacheLayout, key=lambda x: ({*x.value[:2]} != {0, 1}, x.value[-2:] != (3, 4))))


class CPUBackend(Backend):
    """The backend on a CPU, in place of vLLM's own.  Calls run in plain torch, unless the interpreter is asked for."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


class DiffKVImpl(Impl):
    """Attention of a decoder layer whose values have another width than keys; DiffKVBackend has been told the width."""

    def _dims_of_values(self) -> int:
        return DiffKVBackend.head_size_v


class DiffKVBackend(Backend):
    """Values of another width than keys, in place of vLLM's TRITON_ATTN_DIFFKV, which models ask for by name."""

    impl: ClassVar[type] = DiffKVImpl
    head_size_v: ClassVar[int] = 128

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        DiffKVBackend.head_size_v = head_size_v

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN_DIFFKV"

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, row_of(cache_dtype_str, head_size, DiffKVBackend.head_size_v))


host.implemented(Backend)
host.implemented(DiffKVBackend)
