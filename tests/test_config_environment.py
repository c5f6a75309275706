"""The environment variables that users were promised: where data and runs go, and who asks the hub."""

import json
import os
import subprocess
import sys

import pytest

from oxrl.config import check_config
from oxrl.data.prepare import data_dir, prepare
from oxrl.inputs import read_inputs
from oxrl.runs import run_folder
from tests.rows import write_jsonl
from tests.web import Quiet, serving


def test_prepared_data_lies_and_is_found_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_DATA_DIR", str(tmp_path / "there"))
    raw = write_jsonl(tmp_path / "raw.jsonl", [{"question": f"{i}?", "answer": f"so: #### {i}"} for i in range(4)])
    folder = prepare("gsm8k", files=[f"train={raw}"], splits=["train"])
    assert folder == tmp_path / "there" / "gsm8k"
    inputs = read_inputs(check_config({"model": {"name": "tiny"}, "data": {"dataset": "gsm8k"}}))
    assert [sample.answer for sample in sorted(inputs.source.get_prompts(4), key=lambda each: each.id)] == list("0123")
    monkeypatch.delenv("OXRL_DATA_DIR")
    assert str(data_dir()) == "data"


def test_runs_go_where_the_variable_says_unless_the_config_says_otherwise(tmp_path, monkeypatch):
    config = check_config({"model": {"name": "tiny"}, "data": {"train_files_path": "x"}})
    monkeypatch.delenv("OXRL_CHECKPOINT_DIR", raising=False)
    assert str(run_folder(config, None)) == "checkpoints/run"
    monkeypatch.setenv("OXRL_CHECKPOINT_DIR", str(tmp_path))
    assert run_folder(config, None) == tmp_path / "run"
    assert str(run_folder(config, "mine")) == "mine"
    own = check_config({**config.model_dump(mode="json"), "run": {"checkpoint_dir": "own"}})
    assert str(run_folder(own, None)) == "own/run"


@pytest.fixture
def hub():
    """A hub that has nothing and remembers what it was asked for, and by whom."""

    class Hub(Quiet):
        def do_GET(self):
            self.server.asked.append((self.path, self.headers.get("authorization")))
            self.reply(404)

        do_HEAD = do_GET

    with serving(Hub, asked=[]) as server:
        yield server.url, server.asked


def test_the_hub_is_asked_with_the_token_and_for_the_revision(hub, tmp_path):
    address, asked = hub
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": "hf_of_a_test", "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HOME": str(tmp_path)}
    raw = {"model": {"name": "someone/gated", "revision": "v2"}, "data": {"train_files_path": "x"}}
    code = (
        "import json, sys\nfrom oxrl.config import check_config\nfrom oxrl.inputs import model_config\n"
        "from oxrl.models.load import check_model\n"
        "try:\n    check_model(model_config(check_config(json.loads(sys.argv[1]))))\n"
        "except ValueError as error:\n    assert 'someone/gated' in str(error)\nelse:\n    sys.exit('it was found')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(raw)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert ("/someone/gated/resolve/v2/config.json", "Bearer hf_of_a_test") in asked
