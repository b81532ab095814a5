"""What the planner is told of each benchmark case on a device that need not be there: no tensor is filled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import traces
from benchmarks.suites import SUITES
from paged_attn.arguments import OF_MODELS
from paged_attn.launching.platform import Device
from paged_attn.preparation.model import Lengths, Model, problem_of
from paged_attn.preparation.score_mod_ref import named
from paged_attn.records.problem import Problem
from tests.support.cases import Case
from tests.support.score_mods import MODS

H200 = Device("sm90", 132)
# Options that a case and a model have under one name.
ALIKE = [x.name for x in OF_MODELS if hasattr(Case, x.name)]
# Fields of a case that a problem is made of, or that no plan depends on.
TOLD = {
    *ALIKE, "name", "query_lens", "seq_lens", "heads", "kv_heads", "head_dim", "value_dim", "page_size", "dtype",
    "cache_dtype", "out_dtype", "layout", "latent", "new", "causal_by_seq", "prefix", "spans", "softmax_scale", "alibi",
    "slopes_of_seqs",
    "sinks", "qq_bias", "bias_of_seqs", "qq_mask", "tree", "positions", "score_mod", "gate", "scales", "token_scales",
    "only", "batch_invariant", "decode_form", "bounds", "lse", "seed", "run", "head_windows",
}  # fmt: skip


SCALES = {"per_token": "per_token", "per_token, float16": "per_token_float16"}  # scales of a case and of a model


def problem_of_case(case: Case, device: Device = H200) -> Problem:
    """A case as the planner meets it, with the bounds that the case gives."""
    mod = MODS[case.score_mod] if case.score_mod else None
    absent: dict[str, Any] = {name: Model._field_defaults.get(name) for name in Model._fields}
    told: dict[str, Any] = dict(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        dtype=case.dtype,
        cache_dtype=case.dtype_of_cache,
        out_dtype=case.dtype_of_out,
        kv_layout=case.layout,
        new=case.new,
        **{name: getattr(case, name) for name in ALIKE},
        alibi=case.alibi,
        sinks=case.dtype if case.sinks and case.dtype.itemsize > 1 else torch.float32 if case.sinks else None,
        qq_bias=case.qq_bias,
        qq_mask=case.qq_mask,
        query_positions=bool(case.positions),
        scales=SCALES.get(case.scales, "per_head" if case.scales.startswith("per_") else "number"),
        return_lse=case.lse,
        score_mod=mod and named(mod.triton, mod.args(case.heads, "cpu")),
        value_dim=case.value_dim,
        latent=case.latent,
        causal_seqs=case.causal_by_seq,
        head_windows=bool(case.head_windows),
        prefix_lens=case.prefix > 0,
        spans=case.spans,
        gate=case.dtype if case.gate else None,
        token_scales=case.token_scales,
    )
    for field in dataclasses.fields(case):
        if field.name not in TOLD and getattr(case, field.name) != field.default:
            raise ValueError(f"{case.name}: the planner is not told of {field.name} here")
    model = Model(**absent | told)  # features that no benchmark case has are absent
    if not case.bounds:
        raise ValueError(f"{case.name}: without bounds the page table decides")
    lengths = Lengths(not case.decode_form, len(case.query_lens), case.tokens, max(case.query_lens), max(case.seq_lens))
    options = {} if case.softmax_scale is None else {"softmax_scale": case.softmax_scale}
    return problem_of(model, lengths, device, batch_invariant=case.batch_invariant, only=case.only, **options)


def suites() -> Iterator[tuple[str, Case]]:
    """All cases of all suites, and steps of the synthetic trace."""
    for suite, cases in SUITES.items():
        for case in cases:
            yield suite, case
    for cut in traces.cuts(None, steps=200, samples=12):
        for case in cut.cases:
            yield cut.suite, case
