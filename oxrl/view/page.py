"""The page as one HTML file: its script and its style inside, and in an exported one the data as well.

The policy of the page allows exactly this script and this style, by their digests, and no connection but to the server
that it came from: what a model wrote cannot run, whatever it contains.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from oxrl.tracking.files import write_atomically
from oxrl.view.runs import Response, Runs
from oxrl.view.steps import Json, dumped

MOST_EXPORTED = 32 * 2**20  # bytes of compressed steps; metrics and configs are always complete
SCRIPTS = (
    "dom", "numbers", "store", "route", "chart", "filters", "text", "tokens", "run", "findings", "step", "group",
    "answer", "prompt", "keys", "main",
)  # fmt: skip


class Page(NamedTuple):
    """`Page(html, policy)`; the policy is the value of Content-Security-Policy."""

    html: str
    policy: str


class Exported(NamedTuple):
    """What an exported page contains."""

    path: Path
    bytes: int
    steps: int
    left_out: int


def build_page(data: str = "", connect: str = "'self'") -> Page:
    """Put the page together; `data` is what an exported page has inside, as JSON."""
    folder = files("oxrl.view") / "web"
    style = (folder / "style.css").read_text(encoding="utf-8")
    script = "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n{script}'
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    html = (folder / "page.html").read_text(encoding="utf-8")
    inside = {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": data.replace("<", "\\u003c")}
    for name, text in inside.items():
        html = html.replace(f"@@{name}@@", text, 1)
    return Page(html, policy)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def export_page(runs: Runs, path: Path, most: int = MOST_EXPORTED) -> Exported:
    """Write the page with its data inside; of the recorded steps the last ones, at most `most` bytes compressed."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name the file to write, such as {path / 'page.html'}")
    entries: Json = {"overview": _packed(runs.respond("overview"))}
    whole: list[list[int]] = []
    for number in range(len(runs.runs)):
        entries |= _of_run(runs, number)
        whole.append([])
    steps, left_out, room = 0, 0, most
    for number, step in _newest_first(runs):
        packed = dict(_of_step(runs, number, step))
        size = sum(len(text) for entry in packed.values() for text in (entry["gzip"],))
        if size > room:
            left_out += 1
            continue
        room -= size
        steps += 1
        entries |= packed
        whole[number].append(step)
    for number, kept in enumerate(whole):
        entries[f"run/{number}/steps"] = _packed(Response(dumped(sorted(kept))))
        entries |= _prompts(runs, number, set(kept))
    html = build_page(json.dumps(entries), connect="'none'").html
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html)
    return Exported(path, len(html.encode()), steps, left_out)


def _of_run(runs: Runs, number: int) -> Json:
    entries = {f"run/{number}/{what}": _packed(runs.respond(f"run/{number}/{what}")) for what in ("config", "warnings")}
    for what in ("metrics", "checks"):
        path = f"run/{number}/lines/{what}"
        entries[path] = _packed(_all_lines(lambda query, path=path: runs.respond(path, query)))  # type: ignore[misc]
    return entries


def _all_lines(respond: Callable[[str], Response]) -> Response:
    bodies, query = [], ""
    while True:
        response = respond(query)
        bodies.append(response.body)
        if response.headers["X-More"] == "0":
            return response._replace(body=b"".join(bodies), headers={**response.headers, "X-Start": "0"})
        query = f"from={response.headers['X-End']}&file={response.headers['X-File']}"


def _newest_first(runs: Runs) -> Iterator[tuple[int, int]]:
    """Run and step of all steps; the runs take turns."""
    numbered = [(step, number) for number, run in enumerate(runs.runs) for step in run.steps.numbers()]
    for step, number in sorted(numbered, reverse=True):
        yield number, step


def _of_step(runs: Runs, number: int, step: int) -> Iterator[tuple[str, Json]]:
    path = f"run/{number}/step/{step}"
    content = runs.runs[number].steps.step(step)
    yield path, _packed(Response(dumped(content)))
    for each in content["answers"]:
        group, index = (quote(str(each.get(name)), safe="") for name in ("group", "index"))
        path = f"run/{number}/answer/{step}/{group}/{index}"
        yield path, _packed(runs.respond(path))


def _prompts(runs: Runs, number: int, kept: set[int]) -> Iterator[tuple[str, Json]]:
    """One prompt over the steps, for each prompt of the steps inside."""
    over: dict[str, list[Json]] = {}
    for step in sorted(kept):
        content = runs.runs[number].steps.step(step)
        of_step: dict[str, list[Json]] = {}
        for each in content["answers"]:
            of_step.setdefault(str(each.get("sample_id")), []).append(each)
        for sample_id, answers in of_step.items():
            entry = {"step": step, "version": content["header"].get("version"), "answers": answers}
            over.setdefault(sample_id, []).append(entry)
    for sample_id, found in over.items():
        yield f"run/{number}/prompt/{quote(sample_id, safe='')}", _packed(Response(dumped(found)))


def _packed(response: Response) -> Json:
    text = base64.b64encode(gzip.compress(response.body, 6, mtime=0)).decode()
    return {"gzip": text, "headers": dict(response.headers)}
