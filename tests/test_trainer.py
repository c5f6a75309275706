"""`Trainer`: its choices, its keywords and its result."""

import inspect
import json
import logging
import os
import re
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from oxrl import StopTraining, Tokens, Trainer, calculator, dialogue, gym_env, names, single_turn, weighted
from oxrl.algorithms import preference
from oxrl.cli.train import train as train_command
from oxrl.config import load_config
from oxrl.loops.callbacks import Callbacks
from oxrl.names import import_object, import_path_of, live_name, source_digest
from oxrl.rollouts.filters import keep_all
from oxrl.run.arguments import sections_of
from oxrl.tracking.metrics import read_metrics
from tests.large_model import write_large_model
from tests.rows import sums

PAIRS = [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(8)]
QUESTIONS = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(8)]
NOT_IN_PYTHON = {"config", "set_", "dry_run", "json_"}
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
    assert len(result.generate(["1 + 1?", "hello"], max_tokens=4)) == 2
    with pytest.warns(DeprecationWarning, match="max_new_tokens is now max_tokens"):
        result.generate("1 + 1?", max_new_tokens=4)
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


class PolarsFrame:
    """The part of a polars data frame that is used."""

    def to_dicts(self):
        return sums(4)


def test_rows_come_as_a_list_a_dataset_or_a_data_frame():
    import numpy
    import pandas
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(sums(4))
    for each in (rows, pandas.DataFrame(sums(4)), PolarsFrame(), iter(sums(4))):
        assert sections_of({"data": each}) == sections_of({"data": sums(4)})
    assert sections_of({"data": {"a": rows, "b": "b.jsonl"}}) == {
        "data": {"train_files_path": {"a": sections_of({"data": rows})["data"]["train_files_path"], "b": "b.jsonl"}}
    }
    frame = pandas.DataFrame([{"prompt": "1?", "tags": numpy.arange(2)}, {"prompt": "2?", "answer": "2"}])
    file = Path(sections_of({"data": frame})["data"]["train_files_path"])
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"prompt": "1?", "tags": [0, 1], "answer": None},
        {"prompt": "2?", "tags": None, "answer": "2"},
    ]
    with pytest.raises(ValueError, match=r"a list of rows \(dicts\), not int"):
        sections_of({"data": 5})
    with pytest.raises(ValueError, match=r"several splits or columns \(train\): .* data=dataset\['train'\]"):
        sections_of({"data": DatasetDict({"train": rows})})
    with pytest.raises(ValueError, match="row 1 of the data cannot be written as JSON: a value is a object"):
        sections_of({"data": [{"prompt": "a"}, {"prompt": object()}]})


@pytest.mark.trains
def test_a_task_sets_data_reward_and_algorithm_and_each_can_be_replaced():
    result = Trainer("tiny").train(task="math", data=QUESTIONS, steps=1, **SMALL)
    assert (result.config.train.alg_name, result.config.reward.reward_func) == ("sgrpo", "gsm8k_reward_func")
    assert result.config.train.train_batch_size_per_gpu == 2
    with pytest.raises(ValueError, match="geometry3k could not be loaded from the hub"):
        Trainer("tiny-vlm").train(task="vision")


def test_keywords_find_their_section():
    assert sections_of({"lr": 1e-4, "lora": True}) == {"train": {"lr": 1e-4}, "lora": {"enabled": True}}
    assert sections_of({"reward": {"contains": 1.0}}) == {"reward": {"reward_func": {"contains": 1.0}}}
    assert sections_of({"reward": {"clamp": [0, 1]}}) == {"reward": {"clamp": [0, 1]}}
    assert sections_of({"data": "gsm8k"}) == {"data": {"dataset": "gsm8k"}}
    assert sections_of({"rollout": {"lag": 1}, "n_samples": 4}) == {"rollout": {"lag": 1, "n_samples": 4}}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lrr": 1}, "lrr is neither an argument nor a key of the config; did you mean lr?"),
        ({"learning_rate": 1}, "did you mean lr?"),
        ({"per_device_train_batch_size": 1}, "did you mean batch_size?"),
        ({"train_dataset": []}, "did you mean data?"),
        ({"beta": 0.1}, "beta is a parameter of algorithms: pass it as alg_params={'beta': ...}"),
        ({"steps": "3"}, r"^steps \(train.train_steps_per_epoch\): Input should be a valid integer"),
        ({"rollout": 3}, "rollout is a section"),
        ({"lr": "fast"}, "train.lr"),
        ({"algorithm": "dppo"}, "did you mean"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
    ],
)
def test_invalid_keywords_are_reported_before_a_weight_is_loaded(keywords, message):
    with pytest.raises(ValueError, match=message) as error:
        Trainer("tiny").train(**{"algorithm": "sft", "data": sums(4), **keywords})
    assert "--" not in str(error.value), "arguments, not flags"


