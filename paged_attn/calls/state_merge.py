"""One call of merge_states, checked each time and not cached, because calls are rare."""

import torch
from torch import Tensor

from ..checks import argument_rows as checks
from ..launching.platform import device_of
from .untraced import untraced
from .ways import way_of


@untraced
def merge(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge states as merge_states specifies."""
    axes = checks.check_merge(outs, lses, sinks)
    device = device_of(outs.device)
    outs, lses = outs.contiguous(), lses.contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    if axes.tokens and axes.heads:
        way_of(device).merged(out, lse, outs, lses, sinks)
    return out, lse
