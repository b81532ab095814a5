"""A user's function of scores: against the reference, told only of keys that are there, kept apart from others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import paged_attn
from paged_attn.kernels.common.score_mod import compiled
from tests.support.cases import E4M3, Case, build, run
from tests.support.score_mods import MODS, alibi, relative, slopes, softcap, torch_alibi, torch_softcap
from tests.support.torch_ways import IN_TORCH

# decodes, chunks behind contexts, an empty sequence, queries that stand before the first key
LENGTHS = dict(query_lens=(1, 20, 5, 0, 7, 3), seq_lens=(70, 60, 5, 9, 90, 1), heads=4, kv_heads=2)
CALLS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "all that is built in": dict(
        softcap=5.0, alibi=True, qq_bias=8, tree=True, sinks=True, window_size=(30, -1), padding=2
    ),
    "not causal": dict(causal=False),
    "a window to both sides": dict(causal=False, window_size=(9, 4)),
    "keys outside the cache": dict(new=True, page_size=12),
    "x-packed, e4m3": dict(layout="x", dtype=torch.bfloat16, cache_dtype=E4M3, scales="per_head"),
    "trees": dict(positions="tree", qq_bias=32, tree=True),
    "decodes": dict(query_lens=(1, 1, 1), seq_lens=(33, 0, 90), decode_form=True, check=True),
    "invariant": dict(batch_invariant=True),
}


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("name", CALLS)
def test_scores_are_what_the_function_makes_of_them(name: str, mod: str, device: str) -> None:
    case = Case(name, **{**LENGTHS, **CALLS[name], "score_mod": mod})
    run(case, device)
    run(case, device)  # as it was kept


@pytest.mark.parametrize("mod", ["relative", "chunks"])
def test_pieces_of_keys_know_where_they_are(mod: str, cut: Any, device: str) -> None:
    cut(5)
    run(Case("cut", **LENGTHS, score_mod=mod), device)


def test_alibi_and_softcap_written_with_it_are_the_built_in_ones(device: str) -> None:
    inputs = build(Case("plain", **LENGTHS), device)
    for built_in, mod, args, in_torch in (
        ({"alibi_slopes": slopes(4, device)}, alibi, (slopes(4, device),), torch_alibi),
        ({"softcap": 3.0}, softcap, (3.0,), torch_softcap),
    ):
        want, _ = paged_attn.reference.paged_attention(**{**inputs, **built_in, "out": None})
        same, _ = paged_attn.reference.paged_attention(
            **{**inputs, "out": None, "score_mod": in_torch, "score_mod_args": args}
        )
        torch.testing.assert_close(same, want)
        out, _ = paged_attn.paged_attention(**{**inputs, "out": None, "score_mod": mod, "score_mod_args": args})
        live = sum(LENGTHS["query_lens"])  # type: ignore[call-overload]
        torch.testing.assert_close(out[:live].double(), want[:live], atol=2e-5, rtol=2e-5)


def test_the_reference_gives_what_a_hand_computes() -> None:
    one = torch.ones(1, 1, 1)
    k, v = torch.zeros(1, 2, 1, 1), torch.tensor([1.0, 5.0]).view(1, 2, 1, 1)
    out = paged_attn.reference.paged_attention(
        one, k, v, torch.tensor([[0]]), torch.tensor([2]), score_mod=lambda s, i, j, h, x: s + x * j,
        score_mod_args=(torch.tensor(3.0).log(),),
    )  # fmt: skip
    assert out.item() == pytest.approx((1 * 1 + 3 * 5) / 4)  # type: ignore[union-attr]


@triton.jit
def spy(score, query_pos, key_pos, head, seen):
    """Writes the least and the largest position and head that it is asked about."""
    nothing = query_pos * 0 + key_pos * 0
    tl.atomic_min(seen + nothing, query_pos + nothing)
    tl.atomic_max(seen + nothing + 1, query_pos + nothing)
    tl.atomic_min(seen + nothing + 2, key_pos + nothing)
    tl.atomic_max(seen + nothing + 3, key_pos + nothing)
    tl.atomic_min(seen + nothing + 4, head + nothing)
    tl.atomic_max(seen + nothing + 5, head + nothing)
    return score


@pytest.mark.parametrize("name", ["mixed", "not causal", "keys outside the cache", "trees", "invariant"])
def test_it_is_asked_of_positions_in_the_sequence_only(name: str, device: str) -> None:
    fields = {**LENGTHS, **CALLS[name], "query_lens": (5, 20), "seq_lens": (3, 50)}
    for i in range(2):  # each sequence alone: its own bounds
        one = {**fields, "query_lens": fields["query_lens"][i : i + 1], "seq_lens": fields["seq_lens"][i : i + 1]}
        seen = torch.tensor([999, -999] * 3, dtype=torch.int32, device=device)
        run(Case(name, **one), device, score_mod=None)
        paged_attn.paged_attention(**build(Case(name, **one), device), score_mod=spy, score_mod_args=(seen,))
        least_query, most_query, least_key, most_key, least_head, most_head = seen.tolist()
        last = one["seq_lens"][0] - 1
        assert 0 <= least_query <= most_query <= last
        assert least_key == 0
        assert most_key == last or (IN_TORCH and name == "trees" and most_key < last)  # no tile is asked beyond depths
        assert (least_head, most_head) == (0, 3)


def test_calls_of_other_functions_numbers_and_tensors_are_kept_apart(device: str) -> None:
    inputs = build(Case("plain", **LENGTHS, own_out=True, lse=False), device)
    table, size = torch.randn(4, 37, device=device), 37
    calls = [
        ("alibi", alibi, (slopes(4, device),)),
        ("alibi", alibi, (slopes(4, device) * 3,)),
        ("softcap", softcap, (3.0,)),
        ("softcap", softcap, (1.5,)),
        ("relative", relative, (table, size)),
        ("relative", relative, (table[:, :20].contiguous(), 20)),
        ("relative", relative, (table.to(torch.bfloat16), size)),
        ("", None, ()),
    ]
    for _ in range(3):
        for name, mod, args in calls:
            got = paged_attn.paged_attention(**inputs, score_mod=mod, score_mod_args=args)
            in_torch = MODS[name].torch if name else None
            want = paged_attn.reference.paged_attention(**inputs, score_mod=in_torch, score_mod_args=args)
            torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)  # type: ignore[union-attr]


def test_a_kernel_is_found_on_disk_by_the_text_of_the_function() -> None:
    def one(factor: float) -> Any:
        @triton.jit
        def mod(score, query_pos, key_pos, head):
            return score * factor

        return compiled(mod)

    def other() -> Any:
        @triton.jit
        def mod(score, query_pos, key_pos, head):
            return score * 3.0

        return compiled(mod)

    assert repr(one(2.0)) == repr(one(2.0))
    assert repr(one(2.0)) != repr(other())
    assert repr(compiled(alibi)) != repr(compiled(softcap))


@triton.jit
def plain(score, query_pos, key_pos, head):
    return score


TENSOR = torch.zeros(4)
WRONG = TENSOR.to(torch.cfloat)
GRADIENT = torch.zeros(4, requires_grad=True)
TAKES = "score_mod must take (score, query_pos, key_pos, head) and score_mod_args, "
NUMBER = "score_mod_args[0] must be a tensor, a finite float or an int, got "
POINTERS = "float16 | bfloat16 | float32 | float64 | bool | uint8 | int8 | int16 | int32 | int64"
OF_KERNELS = [(torch_alibi, (), TypeError, "score_mod must be a function under @triton.jit, got function")]
# (function, arguments, error, text)
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    *(() if IN_TORCH else OF_KERNELS),
    (None, (TENSOR,), ValueError, "score_mod_args must be () without a score_mod"),
    ("alibi", (), TypeError, f"score_mod must be a function {'in torch or ' * IN_TORCH}under @triton.jit, got str"),
    (alibi, TENSOR, TypeError, "score_mod_args must be a tuple of tensors, floats and ints, got Tensor"),
    (alibi, (), ValueError, f"{TAKES}4 arguments, got one that takes score, query_pos, key_pos, head, slopes"),
    (plain, (1,), ValueError, f"{TAKES}5 arguments, got one that takes score, query_pos, key_pos, head"),
    (alibi, (None,), TypeError, f"{NUMBER}None"),
    (alibi, (True,), TypeError, f"{NUMBER}bool"),
    (alibi, (float("inf"),), ValueError, f"{NUMBER}inf"),
    (alibi, (2**31,), ValueError, "score_mod_args[0] must be an int >= -2147483647 and < 2^31, got 2147483648"),
    (
        alibi,
        (WRONG,),
        TypeError,
        f"score_mod_args[0] must be {POINTERS}, got complex64: score_mod_args[0].to(torch.float16)",
    ),
    (alibi, (TENSOR[::2],), ValueError, "score_mod_args[0] must be contiguous, got [2] strides [2]"),
    (alibi, (TENSOR.to("meta"),), ValueError, "score_mod_args[0] must be on cpu like q, got meta"),
    (
        alibi,
        (GRADIENT,),
        ValueError,
        "score_mod_args[0] requires grad, but paged attention has no backward pass: call it under torch.no_grad()",
    ),
]


@pytest.mark.parametrize(("function", "args", "error", "text"), REFUSED)
def test_what_it_cannot_be_is_refused_by_name(function: Any, args: Any, error: type[Exception], text: str) -> None:
    inputs = build(Case("plain", query_lens=(1,), seq_lens=(9,)), "cpu")
    before = inputs["out"].clone()
    with pytest.raises(error) as raised:
        paged_attn.paged_attention(**inputs, score_mod=function, score_mod_args=args)
    assert str(raised.value) == text
    torch.testing.assert_close(inputs["out"], before, equal_nan=True)


def test_out_shares_no_memory_with_what_it_reads() -> None:
    inputs = build(Case("plain", query_lens=(1,), seq_lens=(9,)), "cpu")
    inside = inputs["out"].flatten()[:4]
    with pytest.raises(ValueError, match=r"out must share no memory with score_mod_args\[0\]"):
        paged_attn.paged_attention(**inputs, score_mod=alibi, score_mod_args=(inside,))


class Layer(torch.nn.Module):
    """A call with a function, between operations that a graph holds."""

    def forward(self, inputs: dict[str, Any]) -> Any:
        q = 2 * inputs["q"]
        return 2 * paged_attn.paged_attention(**{**inputs, "q": q}, score_mod=alibi, score_mod_args=(TENSOR,))


@pytest.mark.usefixtures("nothing_compiled")
def test_a_whole_graph_refuses_it_by_name_and_else_the_call_is_made_between_graphs() -> None:
    inputs = build(Case("plain", query_lens=(1,), seq_lens=(9,), lse=False), "cpu")
    refused = r"score_mod must be None inside torch\.compile"
    with pytest.raises(Exception, match=refused):
        torch.compile(Layer(), fullgraph=True, backend="eager")(inputs)
    with pytest.raises(ValueError, match=refused):
        torch.export.export(Layer(), (inputs,))
    assert torch.compile(Layer(), backend="eager")(inputs).equal(Layer()(inputs))
