"""A run of the demo as numbers, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_attn.launching.gpus import Ceilings
from paged_attn.serving.demo import ServedStep, Sizes, Tolerance


def summary(
    steps: Sequence[ServedStep], sizes: Sizes, tolerance: Tolerance, ceilings: Ceilings | None
) -> dict[str, Any]:
    """Totals, worst errors, seconds and, with ceilings of a GPU, bytes/s and flop/s of attention."""
    attention = sum(step.outcome.attention_seconds for step in steps)
    found: dict[str, Any] = dict(
        steps=len(steps),
        finished=steps[-1].finished,
        preemptions=steps[-1].preemptions,
        prefill_tokens=sum(step.prefill_tokens for step in steps),
        decode_tokens=sum(step.decode_tokens for step in steps),
        pages=sizes.pages,
        peak_pages=max(step.pages for step in steps),
        worst_error=_worst([step.outcome.max_abs for step in steps]),
        worst_relative=_worst([step.outcome.relative for step in steps]),
        tolerance=tolerance.max_abs,
        relative_tolerance=tolerance.relative,
        seconds=sum(step.seconds for step in steps),
        attention_seconds=attention,
        reference_seconds=sum(step.outcome.reference_seconds for step in steps),
    )
    if ceilings is not None:
        moved, computed = (sum(getattr(step.work, x) for step in steps) / attention for x in ("bytes", "flops"))
        found |= dict(bytes_per_s=moved, flops_per_s=computed, ceilings=ceilings._asdict())
    return found


def _worst(errors: list[float]) -> float | None:
    """The largest error; None (JSON's null) if any error is NaN."""
    return None if any(error != error for error in errors) else max(errors)
