"""The records of a failed run, and the bug report made of them."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import unquote_plus

import pytest
import yaml
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import check_config, load_config
from oxrl.diagnose.bug_report import SendError, report_of, send, shareable
from oxrl.run.failure import failures_recorded, fingerprint, record_failure, where_in_oxrl
from oxrl.run.train import train_run
from tests.rows import sums, write_jsonl

LOSS = """
import torch
from oxrl.algorithms.preference import Pairs

def divides(pairs: Pairs):
    return pairs.chosen / 0 if len(pairs.chosen) < 0 else 1 / 0

def allocates(pairs: Pairs):
    return torch.empty(2**50)

def mixes(pairs: Pairs):
    return pairs.chosen + torch.zeros(1000)
"""
SHAPE = {
    "schema", "kind", "exception", "message", "step", "algorithm", "model", "where", "fingerprint", "versions", "time",
    "files",
}  # fmt: skip


def pairs(n, text=""):
    return [{"prompt": f"{text}{i} + 1?", "chosen": f"{i + 1}", "rejected": f"{i}"} for i in range(n)]


def failed(folder: Path, rows, train=None, **sections):
    """Train until it fails; return the error, the folder of its records and the signal."""
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(LOSS)
    config = {
        "model": {"name": "tiny"},
        "data": {"train_files_path": str(write_jsonl(folder / "rows.jsonl", rows))},
        "train": {"alg_name": "sft", "train_batch_size_per_gpu": 4, **(train or {})},
        **sections,
    }
    with pytest.raises(Exception) as caught:
        train_run(check_config(config), folder / "run")
    records = folder / "run" / "failure"
    return caught.value, records, json.loads((records / "signal.json").read_text())


@pytest.fixture(scope="module")
def broken_loss(tmp_path_factory, complete_run):
    folder = tmp_path_factory.mktemp("failure") / "one"
    return failed(folder, pairs(4), {"alg_name": f"{folder / 'own.py'}:divides"})


def test_a_failure_is_recorded_and_raised(broken_loss):
    error, records, signal = broken_loss
    assert isinstance(error, ZeroDivisionError)
    assert set(signal) == SHAPE and signal["schema"] == 1
    assert (signal["kind"], signal["step"], signal["model"]) == ("exception", 1, "tiny")
    assert signal["exception"] == "builtins.ZeroDivisionError"
    assert signal["where"]["file"].startswith("oxrl/algorithms/") and signal["where"]["line"] > 1
    assert {file.name for file in records.iterdir()} == {*signal["files"], "signal.json"}
    assert yaml.safe_load((records / "config.yaml").read_text())["model"]["name"] == "tiny"
    assert "ZeroDivisionError" in (records / "traceback.txt").read_text()
    assert json.loads((records / "environment.json").read_text())["packages"]["torch"]


def test_the_failed_batch_is_recorded_with_the_inputs_of_the_loss(broken_loss):
    _, records, _ = broken_loss
    rows = [json.loads(line) for line in (records / "batch.jsonl").read_text().splitlines()]
    assert len(rows) == 8, "four pairs"
    assert all(row["id"].startswith("rows.jsonl:") for row in rows)
    assert all(len(row["tokens"]) == len(row["mask"]) == len(row["streams"]["ref_logprob"]) for row in rows)
    assert all(sum(row["mask"]) for row in rows)


def test_equal_failures_have_equal_fingerprints_and_others_have_others(broken_loss, tmp_path):
    one = broken_loss[2]
    again = failed(tmp_path / "a", pairs(4, "again "), {"alg_name": f"{tmp_path / 'a' / 'own.py'}:divides"})[2]
    other = failed(tmp_path / "b", pairs(4), {"alg_name": f"{tmp_path / 'b' / 'own.py'}:mixes"})[2]
    assert one["fingerprint"] == again["fingerprint"] != other["fingerprint"]
    numbers = [
        RuntimeError("row 'a.jsonl:7' has 3 tokens (of 5)"),
        RuntimeError("row 'b/c.jsonl:19' has 400 tokens (of 500)"),
    ]
    assert fingerprint(numbers[0]) == fingerprint(numbers[1]) != fingerprint(ValueError(*numbers[0].args))


@pytest.mark.trains
def test_a_loss_that_is_not_finite_is_recorded_with_kind_step_and_rows(tmp_path):
    wild = {"lr": 1e30, "clip_grad_norm": 0.0, "warmup_steps_ratio": 0.0, "total_number_of_epochs": 20}
    _, records, signal = failed(tmp_path, sums(8), wild)
    assert (signal["kind"], signal["algorithm"]) == ("non_finite", "sft")
    metrics = (records / "metrics.jsonl").read_text().splitlines()
    assert signal["step"] == json.loads(metrics[-1])["step"] + 1
    assert (records / "batch.jsonl").exists()


@pytest.mark.trains
def test_out_of_memory_has_its_own_kind(tmp_path):
    _, records, signal = failed(tmp_path, pairs(4), {"alg_name": f"{tmp_path / 'own.py'}:allocates"})
    assert signal["kind"] == "out_of_memory"
    assert (records / "batch.jsonl").exists()


@pytest.mark.trains
def test_a_guard_that_stops_a_run_is_a_failure(tmp_path):
    _, _, signal = failed(
        tmp_path,
        sums(8),
        {"alg_name": "grpo", "max_logprob_gap": 1e-30},
        reward={"reward_func": "length_target", "params": {"target": 4}},
        rollout={"n_samples": 2, "max_tokens": 4, "temperature": 0.7},
    )
    assert signal["kind"] == "guard" and "logprob_gap" in signal["message"]
    assert signal["where"]["function"] == "_check_gap"


def test_a_users_mistake_is_no_failure(tmp_path):
    with pytest.raises(ValueError), failures_recorded(tmp_path, {}):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(KeyboardInterrupt), failures_recorded(tmp_path, {}):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


PLAIN = {"train": {"alg_name": "sft"}, "model": {"name": "tiny"}}


def test_a_value_error_of_another_library_is_a_failure(tmp_path):
    with pytest.raises(ValueError), failures_recorded(tmp_path, PLAIN):
        int("seven")
    signal = json.loads((tmp_path / "failure" / "signal.json").read_text())
    assert (signal["kind"], signal["step"], signal["where"]["function"]) == ("exception", None, "failures_recorded")


def test_a_failure_that_cannot_be_recorded_is_still_raised(tmp_path, caplog):
    (tmp_path / "file").write_text("where a folder should be")
    with pytest.raises(ZeroDivisionError), failures_recorded(tmp_path / "file", PLAIN):
        1 / 0  # noqa: B018
    assert "cannot be written" in caplog.text


def test_the_other_files_are_written_if_one_cannot_be(tmp_path):
    """Numbers of a config that YAML cannot hold."""
    record_failure(tmp_path, {**PLAIN, "odd": object()}, RuntimeError("broken"))
    assert {file.name for file in (tmp_path / "failure").iterdir()} == {
        "environment.json",
        "signal.json",
        "traceback.txt",
    }


def test_the_records_of_an_earlier_attempt_are_renamed(tmp_path):
    with pytest.raises(ZeroDivisionError), failures_recorded(tmp_path, PLAIN):
        1 / 0  # noqa: B018
    with failures_recorded(tmp_path, PLAIN):
        assert not (tmp_path / "failure").exists()
    assert (tmp_path / "failure.before" / "signal.json").exists()


def test_where_is_the_innermost_frame_in_oxrl(tmp_path):
    with pytest.raises(ValueError) as caught:
        load_config(tmp_path / "none.yaml")
    where = where_in_oxrl(caught.value)
    assert (where.file, where.function) == ("oxrl/config/load.py", "_read")
    assert "raise ConfigError" in (Path(__file__).parents[2] / where.file).read_text().splitlines()[where.line - 1]


SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "GITHUB_TOKEN": "ghp_0123456789abcdefghijABCDEFGHIJ",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MY_PASSWORD": "correct horse",
    "HOME": "/srv/people/ada",
}
LEAKS = {
    "an environment value": ("login with correct horse failed", "login with [MY_PASSWORD removed] failed"),
    "a token that is in no variable": ("tried hf_ABCDEFGHIJKLMNOPQRSTUV here", "tried [removed] here"),
    "a key of 40 digits": ("key 89abcdef0123456789abcdef0123456701234567", "key [removed]"),
    "a URL": ("postgres://ada:s3cret@db:5432/x", "postgres://[removed]@db:5432/x"),
    "a key in a config": ("params:\n  api_key: abcdefgh\n  n: 1", "params:\n  api_key: [removed]\n  n: 1"),
    "a token in a config": ('"token": "abcdefgh"', '"token": "[removed]"'),
    "a header": ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer [removed]"),
    "a query": ("https://host/x?access_token=abcdefgh", "https://host/x?access_token=[removed]"),
    "this home": ('File "/srv/people/ada/run/x.py"', 'File "~/run/x.py"'),
    "any home": ("/home/bob/models/m and /Users/carol/x", "~/models/m and ~/x"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_secrets_are_removed(name):
    before, after = LEAKS[name]
    assert shareable(before, SECRETS) == after
    assert not any(value in shareable(f"{value} {before}", SECRETS) for value in SECRETS.values())


def test_what_is_no_secret_stays():
    harmless = (
        "max_tokens: 256\ntokens_per_second: 1234567\napi_key_env: OPENAI_API_KEY\ntoken: null\nkeys: [abcdefg]\n"
    )
    assert shareable(harmless, SECRETS) == harmless


@pytest.fixture
def run(tmp_path):
    """A failed run whose records contain secrets."""
    secret = SECRETS["HF_TOKEN"]
    config = {**PLAIN, "reward": {"params": {"api_key": "sesame-open-wide", "note": secret}}}
    with pytest.raises(RuntimeError), failures_recorded(tmp_path / "run", config):
        raise RuntimeError(f"the server refused {secret} (```)")
    return tmp_path / "run"


def test_a_report_has_a_title_a_body_and_no_secret(run):
    report = report_of(run, environ=SECRETS)
    assert report.title == "[exception] the server refused [removed]"
    assert report.body.rstrip().endswith(f"oxrl-fingerprint: {report.fingerprint}")
    assert "RuntimeError" in report.body and "alg_name: sft" in report.body
    assert not any(secret in report.body + report.title for secret in (*SECRETS.values(), "sesame"))
    assert len(re.findall(r"^````(?:\w+)?$", report.body, flags=re.M)) == 2, "the fence is longer than what it holds"


def test_the_record_itself_has_no_secret_of_an_error(run):
    texts = [(run / "failure" / name).read_text() for name in ("traceback.txt", "signal.json")]
    assert all("the server refused [removed]" in text and SECRETS["HF_TOKEN"] not in text for text in texts)


def test_a_long_report_fits_what_github_takes(run):
    (run / "failure" / "traceback.txt").write_text("x" * 10**6 + "the end")
    body = report_of(run).body
    assert len(body) < 65_536 and "the end" in body


class GitHub:
    """A minimal server that records requests and issues."""

    def __init__(self, refusal: int | None = None) -> None:
        self.requests: list[tuple[str, str, dict]] = []
        self.issues: list[dict] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                found = [each for each in outer.issues if outer.search_term(self.path) in each["body"]]
                self.answer(200, {"total_count": len(found), "items": [{"html_url": "https://x/1"}] if found else []})

            def do_POST(self):
                issue = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.issues.append(issue)
                self.answer(201, {"html_url": f"https://x/{len(outer.issues)}"})

            def answer(self, code, content):
                outer.requests.append((self.command, self.path, dict(self.headers)))
                self.send_response(refusal or code)
                if refusal == 301:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()
                self.wfile.write(json.dumps({"message": "no"} if refusal else content).encode())

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.environ = {
            "GITHUB_TOKEN": SECRETS["GITHUB_TOKEN"],
            "GITHUB_API_URL": f"http://127.0.0.1:{self.server.server_port}/",
        }

    def search_term(self, path: str) -> str:
        return re.search(r"%22(\w+)%22", path)[1]

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args):
        self.server.shutdown()
        self.server.server_close()


def test_a_report_is_filed_once(run, tmp_path):
    with GitHub() as github:
        report = report_of(run)
        sent = send(report, "ox/rl", run, environ=github.environ)
        assert (sent.url, sent.known) == ("https://x/1", False)
        search, post = github.requests
        assert search[0] == "GET"
        assert unquote_plus(search[1]).startswith('/search/issues?q=repo:ox/rl is:issue in:body "')
        assert post[:2] == ("POST", "/repos/ox/rl/issues")
        assert post[2]["Authorization"] == f"Bearer {SECRETS['GITHUB_TOKEN']}"
        assert github.issues == [{"title": report.title, "body": report.body}]
        assert send(report, "ox/rl", run, environ=github.environ).known, "this run was reported"
        (run / "failure" / "sent.json").unlink()
        assert send(report, "ox/rl", run, environ=github.environ).known, "the same failure was reported"
        assert len(github.issues) == 1


@pytest.mark.parametrize(
    ("code", "message"), [(401, "GITHUB_TOKEN is not valid"), (404, "repository does not exist"), (301, "has moved")]
)
def test_a_refusal_by_github_is_reported(run, code, message):
    with GitHub(refusal=code) as github, pytest.raises(SendError, match=message):
        send(report_of(run), "ox/rl", run, environ=github.environ)
    assert len(github.requests) == 1, "nothing is sent to another address"


def test_an_unreachable_server_is_reported(run):
    environ = {"GITHUB_TOKEN": "x" * 10, "GITHUB_API_URL": "http://127.0.0.1:1"}
    with pytest.raises(SendError, match="cannot be reached"):
        send(report_of(run), "ox/rl", run, environ=environ)


@pytest.mark.parametrize(
    ("repository", "environ", "message"),
    [
        ("rl", {"GITHUB_TOKEN": "x"}, "OWNER/REPO"),
        ("ox/rl", {}, "set GITHUB_TOKEN"),
        ("ox/rl", {"GITHUB_TOKEN": "x", "GITHUB_API_URL": "http://example.com"}, "https://"),
    ],
)
def test_nothing_is_sent_by_mistake(run, repository, environ, message):
    with pytest.raises(ValueError, match=message):
        send(report_of(run), repository, run, environ=environ)


def test_the_command_prints_sends_and_reports_mistakes(run, tmp_path, monkeypatch):
    def call(*arguments):
        return CliRunner().invoke(app, ["report", *map(str, arguments)])

    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    shown = call(run)
    assert shown.exit_code == 0 and shown.stdout.startswith("# [exception] the server refused")
    assert call(run, "--send", "ox/rl").exit_code == 2
    assert "no run folder" in call(tmp_path / "none").output
    (tmp_path / "fine").mkdir()
    assert "did not fail" in call(tmp_path / "fine").output
    with GitHub() as github:
        for name, value in github.environ.items():
            monkeypatch.setenv(name, value)
        result = json.loads(call(run, "--send", "ox/rl", "--json").stdout)
    assert result["sent"] == {"url": "https://x/1", "known": False} and len(github.issues) == 1
    with GitHub(refusal=401) as github:
        monkeypatch.setenv("GITHUB_API_URL", github.environ["GITHUB_API_URL"])
        (run / "failure" / "sent.json").unlink()
        assert call(run, "--send", "ox/rl").exit_code == 1


def test_a_run_in_stages_is_reported_by_the_stage_that_failed(run):
    assert report_of(run.parent).fingerprint == report_of(run).fingerprint
