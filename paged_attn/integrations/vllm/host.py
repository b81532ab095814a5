"""vLLM's interface as this adapter knows it, and checks of the installed vLLM by signatures, not by versions."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch

FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
           "output_block_scale")  # fmt: skip
FORWARD_MQA = ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")
BUILD = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")
NEEDED = ("num_actual_tokens", "max_query_len", "max_seq_len", "query_start_loc", "seq_lens", "block_table_tensor",
          "slot_mapping", "causal")  # fmt: skip
# Optional fields of a batch that are served.  For attention to encoders, vLLM copies encoder_seq_lens into seq_lens.
SERVED = ("mm_req_doc_ranges", "rswa_prefix_lens", "encoder_seq_lens")
# Fields of a batch that are not read.  Lengths of a rank's own keys (dcp_local_...) follow from whole lengths.
IGNORED = ("query_start_loc_cpu", "num_reqs", "logits_indices_padded", "num_logits_indices", "max_logits_per_req",
           "encoder_seq_lens_cpu", "dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "positions", "is_prefilling",
           "dcp_local_seq_lens_cpu_upper_bound", "seq_lens_cpu_upper_bound", "req_idx",
           "replayssm_decode_base_cpu")  # fmt: skip


PAGE = 8  # tokens: page sizes must be multiples of this number, for Hopper's kernels


class Common:
    """Answers to vLLM that all backends of this library share.  Backends inherit this class before vLLM's class."""

    supported_dtypes: ClassVar[list[Any]] = [torch.float16, torch.bfloat16, torch.float32]
    impl: ClassVar[type]
    builder: ClassVar[type]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(PAGE)]


def check(impl: type, builder: type, batch: type) -> tuple[str, ...]:
    """Check vLLM's classes; return the names of a batch's unknown fields, for `refuse`.

    Raises: RuntimeError naming what differs from the known interface.
    """
    _parameters(impl.forward, FORWARD)  # type: ignore[attr-defined]
    _parameters(builder.build, BUILD)  # type: ignore[attr-defined]
    fields = {f.name for f in dataclasses.fields(batch)}
    if missing := [name for name in NEEDED if name not in fields]:
        raise RuntimeError(f"paged_attn does not know {_version()}: its {batch.__name__} has no {', '.join(missing)}")
    unknown = fields.difference(NEEDED, SERVED, IGNORED)
    return tuple(sorted(name for name in unknown if not name.startswith("_")))


def check_latent(impl: type) -> None:
    """Raises RuntimeError if `forward_mqa` of vLLM's class for latent attention has unknown parameters or lacks any."""
    _parameters(impl.forward_mqa, FORWARD_MQA)  # type: ignore[attr-defined]


def implemented(backend: type) -> None:
    """Raises RuntimeError if vLLM has abstract methods that this backend lacks."""
    if missing := sorted(getattr(backend, "__abstractmethods__", ())):
        raise RuntimeError(f"paged_attn does not know {_version()}, whose backends have {', '.join(missing)}")


def refuse(batch: Any, unknown: tuple[str, ...]) -> None:
    """Raises NotImplementedError naming an unknown field that the batch sets.  unknown: result of `check`."""
    for name in unknown:
        value, default = getattr(batch, name), type(batch).__dataclass_fields__[name].default
        if value is not None and value is not default:
            raise NotImplementedError(f"paged_attn does not know {name} of vLLM's batch")


def shard_of(config: Any, spec: Any) -> tuple[int, int, int] | None:
    """(rank, world, stripe) where decode context parallelism divides the keys of a cache among ranks; else None."""
    from vllm.distributed.parallel_state import get_dcp_group

    try:
        group = get_dcp_group()
    except AssertionError:  # vLLM has made no groups
        return None
    if group.world_size == 1 or not getattr(spec, "dcp_sharded", True):  # False: each rank keeps all keys
        return None
    return group.rank_in_group, group.world_size, config.parallel_config.cp_kv_cache_interleave_size


def _parameters(function: Callable[..., Any], known: tuple[str, ...]) -> None:
    given = tuple(inspect.signature(function).parameters)
    if given != known:
        differing = sorted(set(given) ^ set(known)) or given
        raise RuntimeError(
            f"paged_attn does not know {_version()}: {function.__qualname__} differs in {', '.join(differing)}"
        )


def _version() -> str:
    return f"vLLM {getattr(__import__('vllm'), '__version__', '')}"
