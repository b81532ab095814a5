"""The free list of cache pages, which knows neither sequences nor tensors."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """More pages were asked for than are free; no page was taken."""


class Pages:
    """`total` pages.  Pages freed last are taken first, so a sequence's pages are soon scattered over the cache."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a cache needs at least 1 page, got {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._is_free = [True] * total

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def take(self, count: int) -> list[int]:
        """Take `count` pages, or raise `OutOfPages` and take none."""
        if count < 0:
            raise ValueError(f"cannot take {count} pages")
        if count > self.free:
            raise OutOfPages(f"{count} pages wanted, {self.free} of {self.total} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._is_free[page] = False
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Give pages back.  `ValueError`, and no change, if a page is free already, given twice or not in the cache."""
        pages = list(pages)
        seen: set[int] = set()
        for page in pages:
            if not 0 <= page < self.total:
                raise ValueError(f"page {page} is outside the cache of {self.total} pages")
            if self._is_free[page]:
                raise ValueError(f"page {page} is free already")
            if page in seen:
                raise ValueError(f"page {page} is given back twice")
            seen.add(page)
        for page in pages:
            self._is_free[page] = True
        self._free.extend(pages)
