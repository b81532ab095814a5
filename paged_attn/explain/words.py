"""Words for a call, and for numbers of bytes, operations and seconds."""

from __future__ import annotations

from collections import Counter

import torch

from ..arguments import ARGUMENTS
from ..records.formats import INT4, is_fp8
from .question import Question

# Arguments that kernels get as modifiers.  The counts leave out keys that COUNTED hide; OF_NO_KEY hide none.
COUNTED = ("causal", "window_size", "chunk", "clip_spans", "shard")
OF_NO_KEY = ("softcap", "alibi_slopes", "alibi_symmetric", "sinks", "score_mod_args")
# Field of Model -> assumption of the counts.  The field of a tensor says that a tensor is given, but not its contents.
ASSUMED = {x.name: f"{x.name} hides no key" for x in ARGUMENTS if x.mods and x.name not in COUNTED + OF_NO_KEY} | {
    "head_windows": "every head has the window of --window",
    "causal_seqs": "--causal or --not-causal holds for every sequence",
    "prefix_lens": "prefix_lens show no key",
    "spans": "spans show no key",
    "query_positions": "positions are places",
    "score_mod": "score_mod hides no key",
}


def queries(count: int) -> str:
    """A number of queries: "1 query", "2 queries"."""
    return f"{count} {'query' if count == 1 else 'queries'}"


def call_of(question: Question) -> str:
    """The batch and the model of a call."""
    model = question.model
    counts = Counter(zip(question.query_lens, question.seq_lens))
    batch = " + ".join(f"{n} x {queries(q)} at {k} keys" for (q, k), n in list(counts.items())[:4])
    batch += f" + {len(counts) - 4} other kinds" if len(counts) > 4 else ""
    cache = "" if model.cache_dtype == model.dtype else f" over {_name(model.cache_dtype)}"
    cache += " with scales by token" if model.slot_scale is not None else ""
    width = "" if model.value_width == model.head_dim else f" and values of {model.value_width}"
    width = f" whose first {model.value_width} are values" if model.latent else width
    sizes = f"{model.heads} heads on {model.kv_heads} of {model.head_dim}{width}, {_name(model.dtype)}{cache}"
    layout = "x-packed" if model.kv_layout == "x" else model.kv_layout
    bounds = f"max_seqlen_q {question.max_seqlen_q}, max_seqlen_k {question.max_seqlen_k}"
    return f"{batch}; {sizes}, pages of {model.page_size} ({layout}); {bounds}"


def shard_of(question: Question) -> str:
    """How many of the batch's keys a rank has."""
    rank, world, stripe = question.shard or (0, 1, 1)
    own = sum(question.key_bounds.own_before(keys) for keys in question.seq_lens)
    return f"rank {rank} of {world} has {own} of {sum(question.seq_lens)} keys, in stripes of {stripe}"


def assumed_of(question: Question) -> str:
    """Assumptions behind the counts of keys, pairs and tiles; "" if lengths and options decide the counts."""
    return "; ".join(text for field, text in ASSUMED.items() if getattr(question.model, field))


def _name(dtype: torch.dtype) -> str:
    if dtype == INT4:
        return "int4"
    return str(dtype).removeprefix("torch.") if not is_fp8(dtype) else str(dtype).removeprefix("torch.float8_")


def bytes_of(count: int) -> str:
    """Bytes with a unit, in powers of 1000."""
    return _scaled(count, ("bytes", "kB", "MB", "GB", "TB"))


def operations_of(count: int) -> str:
    """Operations with a unit, in powers of 1000."""
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(count: float, units: tuple[str, ...]) -> str:
    """Three digits and a unit, in steps of 1000."""
    step = 0
    while count >= 999.5 and step < len(units) - 1:
        count, step = count / 1000, step + 1
    return f"{count:.3g} {units[step]}"


def time_of(seconds: float) -> str:
    """A time in microseconds or milliseconds."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