def test_a_function_of_a_script_is_known_while_the_process_runs():
    def local(rollout):
        return 1.0

    path = import_path_of(local)
    assert import_object(path) is local
    name = "tests.test_trainer.test_a_function_of_a_script_is_known_while_the_process_runs.<locals>.local"
    assert path.startswith(f"live:{name}@") and live_name(path) == "local"
    assert import_path_of(sums) == "tests.rows:sums"
    with pytest.raises(ValueError, match=r"move it to a file .* FILE\.py:forgotten"):
        import_object("live:__main__.forgotten@00000000")


def scaled(factor):
    def reward(rollout):
        return factor * len(rollout.tokens)

    return reward


def test_the_digest_of_a_function_is_that_of_its_source_and_of_what_it_holds():
    assert source_digest(scaled(1)) == source_digest(scaled(1)) != source_digest(scaled(2))
    assert source_digest(partial(by_length, 1)) != source_digest(partial(by_length, 2))
    assert source_digest(dialogue(by_length)) != source_digest(dialogue(scaled(1)))
    made = {}
    for text in ("return 1.0", "return 2.0"):
        exec(f"def at_a_prompt(rollout):\n    {text}", made)
        made[text] = source_digest(made["at_a_prompt"])
    assert made["return 1.0"] != made["return 2.0"], "without a source file, that of its code"


def test_python_objects_are_written_into_the_config_as_what_they_were():
    composed = weighted({"contains": 1.0})
    sections = sections_of(
        {"reward": {by_length: 1, "contains": 0.5}, "env": dialogue(by_length), "tools": [calculator], "filter": sums}
    )
    assert sections["reward"] == {"reward_func": {"tests.test_trainer:by_length": 1.0, "contains": 0.5}}
    assert re.fullmatch(r"live:oxrl.rollouts.envs.dialogue\(by_length\)@[0-9a-f]{8}", sections["rollout"].pop("env"))
    assert sections["rollout"] == {"tools": ["oxrl.rollouts.tools:calculator"], "filter": "tests.rows:sums"}
    assert sections_of({"tools": [calculator]})["rollout"]["env"] == "tools"
    assert sections_of({"reward": [by_length, "contains"]})["reward"]["reward_func"] == {
        "tests.test_trainer:by_length": 1.0,
        "contains": 1.0,
    }
    assert import_object(sections_of({"reward": composed})["reward"]["reward_func"]) is composed
    assert "dpo" in sections_of({"algorithm": preference.dpo})["train"]["alg_name"]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({scaled(1): 1.0, scaled(1.0): "much"}, "a weight is a number, not 'much'"),
        ([lambda rollout: 1.0, lambda rollout: 2.0], "two functions are called <lambda>; define each with `def`"),
        ({5: 1.0}, "5 is neither the name of a reward nor a function"),
        (5, "reward is a name, a function, a list of them or a mapping to weights, not int"),
    ],
)
def test_rewards_that_cannot_be_used_are_refused(reward, message):
    with pytest.raises(ValueError, match=message):
        sections_of({"reward": reward})


def right(prompts, completions, solution, **columns):
    """As for TRL's GRPOTrainer."""
    return [float(number in text[-1]["content"]) for text, number in zip(completions, solution, strict=True)]


def again(conversation, sample):
    return None if sample.answer in conversation.messages[-1].text else "Wrong. Once more."


