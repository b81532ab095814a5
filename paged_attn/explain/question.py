"""A call with known lengths: bytes, operations, and kernels with their grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..checks.axes import MAX_DIM
from ..checks.kernel_tensors import CACHE_FOR, names
from ..launching import gpus
from ..launching.gpus import CEILINGS, Ceilings
from ..launching.platform import HAS_TRITON, Device, device_of
from ..planning.dialects import dialect
from ..preparation.model import Lengths, Model, new_dtype, problem_of
from ..preparation.score_mod_ref import named_by
from ..records.formats import INT4, is_fp8
from ..records.key_bounds import KeyBounds, key_bounds_of, page_ids, visible_keys, visible_pairs

if TYPE_CHECKING:  # these modules need Triton
    from ..launching.scratch import Need
    from ..records.copies import Copies
    from ..records.plan import Launch
    from ..records.problem import Problem
    from .host_schedule import KnownBatch


TF32 = 1 / 6  # share of the 16-bit rate: a float32 product is three TF32 products, each at half of the 16-bit rate
FP8 = 2  # multiple of the 16-bit rate, if all operands of both products are fp8


class Question(NamedTuple):
    """A call: its model, which does not change from step to step, and the lengths of a step."""

    model: Model
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    ragged: bool  # cu_seqlens_q given
    max_seqlen_q: int  # upper bound of query_lens; by default the largest of them
    max_seqlen_k: int  # upper bound of seq_lens; by default the largest of them
    device: Device
    gpu: str | None  # key in CEILINGS; None: no ceilings are known

    @property
    def key_bounds(self) -> KeyBounds:
        return key_bounds_of(self.model, self.model.query_positions)

    @property
    def batch(self) -> KnownBatch:
        """Lengths and bounds on keys, by which launches are cut."""
        from .host_schedule import KnownBatch

        return KnownBatch(self.query_lens, self.seq_lens, self.key_bounds)

    @property
    def shard(self) -> tuple[int, int, int] | None:
        return self.key_bounds.shard

    @property
    def problem(self) -> Problem:
        """The planner's Problem for the call."""
        tokens = sum(self.query_lens)
        lengths = Lengths(self.ragged, len(self.seq_lens), tokens, self.max_seqlen_q, self.max_seqlen_k)
        return problem_of(self.model, lengths, self.device)


def memory(question: Question) -> dict[str, int]:
    """Bytes that must move, by kind, each counted once."""
    model = question.model
    bounds = key_bounds_of(model)
    lengths = list(zip(question.query_lens, question.seq_lens))
    tokens, keys = sum(question.query_lens), sum(visible_keys(q, k, bounds) for q, k in lengths)
    key = model.kv_heads * (model.head_dim + model.value_width * (not model.latent))  # elements of a token
    stored_key = key // 2 if model.cache_dtype == INT4 else key * model.cache_dtype.itemsize
    new = tokens if model.new else 0
    lse = {"log-sum-exps": 4 * tokens * model.heads} if model.return_lse else {}
    stored = (keys - new) * model.kv_heads * (1 if model.latent else 2)
    scales = {"scales": stored * model.slot_scale.itemsize} if model.slot_scale is not None else {}
    gate = {"gate": tokens * model.heads * model.value_width * model.gate.itemsize} if model.gate is not None else {}
    return {
        "keys and values": (keys - new) * stored_key + new * key * new_dtype(model).itemsize,
        "queries": tokens * model.heads * model.head_dim * model.dtype.itemsize,
        "results": tokens * model.heads * model.value_width * model.out_dtype.itemsize,
        "page ids": 4 * sum(page_ids(q, k, model.page_size, bounds) for q, k in lengths),
        "lengths": 4 * (len(lengths) + (len(lengths) + 1 if question.ragged else 0)),
        **scales,
        **lse,
        **gate,
    }


