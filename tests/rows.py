"""Rows that tests share: small sums, generated."""

import json
from pathlib import Path


def sums(n: int, first: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"{i} + {i % 7}?", "response": f"{i + i % 7}"} for i in range(first, first + n)]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