@pytest.mark.trains
def test_a_run_with_rewards_and_a_game_of_a_script_is_resumed_with_them(caplog):
    def brief(rollout):
        return -len(rollout.tokens) / 100

    rows = [
        {"prompt": [{"role": "user", "content": f"{i} + 1?"}], "answer": str(i), "solution": str(i)} for i in range(4)
    ]
    env = dialogue(again, max_turns=2)
    given = {"reward": {right: 1.0, brief: 0.5}, "env": env, "filter": keep_all}
    result = Trainer("tiny").train(algorithm="grpo", data=rows, steps=1, output="run", **given, **SMALL)
    assert {"reward_right", "reward_brief"} <= result.history[0].keys()
    recorded = load_config("run/config.yaml")
    assert import_object(recorded.rollout.env) is env and set(recorded.reward.reward_func.values()) == {1.0, 0.5}

    before = dict(names._LIVE)
    names._LIVE.clear()  # as in another process
    try:
        with pytest.raises(ValueError, match=r"started with (reward=brief|env=dialogue\(again\)), .* pass \w+= again"):
            Trainer("tiny").train(output="run", resume=True, steps=2)
        with pytest.raises(ValueError, match=r"env=dialogue\(again\)"):
            Trainer("tiny").train(output="run", resume=True, steps=2, reward=given["reward"])

        def brief(rollout):  # another one
            return -len(rollout.tokens) / 50

        with caplog.at_level(logging.WARNING, "oxrl"):
            Trainer("tiny").train(output="run", resume=True, steps=2, reward={right: 1.0, brief: 0.5}, env=env)
        assert "another reward.reward_func" in caplog.text and "the source of the function has changed" in caplog.text
    finally:
        names._LIVE.update(before)


class Guess:
    """A game with Gymnasium's methods: the observation is the first thing that the model reads."""

    def __init__(self, sample):
        self.secret = sample.answer

    def reset(self, *, seed):
        return "I have a number from 0 to 9.", {}

    def step(self, action):
        return "no", float(self.secret in action), True, False, {}


@pytest.mark.trains
def test_a_game_that_scores_itself_needs_no_reward():
    result = Trainer("tiny").train(algorithm="grpo", data=QUESTIONS, env=gym_env(Guess), steps=1, output="run", **SMALL)
    assert 0 <= result.metrics["reward"] <= 1

    async def without_score(sample, policy):
        return await single_turn(sample, policy)

    with pytest.raises(RuntimeError, match="the environment gave no score, and no reward is set"):
        Trainer("tiny").train(algorithm="grpo", data=QUESTIONS, env=without_score, steps=1, **SMALL)


def one_number(tokens: Tokens):
    return -tokens.logprob.mean()


def of_nothing(x):
    return x


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"algorithm": "grpo", "reward": lambda a, b: 1.0}, r"takes \(a, b\); a reward takes one rollout"),
        (
            {"algorithm": "grpo", "reward": right},
            r"right\(prompts, completions, solution, \*\*columns\) takes the column",
        ),
        (
            {"algorithm": "grpo", "env": lambda sample: None, "reward": by_length},
            r"takes \(sample\); an environment takes",
        ),
        ({"algorithm": of_nothing}, r"of_nothing\(x\): annotate its first argument with Pairs .* Tokens"),
        ({"callbacks": print}, "callbacks is a list"),
        ({"callbacks": [lambda step: None]}, r"takes \(step\); it is called with \(step, metrics\)"),
        ({"logger": 5}, "5 is no logger"),
        ({"filter": lambda: True, "algorithm": "grpo", "reward": by_length}, "takes no argument; a filter takes"),
    ],
)
def test_functions_that_do_not_fit_are_refused_with_their_signature_and_leave_no_folder(keywords, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        Trainer("tiny").train(**{"algorithm": "sft", "data": QUESTIONS, **keywords})
    assert "--" not in str(error.value) and not (tmp_path / "checkpoints").exists()


def focal(tokens: Tokens, *, gamma: float = 2.0):
    return -((1 - tokens.logprob.exp()) ** gamma) * tokens.logprob


@pytest.mark.trains
def test_a_loss_of_ones_own_over_tokens_trains():
    first, second = (
        Trainer("tiny").train(algorithm=loss, data=sums(8), steps=1, **params).history[0]
        for loss, params in (("sft", {}), (focal, {"alg_params": {"gamma": 0.0}}))
    )
    assert second["loss"] == pytest.approx(first["loss"]), "with gamma 0 it is the likelihood"
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)


@pytest.mark.trains
def test_a_run_with_a_loss_of_a_script_is_resumed_with_another_version_of_it(caplog):
    def loss(tokens: Tokens):
        return -tokens.logprob

    Trainer("tiny").train(algorithm=loss, data=sums(8), steps=1, output="run")

    def loss(tokens: Tokens):
        return -2 * tokens.logprob

    with caplog.at_level(logging.WARNING, "oxrl"):
        Trainer("tiny").train(algorithm=loss, output="run", resume=True, steps=2)
    assert "another train.alg_name" in caplog.text and "the source of the function has changed" in caplog.text
    with pytest.raises(ValueError, match="cannot be resumed with 'tests.test_trainer:focal'"):
        Trainer("tiny").train(algorithm=focal, output="run", resume=True, steps=3)


