"""`Trainer`: its choices, its keywords and its result."""

import json
import os
import signal

import pytest

from oxrl import Trainer
from oxrl.config import load_config
from oxrl.names import import_object, import_path_of
from oxrl.tracking.metrics import read_metrics
from oxrl.trainer import sections_of
from tests.large_model import write_large_model
from tests.rows import sums

PAIRS = [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(8)]
QUESTIONS = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(8)]
SMALL = {"n_samples": 2, "max_tokens": 4, "train_batch_size_per_gpu": 2}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def by_length(rollout):
    return float(len(rollout.tokens))


@pytest.mark.trains
@pytest.mark.parametrize(
    ("algorithm", "rows", "more"),
    [
        ("sft", sums(8), {}),
        ("dpo", PAIRS, {}),
        ("rm", PAIRS, {}),
        ("grpo", QUESTIONS, {**SMALL, "reward": by_length}),
        ("ppo", QUESTIONS, {**SMALL, "reward": "contains"}),
    ],
)
def test_it_trains_by_supervised_preference_and_reinforcement_learning(algorithm, rows, more):
    result = Trainer("tiny", lr=1e-3).train(algorithm=algorithm, data=rows, steps=2, output="run", **more)
    assert [row["step"] for row in result.history] == [1, 2]
    assert (result.best_checkpoint / "model.safetensors").exists()
    recorded = load_config("run/config.yaml")
    assert recorded == result.config and recorded.train.alg_name == algorithm and recorded.train.lr == 1e-3
    shown = repr(result)
    assert shown.startswith("TrainingResult(step 2  ") and shown.endswith(f"folder={str(result.folder)!r})")
    assert len(shown) < 100 + len(str(result.folder))


@pytest.mark.trains
def test_its_choices_have_reasons_and_are_in_the_config_of_the_run(tmp_path):
    (tmp_path / "checkpoints" / "run").mkdir(parents=True)
    (tmp_path / "checkpoints" / "run" / "metrics.jsonl").touch()
    result = Trainer("tiny").train(algorithm="sft", data=sums(8), steps=1)
    assert result.folder == tmp_path / "checkpoints" / "run-2", "a new run gets a new folder"
    chosen = {choice.key: choice for choice in result.choices}
    assert chosen.keys() == {"model.device", "lora.enabled", "model.gradient_checkpointing", "train.micro_batch_tokens"}
    assert chosen["lora.enabled"].value is False and "million parameters" in chosen["lora.enabled"].why
    assert result.config.train.micro_batch_tokens == chosen["train.micro_batch_tokens"].value


@pytest.mark.trains
def test_what_the_user_sets_is_not_chosen():
    result = Trainer("tiny", micro_batch_tokens=333, lora={"r": 4, "enabled": True}).train(
        algorithm="sft", data=sums(8), steps=1, gradient_checkpointing=True
    )
    assert [choice.key for choice in result.choices] == ["model.device"]
    config = result.config
    assert (config.train.micro_batch_tokens, config.model.gradient_checkpointing) == (333, True)
    assert (config.lora.enabled, config.lora.r) == (True, 4)


def test_a_large_model_gets_an_adapter_by_its_config_and_not_by_its_name(tmp_path):
    folder = write_large_model(tmp_path / "small-1b")
    with pytest.raises(ValueError, match="does not fit on cpu") as error:
        Trainer(folder).plan(algorithm="sft", data=sums(8), lora=False)
    assert "use LoRA" in str(error.value)
    frugal = {"dtype": "bfloat16", "micro_batch_tokens": 256, "gradient_checkpointing": True}
    plan = Trainer(folder).plan(algorithm="sft", data=sums(8), **frugal)
    assert "LoRA" in plan.tuning and plan.facts.parameters == pytest.approx(8.09e9, rel=0.01)


@pytest.mark.trains
def test_the_result_generates_evaluates_and_saves():
    result = Trainer("tiny").train(
        algorithm="grpo", data=QUESTIONS, val=QUESTIONS[:4], reward="contains", steps=1, output="run", **SMALL
    )
    assert len(result.generate(["1 + 1?", "hello"], max_new_tokens=4)) == 2
    marks = result.evaluate(max_tokens=4).to_dict()
    assert json.dumps(marks) and result.metrics["eval_reward"] >= 0
    assert (result.save("model") / "model.safetensors").exists()
    with pytest.raises(ValueError, match="HF_TOKEN"):
        result.push("someone/model")


def test_a_folder_with_a_run_is_refused_in_the_words_of_python(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    trainer = Trainer("tiny", algorithm="sft", data=sums(8))
    with pytest.raises(ValueError, match="run already has a run: pass resume=True .* another output") as error:
        trainer.train(output="run")
    assert "--" not in str(error.value)
    with pytest.raises(ValueError, match="resume=True needs output="):
        trainer.train(resume=True)


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="no assistant turn|response"):
        Trainer("tiny").train(algorithm="sft", data=QUESTIONS)
    with pytest.raises(ValueError, match="response"):
        Trainer("tiny").train(algorithm="sft", data=QUESTIONS, output="run")
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "run").exists()


