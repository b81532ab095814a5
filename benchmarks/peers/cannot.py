"""Refusal of a case by a peer, and the features of a case."""

from __future__ import annotations

from tests.support.cases import Case

QUERIES = "32- or 8-bit queries"
FEATURES = (
    QUERIES,
    "window",
    "softcap",
    "alibi",
    "sinks",
    "tree",
    "new",
    "fp8",
    "scales by token",
    "x-packed",
    "log-sum-exps",
    "score_mod",
    "gate",
    "scales of tokens",
    "wide heads",
    "values of another width",
    "latent",
    "chunk",
    "causal by sequence",
    "prefix",
    "spans",
    "trees by sequence",
)


class Cannot(Exception):
    """The peer lacks a feature, which the message names."""


def features(case: Case) -> set[str]:
    """Return what a case asks for beyond plain causal attention over an NHD or HND cache."""
    asked = {
        QUERIES: case.dtype.itemsize != 2,
        "window": case.window_size[0] >= 0,
        "softcap": case.softcap > 0,
        "alibi": case.alibi,
        "sinks": case.sinks,
        "tree": case.qq_bias > 0,
        "new": case.new,
        "fp8": case.dtype_of_cache != case.dtype,
        "scales by token": case.dtype_of_cache != case.dtype and case.scales.startswith("per_token"),
        "x-packed": case.layout == "x",
        "log-sum-exps": case.lse,
        "score_mod": bool(case.score_mod),
        "gate": case.gate,
        "scales of tokens": case.token_scales,
        "wide heads": case.head_dim > 256,
        "values of another width": case.value_width != case.head_dim,
        "latent": case.latent,
        "chunk": case.chunk is not None,
        "causal by sequence": case.causal_by_seq,
        "prefix": case.prefix > 0,
        "spans": case.spans > 0,
        "trees by sequence": case.qq_mask > 0 or case.bias_of_seqs,
    }
    return {name for name in FEATURES if asked[name]}


def allow(case: Case, *known: str) -> None:
    """Raise `Cannot` if a case asks for more than the known features."""
    missing = [name for name in FEATURES if name in features(case) - set(known)]
    if missing:
        raise Cannot(f"no {', '.join(missing)}")
