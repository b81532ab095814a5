"""Questions of tests to `explain`: by its function, by its command, and as a call would put them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

import paged_attn
from paged_attn.arguments import bound
from paged_attn.cli import main
from paged_attn.explain import explain, question
from paged_attn.explain.question import Question, question_of
from paged_attn.preparation.model import call_of

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = dict(
    batch=None, queries="1", keys="4096", heads=32, kv_heads=8, head_dim=128, value_dim=None, latent=False,
    page_size=16,
    dtype=torch.bfloat16, kv_dtype=torch.bfloat16, layout="NHD", window=(-1, -1), causal=True, softcap=0.0, alibi=False,
    sinks=False, gate=False, qq_bias=0, query_positions=False, new=False, lse=False, batch_invariant=False,
    shard=None, max_queries=None, max_keys=None, device="sm90:132", score_mod=None, score_mod_args="",
)  # fmt: skip


def ask(**changes: Any) -> Question:
    return question_of(**{**OPTIONS, **changes})


def told(**changes: Any) -> dict[str, str]:
    lines = list(explain.explain(ask(**changes)))
    assert len({name for name, _ in lines if not name.startswith(" ")}) == sum(not x.startswith(" ") for x, _ in lines)
    return dict(lines)


def printed(words: str) -> str:
    result = CliRunner().invoke(main, ["explain", *words.split()])
    assert result.exit_code == 0, result.output
    return result.output


def call_to(asked: Question) -> tuple[Any, Any, Any]:
    """The tensors of such a call, never filled, its options and axes."""
    problem = asked.problem
    lengths = question.Lengths(asked.ragged, problem.seqs, problem.tokens, problem.max_seqlen_q, problem.max_seqlen_k)
    given, options = bound(call_of(asked.model, lengths))
    return given, options, paged_attn.checks.argument_rows.check_attention(given, options)