@pytest.mark.trains
def test_a_loss_that_returns_a_mean_is_refused():
    with pytest.raises(ValueError, match=r"one_number returned a tensor of shape \[\]; return one number per pair"):
        Trainer("tiny").train(algorithm=one_number, data=sums(8), steps=1)


def test_arguments_of_the_command_line_are_arguments_of_python(caplog):
    flags = {parameter for parameter in inspect.signature(train_command).parameters if parameter not in NOT_IN_PYTHON}
    for flag in flags - {"data", "val", "output", "resume", "model"}:
        assert sections_of({flag: flag if flag != "lora" else True}), flag
    with caplog.at_level(logging.INFO, "oxrl"):
        Trainer("tiny").plan(algorithm="sft", data=sums(8), batch_size=2, lr=1e-4)
    assert "batch_size is train.train_batch_size_per_gpu" in caplog.text and "lr is" not in caplog.text


class Recorder:
    def __init__(self):
        self.seen = []

    def on_start(self, run):
        self.seen.append(("start", run.num_steps))

    async def on_step(self, step, metrics):
        self.seen.append(("step", step, metrics["loss"] > 0))

    def on_evaluate(self, step, metrics):
        self.seen.append(("evaluate", step, "eval_loss" in metrics))
        if step == 2:
            raise StopTraining("good enough")

    def on_save(self, step, folder):
        self.seen.append(("save", step, (folder / "model.safetensors").exists()))

    def on_end(self, result):
        self.seen.append(("end", result.history[-1]["step"]))


@pytest.mark.trains
def test_callbacks_see_every_event_of_a_run_and_can_stop_it(caplog):
    recorder, steps, logged = Recorder(), [], []
    with caplog.at_level(logging.INFO, "oxrl"):
        result = Trainer("tiny", callbacks=[recorder, lambda step, metrics: steps.append(step)]).train(
            algorithm="sft", data=sums(8), val=sums(4), steps=5, eval_every=2, log_every=2, output="run",
            logger=lambda step, metrics: logged.append(step),
        )  # fmt: skip
    assert recorder.seen == [
        ("start", 5),
        ("step", 1, True),
        ("evaluate", 2, True),
        ("step", 2, True),
        ("save", 2, True),
        ("end", 2),
    ]
    assert steps == [1, 2] and logged == [0, 2], "callbacks see every step, loggers those that are logged"
    assert "Recorder.on_evaluate stops the run: good enough" in caplog.text
    assert result.best_checkpoint.name == "step_0002"


@pytest.mark.trains
def test_an_exception_in_a_callback_ends_the_run_with_its_name():
    def broken(step, metrics):
        raise KeyError("lost")

    with pytest.raises(RuntimeError, match=r"the callback .*broken failed: KeyError: 'lost'"):
        Trainer("tiny").train(algorithm="sft", data=sums(8), steps=3, callbacks=[broken])
    with pytest.raises(RuntimeError, match=r"the logger .*broken failed: KeyError: 'lost'"):
        Trainer("tiny").train(algorithm="sft", data=sums(8), steps=3, logger=broken)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            type("Odd", (), {"on_steps": print}),
            "Odd has the method on_steps, which is not called; did you mean on_step?",
        ),
        (5, "5 is not a callback"),
    ],
)
def test_a_callback_that_would_never_be_called_is_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Callbacks([given])


def test_the_same_keywords_plan_and_train():
    trainer = Trainer("tiny")
    plan = trainer.plan(algorithm="sft", data=sums(8), steps=3)
    assert plan.steps == 3 and plan.fits and plan.rows.items == 8


@pytest.mark.trains
def test_an_interrupt_has_the_call_that_resumes_the_run(tmp_path):
    once = threading.Lock()  # a second interrupt would end the process of the tests

    def interrupting(rollout):
        # It is also tried before the run.
        if (tmp_path / "run" / "config.yaml").exists() and once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        return by_length(rollout)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        Trainer("tiny").train(algorithm="grpo", data=QUESTIONS, reward=interrupting, output="run", steps=3, **SMALL)
    call = f"Trainer('tiny').train(output='{tmp_path / 'run'}', resume=True)"
    assert str(interrupted.value) == f"interrupted; resume with: {call}"
    assert len(Trainer("tiny").train(output="run", resume=True, reward=by_length).history) == 3
