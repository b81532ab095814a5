"""Which releases of Triton have been read, by their versions alone: nothing is imported."""

import functools
import re

KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))  # both dialects and the launch path have been looked at


@functools.lru_cache(maxsize=16)
def number(version: str) -> tuple[int, int]:
    """(3, 6) of "3.6.0"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def known(version: str) -> bool:
    """Whether this is a release of a version that was read; what is built between releases is not."""
    return number(version) in KNOWN and "dev" not in version and "git" not in version


def older(version: str) -> bool:
    """Whether this is older than any that was read."""
    return number(version) < KNOWN[0]


def in_words() -> str:
    """The known versions, as messages name them."""
    return f"{'.'.join(map(str, KNOWN[0]))} to {'.'.join(map(str, KNOWN[-1]))}"
