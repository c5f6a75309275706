"""Every example in `registry/examples` loads unchanged, and trains for a step on its data file."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from oxrl.algorithms import ALGORITHMS
from oxrl.config import load_config
from oxrl.config.checks import contradictions, remarks
from oxrl.run.prepare import prepare_run
from oxrl.run.train import train_spec

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "registry" / "examples"
TINY = [
    "model.name=tiny", "train.train_steps_per_epoch=1", "train.total_number_of_epochs=1",
    "train.train_batch_size_per_gpu=2", "rollout.n_samples=2", "rollout.max_tokens=4",
]  # fmt: skip
VARIED = ["reward.reward_func=oxrl.diagnose.verify_model:any_difference"]  # a random model never solves the task
OWN = {
    "kd": ["model.teacher=tiny"],
    "opd": ["model.teacher=tiny"],
    "rft": [*VARIED, "train.alg_params={threshold: 0.0}"],
}


class Recorded:
    """A source of rows that records what is drawn from it."""

    def __init__(self, source):
        self.source, self.drawn = source, []
        self.state, self.restore = source.state, source.restore

    def get_prompts(self, n):
        drawn = self.source.get_prompts(n)
        self.drawn += drawn
        return drawn


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """The model that `rm.yaml` trains and `rlhf.yaml` uses as its reward."""
    folder = tmp_path_factory.mktemp("rm")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        train_spec(prepare_run(load_config(EXAMPLES / "rm.yaml", TINY), folder))
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A model trained to generate a score for every prompt."""
    folder = tmp_path_factory.mktemp("judge")
    rows = [{"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "Score: 7"}]}
            for prompt in ("yes", "no", "perhaps", "a longer question than that")]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    set_ = ["model.name=tiny", "train.alg_name=sft", f"data.train_files_path={folder / 'rows.jsonl'}"]
    set_ += ["train.lr=5e-3", "train.train_steps_per_epoch=40", "train.train_batch_size_per_gpu=4"]
    train_spec(prepare_run(load_config(None, set_), folder / "run"))
    return folder / "run"


def test_there_is_one_example_for_every_algorithm():
    assert {file.stem for file in EXAMPLES.glob("*.yaml")} == set(ALGORITHMS)


@pytest.mark.trains
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_example_trains_on_its_data_file(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(ROOT)
    file = EXAMPLES / f"{name}.yaml"
    as_written = load_config(file)
    assert as_written.train.alg_name == name and as_written.run.experiment_id == name
    assert contradictions(as_written) == [] and remarks(as_written) == []
    graded = as_written.reward.reward_func is not None
    own = OWN.get(name, VARIED if graded else [])
    if name == "rlhf":
        own = [f"reward.model={request.getfixturevalue('reward_model')}"]
    if name == "rlaif":
        own = [f"reward.judge={request.getfixturevalue('judge')}"]
    spec = prepare_run(load_config(file, [*TINY, *own]), tmp_path / "out")
    source = Recorded(spec.source)
    result = train_spec(replace(spec, source=source))
    (line,) = result.history
    assert math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])
    assert len(source.drawn) >= 2
    assert_from_file(source.drawn, Path(as_written.data.train_files_path), spec.tokenizer)


def assert_from_file(drawn, file, tokenizer):
    """Each row that was drawn has the prompt or text of the line in its id."""
    lines = file.read_text().splitlines()
    for item in drawn:
        row = item[0] if isinstance(item, tuple) else item
        where = row.id.split("/")[0].split("~")[0]
        name, _, number = where.partition(":")
        assert name == file.name
        line = json.loads(lines[int(number) - 1])
        text = tokenizer.decode(row.tokens) if isinstance(item, tuple) else row.messages[-1].content
        assert (line.get("prompt") or line["text"]) in text
