"""Records: listed with who, when and which versions, and published as text without secrets and folders."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.models.catalog import RECORDS, Entry, catalog
from oxrl.onboarding.attempt import failed_outcome
from oxrl.onboarding.publish import report_of_record
from oxrl.onboarding.records import current_status, records_folder, source_digest, verification_of
from oxrl.onboarding.remedies import Task
from oxrl.onboarding.scout import entry_as_toml, scout
from tests.onboarding.families import copy
from tests.run.test_failure import GitHub

TINY = json.loads((RECORDS / "tiny.json").read_text())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache" / "verified").mkdir(parents=True)
    return tmp_path / "cache" / "verified"


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_model_is_verified_verified_long_ago_or_config_ready(cache):
    tiny, other = catalog()["tiny"], catalog()["qwen3-0.6b"]
    status, verification = current_status(tiny)
    assert (status, verification.by, verification.date) == ("verified", "the oxRL project", TINY["date"])
    assert current_status(other) == ("config-ready", None)
    before = {**TINY, "by": "Ada", "environment": {**TINY["environment"], "transformers": "4.57.1"}}
    (cache / "tiny.json").write_text(json.dumps(before))
    status, verification = current_status(tiny)
    assert status == "verified long ago" and "by Ada" in str(verification)
    assert "transformers 4.57.1" in next(line for line in run("models", "list").stdout.splitlines() if "Ada" in line)
    (cache / "tiny.json").write_text(json.dumps({**TINY, "problems": ["sft: the loss is not finite"]}))
    assert current_status(tiny) == ("config-ready", None)
    assert not verification_of(TINY).old


def test_models_of_this_machine_are_listed_after_the_catalogue(cache, families):
    entry = {**catalog()["tiny"]._asdict(), "name": "mine", "hub": None}
    (cache / "mine.json").write_text(json.dumps({**TINY, "name": "mine", "entry": entry, "by": None}))
    (cache / "mine.sent").touch()
    listed = json.loads(run("models", "list", "--json").stdout)
    assert listed.keys() - catalog().keys() == {"mine"}
    assert listed["mine"]["status"] == "verified" and "an unnamed user" in listed["mine"]["verified"]
    assert scout(str(families["gguf"])).entry["name"] == "tiny-gguf", "not the model of the catalogue"
    assert records_folder("tiny-gguf") == records_folder("mine") == cache and records_folder("tiny") == RECORDS


def test_a_proposed_entry_is_one_that_the_catalogue_reads(families):
    import tomllib

    entry = Entry(**scout(str(families["experts"])).entry)
    (fields,) = tomllib.loads(entry_as_toml(entry))["models"].values()
    assert fields["architecture"] == "Qwen3MoeForCausalLM" and fields["template"] == "chatml"
    assert fields["active_billions"] < fields["billions"] == pytest.approx(39360e-9, rel=0.01)


def test_the_text_of_a_record_has_no_folder_and_no_secret(tmp_path):
    source = "/home/ada/secret-project/model-x"
    signal = {"kind": "engine", "exception": "", "message": "token=abcd1234 of ghp_" + "a" * 30, "fingerprint": ""}
    attempt = {"settings": {}, "strategy": "full", "signal": signal, "skipped": [], "remedy": "again", "seconds": 1.0}
    changes = [{"repair": "pad_token", "message": f"{source}/config.json: <|pad|>"}]
    record = {**TINY, "source": source, "command": f"oxrl models onboard {source}", "changes": changes}
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**record, "attempts": [attempt, *TINY["attempts"]]}))
    report = report_of_record(file)
    assert report.title == "[model] tiny: verified with changes"
    for hidden in ("ada", "secret-project", "abcd1234", "ghp_"):
        assert hidden not in report.body
    assert "`oxrl models onboard model-x`" in report.body and "engine: token=[removed]" in report.body
    assert '[models."tiny"]' in report.body and "pad_token repaired: model-x/config.json" in report.body
    assert report.fingerprint == report_of_record(RECORDS / "tiny.json").fingerprint
    for missing in ("name", "attempts", "layout"):
        file.write_text(json.dumps({key: value for key, value in TINY.items() if key != missing}))
        with pytest.raises(ValueError, match="is not a record"):
            report_of_record(file)


def test_a_digest_is_that_of_small_files_and_headers(families, tmp_path):
    folder = copy(families["experts"], tmp_path / "same")
    assert source_digest(str(folder)) == source_digest(str(families["experts"]))
    shutil.copyfile(families["hybrid"] / "config.json", folder / "config.json")
    assert source_digest(str(folder)) != source_digest(str(families["experts"]))
    copy(families["experts"], tmp_path / "weights")
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, tmp_path / "weights" / "model.safetensors")
    assert source_digest(str(tmp_path / "weights")) != source_digest(str(families["experts"]))
    assert source_digest("tiny") == TINY["digest"], "the record in the repository is of other files: onboard it again"


def test_a_record_is_printed_by_default_and_filed_once(tmp_path, monkeypatch):
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINY))
    with GitHub() as github:
        for name, value in github.environ.items():
            monkeypatch.setenv(name, value)
        done = run("report", file)
        assert done.exit_code == 0 and done.stdout.startswith("# [model] tiny: verified\n") and not github.requests
        results = [json.loads(run("report", file, "--send", "ox/rl", "--json").stdout)["sent"] for _ in range(2)]
        assert [each["known"] for each in results] == [False, True]
        (tmp_path / "tiny.sent.json").unlink()
        assert json.loads(run("report", file, "--send", "ox/rl", "--json").stdout)["sent"]["known"]
        assert len(github.issues) == 1 and github.requests[0][0] == "GET", "it looks for it first"
    monkeypatch.delenv("GITHUB_TOKEN")
    assert "needs a token" in run("report", file, "--send", "ox/ml").output


def test_the_failure_of_an_onboarding_is_reported_like_that_of_a_run(tmp_path):
    failed_outcome(tmp_path / "failure", Task("tiny"), "engine", "it ended with status 3", "the last lines")
    done = run("report", tmp_path)
    assert done.stdout.startswith("# [engine] it ended with status 3") and "the last lines" in done.stdout
