"""What a failed run left behind to a bug report without secrets, and, only when asked to, to an issue on GitHub.

Of the batch only its size is told: training data stays where it is.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.machine.inventory import SECRET_NAME
from oxrl.run.failure import FOLDER, SIGNAL

GITHUB = "https://api.github.com"
SECONDS = 20.0
SENT = "sent.json"
LONGEST_TITLE, LONGEST_PART = 120, 12_000  # characters; GitHub takes 256 and 65,536 in all
SHAPES_OF_SECRETS = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|wandb_v1_\w{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|[0-9a-f]{40})\b"
)
NAMED_SECRETS = re.compile(
    r"(?i)(\b[\w-]*(?:api[_-]?key|token|secret|passw(?:or)?d|authorization)[\"']?\s*[:=]\s*[\"']?(?:bearer\s+)?)"
    r"(?!null\b|none\b|true\b|false\b)[^\s\"',}\]]{6,}"
)


class Report(NamedTuple):
    """`Report("[non_finite] the loss is not finite", "...", "3f2a...")`."""

    title: str
    body: str
    fingerprint: str


class Sent(NamedTuple):
    """Where the issue is, and whether it was there before."""

    url: str
    known: bool


class SendError(RuntimeError):
    """GitHub cannot be reached or does not want the report."""


def find_failure(run: Path) -> Path:
    """The `failure/` of a run; of a run in stages, that of the stage which failed."""
    if not run.is_dir():
        raise ValueError(f"there is no run folder {run}")
    for place in (run, run / FOLDER, *sorted(run.glob(f"*/{FOLDER}"))):
        if (place / SIGNAL).is_file():
            return place
    raise ValueError(f"{run} has no {FOLDER}/{SIGNAL}: its last try did not fail, or was killed from outside")


def report_of(run: Path, *, environ: Mapping[str, str] = os.environ) -> Report:
    """A title and a text in Markdown, without secrets."""
    place = find_failure(run)
    signal = json.loads((place / SIGNAL).read_text(encoding="utf-8"))
    gist = re.split(r"[\n(;]", signal["message"], maxsplit=1)[0].strip() or signal["exception"]
    title = f"[{signal['kind']}] {gist}"
    body = "\n\n".join(
        [
            _facts(signal),
            _part("Traceback", "text", place / "traceback.txt"),
            _part("Config", "yaml", place / "config.yaml"),
            _part("Last metrics", "json", place / "metrics.jsonl", lines=5),
            _part("Environment", "json", place / "environment.json"),
            f"Batch: {_size(place / 'batch.jsonl')}",
            f"oxrl-fingerprint: {signal['fingerprint']}",
        ]
    )
    title = without_secrets(title, environ)
    shown = title if len(title) <= LONGEST_TITLE else title[: LONGEST_TITLE - 3] + "..."
    return Report(shown, without_secrets(body, environ) + "\n", signal["fingerprint"])


def _facts(signal: Mapping[str, Any]) -> str:
    where = signal["where"]
    told = {
        "what": f"`{signal['exception']}`: {signal['message']}",
        "where": f"`{where['file']}:{where['line']}` in `{where['function']}`" if where else "outside of oxRL",
        "step": signal["step"],
        "algorithm": signal["algorithm"],
        "model": signal["model"],
        "versions": ", ".join(f"{name} {version}" for name, version in signal["versions"].items()),
        "time": signal["time"],
    }
    return "\n".join(f"- {name}: {value}" for name, value in told.items())


def _part(heading: str, language: str, file: Path, *, lines: int | None = None) -> str:
    text = file.read_text(encoding="utf-8").rstrip() if file.is_file() else "(not there)"
    text = "\n".join(text.splitlines()[-lines:]) if lines else text
    if len(text) > LONGEST_PART:
        text = "[...]" + text[-LONGEST_PART:]
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # a message may hold a fence of its own
    return f"### {heading}\n\n{fence}{language}\n{text}\n{fence}"


def _size(file: Path) -> str:
    if not file.is_file():
        return "none was under way"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return f"{len(rows)} rows, {sum(len(row['tokens']) for row in rows)} tokens (kept in the run's folder)"


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """The text without values of secret variables, what looks like a token, passwords in URLs, and people's folders."""
    secrets = {value: name for name, value in environ.items() if SECRET_NAME.search(name) and len(value) >= 6}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"[{secrets[value]} removed]")
    text = re.sub(r"(\w://)[^/\s@]+@", r"\1[removed]@", text)
    text = SHAPES_OF_SECRETS.sub("[removed]", text)
    text = NAMED_SECRETS.sub(r"\1[removed]", text)
    home = environ.get("HOME", "").rstrip("/")
    if home:
        text = re.sub(rf"{re.escape(home)}(?=[/\s\"':,)]|$)", "~", text)
    return re.sub(r"(?<![\w.~])/(?:home|Users)/[^/\s\"':,)]+", "~", text)


def send(report: Report, repository: str, run: Path, *, environ: Mapping[str, str] = os.environ) -> Sent:
    """File the report as an issue of OWNER/REPO, unless the same failure was filed there before."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"a repository looks like OWNER/REPO, not {repository!r}")
    token = environ.get("GITHUB_TOKEN")
    if not token:
        raise ValueError("sending needs a token: set GITHUB_TOKEN to one that may write issues of the repository")
    base = _checked_base(environ.get("GITHUB_API_URL") or GITHUB)
    note = find_failure(run) / SENT
    before = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
    if before.get("repository") == repository:  # GitHub's search needs a while to know of a new issue
        return Sent(before["url"], known=True)
    query = urllib.parse.urlencode({"q": f'repo:{repository} is:issue in:body "{report.fingerprint}"'})
    found = _asked(f"{base}/search/issues?{query}", token, None)
    if found["total_count"]:
        return Sent(str(found["items"][0]["html_url"]), known=True)
    issue = _asked(f"{base}/repos/{repository}/issues", token, {"title": report.title, "body": report.body})
    url = str(issue["html_url"])
    note.write_text(json.dumps({"repository": repository, "url": url}), encoding="utf-8")
    return Sent(url, known=False)


def _checked_base(base: str) -> str:
    parts = urllib.parse.urlsplit(base)
    if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise ValueError(
            f"GITHUB_API_URL must begin with https://, not be {base!r}: the token would travel in the open"
        )
    return base.rstrip("/")


class _NoDetours(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token along to wherever it points."""

    def redirect_request(self, *args: Any) -> None:  # noqa: ARG002 - its signature is urllib's
        return None


def _asked(url: str, token: str, content: Mapping[str, str] | None) -> Any:
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        url,
        data=None if content is None else json.dumps(content).encode(),
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "User-Agent": "oxrl",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )
    try:
        with urllib.request.build_opener(_NoDetours).open(request, timeout=SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise SendError(f"GitHub said {error.code} ({_remedy(error.code)}): {_message(error)}") from None
    except (OSError, ValueError) as error:  # no connection, too slow, or no JSON
        raise SendError(f"GitHub cannot be reached at {url.partition('?')[0]}: {error}") from None


def _remedy(code: int) -> str:
    return {
        301: "the repository has moved: use its new name",
        401: "GITHUB_TOKEN is not valid",
        403: "GITHUB_TOKEN may not do this, or too much was asked for: wait and try again",
        404: "there is no such repository for this token",
        410: "the repository takes no issues",
        422: "it does not like the request: the repository may not exist for this token",
        429: "too much was asked for: wait and try again",
    }.get(code, "try again later")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error).get("message", ""))
    except (ValueError, OSError, AttributeError):
        return ""
