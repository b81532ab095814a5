"""Values of another width than keys, in place of the Triton backend that vLLM's models ask for by name."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backend import AttentionType

from . import backend, host, impl


class Impl(impl.Impl):
    """Attention of a decoder layer; the width of values is set on Backend before the layer is made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.head_size_v = Backend.head_size_v


class Backend(backend.Backend):
    """The backend with the name TRITON_ATTN_DIFFKV."""

    impl: ClassVar[type] = Impl
    head_size_v: ClassVar[int] = 128

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        Backend.head_size_v = head_size_v

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
        return (num_blocks, num_kv_heads, block_size, head_size + Backend.head_size_v)


host.implemented(Backend)
