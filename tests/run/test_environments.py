"""Complete runs in environments that a config names: they learn, resume exactly, and survive what dies meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import string
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxrl import Trainer
from oxrl.cli import app
from oxrl.config import check_config, load_config
from oxrl.data.episodes import write_episodes
from oxrl.rollouts.environments.expert import expert_steps
from oxrl.rollouts.environments.table import Settings
from oxrl.run.prepare import resolve
from oxrl.run.train import RunResult, train_run
from tests.rollouts import calling_engine
from tests.rollouts.example_environments import is_running
from tests.rollouts.test_mcp_tools import SERVER
from tests.rows import write_jsonl

pytest.importorskip("gymnasium")
pytestmark = pytest.mark.trains
SIDES = "tests.rollouts.example_environments:Sides-v0"

CALLER = Path(calling_engine.__file__)
ENVIRONMENTS = "gym:tests.rollouts.example_environments:"


LETTERS = json.dumps(list(string.ascii_lowercase))
BASE = f"""
model: {{name: tiny, dtype: float32}}
run: {{training_gpus: 0}}
train: {{alg_name: grpo, lr: 5.0e-3, warmup_steps_ratio: 0, lr_scheduler: constant, weight_decay: 0}}
rollout: {{n_samples: 8, max_tokens: 6, stop: {LETTERS}, log_samples: 64}}
"""  # answers end with their first small letter


def train(
    folder: Path, steps: int, *overrides: str, resume: bool = False, prompts: int = 2, callbacks: Sequence[Any] = ()
) -> RunResult:
    file = folder / "config.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(BASE)
    sizes = [f"train.train_steps_per_epoch={steps}", f"train.train_batch_size_per_gpu={prompts}"]
    return train_run(load_config(file, [*sizes, *overrides]), folder / "run", resume=resume, callbacks=callbacks)


def rewards(result: RunResult) -> list[float]:
    return [row["reward"] for row in result.history if "reward" in row]


def digests(result: RunResult) -> list[tuple[int, str]]:
    lines = map(json.loads, (result.folder / "rollouts.jsonl").read_text().splitlines())
    return [(line["step"], line["digest"]) for line in lines]


VOWELS = (f'rollout.env="{ENVIRONMENTS}Vowels-v0"', "rollout.max_turns=3")
VERIFIERS = f"verifiers:{Path(__file__).parents[1] / 'rollouts' / 'vowels_env.py'}"


def test_the_reward_of_a_gymnasium_environment_rises(tmp_path):
    run = train(tmp_path, 15, *VOWELS, "data.env_val_rows=2", "train.eval_every=15")
    assert sum(rewards(run)[-3:]) > sum(rewards(run)[:3]) + 1.5
    assert run.history[0]["eval_reward"] < run.history[-1]["eval_reward"]


@pytest.mark.parametrize("kind", ["gym", "verifiers", "openenv", "solve_rate"])
def test_a_resumed_run_in_a_seeded_environment_is_the_same_run(tmp_path, kind):
    with seeded(kind) as settings:
        exact = (*settings, "rollout.mode=fixed", "rollout.slots=8")  # environments return in any order
        whole = train(tmp_path / "whole", 3, *exact)
        train(tmp_path / "parts", 1, *exact)
        resumed = train(tmp_path / "parts", 3, *exact, resume=True)
    assert digests(resumed) == digests(whole) and len(digests(whole)) == 3


@contextmanager
def seeded(kind: str) -> Iterator[tuple[str, ...]]:
    if kind == "openenv":
        pytest.importorskip("websockets")
        from tests.rollouts.openenv_server import served_by_sockets

        with served_by_sockets() as (url, _):
            yield (f"rollout.env=openenv:{url}", "rollout.max_turns=2")
    elif kind == "verifiers":
        pytest.importorskip("verifiers")
        yield (f"rollout.env={VERIFIERS}", "rollout.env_args={turns: 2}")
    elif kind == "solve_rate":
        yield (
            *VOWELS,
            "rollout.sampler=solve_rate",
            "rollout.sampler_params={solved: 0.5, low: 0.3}",
            "data.env_rows=5",
        )
    else:
        yield VOWELS


def test_a_world_whose_process_is_killed_costs_its_episodes_only_and_leaves_nothing(tmp_path):
    (tmp_path / "doomed").write_text("43")
    args = json.dumps({"doomed": str(tmp_path / "doomed"), "started": str(tmp_path / "started")})
    env = (f'rollout.env="{ENVIRONMENTS}Process-v0"', f"rollout.env_args={args}")
    run = train(tmp_path, 2, *env, "data.env_rows=4", "rollout.max_turns=3", "rollout.mode=fixed")
    assert len(rewards(run)) == 2 and sum(row.get("ungraded", 0) for row in run.history) > 0
    started = [int(pid) for pid in (tmp_path / "started").read_text().split()]
    assert len(started) >= 8 and not any(map(is_running, started))


def test_a_run_with_the_tools_of_a_server_goes_on_after_the_server_is_killed(tmp_path):
    (tmp_path / "rewards.py").write_text("def called(rollout):\n    return float(rollout.metadata['tool_calls'] > 0)\n")
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Where is tea?"}, {"prompt": "Where is salt?"}])
    server = f"mcp:{sys.executable} {SERVER} {tmp_path / 'pids'}"
    pids = lambda: [int(pid) for pid in (tmp_path / "pids").read_text().split()]  # noqa: E731

    def kill_after_the_first_step(step, metrics):
        if step == 1:
            os.kill(pids()[-1], signal.SIGKILL)

    tools = ("rollout.env=tools", f"rollout.tools={json.dumps([server])}", "rollout.max_turns=2", "rollout.stop=[]")
    rows = (f"data.train_files_path={tmp_path / 'rows.jsonl'}", f"reward.reward_func={tmp_path / 'rewards.py'}:called")
    engine = (f"inference_engine.name={CALLER}:ENGINE", "rollout.max_tokens=40", "data.max_seq_len=null")
    run = train(tmp_path, 3, *tools, *rows, *engine, callbacks=[kill_after_the_first_step])
    assert len(rewards(run)) == 3 and min(rewards(run)[0], rewards(run)[-1]) > 0
    assert sum(row["ungraded"] for row in run.history) > 0
    assert len(pids()) == 3 and not any(map(is_running, pids()))  # the check before the run, its start, its restart


def test_the_reward_of_an_environment_of_verifiers_rises(tmp_path):
    pytest.importorskip("verifiers")
    run = train(tmp_path, 10, f"rollout.env={VERIFIERS}")
    assert sum(rewards(run)[-3:]) > sum(rewards(run)[:3]) + 0.5
    assert run.history[-1]["reward_ends_with_a_vowel"] == rewards(run)[-1]


def test_a_task_of_reasoning_gym_is_trained_with_its_own_scorer(tmp_path):
    run = train(tmp_path, 2, "rollout.env=reasoning_gym:leg_counting", "data.env_rows=4", "rollout.n_samples=2")
    assert len(rewards(run)) == 2 and run.history[-1]["ungraded"] == 0


def test_a_run_stops_with_the_address_of_a_killed_server_and_resumes_exactly_when_it_is_back(tmp_path):
    pytest.importorskip("websockets")
    from tests.rollouts.openenv_server import served_by_a_process

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    doomed, url = tmp_path / "doomed", f"http://127.0.0.1:{port}"
    exact = (f"rollout.env=openenv:{url}", "rollout.max_turns=2", "rollout.mode=fixed", "rollout.slots=8")

    stops = pytest.raises(RuntimeError, match=f"could not be graded; the first failure: the server {url}")

    with served_by_a_process(port, doomed) as server:
        whole = train(tmp_path / "whole", 2, *exact)
        with stops:
            train(tmp_path / "parts", 2, *exact, callbacks=[lambda step, metrics: server.kill()])
    with served_by_a_process(port, doomed) as server:
        resumed = train(tmp_path / "parts", 2, *exact, resume=True)
        assert digests(resumed) == digests(whole) and len(digests(whole)) == 2
        doomed.touch()  # now in the middle of an episode
        with stops:
            train(tmp_path / "parts", 4, *exact, resume=True)
        assert server.wait() == -signal.SIGKILL


ACTING = """
model: {name: tiny-vlm, dtype: float32, freeze: nothing}
run: {training_gpus: 0}
train: {alg_name: grpo, lr: 1.0e-3, warmup_steps_ratio: 0, lr_scheduler: constant, weight_decay: 0}
rollout:
  env: "gym:tests.rollouts.example_environments:Line-v0"
  env_args: {show: [camera.image, mission], actions: {low: -1, high: 1, bins: 4, chunk: 2}}
  n_samples: 4
  max_tokens: 3
  max_turns: 3
  mode: fixed
  slots: 8