def bytes_exchanged(question: Question) -> int:
    """Bytes of states that a rank sends if each rank joins a part of the heads; the rank receives as many."""
    if question.shard is None:
        return 0
    _, world, _ = question.shard
    states = 4 * sum(question.query_lens) * question.model.heads * (question.model.value_width + 1)
    return states * (world - 1) // world


def bytes_copied(question: Question, copies: Copies) -> int:
    """Bytes of the copies of cached keys and values; only visible keys of sequences that copies serve count."""
    served = [lengths for lengths in zip(question.query_lens, question.seq_lens) if lengths[0] >= copies.shortest]
    question = question._replace(query_lens=[q for q, _ in served], seq_lens=[k for _, k in served])
    new = new_dtype(question.model).itemsize * sum(question.query_lens) if question.model.new else 0
    stored = memory(question)["keys and values"] - new * question.model.kv_heads * (
        question.model.head_dim + question.model.value_width
    )
    dims_of_byte = 2 if question.model.cache_dtype == INT4 else 1
    return stored * dims_of_byte * copies.dtype.itemsize // question.model.cache_dtype.itemsize


def operations(question: Question) -> int:
    """Multiplications and additions of both products for visible (query, key) pairs; query_positions are ignored."""
    model, bounds = question.model, key_bounds_of(question.model)
    lengths = zip(question.query_lens, question.seq_lens)
    pairs = sum(visible_pairs(q, k, bounds) for q, k in lengths)
    return 2 * (model.head_dim + model.value_width) * model.heads * pairs


def need_of(launch: Launch) -> Need:
    """Scratch memory that a launch with cut keys needs."""
    return dialect(launch.dialect).need_of(launch)


def grids(launch: Launch) -> dict[str, tuple[int, ...]]:
    """Grids of a launch's kernels, by name, in order."""
    from ..kernels.shared_steps import merge_grid

    found: dict[str, tuple[int, ...]] = {dialect(launch.dialect).kernel_of(launch): launch.grid}
    if launch.merge is not None:
        found["merge_blocks_kernel"] = merge_grid(launch)
    return found


def seconds(question: Question, moved: int, computed: int) -> tuple[str, Ceilings, float, float] | None:
    """(name of the GPU, its ceilings for this dtype, seconds of memory, seconds of arithmetic); None: not known."""
    if question.gpu is None:
        return None
    from ..planning.planner import plan

    _, ceilings = CEILINGS[question.gpu]
    problem = question.problem
    rate = TF32 if problem.compute == torch.float32 else 1
    if any(dialect(launch.dialect).multiplies_fp8(launch) for launch in plan(problem).launches):
        rate = FP8
    ceilings = ceilings._replace(flops_per_s=rate * ceilings.flops_per_s)
    return f"an {question.gpu.upper()}", ceilings, moved / ceilings.bytes_per_s, computed / ceilings.flops_per_s


# ---- from words ----------------------------------------------------------------------------------


