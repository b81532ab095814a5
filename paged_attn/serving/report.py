"""Report of a demo run: totals as a table for people or as numbers for programs, and a plot of the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from paged_attn.launching.gpus import Ceilings
from paged_attn.serving.demo import ServedStep, Sizes, Tolerance

BLUE, ORANGE, GREEN, GREY = "#3b6fb6", "#e08a2e", "#3a8f5c", "#8a8a8a"


def table(steps: Sequence[ServedStep], sizes: Sizes, tolerance: Tolerance, ceilings: Ceilings | None) -> Table:
    """Table of a run's totals.  ceilings: measured limits of the GPU, with which speeds are compared; None on a CPU."""
    rows = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    mixed = _count(steps, lambda step: step.prefill_tokens > 0 and step.decode_tokens > 0)
    prefills = _count(steps, lambda step: step.decode_tokens == 0)
    decodes = _count(steps, lambda step: step.prefill_tokens == 0)
    rows.add_row(
        "steps", f"{len(steps):,}   ({mixed:,} mixed, {prefills:,} of prefill only, {decodes:,} of decodes only)"
    )
    rows.add_row("requests finished", f"{steps[-1].finished:,}   ({steps[-1].preemptions:,} preemptions)")
    rows.add_row("prefill tokens", f"{sum(step.prefill_tokens for step in steps):,}")
    rows.add_row("decode tokens", f"{sum(step.decode_tokens for step in steps):,}")
    peak = max(step.pages for step in steps)
    rows.add_row("peak pages", f"{peak:,} of {sizes.pages:,}   ({peak / sizes.pages:.0%}; free ones hold NaN)")
    if sizes.checked is None:
        rows.add_row("checked", f"every token of every step, in {_layers(sizes)}")
    else:
        rows.add_row(
            "checked",
            f"in every step, in {_layers(sizes)}, up to {max(2, sizes.checked_in_a_layer or 0)} sequences drawn for it "
            f"(a decode and a prefill among them), up to {sizes.checked_tokens} tokens of each",
        )
    rows.add_row("worst error", _worst(steps, lambda step: step.outcome.max_abs, tolerance.max_abs))
    rows.add_row("worst relative", _worst(steps, lambda step: step.outcome.relative, tolerance.relative))

    total = sum(step.seconds for step in steps)
    attention = sum(step.outcome.attention_seconds for step in steps)
    reference = sum(step.outcome.reference_seconds for step in steps)
    rest = total - attention - reference
    rows.add_row("time", f"{total:.1f} s = attention {attention:.2f} + reference {reference:.2f} + the rest {rest:.2f}")
    if ceilings is None:
        rows.add_row("", "without a GPU: these times say nothing of the speed on one")
    else:
        for name, part in (
            ("decode-only steps", [step for step in steps if step.prefill_tokens == 0]),
            ("steps with prefill", [step for step in steps if step.prefill_tokens > 0]),
            ("all steps", list(steps)),
        ):
            if part:
                rows.add_row(name, _speed(part, ceilings))
        rows.add_row(
            "ceilings",
            f"{ceilings.bytes_per_s / 1e12:.2f} TB/s (torch.sum of 2 GiB), "
            f"{ceilings.flops_per_s / 1e12:.0f} TFLOP/s (bfloat16 product of 8192), measured now",
        )
    return rows


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
        worst_error=_largest([step.outcome.max_abs for step in steps]),
        worst_relative=_largest([step.outcome.relative for step in steps]),
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


def plot(steps: Sequence[ServedStep], sizes: Sizes, title: str, path: Path) -> None:
    """Plot pages in use, tokens of the batch and sequences over the steps, and write the plot to a file."""
    x = range(1, len(steps) + 1)
    figure = Figure(figsize=(10, 8), layout="constrained")
    cache, tokens, sequences = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
    figure.suptitle(title, fontsize=11)

    cache.fill_between(x, [step.pages for step in steps], step="mid", color=BLUE, alpha=0.35, linewidth=0)
    cache.step(x, [step.pages for step in steps], where="mid", color=BLUE, linewidth=1)
    cache.axhline(sizes.pages, color=GREY, linestyle="--", linewidth=1, label=f"the cache: {sizes.pages:,} pages")
    cache.set_ylabel(f"pages in use\n(of {sizes.page_size} tokens)")
    before = [0] + [step.preemptions for step in steps]
    preempted = [i for i in x if before[i] > before[i - 1]]
    if preempted:
        at = [steps[i - 1].pages for i in preempted]
        cache.plot(preempted, at, "v", color=ORANGE, markersize=5, label="a request is preempted")

    decode, prefill = [step.decode_tokens for step in steps], [step.prefill_tokens for step in steps]
    tokens.stackplot(x, decode, prefill, colors=(GREEN, BLUE), labels=("decode", "prefill"), step="mid", linewidth=0)
    tokens.axhline(sizes.budget, color=GREY, linestyle="--", linewidth=1, label=f"the budget: {sizes.budget:,} tokens")
    tokens.set_ylabel("tokens in the step")

    sequences.step(x, [step.running for step in steps], where="mid", color=GREEN, linewidth=1.5, label="running")
    sequences.step(x, [step.waiting for step in steps], where="mid", color=ORANGE, linewidth=1.5, label="waiting")
    sequences.set_ylabel("sequences")
    sequences.set_xlabel("step")
    sequences.yaxis.set_major_locator(MaxNLocator(integer=True))
    sequences.set_xlim(0.5, len(steps) + 0.5)

    for axes in (cache, tokens, sequences):
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.15)  # room for the legend
        axes.legend(loc="upper right", ncols=3, frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _count(steps: Sequence[ServedStep], which: Callable[[ServedStep], bool]) -> int:
    return sum(map(which, steps))


def _layers(sizes: Sizes) -> str:
    return "the one layer" if sizes.layers == 1 else f"each of {sizes.layers} layers"


def _worst(steps: Sequence[ServedStep], error: Callable[[ServedStep], float], tolerance: float) -> str:
    """Text with the largest error and its step.  A NaN counts as the largest error."""
    number, step = max(enumerate(steps, 1), key=lambda s: (error(s[1]) != error(s[1]), error(s[1])))
    worst = error(step)
    verdict = "" if worst <= tolerance else "   [bold red]too large[/]"
    return f"{worst:.2e}   (step {number}; tolerance {tolerance:.0e}){verdict}"


def _speed(steps: Sequence[ServedStep], ceilings: Ceilings) -> str:
    seconds = sum(step.outcome.attention_seconds for step in steps)
    moved = sum(step.work.bytes for step in steps) / seconds
    computed = sum(step.work.flops for step in steps) / seconds
    return (
        f"{moved / 1e12:.2f} TB/s ({moved / ceilings.bytes_per_s:.0%} of the ceiling), "
        f"{computed / 1e12:.1f} TFLOP/s ({computed / ceilings.flops_per_s:.0%})"
    )


def _largest(errors: list[float]) -> float | None:
    """The largest error; None (JSON's null) if any error is NaN."""
    return None if any(error != error for error in errors) else max(errors)
