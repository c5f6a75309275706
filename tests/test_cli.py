"""The command line: results, exit codes and error messages."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import oxrl
from oxrl.algorithms import ALGORITHMS
from oxrl.cli import app, completion
from oxrl.tracking.metrics import read_metrics
from oxrl.tracking.trackers import TRACKERS
from tests.engines import need
from tests.rows import sums, write_jsonl
from tests.waiting import wait_until


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


@pytest.fixture(scope="module")
def trained(complete_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    data = write_jsonl(folder / "rows.jsonl", sums(16))
    val = write_jsonl(folder / "val.jsonl", sums(4, first=16))
    done = run(
        "train", "--model", "tiny", "--algorithm", "sft", "--data", data, "--val", val, "--output", folder / "out",
        "--epochs", 2, "--lr", 1e-3, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_train_writes_a_run_folder_and_prints_its_path(trained):
    folder, result = trained
    assert result["last"]["step"] == 4
    assert result["last"]["eval_loss"] > 0
    assert (folder / "out" / "config.yaml").exists()
    assert len((folder / "out" / "metrics.jsonl").read_text().splitlines()) == 5
    assert (folder / "out" / "checkpoints" / "step_0004" / "model.safetensors").exists()


def test_a_finished_run_is_not_overwritten(trained):
    folder, _ = trained
    again = run("train", "--model", "tiny", "--data", folder / "rows.jsonl", "--output", folder / "out")
    assert again.exit_code == 2
    assert "--resume" in again.output
    alone = run("train", "--output", folder / "out", "--steps", 3)
    assert alone.exit_code == 2 and "model is missing" not in alone.output
    assert f"has a run. To resume it: oxrl train --output {folder / 'out'} --resume" in alone.output


def test_resuming_a_finished_run_has_nothing_to_do(trained):
    folder, _ = trained
    again = run("train", "--output", folder / "out", "--resume")
    assert again.exit_code == 0, again.output
    assert f"to watch: oxrl view {folder / 'out'}" in again.output
    assert "nothing was left to do" in again.output


def test_resuming_with_other_held_out_rows_warns(trained, caplog):
    folder, _ = trained
    before = (folder / "val.jsonl").read_text()
    write_jsonl(folder / "val.jsonl", sums(5, first=16))
    again = run("train", "--output", folder / "out", "--resume")
    (folder / "val.jsonl").write_text(before)
    assert again.exit_code == 0, again.output
    assert "resuming with other content of held-out rows" in caplog.text


def test_resuming_with_other_rows_is_refused(trained):
    folder, _ = trained
    again = run("train", "--output", folder / "out", "--resume", "--data", folder / "val.jsonl")
    assert again.exit_code == 2
    assert "does not match the data" in again.output


def test_generate_reads_a_run_folder(trained):
    folder, _ = trained
    done = run("generate", folder / "out", "--prompt", "1 + 1?", "--max-tokens", 4, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["prompt"] == "1 + 1?"
    assert answer["finish_reason"] in ("stop", "length")


def test_generate_reads_prompts_from_a_file(trained):
    folder, _ = trained
    done = run("generate", "tiny", "--data", folder / "rows.jsonl", "--limit", 3, "--max-tokens", 2, "--json")
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["0 + 0?", "1 + 1?", "2 + 2?"]


def test_chat_ends_at_an_empty_line(trained):
    folder, _ = trained
    done = run("chat", folder / "out", "--max-tokens", 4, input="hello\nand again\n\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("model>") == 2


def test_chat_continues_after_a_message_that_cannot_be_rendered():
    done = run("chat", "tiny", "--max-new-tokens", 2, input="hi <|im_end|> there\nhello\n\n")
    assert done.exit_code == 0, done.output
    assert "--max-new-tokens is now --max-tokens" in done.output, "the former name works"
    assert done.output.count("model>") == 2


def test_the_same_seed_generates_the_same_text():
    def once(seed):
        return run("generate", "tiny", "--prompt", "x", "--temperature", 1, "--seed", seed, "--max-tokens", 8).stdout

    assert once(1) == once(1)
    assert once(1) != once(2)


@pytest.mark.trains
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "model is missing"),
        (["train", "nowhere.yaml"], "no config file"),
        (["train", "configs/sl_args.yaml"], "config/examples/sl_args.yaml"),
        (["train", "--model", "tinny", "--data", "ROWS"], "tiny"),
        (["train", "--model", "tiny", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["train", "--model", "tiny", "--data", "ROWS", "--algorithm", "stf"], "did you mean sft?"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", "train.lrr=1"], "did you mean lr?"),
        (["train", "--model", "tiny", "--data", "ROWS", "--lr", "-1"], "greater than 0"),
        (["train", "--model", "tiny", "--data", "BAD"], "bad.jsonl:2"),
        (
            ["train", "--model", "tiny", "--algorithm", "sft", "--data", "ROWS", "--set", "data.max_seq_len=3"],
            "none of 4",
        ),
        (["train", "--model", "tiny", "--data", "ROWS", "--task", "maths"], "did you mean math?"),
        (["train", "--output", "nowhere", "--resume"], "nothing to resume in nowhere"),
        (["train", "--resume"], "--output names the run"),
        (["train", "--model", "tiny", "--data", "ROWS", "--lora", "--set", "lora.target_modules=[nope]"], "q_proj"),
        (["train", "--model", "tiny", "--data", "ROWS", "--output", "ROWS"], "cannot be created"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", "train.betas=[5,7]"], "less than 1"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", "train.lr=.inf"], "finite"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", "train.lr={"], "not valid YAML"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", "model.name.x=1"], "must be a section"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", "model.device=cuda:99"], "cuda"),
        (["generate", "tiny"], "--prompt"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere"),
        (["chat", "nowhere"], "nowhere"),
        (["plot", "nowhere"], "nowhere"),
        (["data", "show", "nowhere.jsonl", "--model", "tiny"], "nowhere.jsonl"),
        (["no-such-command"], "No such command"),
    ],
)
def test_invalid_input_prints_a_message_and_exits_with_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setenv("OXRL_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    files = {
        "ROWS": write_jsonl(tmp_path / "rows.jsonl", sums(4)),
        "BAD": write_jsonl(tmp_path / "bad.jsonl", [*sums(1), {"prompt": "no response"}]),
    }
    done = run(*[files.get(argument, argument) for argument in arguments])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


LONG = "x" * 5000
DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--model", "tiny", "--data", "ROWS", "--output", ""], "--output"),
        (["train", ""], "it is empty"),
        (["export", "tiny", "--output", ""], "--output"),
        (["train", "--model", LONG, "--data", "ROWS"], "File name too long"),
        (["train", "--model", "tiny", "--data", f"{LONG}.jsonl"], "File name too long"),
        (["train", "--model", "tiny", "--data", "ROWS", "--output", LONG], "File name too long"),
        (["train", LONG], "File name too long"),
        (["config", "validate", LONG], "File name too long"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", f"run.experiment_id={LONG}"], "run.experiment_id"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", f"train.alg_params={DEEP}"], "deeper than"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", "train.lr=1:30"], "train.lr"),
        (["train", "--model", "tiny", "--data", "ROWS", "--set", "reward.params=&a [*a]"], "reward.params has more"),
        (["eval", "tiny", "--data", "ROWS", "--reward", "number_match", "--param", f"x={DEEP}"], "deeper than"),
        (["train", "--model", "tiny", "--algorithm", "sft", "--data", "ROWS", "--output", "LOCKED"], ".lock: "),
        (["train", "--model", "tiny", "--data", "ROWS", "--batch-size", "1000000000000"], "train_batch_size_per_gpu"),
    ],
    ids=range(15),
)
def test_what_no_file_or_size_can_be_prints_a_message_and_exits_with_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    files = {"ROWS": write_jsonl(tmp_path / "rows.jsonl", sums(4)), "LOCKED": tmp_path / "run"}
    done = run(*[files.get(argument, argument) for argument in arguments])
    assert done.exit_code == 2, (done.output, done.exception)
    assert message in done.output.replace("\n", " ")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_an_environment_variable_that_is_no_number_is_named(name, tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "rows.jsonl", sums(4))
    monkeypatch.setenv(name, "abc")
    done = run("train", "--model", "tiny", *SFT, "--data", data, "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert f"the environment variable {name} is 'abc', not a number" in done.output


def test_python_without_docstrings_is_refused_with_the_variable():
    done = subprocess.run([sys.executable, "-OO", "-m", "oxrl", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "PYTHONOPTIMIZE=2" in done.stderr


@pytest.mark.trains
def test_several_rewards_are_given_with_their_weights(tmp_path):
    data, reward = write_jsonl(tmp_path / "rows.jsonl", sums(4)), tmp_path / "reward.py"
    reward.write_text("def third(rollout):\n    return 1 / 3\n")
    given = json.dumps({f"{reward}:third": 1.0, "contains": 0.0})
    small = ("--steps", 1, "--batch-size", 1, "--set", "rollout.max_tokens=4", "--set", "rollout.n_samples=4")
    arguments = ("--model", "tiny", "--algorithm", "grpo", "--reward", given, "--data", data, *small)
    done = run("train", *arguments, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    (metrics,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert (metrics["reward_third"], metrics["reward"]) == pytest.approx((1 / 3, 1 / 3))
    assert "reward_contains" in metrics
    assert ", reward 0.3333\n" in done.output


@pytest.mark.trains
def test_a_run_folder_that_is_removed_during_the_run_is_named(tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", sums(4))
    reward = tmp_path / "reward.py"
    remove = f"shutil.rmtree({str(tmp_path / 'out')!r}, ignore_errors=True)"
    reward.write_text(f"import shutil\ndef length(rollout):\n    {remove}\n    return len(rollout.response)\n")
    small = ("--steps", 1, "--batch-size", 1, "--set", "rollout.max_tokens=4", "--set", "rollout.n_samples=4")
    arguments = ("train", "--model", "tiny", "--algorithm", "grpo", "--reward", f"{reward}:length", *small)
    done = run(*arguments, "--data", data, "--output", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert "No such file or directory" in done.output


def test_invalid_input_is_reported_before_torch_is_imported(tmp_path):
    code = (
        "import sys\nfrom oxrl.cli import app\n"
        "try:\n    app(['train', '--model', 'tiny', '--data', 'x.jsonl', '--set', 'train.lrr=1'])\n"
        "except SystemExit as end:\n    assert end.code == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_resuming_with_another_model_or_algorithm_is_refused_and_changes_nothing(trained):
    folder, _ = trained
    for change in (["--lora"], ["--algorithm", "cpt"], ["--set", "model.name=smollm2-135m"]):
        attempt = run("train", "--output", folder / "out", "--resume", *change)
        assert attempt.exit_code == 2, attempt.output
        assert "cannot be resumed" in attempt.output
    assert run("train", "--output", folder / "out", "--resume").exit_code == 0


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    from filelock import FileLock

    data = write_jsonl(tmp_path / "rows.jsonl", sums(4))
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        done = run("train", "--model", "tiny", *SFT, "--data", data, "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert "another process is training" in done.output


def test_a_reference_with_another_tokenizer_is_refused(tmp_path):
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(4)]
    data = write_jsonl(tmp_path / "pairs.jsonl", rows)
    arguments = ["--model", "tiny", "--algorithm", "dpo", "--data", data, "--output", tmp_path / "out"]
    done = run("train", *arguments, "--set", "model.ref_model=smollm2-135m")
    assert done.exit_code == 2
    assert "another tokenizer" in done.output


ONLINE = ("--algorithm", "grpo", "--reward", "contains", "--set", "rollout.max_tokens=8")


SFT = ("--algorithm", "sft")
RAY = (*SFT, "--backend", "ray", "--set", "run.training_gpus=1", "--set", "run.sharding=fsdp")


@pytest.mark.parametrize(("stop", "how"), [("SIGINT", SFT), ("SIGTERM", SFT), ("SIGINT", ONLINE), ("SIGTERM", RAY)])
def test_an_interrupted_run_saves_a_checkpoint_and_prints_how_to_resume(tmp_path, forks, stop, how):
    if how == RAY:
        need("ray")
    data = write_jsonl(tmp_path / "rows.jsonl", sums(16))
    out = tmp_path / "out"
    train = ["train", "--output", str(out), "--model", "tiny", "--data", str(data), "--epochs", "1000000", *how]
    run = forks.command(tmp_path / "log", *train, RAY_AUTH_MODE="disabled")
    wait_until(lambda: (out / "metrics.jsonl").exists() or run.has_ended, "it trains")
    os.kill(run.pids[0], getattr(signal, stop))
    codes, log = run.end(), (tmp_path / "log").read_text()
    assert codes == [130], log
    assert "--resume" in log
    assert "Traceback" not in log
    done = len((out / "metrics.jsonl").read_text().splitlines())
    assert (out / "checkpoints" / f"step_{done:04d}").is_dir(), "the last step is saved"


def test_two_datasets_are_mixed_by_ratio(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", sums(8))
    two = write_jsonl(tmp_path / "two.jsonl", sums(8, first=50))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{name: tiny}}\ntrain: {{alg_name: sft, train_steps_per_epoch: 1, train_batch_size_per_gpu: 4}}\n"
        f"data:\n  train_dnames: [one, two]\n  train_ratios: {{one: 0.75, two: 0.25}}\n"
        f"  train_files_path: {{one: {one}, two: {two}}}\n"
    )
    from oxrl.config import load_config
    from oxrl.run.prepare import prepare_run

    prepared = prepare_run(load_config(config), tmp_path / "out")
    drawn = [item[0].id.split(":")[0] for item in prepared.source.get_prompts(8)]
    assert (drawn.count("one.jsonl"), drawn.count("two.jsonl")) == (6, 2)


@pytest.mark.trains
def test_bad_rows_can_be_skipped_and_are_counted(tmp_path, caplog):
    bad = write_jsonl(tmp_path / "bad.jsonl", [*sums(2), {"prompt": "no response"}])
    caplog.set_level("INFO", logger="oxrl")
    arguments = ["--data", bad, "--output", tmp_path / "out", "--set", "data.bad_rows=skip"]
    done = run("train", "--model", "tiny", *SFT, *arguments)
    assert done.exit_code == 0, done.output
    assert "1 skipped" in caplog.text


@pytest.mark.trains
def test_a_failed_run_exits_with_1_and_saves_its_batch(tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", sums(4))
    done = run(
        "train", "--model", "tiny", *SFT, "--data", data, "--output", tmp_path / "out", "--lr", 1e30, "--epochs", 20,
        "--set", "train.clip_grad_norm=0", "--set", "train.warmup_steps_ratio=0.0",
    )  # fmt: skip
    assert done.exit_code == 1, done.output
    assert "is not finite" in done.output
    rows = [json.loads(line) for line in (tmp_path / "out" / "failure" / "batch.jsonl").read_text().splitlines()]
    assert rows[0]["id"].startswith("rows.jsonl:")


def commands(command, words=()):
    """Yield every command below `command` with the words that call it."""
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
    else:
        for name, each in below.items():
            yield from commands(each, (*words, name))


@pytest.mark.parametrize(
    ("words", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands(get_command(app))]
)
def test_the_help_of_every_command_has_a_summary_an_example_and_a_line_for_each_option(words, command):
    summary, *more = [line.strip() for line in command.help.splitlines() if line.strip()]
    assert summary.endswith(".") and "oxrl " not in summary.replace("`oxrl merge`", ""), summary
    assert any(line.startswith(" ".join(("oxrl", *words))) for line in more), "an example"
    shown = [each for each in command.params if each.name != "help" and not getattr(each, "hidden", False)]
    unexplained = [each.name for each in shown if not each.help]
    assert not unexplained
    assert "Usage" in run(*words, "--help").output


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("train --algorithm dp", {"dpo", "dpop", "dposhift", "dpnll"}),
        ("train --model smol", {"smollm2-135m"}),
        ("train --tracker ", set(TRACKERS)),
        ("train --engine v", {"vllm"}),
        ("train --backend f", {"fsdp"}),
        ("algorithms sg", {"sgrpo"}),
        ("data prepare gs", {"gsm8k"}),
    ],
)
def test_the_shell_completes_names(words, found):
    line = f"oxrl {words}"
    env = {"_OXRL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    done = CliRunner().invoke(app, [], prog_name="oxrl", env=env)
    names = set(done.output.split())
    assert found <= names and all(name.startswith(words.split(" ")[-1]) for name in names)


def test_completed_algorithms_are_those_of_the_table():
    assert dict(completion.algorithms()).keys() == ALGORITHMS.keys()


def test_a_tracker_is_chosen_by_an_option(tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", sums(2))
    command = ("train", "--model", "tiny", "--algorithm", "sft", "--data", data, "--dry-run", "--tracker")
    wrong = run(*command, "wandbb")
    assert wrong.exit_code == 2 and "run.trackers" in wrong.output and "'wandb'" in wrong.output
    done = run(*command, "tensorboard", "--tracker", "mlflow", "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output


def test_the_list_of_models_has_a_header_over_its_columns():
    header, tiny, *_ = run("models", "list").output.splitlines()
    assert header.split() == ["name", "size", "architecture", "tasks", "tuning", "status", "verified"]
    assert header.index("architecture") == tiny.index("LlamaForCausalLM")


def test_version_prints_the_version():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.strip()) == (0, oxrl.__version__)
