"""The dialect of plain torch: tensors of any device, every feature, no kernel of ours."""

from __future__ import annotations

from torch import Tensor

from ...arguments import Options, Tensors
from .attention import attend, words
from .cache import layouts_of, write
from .call import Call, Sizes, quiet
from .pages import gather_pages, move_pages
from .rotary_write import write_qkv
from .state import join

__all__ = ["attention", "gather_pages", "merge_states", "move_pages", "ways", "write", "write_qkv"]

TITLE = "plain torch"


def attention(given: Tensors, options: Options, scale: float, cap: float | None, lse: Tensor | None) -> None:
    """Compute paged_attention: write `given.out`, and the log-sum-exps if lse is not None."""
    attend(_call(given, options, scale, cap, lse))


def ways(given: Tensors, options: Options, scale: float, cap: float | None) -> list[str]:
    """How each group of a call's sequences is computed, in words."""
    return words(_call(given, options, scale, cap, None))


def _call(given: Tensors, options: Options, scale: float, cap: float | None, lse: Tensor | None) -> Call:
    keys, _ = layouts_of(given.k_cache, options.kv_layout)
    page_size, kv_heads = given.k_cache.permute(keys.slots).shape[1:3]
    sizes = Sizes(given.q.shape[1], kv_heads, given.q.shape[2], given.out.shape[2], page_size)
    return Call(given, options, sizes, scale, cap, lse)


def merge_states(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor, sinks: Tensor | None) -> None:
    """Compute merge_states: write out and lse."""
    with quiet(outs.device):
        for result, joined in zip((out, lse), join(outs.float(), lses, sinks)):
            result.copy_(joined)
