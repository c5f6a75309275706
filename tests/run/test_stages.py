"""From SFT to RL in one run, as the config's sections define; and models as rewards."""

import json
import random
import re
import shutil

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import ConfigError, load_config, load_stages
from oxrl.models.builtin import prepare_builtin
from oxrl.run.folder import record_config, record_stages, recorded_stages, resolve_weights
from oxrl.run.prepare import prepare_run, prepare_stages
from oxrl.run.train import run_rl, run_sft, train_run, train_spec
from oxrl.tracking.metrics import read_metrics
from oxrl.types import TrainingState
from tests.rows import sums, write_jsonl

YAML = """
model: {{name: tiny}}
sft:
  data: {{train_files_path: {rows}}}
  train: {{lr: 2e-3, train_steps_per_epoch: 4}}
rl:
  data: {{train_files_path: {rows}}}
  train: {{alg_name: grpo, lr: 1e-3, train_steps_per_epoch: 2, train_batch_size_per_gpu: 2}}
  reward: {{reward_func: length_target, params: {{target: 3}}}}
  rollout: {{n_samples: 2, max_tokens: 4}}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(YAML.format(rows=write_jsonl(tmp_path / "rows.jsonl", sums(16))))
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_sections_define_the_stages(config):
    assert list(load_stages(config)) == ["sft", "rl"]
    text = config.read_text()
    config.write_text(text[: text.index("rl:")])
    assert list(load_stages(config)) == ["sft"]
    assert load_stages(None, ["model.name=tiny", "data.train_files_path=x"])[""].train.alg_name == "sgrpo"


def test_shared_settings_apply_to_each_stage_unless_it_overrides_them(config):
    config.write_text(config.read_text() + "train: {weight_decay: 0.5, lr: 1.0}\n")
    stages = load_stages(config)
    assert [stage.train.weight_decay for stage in stages.values()] == [0.5, 0.5]
    assert [stage.train.lr for stage in stages.values()] == [2e-3, 1e-3]


def test_a_mistake_in_a_stage_is_reported_with_its_line(config):
    config.write_text(config.read_text().replace("n_samples", "n_sample"))
    with pytest.raises(ConfigError, match=r"line 10: rollout.n_sample is not a key; did you mean n_samples\?"):
        load_stages(config)


@pytest.mark.trains
def test_rl_starts_from_the_latest_checkpoint_of_sft(config, tmp_path):
    done = run("train", config, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out/sft/checkpoints/step_0004").is_dir()
    assert (tmp_path / "out/rl/checkpoints/step_0002").is_dir()
    assert len(read_metrics(tmp_path / "out/rl/metrics.jsonl")) == 2
    resolved = (tmp_path / "out/rl/config.yaml").read_text()
    assert "sft/checkpoints/step_0004" in resolved
    again = run("train", "--output", tmp_path / "out", "--resume")
    assert again.exit_code == 0 and "nothing was left to do" in again.output
    assert str(tmp_path / "out/rl/checkpoints/step_0002") in "".join(again.output.split())
    longer = run("train", "--output", tmp_path / "out", "--resume", "--set", "rl.train.train_steps_per_epoch=3")
    assert longer.exit_code == 0 and (tmp_path / "out/rl/checkpoints/step_0003").is_dir()


@pytest.fixture
def between(config, tmp_path):
    """A run whose first stage is finished, and whose second one has not started."""
    stages, out = load_stages(config), tmp_path / "out"
    record_stages(stages, out)
    folder = shutil.copytree(prepare_builtin("tiny"), out / "sft/checkpoints/step_0004")
    record_config(stages["sft"], out / "sft/config.yaml", resuming=False)
    state = {**TrainingState(step=4, cursor={"finished": True})._asdict(), "environment": {}}
    (folder / "training_state.json").write_text(json.dumps(state))
    return out


def resumed(out, *overrides):
    return next(prepare_stages(recorded_stages(out, overrides), out, resume=True))


def test_a_resumed_run_with_stages_applies_flags_to_stages_that_are_left(between):
    assert resumed(between, "train.lr=0.25").config.train.lr == 0.25
    assert [stage.train.lr for stage in recorded_stages(between).values()] == [2e-3, 0.25]
    assert resumed(between, "rl.train.lr=0.5").config.train.lr == 0.5


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("nonsense.key=1", "nonsense is not a key"),
        ("train.alg_name=ppo", "train.alg_name is set per stage"),
        ("rl.train.alg_name=nonsense", "nonsense"),
        ("sft.train.lr=1", "the stage sft .* is finished, so its train.lr cannot be changed"),
        ("model.name=smollm2-135m", "the stage sft .* is finished, so its model.name cannot be changed"),
    ],
)
def test_a_resumed_run_with_stages_refuses_flags_that_it_cannot_apply(between, flag, message):
    recorded = (between / "stages.yaml").read_bytes()
    done = run("train", "--output", between, "--resume", "--set", flag)
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split()))
    assert (between / "stages.yaml").read_bytes() == recorded


def test_a_run_that_is_refused_leaves_the_stages_of_the_run_that_is_there(config, tmp_path):
    record_stages(load_stages(config), tmp_path)
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="already has a run"):
        next(prepare_stages(load_stages(config, ["train.lr=0.5"]), tmp_path))
    assert recorded_stages(tmp_path) == load_stages(config)


def test_a_mistake_in_the_second_stage_is_found_before_the_first_one_trains(config, tmp_path):
    config.write_text(config.read_text().replace("length_target", "length_targe"))
    done = run("train", config, "--output", tmp_path / "out")
    assert done.exit_code == 2 and "did you mean length_target" in done.output
    assert not (tmp_path / "out/sft/metrics.jsonl").exists()


@pytest.mark.trains
def test_a_run_that_stopped_between_its_stages_is_resumed_with_the_next(config, tmp_path):
    stages = load_stages(config)
    first = run_sft(stages["sft"], tmp_path / "out")
    record_stages(stages, tmp_path / "out")
    done = run("train", "--output", tmp_path / "out", "--resume")
    assert done.exit_code == 0, done.output
    assert recorded_stages(tmp_path / "out") == stages
    assert len(first.history) == 4 and (tmp_path / "out/rl/checkpoints/step_0002").is_dir()


@pytest.mark.trains
def test_rl_starts_from_any_checkpoint(config, tmp_path):
    stages = load_stages(config)
    source = run_sft(stages["sft"], tmp_path / "one").checkpoint
    result = run_rl(stages["rl"], tmp_path / "two", source_checkpoint=source)
    assert result.folder == tmp_path / "two/rl" and len(result.history) == 2


def random_texts(characters, count):
    rng = random.Random(0)
    return ["".join(rng.choices(characters, k=4)) for _ in range(count)]


def online(tmp_path, **sections):
    raw = {
        "model": {"name": "tiny"},
        "data": {
            "train_files_path": str(write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"say {i}"} for i in range(8)]))
        },
        "train": {"lr": 1e-3, "train_steps_per_epoch": 2, "train_batch_size_per_gpu": 2},
        "rollout": {"n_samples": 4, "max_tokens": 4},
    }
    for name, keys in sections.items():
        raw[name] = {**raw.get(name, {}), **keys}
    file = tmp_path / "online.yaml"
    file.write_text(json.dumps(raw))
    return file


@pytest.mark.trains
def test_rlhf_learns_from_a_reward_model_that_rm_trained(tmp_path):
    """The policy generates letters and digits, the reward model prefers letters: their share rises."""
    mixed, letters, digits = (random_texts(each, 64) for each in ("abcdefgh01234567", "abcdefgh", "01234567"))
    rows = [{"prompt": f"say {i}", "response": text} for i, text in enumerate(mixed)]
    pairs = [{"prompt": f"say {i}", "chosen": letters[i], "rejected": digits[i]} for i in range(64)]
    for name, data in (("sft", rows), ("rm", pairs)):
        file = write_jsonl(tmp_path / f"{name}.jsonl", data)
        trained = run(
            "train", "--model", "tiny", "--algorithm", name, "--data", file, "--output", tmp_path / name,
            "--epochs", 6, "--lr", 3e-3,
        )  # fmt: skip
        assert trained.exit_code == 0, trained.output
    config = online(
        tmp_path,
        model={"name": str(tmp_path / "sft")},
        train={"alg_name": "rlhf", "train_steps_per_epoch": 16, "train_batch_size_per_gpu": 8},
        reward={"model": str(tmp_path / "rm")},
        rollout={"n_samples": 8, "max_tokens": 8, "log_samples": 64},
    )
    done = run("train", config, "--output", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    samples = [json.loads(line)["samples"] for line in (tmp_path / "out/rollouts.jsonl").read_text().splitlines()]
    shares = [_share_of_letters([each["response"] for each in step]) for step in samples]
    assert shares[0] < 0.7 and shares[-1] > shares[0] + 0.2
    rewards = [line["reward"] for line in read_metrics(tmp_path / "out/metrics.jsonl")]
    assert rewards[-1] > rewards[0]


def _share_of_letters(texts):
    together = "".join(texts)
    return sum(character in "abcdefgh" for character in together) / max(1, len(together))


@pytest.mark.trains
def test_rlaif_uses_a_local_model_as_its_judge(tmp_path):
    """A judge that was trained to end with a score is used; an untrained one grades nothing."""
    judge = online(tmp_path, train={"alg_name": "rlaif"}, reward={"judge": "tiny"})
    done = run("train", judge, "--output", tmp_path / "untaught")
    assert done.exit_code == 1 and "could not be graded" in done.output
    from oxrl.rewards.judge import RUBRIC, judge_messages
    from oxrl.types import Generation, Message, Rollout, Sample, Turn

    def lesson(number):
        text = "abcdefgh"[number % 8] * 4
        turn = Turn((1,), Generation((2,), (-1.0,), "stop", text=text), (Message("assistant", text),))
        rollout = Rollout(Sample("s", (Message("user", f"say {number % 8}"),)), (turn,))
        prompt = [message.to_dict() for message in judge_messages(rollout, RUBRIC, (0, 10))]
        return {"messages": [*prompt, {"role": "assistant", "content": "Score: 7"}]}

    lessons = write_jsonl(tmp_path / "lessons.jsonl", [lesson(number) for number in range(32)])
    taught = run(
        "train", "--model", "tiny", "--algorithm", "sft", "--data", lessons, "--output", tmp_path / "judge",
        "--epochs", 8, "--lr", 3e-3,
    )  # fmt: skip
    assert taught.exit_code == 0, taught.output
    config = online(tmp_path, train={"alg_name": "rlaif"}, reward={"judge": str(tmp_path / "judge")})
    done = run("train", config, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert [line["reward"] for line in read_metrics(tmp_path / "out/metrics.jsonl")] == pytest.approx([0.7, 0.7])


LENGTH = {"reward": {"reward_func": "length_target", "params": {"target": 3}}}


@pytest.mark.parametrize(
    ("name", "sections", "message"),
    [
        ("grpo", {}, "grpo learns from rewards: set reward to a name"),
        ("rlhf", {"reward": {"reward_func": "contains"}}, "graded by a reward model: set reward.model"),
        ("rlaif", {}, "graded by a judge: set reward.judge"),
        ("grpo", {"reward": {"reward_func": "contains", "judge": "tiny"}}, "reward_func and judge are set"),
        ("grpo", {"reward": {"reward_func": "number_match"}}, "answer"),
        ("grpo", {**LENGTH, "inference_engine": {"name": "http", "urls": ["localhost"]}}, "http://"),
        (
            "grpo",
            {**LENGTH, "inference_engine": {"name": "http", "urls": ["http://127.0.0.1:9"]}},
            "no healthy server",
        ),
        ("grpo", {"reward": {"reward_func": "length_target"}}, "target"),
        ("grpo", {**LENGTH, "rollout": {"n_samples": 1}}, "compares at least 2 completions"),
        ("grpo", {**LENGTH, "rollout": {"env": "tools"}}, "needs rollout.tools"),
        ("grpo", {**LENGTH, "rollout": {"max_tokens": 4000}}, "leaves room for rollout.max_tokens=4000"),
        ("grpo", {**LENGTH, "rollout": {"filter": "check_min"}}, "unknown filter 'check_min'"),
        ("reinforce", {**LENGTH, "train": {"iterations": 2}}, "one optimizer step per batch"),
        ("spin", {"reward": {"reward_func": "length_target"}}, "target"),
        (
            "online_dpo",
            {"model": {"ref_update": "ema", "ref_model": "tiny"}, "lora": {"enabled": True}},
            "cannot follow an adapter",
        ),
    ],
)
def test_invalid_settings_are_reported_before_a_weight_is_loaded(tmp_path, name, sections, message):
    sections = {**sections, "train": {"alg_name": name, **sections.get("train", {})}}
    done = run("train", online(tmp_path, **sections), "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "out/metrics.jsonl").exists()


@pytest.mark.trains
def test_spin_needs_a_reward_for_held_out_rows_and_evaluates_with_it(tmp_path):
    rows = str(write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": f"say {i}", "response": "a"} for i in range(8)]))
    spin = {"data": {"train_files_path": rows, "val_files_path": rows}, "train": {"alg_name": "spin"}}
    refused = run("train", online(tmp_path, **spin), "--output", tmp_path / "out")
    assert (refused.exit_code, "leave data.val_files_path out" in " ".join(refused.output.split())) == (2, True)
    assert run("train", online(tmp_path, **spin, **LENGTH), "--output", tmp_path / "out").exit_code == 0
    assert "eval_reward" in (tmp_path / "out/metrics.jsonl").read_text()


@pytest.mark.trains
def test_with_lora_a_moving_reference_is_a_second_adapter(tmp_path):
    def trained(update, **keys):
        model = {"ref_update": update, **keys}
        config = online(tmp_path, model=model, lora={"enabled": True, "r": 4}, train={"alg_name": "spin"})
        write_jsonl(tmp_path / "p.jsonl", sums(8))
        done = run("train", config, "--output", tmp_path / update)
        assert done.exit_code == 0, done.output
        return tmp_path / update / "checkpoints/step_0002"

    fixed, ema, periodic = trained("fixed"), trained("ema", ref_decay=0.5), trained("periodic", ref_every=1)
    files = {folder: {file.name for file in folder.rglob("*")} for folder in (fixed, ema, periodic)}
    assert files[ema] == files[periodic] == files[fixed] | {"reference.safetensors"}
    policy = load_file(periodic / "adapter_model.safetensors")
    copied, averaged = (load_file(folder / "reference.safetensors") for folder in (periodic, ema))
    assert len(copied) == len(averaged) == len(policy) == 28
    for key, weight in copied.items():
        assert weight.equal(policy[key.replace(".ref.", ".")]), key
    assert any(weight.abs().max() > 0 for key, weight in averaged.items() if "lora_B" in key)


@pytest.mark.trains
def test_the_folder_of_a_run_in_stages_refers_to_its_last_stage(config, tmp_path):
    assert run("train", config, "--output", tmp_path / "run").exit_code == 0
    assert resolve_weights(str(tmp_path / "run")) == str(tmp_path / "run" / "rl" / "checkpoints" / "step_0002")
    drawn = run("plot", tmp_path / "run")
    assert drawn.exit_code == 0 and "steps 1 to 2" in drawn.output


def test_the_command_line_overrides_every_stage(config):
    stages = load_stages(config, ["train.lr=0.5", "rl.train.train_steps_per_epoch=7"])
    assert [stage.train.lr for stage in stages.values()] == [0.5, 0.5]
    assert [stage.train.train_steps_per_epoch for stage in stages.values()] == [4, 7]
    graded = load_stages(config, ["reward.reward_func=contains", "reward.params={}"])
    assert (graded["sft"].reward.reward_func, graded["rl"].reward.reward_func) == (None, "contains")
    with pytest.raises(ConfigError, match="train.alg_name is set per stage"):
        load_stages(config, ["train.alg_name=ppo"])


@pytest.mark.trains
def test_a_run_that_continued_while_another_was_prepared_is_not_changed(tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", sums(16))
    single = load_config(None, ["model.name=tiny", "train.alg_name=sft", f"data.train_files_path={data}"])
    late = prepare_run(single, tmp_path / "run")
    train_run(single, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="continued while this one was prepared"):
        train_spec(late)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
