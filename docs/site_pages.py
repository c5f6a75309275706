"""What the site has from outside of docs/: pages that lie elsewhere in the repository, and links to its files.

A link to another page leads there; a link to anything else in the repository becomes plain text, since the site does
not know where the repository is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "README.md": "index.md",
    "FAQ.md": "FAQ.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "BUG_REPORTING.md": "BUG_REPORTING.md",
    "AGENTS.md": "AGENTS.md",
    "benchmarks/README.md": "benchmarks.md",
    "assets/logo.svg": "assets/logo.svg",
    "assets/results.svg": "assets/results.svg",
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = {there: here for here, there in ELSEWHERE.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        if not target:
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        there = ELSEWHERE.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        return f"[{words}]({there}{anchor})" if there else words

    return LINK.sub(moved, markdown)
