"""Gluon's names in one place, since Triton versions rename them; importing this fails where one is not found.

Kernels take from here what has had more than one name, under a name of our own, and all else from `gl` and the modules.
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
    """What a module has under the first of these names that it knows."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"{module.__name__} has no {' or '.join(names)}")


# Whether Triton copies operands in registers as it sends a product, behind one that already runs: 3.8 alone, for ptxas
# 12.9.  Of operands that were words of two, that ptxas thinks that others write them, and sends products one by one.
COPIES_OPERANDS = gl.constexpr(triton_version.number(triton.__version__) == (3, 8))


@core.builtin
def _wait_alone(num_outstanding=0, deps=None, _semantic=None):
    """3.9: all warps of a partition meet behind a wait for products, unless it says that it is a warpgroup's own.

    Where several share one code that takes a fifth of long prefills.
    """
    results = _wait_of_warpgroup(num_outstanding, deps=deps, _semantic=_semantic)
    one = results[0] if isinstance(results, tuple) else results
    one.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return results


warpgroup_mma_wait = _wait_of_warpgroup if triton_version.number(triton.__version__) < (3, 9) else _wait_alone


@triton.constexpr_function
def replaced(record: Any, **values: Any) -> Any:
    """A compile-time record with other values in these fields, called by a kernel.

    3.8: records are tuples of Triton's there, which know their fields, and have no methods of Python's.
    """
    if hasattr(record, "_replace"):
        return record._replace(**values)
    fields = record.type.fields
    parts = [core.constexpr(values.get(name, x)) for name, x in zip(fields, record.values)]
    return core.tuple(parts, core.tuple_type([x.type for x in parts], fields))


# New names first: an old one may stay for a while as something that only raises.
thread_barrier = first_of(gl, "barrier", "thread_barrier")  # 3.7
load_box = first_of(tma, "async_load", "async_copy_global_to_shared")  # 3.8
reinterpret = first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")  # 3.9

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
