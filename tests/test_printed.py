"""What earlier designs of oxRL printed works here: signatures, configs and snippets; differences are listed and proven.

Model names, paths and sizes are adapted, nothing else. Snippets of the loops are in tests/run/test_loops.py and
tests/rollouts/test_recorded.py, those of the primitives in tests/primitives/test_printed_primitives.py.
"""

import ast
import inspect
import json
import runpy
import sys
from pathlib import Path

import pytest

import oxrl
from docs.differences import PAGE, differences, page
from oxrl.concurrency import run_blocking
from oxrl.models.load import load_model, load_tokenizer
from oxrl.tracking.metrics import read_metrics

ROOT = Path(__file__).parents[1]

CALLS = """
run_sft_training(backend, samples, config, metrics_logger=None)
run_rl_training(backend, data_buffer, rollout_manager, inference_engines, config, metrics_logger=None)
generate_rollout_batches(data_buffer, config, anything=1)
RolloutConfig(batch_size=4, n_samples_per_prompt=1, over_sampling_factor=1.0)
RolloutConfig(batch_size=4, generate_fn=None, reward_fn=None, filter_fn=None)
RolloutBatch(tokens=[], loss_masks=[], rewards=[], response_lengths=[], metadata={})
SFTTrainingConfig(num_steps=1, batch_size=1, log_every=1, checkpoint_every=0)
RLTrainingConfig(num_steps=1, sync_every=1, baseline=0.0, log_every=1, checkpoint_every=0)
AsyncRolloutManager(data_buffer, config)
AsyncRolloutManager.generate_batch(manager, reward_fn=None)
PyTorchTrainingBackend.forward_backward(backend, batch)
PyTorchTrainingBackend.optim_step(backend)
PyTorchTrainingBackend.get_weights(backend)
PyTorchTrainingBackend.load_weights(backend, weights)
grpo_loss(logits, labels, loss_mask, advantages)
ppo_loss(logits, labels, loss_mask, advantages, old_log_probs, clip_range=0.2)
SGLangEngine.update_weights_from_checkpoint(engine, checkpoint_path)
VLLMEngine.update_weights_from_checkpoint(engine, checkpoint_path)
sync_weights_to_engines(engines, checkpoint_path)
prepare_grpo_batch(samples, rewards)
compute_advantages(rewards, baseline)
compute_reward(rollout, reward_fn)
create_rollout(model, tokenizer, prompt, gen_config, ref_model=None, reward_fn=None, tool_parser=None)
generate(model, tokenizer, prompt, config, generator=None)
compute_forward_kl(logprobs, ref_logprobs, kl_fn=None)
compute_grpo_loss(batch, advantages, loss_fn=None)
create_truncated_kl(threshold=1.0)
create_adaptive_kl(confidence_threshold=0.1)
create_algorithm_config("grpo", {"kl_coef": 0.2})
create_ema_updater(decay=0.999)
create_periodic_updater(update_every=10)
create_multiturn_rollout(model, tokenizer, conversation, gen_config, tool_parser=1, tool_executor=1, stop_condition=1)
create_multiturn_rollout(model, tokenizer, conversation, gen_config, ref_model=1, reward_fn=1)
quick_start_training(model_name="tiny", prompts=[], reward_fn=1, num_iterations=100)
train(initial_state=1, prompt_loader=1, num_iterations=1, gen_config=1, algorithm_config=1, reward_fn=1, eval_fn=1)
train(1, 1, 1, 1, 1, 1, ref_model_update_fn=1, checkpoint_fn=1, logger=1)
"""


@pytest.mark.parametrize("call", CALLS.strip().splitlines())
def test_a_printed_call_fits_the_signature(call):
    parsed = ast.parse(call, mode="eval").body
    function = oxrl
    for name in ast.unparse(parsed.func).split("."):
        function = getattr(function, name)
    inspect.signature(function).bind(*parsed.args, **{keyword.arg: keyword.value for keyword in parsed.keywords})


