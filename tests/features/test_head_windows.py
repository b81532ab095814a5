"""Windows by head: what each head sees, in calls, operators and checks, through the portable kernels.

Beside other features they are lines of tests/support/masks.py.  What they cost is counted in
tests/kernels/common/test_head_windows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import paged_attn
from paged_attn import reference
from paged_attn.explain import explain
from paged_attn.planning import planner
from tests.explain.asked import ask
from tests.features.test_masks import means
from tests.support.bad_input import refuses
from tests.support.cases import BAD_PAGE, Case, build, compare, run

Cut = Callable[..., None]
CLOSE = dict(atol=2e-5, rtol=2e-5)  # float32, sums in another order


def test_heads_of_other_windows_are_a_call_over_a_slice_of_heads(device: str) -> None:
    """Two KV heads of a streaming window beside two of none, each with its two heads, into slices of one result."""
    case = Case("by head", (5, 1, 40), (35, 60, 40), heads=8, kv_heads=4, lse=False)
    inputs = build(case, device)
    for first, window in ((0, (9, -1)), (2, (-1, -1))):
        heads, kv_heads = slice(2 * first, 2 * first + 4), slice(first, first + 2)
        own = {"q": inputs["q"][:, heads], "out": inputs["out"][:, heads], "window_size": window}
        own |= {name: inputs[name][:, :, kv_heads] for name in ("k_cache", "v_cache")}
        paged_attn.paged_attention(**inputs | own)
        wanted = reference.paged_attention(**inputs | own | {"out": None})
        torch.testing.assert_close(inputs["out"][:, heads].double(), wanted, **CLOSE)
    assert inputs["out"].isfinite().all()


def test_a_window_by_head_is_a_tuple_for_that_head() -> None:
    """Keys 0 ... 5, three queries, two heads of one KV head."""
    of = lambda *windows: {"window_size": torch.tensor(windows)}  # noqa: E731
    assert means(3, 6, heads=2, **of([-1, -1], [1, -1])) == [[0b1111, 0b1100], [0b11111, 0b11000], [0b111111, 0b110000]]
    assert means(2, 4, heads=2, causal=False, **of([0, 1], [-1, 0])) == [[0b1100, 0b111], [0b1000, 0b1111]]
    assert means(2, 4, heads=2, **of([0, 1], [1, -1])) == [[0b100, 0b110], [0b1000, 0b1100]]
    assert means(2, 6, heads=2, chunk=4, **of([-1, -1], [0, -1])) == [[0b10000, 0b10000], [0b110000, 0b100000]]
    assert means(1, 6, heads=2, prefix_lens=torch.tensor([2]), **of([2, -1], [0, -1])) == [[0b111011, 0b100011]]


def test_windows_by_head_are_calls_over_slices_of_heads(device: str) -> None:
    """Each head with its KV head alone and a window of its own."""
    case = Case("slices", (5, 1, 40), (35, 60, 40), heads=4, kv_heads=2, lse=False, alibi=True)
    windows = ((9, 2), (-1, -1), (0, -1), (30, 0))
    for causal in (True, False):
        inputs = build(case, device) | {"causal": causal}
        given = inputs | {"window_size": torch.tensor(windows, device=device), "out": None}
        out = paged_attn.paged_attention(**given, check=True)
        for head, window in enumerate(windows):
            own = {name: inputs[name][:, :, head // 2 :][:, :, :1] for name in ("k_cache", "v_cache")}
            own |= {"q": inputs["q"][:, head : head + 1], "alibi_slopes": inputs["alibi_slopes"][head : head + 1]}
            wanted = reference.paged_attention(**inputs | own | {"out": None, "window_size": window})
            torch.testing.assert_close(out[:, head : head + 1].double(), wanted, **CLOSE)


def test_windows_alike_of_all_heads_give_the_bits_of_one_window(device: str, cut: Cut) -> None:
    cut(3)
    case = Case("alike", (5, 1, 40), (35, 60, 90), heads=4, kv_heads=2, lse=False, own_out=True)
    inputs = build(case, device)
    for window in ((9, -1), (0, 0), (-1, -1), (50, 7)):
        by_head = torch.tensor([window] * 4, dtype=torch.int32, device=device)
        out = paged_attn.paged_attention(**inputs | {"window_size": window})
        assert torch.equal(paged_attn.paged_attention(**inputs | {"window_size": by_head}), out)


def test_the_same_call_takes_other_windows_by_head(device: str) -> None:
    case = Case("again", (5, 5), (35, 20), lse=False)
    inputs = build(case, device)
    for windows in ([[-1, -1], [3, -1]], [[3, -1], [-1, -1]], [[0, 0], [0, 0]], [[-1, -1]] * 2):
        given = inputs | {"window_size": torch.tensor(windows, device=device)}
        for _ in range(2):
            compare(case, paged_attn.paged_attention(**given), None, given)
    compare(case, paged_attn.paged_attention(**inputs), None, inputs)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_windows_by_head_may_be_slices_of_wider_tensors_and_as_wide_as_can_be(
    integers: torch.dtype, device: str
) -> None:
    windows = ((9, 2**31 - 1), (2**31 - 1, 3), (-1, 0), (2**30, 2**30 + 1))
    case = Case("slices", (5, 9), (35, 9), heads=4, kv_heads=2, causal=False, integers=integers, head_windows=windows)
    run(case, device)
    inputs = build(replace(case, strided=True), device)
    assert inputs["window_size"].stride() == (3, 1)
    compare(replace(case, strided=True), *paged_attn.paged_attention(**inputs, check=True), inputs)


def test_pages_left_of_the_widest_window_may_be_anything(device: str) -> None:
    """Pages of 8, a query at 39: heads that see 10 and 17 keys before it leave pages 0 and 1 out; 22 is in page 2."""
    case = Case("pages", (1, 1), (40, 40), page_size=8, head_windows=((10, -1), (17, -1)))
    inputs = build(case, device)
    assert inputs["page_table"][0, :4].eq(BAD_PAGE).tolist() == [True, True, False, False]
    compare(case, *paged_attn.paged_attention(**inputs, check=True), inputs)
    inputs["page_table"][0, 2] = BAD_PAGE
    text = f"page_table[0, 2] = 2147483647, but the cache has {len(inputs['k_cache'])} pages"
    refuses(paged_attn.paged_attention, inputs | {"check": True}, ValueError, text)


@pytest.mark.parametrize(
    "lengths", [((1, 1, 1), (90, 33, 200)), ((40, 1, 64), (90, 200, 64))], ids=["decodes", "mixed"]
)
@pytest.mark.parametrize("invariant", [False, True])
def test_keys_that_no_head_of_a_kv_head_sees_are_never_read_into_a_result(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], invariant: bool, device: str, cut: Cut
) -> None:
    """Another KV head sees them all, so their pages are there; of this one they are no numbers."""
    windows = ((-1, -1), (5, -1), (9, -1), (20, -1))
    for segments in (1, 3):
        cut(segments)
        case = Case("nan", *lengths, heads=4, kv_heads=2, head_windows=windows, batch_invariant=invariant, lse=False)
        inputs = build(case, device) | {"out": None}
        wanted = paged_attn.paged_attention(**inputs)
        assert wanted.isfinite().all()
        for seq, context in enumerate(case.context_lens):
            for pos in range(max(0, context - 20)):
                page, slot = int(inputs["page_table"][seq, pos // 16]), pos % 16
                for name in ("k_cache", "v_cache"):
                    inputs[name][page, slot, 1] = torch.nan
        assert torch.equal(paged_attn.paged_attention(**inputs), wanted)


def test_the_operator_has_a_name_of_its_own_for_windows_by_head(device: str) -> None:
    case = Case("operator", (5, 5), (35, 20), head_windows=((3, -1), (-1, -1)), lse=False)
    inputs = {name: x for name, x in build(case, device).items() if name != "return_lse"}
    given = inputs | {"window_size": (-1, -1), "head_windows": inputs["window_size"]}
    torch.ops.paged_attn.attention(**given)
    compare(case, inputs["out"], None, inputs)
    text = "window_size must be (-1, -1) beside head_windows, got (5, -1)"
    refuses(torch.ops.paged_attn.attention, given | {"window_size": (5, -1)}, ValueError, text)


def test_results_share_no_memory_with_windows_by_head(device: str) -> None:
    memory = torch.full((64,), -1, dtype=torch.int32, device=device)
    inputs = build(Case("alias", (1,), (20,), heads=2, head_dim=32, lse=False), device)
    inputs |= {"window_size": memory[:4].view(2, 2), "out": memory.view(torch.float32).view(1, 2, 32)}
    refuses(paged_attn.paged_attention, inputs, ValueError, "out must share no memory with window_size")


def test_plans_know_no_width_of_windows_by_head() -> None:
    plain, by_head = ask(), ask(head_windows=True)
    assert by_head.problem == plain.problem._replace(head_windows=True)
    assert planner.plan(by_head.problem) == planner.plan(plain.problem)
    plain, by_head = ask(batch=64), ask(batch=64, head_windows=True)
    (launch,), (other,) = (planner.plan(x.problem).launches for x in (by_head, plain))
    # KV heads have any numbers of programs, so all there are, and states of one lie side by side
    assert (launch.programs, other.programs) == (132, 128)
    pipe = launch.pipe._replace(SKIP=8 * launch.pipe.SKIP, STRIDE=8 * launch.pipe.STRIDE)
    assert launch.shape.BY_HEAD
    shape = launch.shape._replace(BY_HEAD=False)
    assert launch._replace(programs=128, slots=256, shape=shape, pipe=pipe) == other
    assert ask(head_windows=True, prefix_lens=True).problem.gap, "a prefix may stay visible behind some"


def test_explain_says_where_windows_by_head_are_left_to_the_portable_kernels() -> None:
    latent = dict(heads=16, kv_heads=1, head_dim=576, value_dim=512, latent=True, page_size=64, keys="4096", batch=64)
    text = "windows by head over keys that hold their values"
    assert any(text in line for _, line in explain.explain(ask(head_windows=True, **latent)))
    for options in (dict(head_windows=True), latent):
        assert not any(text in line for _, line in explain.explain(ask(**options)))
