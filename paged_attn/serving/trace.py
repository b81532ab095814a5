"""Requests over time, read from a public trace, or drawn from the distributions of such a trace.

Two formats of traces are read, both line by line.

- Azure LLM inference trace, CSV `TIMESTAMP,ContextTokens,GeneratedTokens` (Patel et al. 2024, Splitwise).
- Mooncake, JSON lines `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (Qin et al. 2025).
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """A request that arrives `arrival` seconds after the first one, has `prompt` tokens, and wants `output` tokens."""

    arrival: float
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()  # an id for each 512 prompt tokens; equal first ids mean equal first tokens


@dataclass(frozen=True)
class LogNormal:
    """Log-normal distribution of lengths in tokens with this median and mean, clamped to `longest`."""

    median: float
    mean: float
    longest: int

    @property
    def sigma(self) -> float:
        # mean = median * exp(sigma^2 / 2).  If the mean is not above the median, sigma is 0.
        return math.sqrt(2 * math.log(max(1.0, self.mean / self.median)))

    def draw(self, rng: random.Random) -> int:
        return min(self.longest, max(1, round(rng.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True)
class Traffic:
    """`rate` arrivals per second, in gaps of a Gamma distribution whose coefficient of variation is `gap_cv`.

    With gap_cv = 1, arrivals are a Poisson process.  `prompt` and `output` are the distributions of lengths.
    """

    rate: float
    gap_cv: float
    prompt: LogNormal
    output: LogNormal

    def requests(self, seed: int = 0) -> Iterator[Request]:
        """Draw requests without end; equal seeds give equal requests."""
        rng = random.Random(seed)
        shape = self.gap_cv**-2
        arrival = 0.0
        while True:
            yield Request(arrival, self.prompt.draw(rng), self.output.draw(rng))
            arrival += rng.gammavariate(shape, 1 / (self.rate * shape))


# The conversation trace of Azure (19,366 requests in 3,502 s), with medians and means over the whole file.
# The log-normals have these medians and means, but are smoother than the trace, which has peaks at some lengths.
CONVERSATION = Traffic(
    rate=5.53,
    gap_cv=1.09,
    prompt=LogNormal(median=1020, mean=1154.7, longest=14050),
    output=LogNormal(median=129, mean=211.1, longest=1000),
)


def read(path: str | Path) -> Iterator[Request]:
    """Read a trace file, one request at a time; the first line tells the format."""
    with open(path, encoding="utf-8", newline="") as lines:
        first = next((line for line in lines if line.strip()), None)
        if first is None:
            raise ValueError(f"{path} is empty")
        every_line = itertools.chain([first], lines)
        yield from _read_mooncake(every_line, path) if first.lstrip().startswith("{") else _read_azure(every_line, path)


def shrink(requests: Iterable[Request], divisor: float) -> Iterator[Request]:
    """Divide every length by `divisor` and round it to an integer of at least 1; arrivals stay.

    Prefix ids are dropped, unless the divisor is 1.
    """
    if not divisor > 0:
        raise ValueError(f"lengths can be divided by a positive number only, got {divisor}")
    if divisor == 1:
        yield from requests
        return
    for request in requests:
        prompt, output = max(1, round(request.prompt / divisor)), max(1, round(request.output / divisor))
        yield replace(request, prompt=prompt, output=output, prefix=())


def _read_azure(lines: Iterable[str], path: str | Path) -> Iterator[Request]:
    """Read an Azure CSV.  Timestamps have seven decimals, of which Python reads six."""
    rows = csv.DictReader(lines)
    missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(rows.fieldnames or ())
    if missing:
        raise ValueError(
            f"{path} is neither an Azure CSV nor Mooncake JSON lines: no column {', '.join(sorted(missing))}"
        )
    start: datetime | None = None
    for number, row in enumerate(rows, start=2):
        try:
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        start = start or time
        yield _request((time - start).total_seconds(), prompt, output, (), path, number)


def _read_mooncake(lines: Iterable[str], path: str | Path) -> Iterator[Request]:
    """Read Mooncake JSON lines.  Timestamps are milliseconds."""
    start: float | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            time, prompt, output = float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
            prefix = tuple(int(i) for i in row.get("hash_ids", ()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        except KeyError as error:
            raise ValueError(f"{path}, line {number}: no field {error}") from None
        start = time if start is None else start
        yield _request((time - start) / 1000, prompt, output, prefix, path, number)


def _request(
    arrival: float, prompt: int, output: int, prefix: tuple[int, ...], path: str | Path, number: int
) -> Request:
    if prompt < 1 or output < 1:
        raise ValueError(f"{path}, line {number}: lengths must be at least 1, got {prompt} and {output}")
    return Request(arrival, prompt, output, prefix)
