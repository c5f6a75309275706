"""Build a bug report without secrets from the `failure/` folder of a run; on request, file it as a GitHub issue.

Of the batch only the size is reported: training data never leaves the run folder.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from oxrl.machine.secrets import without_secrets
from oxrl.parsing import read_json
from oxrl.run.failure import FOLDER, SIGNAL

GITHUB = "https://api.github.com"
TIMEOUT = 20.0  # seconds
SENT = "sent.json"
MAX_TITLE, MAX_SECTION = 120, 12_000  # characters; GitHub accepts 256, and 65,536 for the whole body


class Report(NamedTuple):
    """`Report("[non_finite] the loss is not finite", "...", "3f2a...")`."""

    title: str
    body: str
    fingerprint: str


class Sent(NamedTuple):
    """URL of the issue, and whether it existed before."""

    url: str
    known: bool


class SendError(RuntimeError):
    """GitHub cannot be reached or rejects the report."""


def find_failure(run: Path) -> Path:
    """Return the `failure/` folder of a run; of a run in stages, that of the failed stage."""
    if not run.is_dir():
        raise ValueError(f"there is no run folder {run}")
    for folder in (run, run / FOLDER, *sorted(run.glob(f"*/{FOLDER}"))):
        if (folder / SIGNAL).is_file():
            return folder
    raise ValueError(f"{run} has no {FOLDER}/{SIGNAL}: its last attempt did not fail, or its process was killed")


def report_of(run: Path, *, environ: Mapping[str, str] = os.environ) -> Report:
    """Return title and Markdown body, without secrets."""
    folder = find_failure(run)
    signal = read_json(folder / SIGNAL)
    summary = re.split(r"[\n(;]", signal["message"], maxsplit=1)[0].strip() or signal["exception"]
    title = f"[{signal['kind']}] {summary}"
    body = "\n\n".join(
        [
            _facts(signal),
            _section("Traceback", "text", folder / "traceback.txt"),
            _section("Config", "yaml", folder / "config.yaml"),
            _section("Last metrics", "json", folder / "metrics.jsonl", lines=5),
            _section("Environment", "json", folder / "environment.json"),
            f"Batch: {_batch_size(folder / 'batch.jsonl')}",
            f"oxrl-fingerprint: {signal['fingerprint']}",
        ]
    )
    title = shareable(title, environ)
    title = title if len(title) <= MAX_TITLE else title[: MAX_TITLE - 3] + "..."
    return Report(title, shareable(body, environ) + "\n", signal["fingerprint"])


def _facts(signal: Mapping[str, Any]) -> str:
    where = signal["where"]
    facts = {
        "what": f"`{signal['exception']}`: {signal['message']}",
        "where": f"`{where['file']}:{where['line']}` in `{where['function']}`" if where else "outside of oxRL",
        "step": signal["step"],
        "algorithm": signal["algorithm"],
        "model": signal["model"],
        "versions": ", ".join(f"{name} {version}" for name, version in signal["versions"].items()),
        "time": signal["time"],
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _section(heading: str, language: str, file: Path, *, lines: int | None = None) -> str:
    text = file.read_text(encoding="utf-8").rstrip() if file.is_file() else "(missing)"
    text = "\n".join(text.splitlines()[-lines:]) if lines else text
    if len(text) > MAX_SECTION:
        text = "[...]" + text[-MAX_SECTION:]
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # the text may contain a fence
    return f"### {heading}\n\n{fence}{language}\n{text}\n{fence}"


def _batch_size(file: Path) -> str:
    if not file.is_file():
        return "none in flight"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return f"{len(rows)} rows, {sum(len(row['tokens']) for row in rows)} tokens (kept in the run folder)"


def shareable(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` without secrets, keys of 40 digits (and commits, which look like them) and home folders."""
    text = re.sub(r"\b[0-9a-f]{40}\b", "[removed]", without_secrets(text, environ))
    home = environ.get("HOME", "").rstrip("/")
    if home:
        text = re.sub(rf"{re.escape(home)}(?=[/\s\"':,)]|$)", "~", text)
    return re.sub(r"(?<![\w.~])/(?:home|Users)/[^/\s\"':,)]+", "~", text)


def send(report: Report, repository: str, run: Path, *, environ: Mapping[str, str] = os.environ) -> Sent:
    """File the report as an issue of OWNER/REPO, unless the same failure was already filed there."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"a repository looks like OWNER/REPO, not {repository!r}")
    token = environ.get("GITHUB_TOKEN")
    if not token:
        raise ValueError("--send needs a token: set GITHUB_TOKEN to one that may write issues of the repository")
    base = _checked_base(environ.get("GITHUB_API_URL") or GITHUB)
    # Beside a record of a model, in the record of a failed run.
    sent_file = run.with_suffix(f".{SENT}") if run.is_file() else find_failure(run) / SENT
    sent = read_json(sent_file) if sent_file.is_file() else {}
    if sent.get("repository") == repository:  # GitHub's search index lags behind new issues
        return Sent(sent["url"], known=True)
    query = f'repo:{repository} is:issue in:body "{report.fingerprint}"'
    found = _request("GET", f"{base}/search/issues", token, params={"q": query})
    if found["total_count"]:
        return Sent(str(found["items"][0]["html_url"]), known=True)
    content = {"title": report.title, "body": report.body}
    issue = _request("POST", f"{base}/repos/{repository}/issues", token, json=content)
    url = str(issue["html_url"])
    sent_file.write_text(json.dumps({"repository": repository, "url": url}), encoding="utf-8")
    return Sent(url, known=False)


def _checked_base(base: str) -> str:
    parts = urlsplit(base)
    if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise ValueError(
            f"GITHUB_API_URL must start with https://, not be {without_secrets(base)!r}: the token would be unencrypted"
        )
    return base.rstrip("/")


def _request(method: str, url: str, token: str, **content: Any) -> Any:
    import httpx

    headers = {
        "Accept": "application/vnd.github+json",
        "Authorization": f"Bearer {token}",
        "User-Agent": "oxrl",
        "X-GitHub-Api-Version": "2022-11-28",
    }
    try:
        with httpx.Client(timeout=TIMEOUT, verify=ssl.create_default_context()) as client:
            # Redirects are not followed, which is the default: they would forward the token to another address.
            response = client.request(method, url, headers=headers, **content)
        if not response.is_success:
            raise SendError(
                f"GitHub responded with {response.status_code} ({_remedy(response.status_code)}): {_message(response)}"
            )
        return response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # no connection, timeout, or not JSON
        raise SendError(without_secrets(f"GitHub cannot be reached at {url}: {error}")) from None


def _remedy(code: int) -> str:
    return {
        301: "the repository has moved: use its new name",
        401: "GITHUB_TOKEN is not valid",
        403: "GITHUB_TOKEN lacks the permission, or the rate limit is exceeded: wait and retry",
        404: "the repository does not exist, or GITHUB_TOKEN has no access to it",
        410: "the repository has issues disabled",
        422: "the request was rejected: the repository may not exist, or GITHUB_TOKEN has no access to it",
        429: "the rate limit is exceeded: wait and retry",
    }.get(code, "retry later")


def _message(response: Any) -> str:
    try:
        return str(response.json().get("message", ""))
    except (ValueError, AttributeError):
        return ""
