"""Keys over ranks in the Hopper kernels: each rank's own keys alone, on a Hopper GPU or simulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paged_attn.planning.planner import plan
from tests.support import hopper_plans
from tests.support.cases import build, problem_of, run
from tests.support.hopper_cases import ALL_E4M3, DEVICE, E4M3_CACHE, PACKED, ragged, sized

pytestmark = [pytest.mark.simulated, pytest.mark.hopper, pytest.mark.usefixtures("on_hopper", "copied")]


@pytest.fixture
def copied() -> Iterator[None]:
    """Plans in which even the few scores that a test can afford are worth a copy into whole pages."""
    with hopper_plans.planned(MIN_SCORES_WORTH_A_COPY=0, MIN_SCORES_PER_COPIED_KEY=0):
        yield


# Lengths that end on borders of stripes and of tiles, and beside them; some ranks have none of the shorter ones' keys.
DECODES = ragged((1, 1024), (1, 0), (1, 1), (1, 1500), (1, 130), (1, 257)) | dict(decode_form=True)
DRAFTS = ragged((8, 190), (8, 200), (5, 132), (8, 8), (1, 64), (0, 77), (8, 1400)) | dict(bounds=True)
MIXED = ragged((1, 500), (40, 230), (150, 300), (64, 700), (1, 1), (17, 33), (1, 0), (2, 130), (90, 1200), (40, 9))
BESIDE = ragged((200, 900), *[(1 + 3 * (i % 2), 64 + 37 * i) for i in range(20)]) | dict(bounds=True)
LONG = ragged((300, 900), (300, 300), (300, 1200)) | dict(bounds=True)
LATENT: dict[str, Any] = dict(heads=16, kv_heads=1, head_dim=192, value_dim=128, latent=True)
TREE: dict[str, Any] = dict(qq_mask=1, positions="tree")

CASES: dict[str, dict[str, Any]] = {
    "decodes": DECODES,
    "decodes, window": DECODES | dict(window_size=(100, -1)),
    "decodes, alibi, x-packed": DECODES | dict(alibi=True) | PACKED,
    "decodes, e4m3 cache": DECODES | E4M3_CACHE,
    "decodes, latents": DECODES | LATENT,
    "drafts, tree, alibi": DRAFTS | TREE | dict(alibi=True),
    "drafts, tree, window, softcap": DRAFTS | TREE | dict(window_size=(100, -1), softcap=20.0),
    "drafts, latents, tree": DRAFTS | LATENT | TREE,
    "drafts, all e4m3": DRAFTS | ALL_E4M3,
    "mixed": MIXED,
    "mixed, alibi": MIXED | dict(alibi=True),
    "mixed, chunk, softcap": MIXED | dict(chunk=150, softcap=20.0),
    "mixed, window, a bias": MIXED | dict(window_size=(100, 20), causal=False, qq_bias=64, tree=True),
    "mixed, spans": MIXED | dict(spans=2, window_size=(100, -1)),
    "mixed, windows by head": MIXED | dict(head_windows=((-1, -1), (100, -1), (200, -1), (0, -1))),
    "mixed, e4m3 cache": MIXED | E4M3_CACHE,
    "decodes beside a chunk": BESIDE | dict(alibi=True),
    "long": LONG,
    "long, alibi": LONG | dict(alibi=True),
    "long, alibi both ways": LONG | dict(alibi=True, alibi_symmetric=True, causal=False),
    "long, alibi, softcap": LONG | dict(alibi=True, softcap=20.0),
    "long, window": LONG | dict(window_size=(100, -1)),
    "long, prefix": LONG | dict(prefix=70),
    "long, all e4m3": LONG | ALL_E4M3,
    "long, x-packed": LONG | PACKED,
    "long, pages of 4": LONG | dict(page_size=4, window_size=(200, -1)),
    "long, score_mod": LONG | dict(score_mod="alibi"),
}
# Of a token, of parts of what a thread holds, of pages, of tiles, of no power of two, longer than most sequences.
SHARDS = [(1, 2, 1), (2, 3, 4), (0, 4, 16), (1, 2, 128), (1, 2, 24), (1, 2, 384)]
QUICK = {
    ("decodes, alibi, x-packed", (2, 3, 4)),
    ("drafts, latents, tree", (0, 4, 16)),
    ("mixed, chunk, softcap", (1, 2, 24)),
    ("long, alibi", (0, 4, 16)),
    ("long, alibi both ways", (1, 2, 24)),
    ("long, window", (1, 2, 1)),
}
NAMES = [
    pytest.param(name, shard, marks=[pytest.mark.quick] * ((name, shard) in QUICK))
    for name in CASES
    for shard in SHARDS
]


@pytest.mark.parametrize("name, shard", NAMES)
@hopper_plans.mixed()
def test_results_are_those_of_the_reference(name: str, shard: tuple[int, int, int]) -> None:
    case = sized(name, **CASES[name], shard=shard)
    run(case, DEVICE)
    run(case, DEVICE)  # which is a kept call


@pytest.mark.parametrize("name", ["mixed", "mixed, alibi", "decodes beside a chunk"])
@hopper_plans.two_lists()
def test_two_lists_give_the_results_of_the_reference(name: str) -> None:
    run(sized(name, **CASES[name], shard=(1, 2, 16)), DEVICE)


def test_shards_are_met_by_every_kind_of_kernel() -> None:
    met: set[str] = set()
    with hopper_plans.mixed():
        for name, fields in CASES.items():
            made = plan(problem_of(build(sized(name, **fields, shard=(1, 2, 16)), DEVICE)))
            met |= {f"copies={made.copies is not None}"}
            for launch in made.launches:
                if launch.dialect == "hopper":
                    for x in launch.parts:
                        met |= {
                            f"{n}={getattr(x.pipe, n)}" for n in ("SHARES", "FP8_PRODUCTS", "AHEAD", "MIXED", "PACKED")
                        }
                        met |= {f"columns={x.pipe.COLUMNS > 0}", f"beside={launch.beside is not None}"}
                        met |= {f"latent={x.shape.REST is not None}", f"converts={x.pipe.CONVERT > 0}"}
    names = ["copies", "SHARES", "FP8_PRODUCTS", "MIXED", "PACKED", "columns", "beside", "latent", "converts"]
    assert {f"{name}={value}" for name in names for value in (True, False)} <= met, sorted(met)
