"""Write the tables of docs/migration.md from docs/differences.toml: `python docs/differences.py`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "migration.md"
MARKED = re.compile(r"(<!-- (\w+): from differences\.toml -->\n).*?(<!-- end -->)", re.DOTALL)


def differences() -> dict[str, list[dict[str, str]]]:
    return tomllib.loads((HERE / "differences.toml").read_text(encoding="utf-8"))


def page() -> str:
    """The migration page with current tables."""
    tables = differences()

    def table(marked: re.Match[str]) -> str:
        rows = [f"| {each['there']} | {each['here']} | {each['why']} |" for each in tables[marked[2]]]
        return marked[1] + "\n".join(["| there | here | why |", "|---|---|---|", *rows, ""]) + marked[3]

    return MARKED.sub(table, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