def question_of(
    *,
    batch: int | None,
    queries: str,
    keys: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    layout: str,
    window: tuple[int, int],
    sinks: bool,
    gate: bool,
    score_mod: str | None,
    score_mod_args: str,
    new: bool,
    lse: bool,
    max_queries: int | None,
    max_keys: int | None,
    device: str | None,
    **options: Any,
) -> Question:
    """The call that the options of `paged-attn explain` describe; raises ValueError if no such call is possible.

    With a shard, the call is the one that distributed.paged_attention makes: float32 results, with log-sum-exps.
    options: the other fields of a Model.
    """
    query_lens, seq_lens, shard = lengths(queries, "queries"), lengths(keys, "keys"), options["shard"]
    seqs = batch or max(len(query_lens), len(seq_lens))
    query_lens, seq_lens = (x * seqs if len(x) == 1 else x for x in (query_lens, seq_lens))
    x = 16 // kv_dtype.itemsize
    for wrong, text in (
        (
            not len(query_lens) == len(seq_lens) == seqs,
            f"queries and keys must pair up, got {len(query_lens)} of queries, {len(seq_lens)} of keys, "
            f"and a batch of {seqs}",
        ),
        (
            any(query > key for query, key in zip(query_lens, seq_lens)),
            f"keys must be at least queries, for they count the call's own, got {keys} keys of {queries} queries: "
            "keys in the cache plus queries",
        ),
        (heads % kv_heads > 0, f"heads must be a multiple of kv_heads = {kv_heads}, got {heads}"),
        (
            kv_dtype not in CACHE_FOR[dtype],
            f"kv_dtype must be {names(CACHE_FOR[dtype])}, for dtype is {names((dtype,))}, got {names((kv_dtype,))}",
        ),
        (layout == "x-packed" and head_dim % x > 0, f"x-packed {kv_dtype} wants a head_dim divisible by {x}"),
        (head_dim > MAX_DIM and not options["latent"], f"head_dim must be between 1 and {MAX_DIM}, got {head_dim}"),
        (
            options["latent"] and (layout == "x-packed" or (value_dim or head_dim) > head_dim),
            "values of a latent cache are the first dims of its keys, which are not x-packed",
        ),
        (options["batch_invariant"] and new, "batch_invariant is not to be had with keys outside the cache"),
        (
            shard is not None and (sinks or gate or new or options["batch_invariant"]),
            "a shard is without sinks, gate, new keys and batch_invariant",
        ),
        (shard is not None and shard[0] >= shard[1], f"rank must be less than world, got {shard}"),
    ):
        if wrong:
            raise ValueError(text)
    model = Model(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        cache_dtype=kv_dtype,
        out_dtype=torch.float32 if shard else torch.bfloat16 if is_fp8(dtype) else dtype,
        kv_layout="x" if layout == "x-packed" else layout,
        new=new,
        window_size=window,
        sinks=torch.float32 if sinks else None,
        gate=(torch.bfloat16 if is_fp8(dtype) else dtype) if gate else None,
        return_lse=lse or shard is not None,
        score_mod=named_by(score_mod, score_mod_args),
        value_dim=value_dim,
        **options,
    )
    if (why := model.why_not_int4) is not None:
        raise ValueError(why)
    bounds = max_queries or max(query_lens), max_keys or max(seq_lens)
    return Question(
        model,
        query_lens,
        seq_lens,
        max(query_lens) > 1,
        *bounds,
        device_named(device),
        gpu_named(device),
    )


def lengths(text: str, name: str) -> list[int]:
    """Parse lengths: "1x2048,63x1" gives 64 numbers."""
    found: list[int] = []
    for part in text.split(","):
        count, _, length = part.rpartition("x")
        if not (length.isdecimal() and (count or "1").isdecimal() and int(length) > 0):
            raise ValueError(f"{name} must be lengths like 4096 or 1x2048,63x1, got {text!r}")
        found += [int(length)] * int(count or 1)
    return found


def device_named(text: str | None) -> Device:
    """The device of a name (sm90, sm90:132, h200, cpu); by default this machine's, or an H200 for the interpreter."""
    if text is not None and text.lower() == "cpu":
        return Device("cpu", torch.get_num_threads())
    if text is None:
        own = device_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if own.arch != "interpreter":
            return own
    if not HAS_TRITON:
        raise ValueError("a GPU is planned for by Triton, which is not installed here")
    return Device(*gpus.named(text or "h200"))


def gpu_named(text: str | None) -> str | None:
    """Key of the ceilings for `device_named`; None: unknown.  sm90 with any number of multiprocessors is an H200."""
    if text is None and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return next((gpu for gpu, (of_cuda, _) in CEILINGS.items() if of_cuda == name), None)
    if text is None:
        return None if device_named(None).in_torch else "h200"
    if text.lower().startswith("sm90"):
        return "h200"
    return text.lower() if text.lower() in CEILINGS else None
