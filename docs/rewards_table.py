"""The table of docs/rewards.md from the code: `python docs/rewards_table.py`."""

from __future__ import annotations

from pathlib import Path

from oxrl.rewards.table import document

PAGE = Path(__file__).parent / "rewards.md"


def with_table(page: str) -> str:
    """The text of the page with the current table."""
    start = page.index("| name | reward | reads |")
    return page[:start] + document() + page[page.index("\n\n", start) :]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