data: {env_rows: 4}
"""


def acted(folder: Path, steps: int, *overrides: str, resume: bool = False) -> RunResult:
    (folder / "acting.yaml").write_text(ACTING)
    sizes = [f"train.train_steps_per_epoch={steps}", "train.train_batch_size_per_gpu=4"]
    return train_run(load_config(folder / "acting.yaml", [*sizes, *overrides]), folder / "run", resume=resume)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_model_that_acts_from_pictures_resumes_exactly(tmp_path, algorithm):
    pytest.importorskip("PIL")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = acted(tmp_path / "whole", 2, f"train.alg_name={algorithm}")
    acted(tmp_path / "parts", 1, f"train.alg_name={algorithm}")
    resumed = acted(tmp_path / "parts", 2, f"train.alg_name={algorithm}", resume=True)
    assert digests(resumed) == digests(whole) and len(digests(whole)) == 2
    assert all(row["ungraded"] == 0 and row["logprob_gap"] < 1e-3 for row in whole.history if "logprob_gap" in row)
    assert any("logprob_gap" in row for row in whole.history)


def test_imitation_of_recorded_episodes_raises_the_success_in_the_environment(tmp_path):
    pytest.importorskip("PIL")
    (tmp_path / "acting.yaml").write_text(ACTING)
    asked = ["env", "record", str(tmp_path / "acting.yaml"), "--output", str(tmp_path / "line"), "--episodes", "12"]
    recorded = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert recorded == {"folder": str(tmp_path / "line"), "episodes": 12, "steps": 24}
    again = CliRunner().invoke(app, asked)
    assert again.exit_code == 2 and "exists; give another folder" in again.stderr
    data = f"data.train_files_path={tmp_path / 'line'}"
    actions = "data.actions={low: -1, high: 1, bins: 4, chunk: 2}"
    sft = ("train.alg_name=sft", data, actions, "data.env_rows=512")
    run = acted(tmp_path, 12, *sft)
    success = {}
    for name in ("tiny-vlm", str(run.folder)):
        asked = ["eval", name, "--env", str(tmp_path / "acting.yaml"), "--episodes", "6", "--json"]
        (result,) = json.loads(CliRunner().invoke(app, asked).stdout)["results"]
        success[name] = result["marks"]["success"]["reward"]["mean"]
    assert success["tiny-vlm"] < 0.5 and success[str(run.folder)] == 1.0


@pytest.fixture(scope="module")
def imitated(tmp_path_factory):
    """A run that was trained with the words "l" and "r" in the environment SIDES."""
    folder = tmp_path_factory.mktemp("imitated")
    given = {"actions": {"words": ["l", "r"]}}
    (folder / "sides").mkdir()
    write_episodes(folder / "sides" / "episodes.parquet", expert_steps(SIDES, Settings(given), 4))
    run = folder / "run"
    Trainer("tiny-vlm").train(algorithm="sft", data=folder / "sides", steps=1, batch_size=2, output=run, **given)
    return run


@pytest.mark.parametrize("model", [".", "checkpoints/step_0001"])
@pytest.mark.parametrize(("words", "warns"), [(["l", "r"], False), (["r", "l"], True)])
def test_a_run_warns_of_a_model_that_was_trained_with_other_actions(imitated, tmp_path, caplog, model, words, warns):
    config = check_config(
        {
            "model": {"name": str(imitated / model)},
            "train": {"alg_name": "grpo"},
            "rollout": {"env": f"gym:{SIDES}", "env_args": {"actions": {"words": words}}, "max_tokens": 2},
        }
    )
    resolve(config, tmp_path / "run")
    assert ("was trained with the actions" in caplog.text) == warns
