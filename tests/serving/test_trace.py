"""Both public formats are read as they are, errors name the line, and the synthetic trace has the moments it states."""

from __future__ import annotations

import itertools
import os
import random
import statistics
from pathlib import Path

import pytest

from paged_attn.serving.trace import CONVERSATION, LogNormal, Request, read, shrink

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}

{"timestamp": 4500, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_rows_become_requests_from_second_zero(tmp_path: Path) -> None:
    first, second = read(_file(tmp_path, AZURE))
    assert first == Request(0.0, 374, 44)
    assert (second.prompt, second.output) == (396, 109)
    assert second.arrival == pytest.approx(4.314579)


def test_mooncake_lines_keep_their_prefix_ids(tmp_path: Path) -> None:
    assert list(read(_file(tmp_path, MOONCAKE))) == [
        Request(0.0, 1030, 5, (0, 1, 2)),
        Request(1.5, 600, 7, (0, 9)),
    ]


def test_a_trace_is_read_line_by_line(tmp_path: Path) -> None:
    requests = read(_file(tmp_path, MOONCAKE + "not json\n"))
    assert len(list(itertools.islice(requests, 2))) == 2
    with pytest.raises(ValueError, match="line 4"):
        next(requests)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "no column ContextTokens, GeneratedTokens, TIMESTAMP"),
        (AZURE + "yesterday,1,1\n", "line 4: Invalid isoformat"),
        (AZURE + "2023-11-16 18:15:51.1,0,1\n", "line 4: lengths must be at least 1, got 0 and 1"),
        ('{"timestamp": 0, "input_length": 3}\n', "line 1: no field 'output_length'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read(_file(tmp_path, text)))


def test_shrinking_divides_lengths_and_keeps_at_least_one_token() -> None:
    requests = [Request(0.0, 1000, 3, (1, 2)), Request(2.0, 24, 100)]
    assert list(shrink(requests, 10)) == [Request(0.0, 100, 1), Request(2.0, 2, 10)]
    assert list(shrink(requests, 1)) == requests
    with pytest.raises(ValueError, match="positive"):
        next(shrink(requests, 0))


def test_the_synthetic_trace_has_the_stated_medians_means_and_rate() -> None:
    requests = list(itertools.islice(CONVERSATION.requests(seed=1), 20000))
    for law, lengths in (
        (CONVERSATION.prompt, [request.prompt for request in requests]),
        (CONVERSATION.output, [request.output for request in requests]),
    ):
        assert statistics.median(lengths) == pytest.approx(law.median, rel=0.04)
        # The cut at the longest length takes 5% from the mean of the wider law.
        assert statistics.mean(lengths) == pytest.approx(law.mean, rel=0.07)
        assert max(lengths) <= law.longest
    gaps = [after.arrival - before.arrival for before, after in itertools.pairwise(requests)]
    assert 1 / statistics.mean(gaps) == pytest.approx(CONVERSATION.rate, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(CONVERSATION.gap_cv, rel=0.05)


def test_equal_seeds_draw_equal_requests() -> None:
    draws = [list(itertools.islice(CONVERSATION.requests(seed), 5)) for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


def test_a_law_without_spread_draws_its_median() -> None:
    assert LogNormal(median=7, mean=7, longest=9).draw(random.Random(0)) == 7


@pytest.mark.skipif("PAGED_ATTN_TRACES" not in os.environ, reason="PAGED_ATTN_TRACES names no folder of public traces")
def test_public_traces_are_read_to_the_end() -> None:
    folder = Path(os.environ["PAGED_ATTN_TRACES"])
    files = sorted([*folder.glob("*.csv"), *folder.glob("*.jsonl")])
    assert files
    for path in files:
        requests = list(read(path))
        assert requests[0].arrival == 0
        assert all(before.arrival <= after.arrival for before, after in itertools.pairwise(requests))
        assert len(requests) > 1000
        if path.name == "azure_llm_2023_conv.csv":
            assert statistics.median(request.prompt for request in requests) == CONVERSATION.prompt.median
            assert statistics.median(request.output for request in requests) == CONVERSATION.output.median
            assert statistics.mean(request.prompt for request in requests) == pytest.approx(1154.7, abs=0.05)
            assert statistics.mean(request.output for request in requests) == pytest.approx(211.1, abs=0.05)
        if path.name == "mooncake_conversation.jsonl":
            assert all(len(request.prefix) == -(-request.prompt // 512) for request in requests)