QUICK_START = """\
run:
  experiment_id: "my-run"
  training_gpus: 2
  rollout_gpus: 2

train:
  alg_name: "sgrpo"           # or "cispo"
  total_number_of_epochs: 10
  train_steps_per_epoch: 20

model:
  name: "google/gemma-3-1b-it" # any HuggingFace model

data:
  train_dnames: ["my_data"]
  train_ratios: {"my_data": 1.0}
  train_files_path: "./data/train.parquet"
  val_files_path: "./data/val.parquet"
"""
REASONING = """\
model:
  name: "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
lora:
  enabled: true
reward:
  reward_func: "reasoning_reward_func"
data:
  dataset: "openr1_math"
"""
REWARD = """\
import torch


def my_reward(prompt_ids, response_ids, finish_reason):
    r = torch.zeros(len(response_ids), dtype=torch.float32)
    r[-1] = 1.0 if len(response_ids) > 3 else 0.0
    return r, False  # (reward_tensor, is_per_token)
"""
SMALL = {
    "google/gemma-3-1b-it": "tiny",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "tiny",
    "total_number_of_epochs: 10": "total_number_of_epochs: 2",
    "train_steps_per_epoch: 20": "train_steps_per_epoch: 1\n  train_batch_size_per_gpu: 2",
}
SHORT = "rollout:\n  max_tokens: 6\n  n_samples: 2\n"
QUESTIONS = [{"prompt": [{"role": "user", "content": f"What is {i}+2?"}], "answer": str(i + 2)} for i in range(8)]


def adapted(text):
    for printed, here in SMALL.items():
        text = text.replace(printed, here)
    return text


