"""Loading and validating configs: defaults, error messages, tasks, stages, and the `oxrl config` commands."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.config import ConfigError, check_config, load_config, load_stages, trace_stages
from oxrl.config.checks import contradictions, remarks
from oxrl.config.reference import fields, generated, json_schema
from oxrl.config.tasks import task_config, tasks
from oxrl.rewards import REWARDS
from oxrl.run.prepare import config_problems, resolve
from tests.rows import sums, write_jsonl

ROOT = Path(__file__).parents[2]
GOOD = """\
model:
  name: tiny
train:
  alg_name: SFT
  lr: 1e-5
data:
  train_files_path: rows.jsonl
"""


def written(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


COLOCATED = {"inference_engine": {"name": "vllm", "colocated": True}}


def config_of(**sections):
    raw = {"model": {"name": "tiny"}, "data": {"train_files_path": "rows.jsonl"}}
    for name, keys in sections.items():
        raw[name] = {**raw.get(name, {}), **keys}
    return check_config(raw)


def test_a_minimal_file_loads_and_everything_else_has_a_default(tmp_path):
    config = load_config(written(tmp_path, GOOD))
    assert config.train.lr == 1e-5, "YAML 1.1 would read 1e-5 as text"
    assert config.train.alg_name == "sft"
    assert config.data.train_files == {"rows": "rows.jsonl"}


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("  lr: 1e-5", "  learning_rate: 1e-5", "line 5: train.learning_rate is not a key"),
        ("  lr: 1e-5", "  l: 1e-5", "did you mean lr?"),
        ("  lr: 1e-5", "  lr: fast", "line 5: train.lr"),
        ("  lr: 1e-5", "  lr: -1.0", "greater than 0"),
        ("  lr: 1e-5", "  lr: 1:30", "line 5: train.lr: Input should be a valid number, got '1:30'"),
        ("  lr: 1e-5", "  lr: 010", "line 5: train.lr: Input should be a valid number, got '010'"),
        ("  lr: 1e-5", "  lr: 2024-13-45", "line 5: train.lr: Input should be a valid number, got '2024-13-45'"),
        ("  lr: 1e-5", "  lr: " + 5000 * "1", "line 5: train.lr is a number of 5000 characters"),
        ("  lr: 1e-5", "  lr: 1e-5\n  lr: 1e-4", "line 6: train.lr is a duplicate of line 5"),
        ("  alg_name: SFT", "  alg_name: sfd", "did you mean sft?"),
        ("  name: tiny", "  name: tiny\n  dtype: float8", "float32"),
        ("  name: tiny", "  name: tiny\nmodel:\n  device: cpu", "line 3: model is a duplicate of line 1"),
        ("train:", "trane:", "did you mean train?"),
        ("train:", "run: {task: mth}\ntrain:", "line 3: run.task: no task is called 'mth'; did you mean math?"),
        ("train:", "run: {task: visoin}\ntrain:", "no task is called 'visoin'; did you mean vision"),
        ("  train_files_path: rows.jsonl", "  {}", "data.train_files_path is missing"),
        ("  train_files_path: rows.jsonl", "  train_files_path: a\n  dataset: gsm8k", "both set"),
        ("  name: tiny", "  name: [", "not valid YAML"),
        ("train:", "deepspeed: 3\ntrain:", "line 3: deepspeed"),
    ],
)
def test_an_error_names_its_line_and_the_allowed_values(tmp_path, line, instead, message):
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, GOOD.replace(line, instead, 1)))
    assert message in str(caught.value)


def test_a_missing_file_suggests_an_existing_one(tmp_path):
    written(tmp_path, GOOD)
    with pytest.raises(ConfigError, match="did you mean config.yaml"):
        load_config(tmp_path / "confg.yaml")


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("run", "experiment_id", "..", "run.experiment_id"),
        ("run", "experiment_id", ".", "run.experiment_id"),
        ("run", "experiment_id", "x" * 201, "run.experiment_id: String should have at most 200 characters"),
        ("run", "seed", 2**32, "run.seed: Input should be less than 4294967296"),
        ("model", "name", "", "model.name: String should have at least 1 character"),
        ("data", "train_ratios", {"rows": -1.0}, "data: train_ratios must be 0 or more"),
        ("data", "train_ratios", {"rows": 0.0}, "data: train_ratios must be 0 or more"),
        ("rollout", "env", "x" * 10_000, "rollout.env: 'xxx"),
    ],
)
def test_a_value_outside_its_range_is_refused_with_its_key(section, key, value, message):
    with pytest.raises(ConfigError) as caught:
        config_of(**{section: {key: value}})
    assert message in str(caught.value) and len(str(caught.value)) < 400


def test_names_of_runs_may_have_dots():
    assert config_of(run={"experiment_id": "..v1.0-x"}).run.experiment_id == "..v1.0-x"
    assert config_of(run={"experiment_id": "x" * 200, "seed": 2**32 - 1}).run.seed == 2**32 - 1


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path} is a folder: pass the YAML file in it"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        load_config(tmp_path / ("x" * 300))


def test_overrides_take_precedence_over_the_file(tmp_path):
    config = load_config(written(tmp_path, GOOD), ["train.lr=3e-4", "lora.enabled=true", "data.columns={response: a}"])
    assert (config.train.lr, config.lora.enabled, config.data.columns) == (3e-4, True, {"response": "a"})
    with pytest.raises(ConfigError, match="looks like"):
        load_config(written(tmp_path, GOOD), ["lr 3"])


def test_a_row_template_is_text_also_where_yaml_would_read_a_mapping(tmp_path):
    overrides = ["data.prompt={Body} {Question}", "data.response={Answer}", "data.system='Be brief.'"]
    template = {"prompt": "{Body} {Question}", "response": "{Answer}", "system": "Be brief."}
    assert load_config(written(tmp_path, GOOD), overrides).data.template == template
    with pytest.raises(ConfigError, match="placeholders have the names of columns"):
        load_config(written(tmp_path, GOOD), ["data.prompt={Body"])
    with pytest.raises(ConfigError, match="data.prompt: write a text with braces in quotes"):
        check_config({"model": {"name": "tiny"}, "data": {"train_files_path": "x", "prompt": {"Body": None}}})
    with pytest.raises(ConfigError, match="prompt and columns.prompt are both set"):
        load_config(written(tmp_path, GOOD), ["data.prompt=a", "data.columns={prompt: b}"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train_files_path": "a.jsonl", "train_dnames": ["a", "b"]}, "different datasets"),
        ({"train_files_path": {"a": "a.jsonl"}, "train_ratios": {"b": 1.0}}, "exactly the datasets"),
    ],
)
def test_datasets_and_their_names_must_agree(data, message):
    with pytest.raises(ConfigError, match=message):
        check_config({"model": {"name": "tiny"}, "data": data})


def test_a_config_survives_being_written_and_read():
    for config in (config_of(deepspeed={"zero_optimization": {"stage": 3}}), config_of(run={"task": "math"})):
        assert check_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"run": {"training_gpus": 1}, "model": {"device": "cpu"}}, "contradict each other"),
        ({"run": {"training_gpus": 0}, "model": {"device": "cuda"}}, "contradict each other"),
        ({"run": {"rollout_gpus": 3}, "rollout": {"tensor_parallel_size": 2}}, "does not divide run.rollout_gpus 3"),
        ({"rollout": {"tensor_parallel_size": 2}}, "tensor_parallel_size 2 needs inference_engine.name: vllm"),
        ({"inference_engine": {"name": "http"}}, "http needs inference_engine.urls"),
        ({"inference_engine": {"name": "vllm", "place": "process", "replicas": 2}}, "place: process runs one vLLM"),
        ({"inference_engine": {"name": "vllm"}, "rollout": {"mode": "fixed"}}, "fixed is for the embedded engine only"),
        ({"run": {"backend": "ray"}}, "run.backend: ray trains in other processes"),
        ({"run": {"backend": "local", "training_gpus": 2}}, "local trains on one device, and run.training_gpus is 2"),
        ({"run": {"backend": "fsdp", "training_gpus": 2}, "model": {"device": "cuda:1"}}, "is one device"),
        ({"inference_engine": {"colocated": True}}, "colocated needs an engine that can sleep: set infer"),
        ({**COLOCATED, "rollout": {"lag": 1}}, "sleeps during training, and rollout.lag samples during it"),
        ({**COLOCATED, "run": {"rollout_gpus": 1}}, "colocated samples on the training devices, and run.rollout_gpus"),
        ({**COLOCATED, "rollout": {"tensor_parallel_size": 2}}, "colocated uses one training device per replica"),
        ({**COLOCATED, "model": {"device": "cuda:1"}}, "colocated starts at the first device: set model.device: auto"),
        (
            {"inference_engine": {"name": "vllm", "colocated": True, "replicas": 3}, "run": {"training_gpus": 2}},
            "replicas 3 exceeds the 2 training devices",
        ),
        ({"inference_engine": {"name": "vllm", "enable_sleep_mode": True}}, "enable_sleep_mode is not set here"),
        (
            {"model": {"device": "cpu"}, "inference_engine": {"transfer": "nccl"}},
            "transfer: nccl needs GPUs, and model.device is cpu",
        ),
        ({"inference_engine": {"adapter": True}}, "adapter: embedded takes full weights: set inference_engine.name"),
        (
            {"inference_engine": {"name": "vllm", "adapter": True}, "run": {"backend": "fsdp"}},
            "adapter: servers take full weights: leave it out",
        ),
        ({"deepspeed": {"optimizer": {}}}, "deepspeed.optimizer is not set here: train.lr"),
        ({"deepspeed": {"world_size": 4}, "run": {"training_gpus": 2}}, "world_size 4 is not run.training_gpus 2"),
        ({"train": {"train_batch_size_per_gpu": 10**12}}, "makes steps of 1,000,000,000,000 rows; at most 1,000,000"),
        (
            {"train": {"train_batch_size_per_gpu": 10**4, "gradient_accumulation_steps": 10**4, "alg_name": "sft"}},
            "makes steps of 100,000,000 rows",
        ),
        ({"rollout": {"over_sampling_factor": 1e9}}, "over_sampling_factor 1e+09 x 8 prompts start 64,000,000,000"),
        ({"rollout": {"n_samples": 10**9}}, "rollout.n_samples 1,000,000,000 x over_sampling_factor 1 x 8 prompts"),
        ({"data": {"max_seq_len": 10**12}}, "data.max_seq_len is 1,000,000,000,000; at most 10,000,000 tokens"),
        ({"train": {"mini_batches": 65}}, "exceeds the 64 completions of a step"),
        ({"rollout": {"max_draws": 3}}, "less than the 8 prompts of a step"),
        ({"rollout": {"max_tokens": 4096}}, "no prompt leaves room"),
        ({"rollout": {"filter_params": {"min_reward": 1}}}, "but rollout.filter is not"),
        ({"rollout": {"force_strict_on_policy": True, "lag": 1}}, "rollout.lag samples with older weights"),
        ({"rollout": {"force_strict_on_policy": True, "partial_rollouts": True}}, "rollout.partial_rollouts samples"),
        ({"rollout": {"force_strict_on_policy": True}, "train": {"iterations": 2}}, "the later ones are not on-policy"),
        ({"model": {"ref_update": "ema"}}, "and sgrpo has none"),
        ({"model": {"ref_update": "ema"}, "train": {"alg_name": "dpo"}}, "and dpo has none"),
        (
            {
                "train": {"alg_name": "spin"},
                "model": {"ref_update": "ema", "ref_model": "tiny"},
                "lora": {"enabled": True},
            },
            "model.ref_model is a separate model, which cannot follow an adapter",
        ),
        ({"train": {"alg_name": "sft"}, "reward": {"reward_func": "contains"}}, "sft trains on dataset rows"),
    ],
)  # fmt: skip
def test_contradicting_keys_are_reported_with_a_remedy(sections, message):
    (reported,) = contradictions(config_of(**sections))
    assert message in reported


def test_sending_the_adapter_alone_needs_lora():
    engine = {"inference_engine": {"name": "vllm", "adapter": True}}
    assert remarks(config_of(**engine)) == ["inference_engine.adapter has no effect without lora.enabled: true"]
    assert remarks(config_of(**engine, lora={"enabled": True})) == []


def test_an_online_algorithm_with_a_reference_may_update_it():
    for train in ({"alg_name": "online_dpo"}, {"alg_params": {"kl_coef": 0.1}}):
        for lora in ({}, {"enabled": True}):
            assert contradictions(config_of(model={"ref_update": "ema"}, train=train, lora=lora)) == []


def test_a_top_level_reward_applies_to_rl(tmp_path):
    text = "model: {name: tiny}\ndata: {train_files_path: x}\nreward: {reward_func: contains}\nsft: {}\nrl: {}\n"
    stages = load_stages(written(tmp_path, text))
    assert [stage.reward.reward_func for stage in stages.values()] == [None, "contains"]
    assert [stage.train.alg_name for stage in stages.values()] == ["sft", "sgrpo"]
    assert all(contradictions(stage) == [] for stage in stages.values())


@pytest.mark.parametrize("name", tasks())
def test_a_task_names_an_existing_dataset_algorithm_and_reward(name):
    from oxrl.algorithms import algorithm
    from oxrl.data.prepare import find_dataset

    config = check_config({"model": {"name": "tiny"}, "run": {"task": name}})
    assert config.data.dataset == task_config(name)["data"]["dataset"]
    assert not find_dataset(config.data.dataset).evaluation_only
    samples = algorithm(config.train.alg_name).online is not None
    reward = tasks()[name].reward
    assert (reward in REWARDS) == samples
    assert contradictions(check_config({"model": {"name": "tiny"}, **task_config(name)})) == []


def test_a_task_fills_in_only_what_is_not_set():
    math = check_config({"model": {"name": "tiny"}, "run": {"task": "math"}})
    assert (math.train.alg_name, math.train.lr, math.rollout.max_tokens) == ("sgrpo", 1e-6, 512)
    own = config_of(run={"task": "Coding"}, rollout={"max_tokens": 9}, lora={"enabled": True})
    assert own.run.task == "code" and own.data.dataset is None and own.data.train_files == {"rows": "rows.jsonl"}
    assert (own.rollout.max_tokens, own.rollout.n_samples, own.train.lr) == (9, 8, 1e-5)
    imitated = config_of(run={"task": "math"}, train={"alg_name": "sft"})
    assert imitated.rollout.max_tokens == 256 and contradictions(imitated) == []


ROWS = {
    "numbers": [{"prompt": f"{i}?", "answer": f"it is so\n#### {i},000" if i else "7"} for i in range(3)],
    "tests": [{"prompt": "double", "tests": ["assert double(1) == 2"]}],
    "letters": [{"prompt": "A or B?", "answer": letter} for letter in "AB"],
    "formulas": [{"prompt": "?", "answer": r"\frac{1}{2}"}, {"prompt": "?", "answer": "3"}],
    "texts": [{"prompt": "capital?", "answer": "Lima"}],
    "replies": [{"prompt": "1 + 1?", "response": "2"}],
}


@pytest.mark.parametrize(
    ("rows", "reward"),
    [
        ("numbers", "gsm8k_reward_func"),
        ("tests", "code_reward_func"),
        ("letters", "mcqa_reward_func"),
        ("formulas", "math_reward_func"),
        ("texts", "exact_match"),
        ("replies", "gsm8k_reward_func"),
    ],
)
def test_without_a_reward_it_is_inferred_from_the_rows_and_logged(rows, reward, tmp_path, caplog):
    caplog.set_level("INFO", logger="oxrl")
    data = str(write_jsonl(tmp_path / "rows.jsonl", ROWS[rows]))
    inputs = resolve(config_of(data={"train_files_path": data}, reward={"allow_unsandboxed": True}))
    assert inputs.config.reward.reward_func == reward
    assert f"reward: {reward}, because" in caplog.text and "to change it, set reward" in caplog.text
    assert "so sgrpo is used" in caplog.text
    assert ("as reference answers" in caplog.text) == (rows == "replies")


@pytest.mark.parametrize("row", [{"prompt": "hi"}, {"prompt": "hi", "response": "a long reply, " * 20}])
def test_a_reward_that_cannot_be_inferred_is_required(row, tmp_path):
    data = str(write_jsonl(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(ConfigError, match="sgrpo learns from rewards: set reward to a name"):
        resolve(config_of(data={"train_files_path": data}))


def test_the_reward_of_a_dataset_takes_precedence_over_the_task(tmp_path, monkeypatch, caplog):
    from oxrl.data.prepare import prepare

    caplog.set_level("INFO", logger="oxrl")
    monkeypatch.setenv("OXRL_DATA_DIR", str(tmp_path))
    raw = write_jsonl(tmp_path / "raw.jsonl", [{"question": f"{i}?", "answer": f"so: #### {i}"} for i in range(4)])
    prepare("gsm8k", files=[f"train={raw}"], splits=["train"])
    config = check_config({"model": {"name": "tiny"}, "data": {"dataset": "gsm8k"}, "run": {"task": "reasoning"}})
    assert resolve(config).config.reward.reward_func == "gsm8k_reward_func"
    assert "the reward of the dataset gsm8k" in caplog.text
    rows = str(write_jsonl(tmp_path / "rows.jsonl", sums(4)))
    config = config_of(data={"train_files_path": rows}, run={"task": "reasoning"}, rollout={"max_tokens": 8})
    assert resolve(config).config.reward.reward_func == "reasoning_reward_func"
    assert "the reward of the task reasoning" in caplog.text


MY_REWARD = """\
import torch


