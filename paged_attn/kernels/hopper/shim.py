"""Gluon's names in one place, because Triton versions rename them; the import fails if a name is missing.

Kernels import names that differ between versions from here, and use `gl` and Gluon's modules, also from here, for all
other names.
"""

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as _wait_of_warpgroup
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...launching import triton_version


def first_of(module: Any, *names: str) -> Any:
    """Return the attribute with the first of `names` that a module has."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"{module.__name__} has no {' or '.join(names)}")


# Whether Triton copies a product's register operands while an earlier product runs.  Only 3.8 does, for ptxas 12.9.
# Copies of operands that were unpacked from words of two numbers look overwritten to ptxas, so products run one by one.
COPIES_OPERANDS = gl.constexpr(triton_version.number(triton.__version__) == (3, 8))


@core.builtin
def _wait_alone(num_outstanding=0, deps=None, _semantic=None):
    """Wait for products, without a barrier between the warpgroups of a partition.

    From Triton 3.9 on, all warps of a partition meet after any other wait.  If several warpgroups run one copy of the
    code, these barriers take a fifth of the time of long prefills.
    """
    results = _wait_of_warpgroup(num_outstanding, deps=deps, _semantic=_semantic)
    one = results[0] if isinstance(results, tuple) else results
    one.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return results


warpgroup_mma_wait = _wait_of_warpgroup if triton_version.number(triton.__version__) < (3, 9) else _wait_alone


@triton.constexpr_function
def replaced(record: Any, **values: Any) -> Any:
    """Return a compile-time record with other values in some fields; for use in kernels.

    In kernels, Triton 3.8 turns records into its own tuples, which have fields but no Python methods.
    """
    if hasattr(record, "_replace"):
        return record._replace(**values)
    fields = record.type.fields
    parts = [core.constexpr(values.get(name, x)) for name, x in zip(fields, record.values)]
    return core.tuple(parts, core.tuple_type([x.type for x in parts], fields))


# New names come first, because an old name may stay for a while and raise an error when called.
thread_barrier = first_of(gl, "barrier", "thread_barrier")  # renamed in Triton 3.7
load_box = first_of(tma, "async_load", "async_copy_global_to_shared")  # renamed in Triton 3.8
reinterpret = first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")  # renamed in Triton 3.9

__all__ = [
    "COPIES_OPERANDS",
    "GluonASTSource",
    "TensorDescriptor",
    "async_copy",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "load_box",
    "mbarrier",
    "reinterpret",
    "replaced",
    "thread_barrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