def main(script, *arguments):
    """`python SCRIPT ARGUMENTS`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    return end.value.code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OXRL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("OXRL_CHECKPOINT_DIR", raising=False)
    return tmp_path


@pytest.mark.trains
@pytest.mark.parametrize("reward", ["", 'reward:\n  reward_func: "my_reward"\n'], ids=["default", "my_reward"])
def test_three_steps_from_a_parquet_file_to_a_run(folder, reward):
    import pandas

    (folder / "data").mkdir()
    for name in ("train", "val"):
        pandas.DataFrame(QUESTIONS).to_parquet(folder / "data" / f"{name}.parquet")
    (folder / "rewards").mkdir()
    (folder / "rewards" / "compute_score.py").write_text(REWARD)
    (folder / "config.yaml").write_text(adapted(QUICK_START) + reward + SHORT)
    assert main("main_rl.py", "--config-file", "config.yaml") == 0
    steps = read_metrics(folder / "checkpoints" / "my-run" / "metrics.jsonl")
    assert [row["step"] for row in steps] == [0, 1, 2], "step 0 is the evaluation before training"
    if reward:
        assert steps[1]["reward"] == 1.0


@pytest.mark.trains
def test_a_reasoning_model_from_the_printed_config(folder):
    rows = [{**row, "answer": f"${row['answer']}$"} for row in QUESTIONS]
    (folder / "data").mkdir()
    (folder / "data" / "openr1_math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = adapted(REASONING).replace('dataset: "openr1_math"', "train_files_path: data/openr1_math.jsonl")
    (folder / "config.yaml").write_text(config + SHORT + "train:\n  train_steps_per_epoch: 1\n")
    assert main("main_rl.py", "--config-file", "config.yaml") == 0
    (metrics,) = folder.glob("checkpoints/*/metrics.jsonl")
    assert len(read_metrics(metrics)) == 1
    assert (metrics.parent / "checkpoints" / "step_0001" / "adapter_model.safetensors").exists()


@pytest.mark.trains
def test_the_headline_trains_on_a_task(folder):
    from oxrl import Trainer

    trainer = Trainer(model="tiny")
    small = {"n_samples": 2, "max_tokens": 6, "train_batch_size_per_gpu": 2}
    result = trainer.train(task="reasoning", data=QUESTIONS, steps=1, **small)
    assert result.config.reward.reward_func == "reasoning_reward_func"
    assert len(result.history) == 1


@pytest.mark.trains
def test_supervised_fine_tuning_from_the_complete_config(folder):
    text = (ROOT / "oxrl" / "config" / "examples" / "sl_args.yaml").read_text()
    config = oxrl.load_config(ROOT / "oxrl" / "config" / "examples" / "sl_args.yaml")
    (folder / "rows.jsonl").write_text("".join(json.dumps({**row, "response": "4"}) + "\n" for row in QUESTIONS))
    (folder / "sl_args.yaml").write_text(text.replace(config.model.name, "tiny"))
    given = ["data.dataset=null", "data.train_files_path=rows.jsonl", "train.train_steps_per_epoch=1"]
    overrides = [part for each in given for part in ("--set", each)]
    assert main("main_sl.py", "--config-file", "sl_args.yaml", "--output", "out", *overrides) == 0
    assert len(read_metrics(folder / "out" / "metrics.jsonl")) == 1


def test_a_sample_cannot_be_changed_in_place(setting):
    for name, value in (("reward", 1.0), ("error", "late")):
        with pytest.raises(AttributeError, match="dataclasses.replace"):
            setattr(setting["SAMPLE"], name, value)


def test_a_mask_that_is_a_weight_is_named():
    refused(lambda: oxrl.Sample(prompt="a", tokens=[1, 2, 3], loss_mask=[0, 0.5, 1]), "contains 0.5")
    refused(lambda: oxrl.Sample(prompt="a", tokens=[1, 2, 3], loss_mask=[0, 1]), "2 entries for 3 tokens")


def test_the_second_stage_refuses_an_algorithm_that_does_not_sample(setting, tmp_path):
    config = oxrl.Config.model_validate({**setting["CONFIG"], "train": {"alg_name": "sft"}})
    refused(lambda: oxrl.run_rl(config, tmp_path), "run_rl samples completions.*run_sft")
    refused(lambda: oxrl.run_sft({"rl": config}, tmp_path), "no stage 'sft'")


def test_an_updater_needs_a_reference(setting):
    state = oxrl.create_training_state(setting["MODEL"], setting["TOKENIZER"])
    config = oxrl.create_algorithm_config("reinforce")
    update = oxrl.create_ema_updater(decay=0.9)
    sampling = oxrl.GenerationConfig(max_new_tokens=2)
    refused(
        lambda: oxrl.train(state, ["a"], 1, sampling, config, lambda _: 1.0, ref_model_update_fn=update),
        "the state has none",
    )


@pytest.mark.parametrize("tokens", [True, False])
def test_an_rl_loop_grades_by_metadata_and_needs_tokens(setting, tokens):
    def generate(prompts):
        ids = {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1]} if tokens else {"response": "x"}
        return [oxrl.Sample(prompt=p, **ids, metadata={"correct": i == 0}) for i, p in enumerate(prompts)]

    config = oxrl.RolloutConfig(batch_size=1, n_samples_per_prompt=2, generate_fn=generate)
    manager = oxrl.AsyncRolloutManager(oxrl.DataBuffer(["a", "b"]), config)
    arguments = (setting["BACKEND"], oxrl.DataBuffer(["a", "b"]), manager, [], oxrl.RLTrainingConfig(num_steps=1), None)
    if tokens:
        (metrics,) = run_blocking(oxrl.run_rl_training, *arguments)
        assert metrics["reward"] == 0.5
    else:
        refused(lambda: run_blocking(oxrl.run_rl_training, *arguments), "without tokens")


def refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


DIFFERENCES = [
    pytest.param(each, id=f"{group}-{number}")
    for group, rows in differences().items()
    for number, each in enumerate(rows)
]


@pytest.fixture(scope="module")
def setting():
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    return {
        "oxrl": oxrl,
        "ROOT": ROOT,
        "CONFIG": {"model": {"name": "tiny"}, "data": {"dataset": "gsm8k"}},
        "SAMPLE": oxrl.Sample(prompt="2+2?", response="4", tokens=[5, 6, 7], loss_mask=[0.0, 1.0, 1.0]),
        "MODEL": model,
        "TOKENIZER": tokenizer,
        "BACKEND": oxrl.create_pytorch_backend(model),
        "refused": refused,
        "run": run_blocking,
    }


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_deliberate_difference_is_as_documented(difference, setting):
    exec(difference["proof"], dict(setting))


def test_the_migration_page_has_the_differences():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python docs/differences.py"
