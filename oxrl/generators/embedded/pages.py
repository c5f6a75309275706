"""Pages of key-value memory, and which sequence uses which: allocation, shared prompts, and moves between rows.

Numbers only, no tensors: `paged` has the buffers that the page numbers refer to.
"""

from __future__ import annotations

from collections.abc import Sequence

PAGE = 64  # tokens per page
SCRATCH = 0  # a page that no sequence owns: idle rows of a batch write there


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


class PageTables:
    """The pages of every row. A page may belong to several rows, if their contexts begin with the same tokens."""

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise ValueError(f"{pages} pages of {PAGE} tokens hold no sequence: at least 2 are needed")
        self.pages = pages
        self.free = list(range(pages - 1, SCRATCH, -1))
        self.owners = [0] * pages
        self.tables: dict[int, list[int]] = {}

    def __getitem__(self, row: int) -> list[int]:
        return self.tables[row]

    def enter(self, rows: Sequence[int], length: int) -> bool:
        """Give `rows` one context of `length` tokens: full pages once, the last page each. False if it does not fit."""
        full, rest = divmod(length, PAGE)
        needed = full + (len(rows) if rest else 0)
        if needed > len(self.free):
            return False
        shared = [self._take() for _ in range(full)]
        for row in rows:
            assert row not in self.tables, f"row {row} is in use"
            for page in shared:
                self.owners[page] += 1
            self.tables[row] = [*shared, *([self._own()] if rest else [])]
        return True

    def extend(self, row: int, length: int) -> bool:
        """Make room for `length` tokens in all. False, and nothing changes, if there are too few pages."""
        missing = pages_for(length) - len(self.tables[row])
        if missing > len(self.free):
            return False
        self.tables[row] += [self._own() for _ in range(missing)]
        return True

    def leave(self, row: int) -> None:
        self.release(self.remove(row))

    def remove(self, row: int) -> list[int]:
        """Remove the row; its pages are not free before `release`."""
        return self.tables.pop(row, [])

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page] -= 1
            if not self.owners[page]:
                self.free.append(page)

    def move(self, source: int, target: int) -> None:
        assert target not in self.tables, f"row {target} is in use"
        self.tables[target] = self.tables.pop(source)

    def _take(self) -> int:
        return self.free.pop()

    def _own(self) -> int:
        page = self._take()
        self.owners[page] += 1
        return page