def my_reward(prompt_ids, response_ids, finish_reason):
    r = torch.zeros(len(response_ids), dtype=torch.float32)
    r[-1] = 0.25
    return r, False
"""


@pytest.mark.trains
@pytest.mark.parametrize("file", ["rewards/compute_score.py", "rewards.py"])
def test_a_reward_next_to_the_config_is_found_by_its_name(file, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(MY_REWARD)
    rows = write_jsonl(tmp_path / "rows.jsonl", sums(4))
    text = f"model: {{name: tiny}}\ndata: {{train_files_path: {rows}}}\nreward: {{reward_func: my_reward}}\n"
    text += "train: {train_steps_per_epoch: 1, train_batch_size_per_gpu: 2}\nrollout: {n_samples: 2, max_tokens: 4}\n"
    done = run("train", written(tmp_path, text), "--output", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["last"]["reward"] == 0.25


def test_an_unknown_reward_is_reported_with_how_to_name_it(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", sums(4))
    text = f"model: {{name: tiny}}\ndata: {{train_files_path: {rows}}}\nreward: {{reward_func: my_reward}}\n"
    done = run("train", written(tmp_path, text), "--output", tmp_path / "out")
    assert done.exit_code == 2 and "file.py:function" in done.output
    (tmp_path / "rewards.py").write_text("def contains(rollout):\n    return 1.0\n")
    named = load_config(written(tmp_path, text.replace("my_reward", "contains")))
    assert named.reward.reward_func == "contains", "built-in names take precedence"


def test_show_prints_every_key_with_its_origin(tmp_path):
    file = written(tmp_path, "model: {name: tiny}\nrun:\n  task: math\n")
    done = run("config", "show", file, "--set", "train.weight_decay=0.5")
    assert done.exit_code == 0, done.output
    lines = {line.split(":")[0].strip(): line for line in done.stdout.splitlines() if ":" in line}
    assert lines["task"].endswith("# line 3") and lines["dataset"].endswith("# task math")
    assert lines["weight_decay"].endswith("# command line") and "#" not in lines["adam_epsilon"]
    assert "# reward: gsm8k_reward_func, the reward of the dataset gsm8k" in done.stdout
    as_json = json.loads(run("config", "show", file, "--json").stdout)
    assert check_config(as_json) == load_config(file)
    again = load_config(written(tmp_path, done.stdout))
    assert again == load_config(None, ["model.name=tiny", "run.task=math", "train.weight_decay=0.5"])


def test_show_prints_stages_separately(tmp_path):
    file = written(tmp_path, "model: {name: tiny}\ndata: {train_files_path: x}\nsft: {}\nrl: {train: {lr: 1e-3}}\n")
    done = run("config", "show", file)
    assert load_stages(written(tmp_path, done.stdout)) == load_stages(
        written(tmp_path, "model: {name: tiny}\ndata: {train_files_path: x}\nsft: {}\nrl: {train: {lr: 1e-3}}\n")
    )
    origins = {name: stage.origins[("train", "alg_name")] for name, stage in trace_stages(file).items()}
    assert origins == {"sft": "stage sft", "rl": "stage rl"}


def test_validate_lists_all_errors_and_reads_no_data(tmp_path):
    assert run("config", "validate", written(tmp_path, GOOD)).exit_code == 0, "rows.jsonl need not exist"
    wrong = GOOD.replace("lr:", "lrr:").replace("name: tiny", "name: 3")
    done = run("config", "validate", written(tmp_path, wrong))
    assert done.exit_code == 2
    assert "line 5: train.lrr" in done.output and "line 2: model.name" in done.output
    noted = run("config", "validate", written(tmp_path, GOOD), "--set", "lora.r=4", "--json")
    report = json.loads(noted.stdout)
    assert report == {"valid": True, "mistakes": [], "remarks": ["lora.r has no effect without lora.enabled: true"]}
    invalid = run("config", "validate", written(tmp_path, GOOD), "--set", "reward.reward_func=contains", "--json")
    assert invalid.exit_code == 2 and "sft trains on dataset rows" in json.loads(invalid.stdout)["mistakes"][0]


def test_diff_lists_the_keys_that_differ(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(GOOD.replace("1e-5", "1e-4") + "lora: {enabled: true}\n")
    done = run("config", "diff", written(tmp_path, GOOD), other)
    assert done.stdout.splitlines() == ["train.lr: 1e-05 -> 0.0001", "lora.enabled: false -> true"]
    assert json.loads(run("config", "diff", other, other, "--json").stdout) == {}


def test_the_json_schema_has_every_key_and_its_description():
    schema = json.loads(run("config", "schema").stdout)
    assert schema == json_schema()
    assert {"sft", "rl", "inference_engine"} <= schema["properties"].keys()
    for section, key, field in fields():
        assert field.description, f"{section}.{key} has no description"
        owner = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        assert owner["properties"][key]["description"] == field.description


def test_generated_files_are_up_to_date():
    for file, text in generated().items():
        assert file.read_text() == text, "run: python -m oxrl.config.reference"


@pytest.mark.parametrize(("name", "algorithm"), [("rl_args", "sgrpo"), ("sl_args", "sft")])
def test_the_complete_files_load_to_the_defaults(name, algorithm):
    file = ROOT / "oxrl" / "config" / "examples" / f"{name}.yaml"
    config = load_config(file)
    sections = yaml.safe_load(file.read_text())
    assert config.train.alg_name == algorithm and contradictions(config) == [] and remarks(config) == []
    plain = config_of(data={"train_files_path": None, "dataset": config.data.dataset})
    for section, key, _ in fields():
        given = {"alg_name", "name", "dataset", "reward_func"}
        assert section not in sections or key in sections[section], f"{section}.{key} is missing"
        assert key in given or getattr(getattr(config, section), key) == getattr(getattr(plain, section), key)


@pytest.mark.trains
@pytest.mark.parametrize("script", ["main_rl.py", "main_sl.py"])
def test_the_root_scripts_run_any_algorithm(script, tmp_path, monkeypatch):
    rows = write_jsonl(tmp_path / "rows.jsonl", sums(4))
    file = written(tmp_path, GOOD.replace("rows.jsonl", str(rows)))
    command = [script, "--config-file", str(file), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 0
    assert (tmp_path / "out" / "checkpoints" / "step_0001").is_dir()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"alg_name": "rlhf"}}, "set reward.model"),
        ({"train": {"alg_name": "kd"}}, "model.teacher"),
        ({"train": {"alg_name": "rloo", "iterations": 2}}, "one optimizer step per batch"),
        ({"reward": {"model": "x", "judge": "y"}}, "model and judge are set"),
        ({"reward": {"reward_func": "exact_mtch"}}, "did you mean exact_match?"),
        ({"reward": {"reward_func": "exact_match", "params": {"nope": 1}}}, "no parameter nope"),
        ({"rollout": {"filter": "nofilter"}}, "nofilter"),
        ({"rollout": {"env": "tools"}}, "needs rollout.tools"),
        ({"inference_engine": {"name": "http", "urls": ["host:8000"]}}, "is not an engine's address"),
        ({"inference_engine": {"name": "http", "urls": ["http://127.0.0.1:1", "http://localhost:1/"]}}, "one server"),
        ({"inference_engine": {"nmae": "http"}}, "inference_engine.nmae is no key; did you mean name?"),
    ],
)
def test_invalid_names_are_reported_without_reading_data_or_models(sections, message):
    base = {"model": {"name": "tiny"}, "data": {"train_files_path": "rows.jsonl"}}
    assert any(message in mistake for mistake in config_problems(check_config({**base, **sections})))
    assert config_problems(check_config(base)) == []


def test_rollout_keys_without_sampling_are_reported():
    base = {"model": {"name": "tiny"}, "data": {"train_files_path": "rows.jsonl"}, "train": {"alg_name": "sft"}}
    messages = remarks(check_config({**base, "rollout": {"n_samples": 3}}))
    assert "rollout.n_samples has no effect with an algorithm that does not sample" in messages


@pytest.mark.parametrize(
    ("override", "right"),
    [("alg_params.beta=1", "train.alg_params"), ("train.env=tools", "rollout.env"), ("data.lr=1", "train.lr")],
)
def test_a_key_in_the_wrong_section_gets_the_right_one(override, right):
    with pytest.raises(ConfigError, match=f"is not a key; did you mean {right}"):
        load_config(None, ["model.name=tiny", "data.train_files_path=x", override])


def test_keys_of_other_frameworks_get_a_suggestion():
    with pytest.raises(ConfigError, match=r"train.learning_rate is not a key; did you mean lr\?"):
        load_config(None, ["model.name=tiny", "data.train_files_path=x", "train.learning_rate=1"])