@pytest.mark.trains
def test_a_run_is_resumed_in_its_folder():
    first = Trainer("tiny").train(algorithm="sft", data=sums(16), output="run", epochs=1)
    assert len(first.history) == 2
    again = Trainer("tiny").train(output="run", resume=True)
    assert again.metrics == first.metrics, "nothing was left to do"
    Trainer("tiny").train(output="run", epochs=2, resume=True)
    assert [row["step"] for row in read_metrics(first.folder / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.trains
@pytest.mark.parametrize(
    ("model", "keywords", "message"),
    [
        ("smollm2-135m", {}, "model.name 'tiny' and cannot be resumed"),
        ("tiny", {"algorithm": "cpt"}, "train.alg_name 'sft' and cannot be resumed"),
        ("tiny", {"data": sums(16, first=50)}, "data"),
    ],
)
def test_what_cannot_change_in_a_run_is_refused_when_it_is_resumed(model, keywords, message):
    Trainer("tiny").train(algorithm="sft", data=sums(16), output="run", steps=1)
    with pytest.raises(ValueError, match=message):
        Trainer(model).train(output="run", resume=True, steps=2, **keywords)


@pytest.mark.trains
def test_a_plan_can_be_made_beside_a_run():
    trainer = Trainer("tiny", algorithm="sft", data=sums(8))
    trainer.train(steps=1)
    assert trainer.plan(steps=1).steps == 1


def test_rows_come_as_a_list_a_dataset_or_a_data_frame():
    import pandas
    from datasets import Dataset

    for rows in (Dataset.from_list(sums(4)), pandas.DataFrame(sums(4))):
        assert sections_of({"data": rows}) == sections_of({"data": sums(4)})
    with pytest.raises(ValueError, match=r"a list of rows \(dicts\), not int"):
        sections_of({"data": 5})


@pytest.mark.trains
def test_a_task_sets_data_reward_and_algorithm_and_each_can_be_replaced():
    result = Trainer("tiny").train(task="math", data=QUESTIONS, steps=1, **SMALL)
    assert (result.config.train.alg_name, result.config.reward.reward_func) == ("sgrpo", "gsm8k_reward_func")
    assert result.config.train.train_batch_size_per_gpu == 2
    with pytest.raises(ValueError, match="the task vision is not supported yet"):
        Trainer("tiny").train(task="vision")


def test_keywords_find_their_section():
    assert sections_of({"lr": 1e-4, "lora": True}) == {"train": {"lr": 1e-4}, "lora": {"enabled": True}}
    assert sections_of({"reward": {"contains": 1.0}}) == {"reward": {"reward_func": {"contains": 1.0}}}
    assert sections_of({"reward": {"clamp": [0, 1]}}) == {"reward": {"clamp": [0, 1]}}
    assert sections_of({"data": "gsm8k"}) == {"data": {"dataset": "gsm8k"}}
    assert sections_of({"rollout": {"lag": 1}, "n_samples": 4}) == {"rollout": {"lag": 1, "n_samples": 4}}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lrr": 1}, "no key of the config is called lrr; did you mean lr?"),
        ({"learning_rate": 1}, "did you mean lr?"),
        ({"batch_size": 1}, "did you mean train_batch_size_per_gpu?"),
        ({"rollout": 3}, "rollout is a section"),
        ({"lr": "fast"}, "train.lr"),
        ({"algorithm": "dppo"}, "did you mean"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
    ],
)
def test_invalid_keywords_are_reported_before_a_weight_is_loaded(keywords, message):
    with pytest.raises(ValueError, match=message):
        Trainer("tiny").train(**{"algorithm": "sft", "data": sums(4), **keywords})


def test_a_function_of_a_script_is_known_while_the_process_runs():
    def local(rollout):
        return 1.0

    assert import_object(import_path_of(local)) is local
    assert import_path_of(sums) == "tests.rows:sums"
    with pytest.raises(ValueError, match=r"move it to a file .* FILE\.py:forgotten"):
        import_object("live:forgotten")


def test_the_same_keywords_plan_and_train():
    trainer = Trainer("tiny")
    plan = trainer.plan(algorithm="sft", data=sums(8), steps=3)
    assert plan.steps == 3 and plan.fits and plan.rows.items == 8


@pytest.mark.trains
def test_an_interrupt_has_the_call_that_resumes_the_run(tmp_path):
    def interrupting(rollout):
        if (tmp_path / "run" / "config.yaml").exists():  # it is also tried before the run
            os.kill(os.getpid(), signal.SIGINT)
        return by_length(rollout)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        Trainer("tiny").train(algorithm="grpo", data=QUESTIONS, reward=interrupting, output="run", steps=3, **SMALL)
    call = f"Trainer('tiny').train(output='{tmp_path / 'run'}', resume=True)"
    assert str(interrupted.value) == f"interrupted; resume with: {call}"
    assert len(Trainer("tiny").train(output="run", resume=True, reward=by_length).history) == 3
