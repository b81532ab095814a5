"""One call of merge_states: checked and described each time, for it is rare."""

import torch
from torch import Tensor

from ..checks import argument_rows as checks
from ..launching.backend import device_of
from .untraced import untraced
from .ways import way_of


@untraced
def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Do what merge_states says."""
    axes = checks.check_merge(outs, lses)
    device = device_of(outs.device)
    outs, lses = outs.contiguous(), lses.contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    if axes.tokens and axes.heads:
        way_of(device).merged(out, lse, outs, lses)
    return out, lse
