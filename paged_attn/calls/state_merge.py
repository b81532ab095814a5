"""One call of merge_states: checked and described each time, for it is rare."""

import torch
from torch import Tensor

from ..checks import argument_rows as checks
from ..kernels.shared_arguments import merge_states as steps
from ..launching.backend import device_of
from ..launching.launch import Launches
from ..launching.template import arguments_for
from ..records import layout
from .untraced import untraced


@untraced
def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Do what merge_states says."""
    axes = checks.check_merge(outs, lses)
    device_of(outs.device)
    outs, lses = outs.contiguous(), lses.contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    if axes.tokens and axes.heads:
        tensors = (out, lse, outs, lses)
        with arguments_for(tensors) as (result, *others):
            launches = Launches(steps(layout.rows(result), *others), outs.device)
        launches.first(tensors)
    return out, lse
