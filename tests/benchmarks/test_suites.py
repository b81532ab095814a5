"""What the benchmark measures: suites, inputs without poison, steps of a trace, and the work of a case, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import traces
from benchmarks.inputs import inputs_of, tree
from benchmarks.masked import keys_and_pairs
from benchmarks.peers import OURS, PEERS
from benchmarks.peers.cannot import Cannot
from benchmarks.suites import SUITES, uniform
from benchmarks.work import operations, traffic
from paged_attn import reference
from paged_attn.serving.trace import Request
from tests.support.cases import E4M3, Case

SMALL = Case("small", (3, 1), (20, 33), heads=2, kv_heads=1, head_dim=16, lse=False)

# Work, by hand.


def test_decode_reads_keys_and_values_once() -> None:
    """2 sequences x 100 keys x (K and V) x 8 heads x 128 x 2 bytes, and q and out of 2 x 32 x 128 x 2 bytes each."""
    case = uniform("", 2, 1, 100)
    assert traffic(case) == 2 * 100 * 2 * 8 * 128 * 2 + 2 * 2 * 32 * 128 * 2
    assert operations(case) == 4 * 128 * 32 * 2 * 100


def test_causal_pairs_are_a_triangle_behind_the_context() -> None:
    """3 queries at 10 keys see 8, 9 and 10 of them."""
    case = Case("", (3,), (10,), heads=2, kv_heads=1, head_dim=16)
    assert operations(case) == 4 * 16 * 2 * (8 + 9 + 10)


def test_a_window_bounds_keys_and_pairs() -> None:
    """4 queries at 6 keys with 2 keys to the left see 3 each, of 6 keys 6; at 4 keys 1, 2, 3 and 3."""
    case = Case("", (4, 4), (6, 4), heads=1, kv_heads=1, head_dim=16, window_size=(2, -1))
    assert operations(case) == 4 * 16 * (3 + 3 + 3 + 3 + 1 + 2 + 3 + 3)
    row = 2 * 16 * 4
    assert traffic(case) == (6 + 4) * row + 8 * row


def test_an_fp8_cache_moves_one_byte_an_element() -> None:
    case = uniform("", 1, 1, 100, cache_dtype=E4M3)
    assert traffic(case) == 100 * 2 * 8 * 128 + 2 * 32 * 128 * 2


def test_a_sequence_without_queries_moves_nothing() -> None:
    case = Case("", (0, 1), (50, 7), heads=1, kv_heads=1, head_dim=16)
    assert (traffic(case), operations(case)) == ((7 + 1) * 2 * 16 * 4, 4 * 16 * 7)


def test_work_of_masks_is_counted_by_hand() -> None:
    """3 queries behind 5 keys: chunks of 4, a prefix of 2 behind a window of one, both directions, an image of all."""
    small = Case("", (3,), (8,), heads=1, kv_heads=1, head_dim=16)
    for changes, keys, pairs in (
        (dict(chunk=4), 4, 2 + 3 + 4),
        (dict(chunk=6), 8, 6 + 1 + 2),
        (dict(prefix=2, window_size=(0, -1)), 2 + 3, 3 * 3),
        (dict(prefix=7), 8, 7 + 7 + 8),
        (dict(causal_by_seq=True, causal=False), 8, 3 * 8),
        (dict(spans=1), 8, 8 + 8 + 8),
        (dict(spans=1, window_size=(1, -1)), 4, 4 + 3 + 3),
        (dict(spans=1, window_size=(1, 1), clip_spans=True), 4, 3 + 3 + 2),
        (dict(head_windows=((1, -1),)), 4, 2 + 2 + 2),
    ):
        case = replace(small, **changes)
        assert keys_and_pairs(case) == (keys, pairs), changes
        assert operations(case) == 4 * 16 * pairs
        assert traffic(case) == keys * 2 * 16 * 4 + 2 * 3 * 16 * 4
    streaming = replace(small, heads=4, kv_heads=2, head_windows=((-1, -1), (3, -1), (0, -1), (1, -1)))
    assert keys_and_pairs(streaming) == ((8 + 4) // 2, (6 + 7 + 8 + 4 * 3 + 3 + 2 * 3) // 4), "means of heads"


def test_masks_of_cases_are_what_their_inputs_show() -> None:
    """Every case of the suite, small: pairs are counted in what the reference lets queries see."""
    for case in SUITES["masks"]:
        lengths = {
            name: tuple(
                [max(1, n // 128) if max(case.seq_lens) > 512 else max(1, n // 16) for n in getattr(case, name)]
            )
            for name in ("query_lens", "seq_lens")
        }
        lengths = {name: values[-3:] for name, values in lengths.items()}
        sizes = dict(chunk=case.chunk and case.chunk // 128, prefix=case.prefix and 1 + case.prefix // 128)
        sizes |= dict(window_size=tuple(n // 128 if n > 0 else n for n in case.window_size), lse=True)
        small = replace(case, **lengths, **sizes, heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)
        if case.head_windows:
            small = replace(small, head_windows=((-1, -1), (7, -1)))
        inputs = inputs_of(small, "cpu")
        _, lse = reference.paged_attention(**inputs | {"softmax_scale": 0.0, "out": None})
        assert round(float(lse.exp().sum()) / 2) == keys_and_pairs(small)[1], case.name
        if case.name.endswith(("8192", "images", "128", "300", "causal", "1024")):
            assert PEERS[OURS](small, inputs)().shape == inputs["out"].shape


# Suites.


def test_suites_are_those_of_the_readme_and_names_are_unique() -> None:
    names = "decode, features, prefill, mixed, ragged, spec, single, fp8, formats, window, models, layouts, invariant, "
    names += "wide, mla, masks, layers"
    assert ", ".join(SUITES) == names
    for suite, cases in SUITES.items():
        assert len({case.name for case in cases}) == len(cases), suite
        for case in cases:
            assert all(q <= k for q, k in zip(case.query_lens, case.seq_lens, strict=True)), case.name


def test_wide_and_latent_cases_run_when_they_are_small() -> None:
    """The cases run with few heads and few tokens; results are as wide as values."""
    for case in (*SUITES["wide"], *SUITES["mla"]):
        lengths = {tuple(zip(case.query_lens, case.seq_lens, strict=True))[i] for i in (0, -1)}
        query_lens, seq_lens = zip(*((min(q, 3), min(k, 40)) for q, k in lengths))
        small = replace(
            case, query_lens=query_lens, seq_lens=seq_lens, decode_form=False, heads=case.heads // case.kv_heads,
            kv_heads=1, dtype=torch.float16,
        )  # fmt: skip
        inputs = inputs_of(small, "cpu")
        out = PEERS[OURS](small, inputs)()
        assert out.shape == (sum(query_lens), small.heads, case.value_width), case.name
        assert out.isfinite().all(), case.name


def test_a_latent_key_is_read_once() -> None:
    """100 keys of 576 dims; products of 576 and of 512."""
    case = uniform("", 1, 1, 100, heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True)
    assert traffic(case) == 100 * 576 * 2 + 16 * (576 + 512) * 2
    assert operations(case) == 2 * (576 + 512) * 16 * 100


def test_speculation_goes_from_1_to_64_queries_and_has_a_tree_of_32() -> None:
    lengths = {length for case in SUITES["spec"] for length in case.query_lens}
    assert {1, 2, 4, 8, 16, 32, 64} <= lengths
    assert any(case.qq_bias == 32 and set(case.query_lens) == {32} for case in SUITES["spec"])


def test_every_fp8_case_stands_beside_its_twin() -> None:
    names = {case.name for case in SUITES["fp8"]}
    for case in SUITES["fp8"]:
        if case.cache_dtype is not None:
            assert case.name.split(", e4m3")[0] in names


def test_batch_invariant_cases_are_held_against_the_default_mode() -> None:
    default = PEERS["default mode"]
    for case in (case for cases in SUITES.values() for case in cases):
        assert case.batch_invariant == (case in SUITES["invariant"])
    with pytest.raises(Cannot, match="default mode itself"):
        default(SMALL, {})
    case = replace(SMALL, batch_invariant=True)
    inputs = inputs_of(case, "cpu")
    assert default(case, inputs)().shape == inputs["out"].shape


def test_cases_that_ask_for_log_sum_exps_get_them() -> None:
    asked = {case.name for cases in SUITES.values() for case in cases if case.lse}
    assert asked == {case.name for cases in SUITES.values() for case in cases if "lse" in case.name.split(", ")}
    assert "prefill b4 x 4096, lse" in asked
    small = replace(SMALL, lse=True)
    inputs = inputs_of(small, "cpu")
    assert inputs["return_lse"]
    assert PEERS[OURS](small, inputs)().shape == inputs["out"].shape


def test_a_tree_sees_itself_and_its_ancestors() -> None:
    """Node 5 descends from 2, and 2 from 0."""
    seen = tree(7) == 0
    assert seen[5].nonzero().flatten().tolist() == [0, 2, 5]
    assert seen[0].nonzero().flatten().tolist() == [0]
    assert not seen.triu(1).any()


def test_inputs_hold_no_poison() -> None:
    for case in (SMALL, Case("fp8", (1,), (20,), cache_dtype=E4M3), Case("x", (1,), (20,), layout="x")):
        inputs = inputs_of(case, "cpu")
        assert all(inputs[name].float().isfinite().all() for name in ("k_cache", "v_cache")), case.name
        assert 0 <= inputs["page_table"].min() <= inputs["page_table"].max() < len(inputs["k_cache"])


# The trace.


def requests(prompt: int, output: int, count: int) -> list[Request]:
    return [Request(0.0, prompt, output)] * count


def test_a_cut_is_the_schedule_of_chunks_behind_decodes() -> None:
    """Prompts of 300 with 3 tokens of output under a budget of 256: 256 + (44, 212) + (1, 88, 167) ..."""
    cut = traces.cut(requests(300, 3, 4), budget=256, steps=3, samples=3)
    lengths = [list(zip(case.query_lens, case.seq_lens, strict=True)) for case in cut.cases]
    assert lengths == [[(256, 256)], [(44, 300), (212, 212)], [(1, 301), (88, 300), (167, 167)]]
    assert (cut.suite, cut.steps, cut.dropped) == ("trace-256", 3, 0)


def test_samples_are_spread_over_a_run() -> None:
    cut = traces.cut(requests(50, 400, 1000), budget=256, steps=120, samples=4)
    assert [int(case.name.split()[1].rstrip(":")) for case in cut.cases] == [15, 45, 75, 105]
    assert all(sum(case.query_lens) <= 256 for case in cut.cases)


def test_a_trace_may_end_before_the_steps_do() -> None:
    cut = traces.cut(requests(10, 3, 2), budget=256, steps=100, samples=24)
    assert cut.steps == len(cut.cases) == 3


def test_requests_that_no_cache_holds_are_dropped_and_counted() -> None:
    cut = traces.cut([*requests(traces.CACHE_TOKENS, 2, 3), *requests(8, 2, 1)], budget=256, steps=9, samples=2)
    assert (cut.dropped, cut.steps) == (3, 2)


def test_both_budgets_are_cut_from_the_synthetic_trace() -> None:
    small, large = traces.cuts(None, steps=60, samples=3)
    assert [small.budget, large.budget] == [256, 2048]
    assert max(sum(case.query_lens) for case in large.cases) > 256
    assert all((case.heads, case.kv_heads, case.head_dim, case.page_size) == (32, 8, 128, 16) for case in large.cases)
