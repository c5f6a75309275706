"""Onboarding brings in what can be, says of the others why not, and records each attempt of the bugfixer."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.models.catalog import RECORDS
from oxrl.onboarding.agent import ask_agent, changed_task
from oxrl.onboarding.attempt import Outcome, attempt_here, attempt_in_child, failed_outcome
from oxrl.onboarding.pipeline import Options, onboard, planned
from oxrl.onboarding.remedies import REMEDIES, Task, next_remedy
from tests.forks import answer_calls, has_ended
from tests.onboarding.families import MAKERS, change, copy, plain, working_code
from tests.onboarding.planted import attempt_tiny_in_child
from tests.waiting import EXPIRES, HANG, wait_until

BROUGHT_IN = {  # with these changes
    "base": ["pad_token", "template"],
    "wrong_end": ["end_token"],
    "end_outside": ["template"],
    "resized": ["vocabulary", "dtype", "rope"],
    "experts": [],
    "hybrid": [],
    "vision": [],
    "gguf": ["template"],
}
NOT = {
    "reward_model": "use it as reward.model",
    "missing_shard": "the shard model-00002-of-00002.safetensors is missing",
    "own_code": "contains custom code; review it",
    "encoder": "not a causal language model",
}
PLANTED = "tests.onboarding.planted:"
AGENT = """
import sys, pathlib, yaml
folder = pathlib.Path(sys.argv[1])
config = yaml.safe_load((folder / "config.yaml").read_text())
config["inference_engine"]["name"] = "embedded"
(folder / "changed.yaml").write_text(yaml.safe_dump(config))
"""


@pytest.fixture(scope="module")
def brought_in(complete_run, families, tmp_path_factory):
    """All families, onboarded in one go, and the options for another one."""
    home = tmp_path_factory.mktemp("onboarding")
    names = [copy(path, home / family) if path.is_dir() else path for family, path in families.items()]
    options = Options(home / "work", home / "records", trials=("grpo",), attempt=attempt_here, by="a test")
    results = onboard(list(map(str, names)), options)
    return dict(zip(families, results, strict=True)), list(map(str, names)), options


@pytest.mark.parametrize("family", BROUGHT_IN)
def test_what_can_be_brought_in_is_verified_with_the_changes_it_needed(brought_in, family):
    result = brought_in[0][family]
    assert result.status == ("verified with changes" if BROUGHT_IN[family] else "verified"), result.why
    record = json.loads(result.record.read_text())
    assert [each["repair"] for each in record["changes"]] == BROUGHT_IN[family]
    assert record["name"] == record["entry"]["name"] == ("tiny-gguf" if family == "gguf" else family)
    assert record["problems"] == [] and len(record["grpo"]["loss"]) == 2 and record["grpo"]["resume_gap"] == 0
    assert max(record["grpo"]["logprob_gap"]) < 1e-3
    assert record["command"] == f"oxrl models onboard {record['source']}"
    assert record["environment"].keys() >= {"oxrl", "torch", "transformers", "device", "threads"}
    assert (record["by"], len(record["attempts"])) == ("a test", 1)
    assert record["layout"] == ("padded" if family == "hybrid" else "shared")
    assert record["generation"] == ("padded waves" if family == "hybrid" else "slots")
    assert record["media"] == (["image"] if family == "vision" else [])


@pytest.mark.parametrize("family", NOT)
def test_what_cannot_is_reported_with_the_reason_and_no_code_is_executed(brought_in, families, family):
    result = brought_in[0][family]
    assert (result.status, result.record) == ("not verified", None)
    assert NOT[family] in result.why
    assert not (families["own_code"] / "executed").exists()


@pytest.mark.trains
def test_what_the_scout_could_not_know_is_brought_in_or_named(tmp_path):
    """Faults that only a run shows, another architecture, and code that the user trusts."""
    sampling = plain(tmp_path / "sampling")
    change(sampling / "generation_config.json", do_sample=False, temperature=0.6)
    mamba = plain(tmp_path / "mamba", "MambaConfig", state_size=8)
    not_finite = plain(tmp_path / "not_finite")
    weights = load_file(not_finite / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, not_finite / "model.safetensors", metadata={"format": "pt"})
    occupied = plain(tmp_path / "occupied")
    change(occupied / "config.json", pad_token_id=-1)
    (tmp_path / "occupied-repaired").mkdir()  # the repair would write there
    options = Options(tmp_path / "work", tmp_path / "records", trials=("grpo", "lora"), attempt=attempt_here)
    names = [str(each) for each in (not_finite, occupied, sampling, mamba)]
    results = onboard(names, options)
    assert [each.status for each in results] == ["not verified", "not verified", "verified", "verified"]
    assert (
        "non_finite: the hidden states of LlamaForCausalLM are not finite: check that its weights are" in results[0].why
    )
    assert "exists and was not written by a repair" in results[1].why
    mistaken = working_code(tmp_path / "mistaken")
    (mistaken / "configuration_own.py").write_text("from transformers import")
    own_code = str(working_code(tmp_path / "own_code"))
    trusted = replace(options, trials=("sft",), trust_remote_code=True)
    mistake, result = onboard([str(mistaken), own_code], trusted)
    assert mistake.why.startswith("scouting failed with SyntaxError")
    record = json.loads(result.record.read_text())
    assert (result.status, record["architecture"]) == ("verified", "OwnForCausalLM")
    assert record["command"] == f"oxrl models onboard {own_code} --trust-remote-code"


def test_a_second_call_does_nothing_again(brought_in):
    results, names, options = brought_in
    assert BROUGHT_IN.keys() | NOT.keys() == MAKERS.keys() == results.keys()

    def never(task, folder, seconds):
        raise AssertionError("an attempt was repeated")

    again = onboard(names, replace(options, attempt=never))
    assert [each.status for each in again] == [each.status for each in results.values()]
    assert again[0].why == "as before: --again tries it anew"
    with pytest.raises(AssertionError, match="repeated"):
        onboard([names[4]], replace(options, attempt=never, again=True))


def fixed_with(tmp_path, engine, **more):
    """Onboard a small model with a planted engine; returns the result, its record and the remedies tried."""
    folder = plain(tmp_path / "model")
    options = Options(
        tmp_path / "work", tmp_path / "records", trials=("grpo",), attempt=attempt_here, engine=PLANTED + engine, **more
    )
    (result,) = onboard([str(folder)], options)
    record = json.loads(result.record.read_text()) if result.record else None
    return result, record, [each["remedy"] for each in record["attempts"]] if record else list(result.changes)


@pytest.mark.trains
def test_of_the_remedies_for_memory_the_third_fits(tmp_path):
    result, record, remedies = fixed_with(tmp_path, "BOUNDED")
    assert remedies == ["smaller_micro_batches", "gradient_checkpointing", "lora", None]
    assert [each["signal"] and each["signal"]["kind"] for each in record["attempts"]] == ["out_of_memory"] * 3 + [None]
    assert (result.status, record["strategy"]) == ("verified with changes", "lora")
    assert record["settings"]["train"] == {"micro_batch_tokens": 128}


@pytest.mark.trains
def test_a_flaky_engine_is_tried_again_and_one_that_refuses_is_replaced(tmp_path):
    _, record, remedies = fixed_with(tmp_path / "flaky", "FLAKY")
    assert remedies == ["again", None]
    assert record["settings"]["inference_engine"]["name"] == f"{PLANTED}FLAKY"
    _, record, remedies = fixed_with(tmp_path / "broken", "BROKEN")
    assert remedies == ["again", "embedded_engine", None]
    assert record["settings"]["inference_engine"] == {"name": "embedded"}
    assert {each["signal"]["message"] for each in record["attempts"][:2]} == {
        "the engine does not know this architecture"
    }


@pytest.mark.trains
def test_a_template_that_refuses_some_rows_is_replaced(tmp_path):
    folder = plain(tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text()
    refusal = "{% if 'fox' in messages[0].content %}{{ raise_exception('no foxes') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refusal + template)
    options = Options(tmp_path / "work", tmp_path / "records", trials=("sft",), attempt=attempt_here)
    (result,) = onboard([str(folder)], options)
    record = json.loads(result.record.read_text())
    first, second = record["attempts"]
    assert (first["signal"]["kind"], first["remedy"]) == ("template", "repair_template")
    assert "no foxes" in first["signal"]["message"] and second["signal"] is None
    assert record["settings"] == {"model": {"chat_template": "chatml"}}


def test_a_fault_outside_of_the_table_ends_in_a_report_that_names_it_or_goes_to_the_agent(tmp_path):
    result, record, _ = fixed_with(tmp_path / "alone", "OUTSIDE")
    assert (result.status, record, result.attempts) == ("not verified", None, 1)
    assert result.why.startswith("exception: a planted fault that is in no table; there is no remedy")
    failure = tmp_path / "alone" / "work" / result.name.strip("/").replace("/", "-") / "failure"
    assert "a planted fault" in (failure / "traceback.txt").read_text()
    assert json.loads((failure / "signal.json").read_text())["kind"] == "exception"


@pytest.mark.trains
def test_an_agent_returns_a_changed_config_that_is_tried(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    command = f"{sys.executable} {tmp_path / 'agent.py'}"
    result, record, remedies = fixed_with(tmp_path, "OUTSIDE", agent=command)
    assert remedies == ["agent", None]
    assert record["settings"] == {"inference_engine": {"name": "embedded"}}
    assert result.status == "verified with changes"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"model": {"name": "other"}}, "model.name cannot be changed by an agent"),
        ({"model": {"trust_remote_code": True}}, "model.trust_remote_code cannot be changed"),
        ({"reward": {"reward_func": "easy.py:one"}}, "reward.reward_func cannot be changed"),
        ({"inference_engine": {"name": "mine.py:ENGINE"}}, "inference_engine.name is one of"),
        ({"model": {"name": "tiny"}}, "it changes nothing"),
        ({"train": {"lrr": 1e-5}}, "train.lrr cannot be changed by an agent; did you mean train.lr?"),
        ({"trian": {"lr": 1e-5}}, "trian.lr cannot be changed by an agent; did you mean train.lr?"),
        ({"train": {"lr": "fast"}}, "train.lr"),
        ({"lora": {"enabled": "no"}}, "lora.enabled"),
        ({"lora": {"target_modules": 5}}, "lora.target_modules"),
        ("nonsense", "it must have sections"),
        ([], "it must have sections"),
        ({"model": 3}, "model must be a section"),
    ],
)
def test_an_agent_may_not_change_what_the_test_means(sections, problem):
    with pytest.raises(ValueError, match=problem):
        changed_task(Task("tiny"), sections)
    assert changed_task(Task("tiny"), {"lora": {"enabled": True}, "train": {"lr": 1e-5}}).strategy == "lora"


def test_an_agent_that_fails_or_answers_nothing_ends_the_attempts(tmp_path):
    task, folder = Task("tiny", trials=("sft",)), tmp_path / "failure"
    folder.mkdir()
    for command, why in (
        ("sh -c 'echo no idea; exit 3'", "the agent ended with status 3; its output is in"),
        ("true", "the agent wrote no changed.yaml"),
        ("sh -c 'echo {{{ > $0/changed.yaml'", "changed.yaml is refused"),
        ("sh -c 'head -c 99 /dev/urandom > $0/changed.yaml'", "changed.yaml is refused"),
        ("sh -c 'mkdir $0/changed.yaml'", "the agent wrote no changed.yaml"),
    ):
        assert why in ask_agent(command, folder, task, [], HANG)
    assert (folder / "agent.log").read_text() == ""
    assert "the agent cannot be started" in ask_agent("./no-such-program", folder, task, [], HANG)
    result, _, _ = fixed_with(tmp_path, "OUTSIDE", agent="false")
    assert "not possible: agent (the agent ended with status 1" in result.why


def test_an_agent_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    """A shell that is killed leaves its children."""
    command = f"sh -c 'sleep infinity & echo $! > {tmp_path}/pid; wait'"
    assert "the agent did not end within" in ask_agent(command, tmp_path, Task("tiny"), [], EXPIRES)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{child}").exists() or has_ended(child), "the child has ended")


@pytest.mark.parametrize("command", ["./no-such-program --fast", "'half a quote", ""])
def test_an_agent_that_does_not_exist_is_refused_before_a_model_is_scouted(tmp_path, command):
    with pytest.raises(ValueError, match="--agent .* (cannot be started|is not a command)"):
        onboard(["/nowhere"], Options(tmp_path, agent=command))


def test_the_plan_refuses_what_does_not_fit_and_remedies_are_used_up(families, tmp_path):
    options = Options(tmp_path / "work", tmp_path / "records", trials=("dpo",), attempt=attempt_here, memory=0.01)
    (result,) = onboard([str(families["experts"])], options)
    assert result.changes == ("smaller_micro_batches", "gradient_checkpointing", "lora")
    assert "the plan needs" in result.why and "four_bit (oxRL does not load weights in 4 bits)" in result.why
    assert planned(Task(str(families["experts"]), trials=("dpo",)), 64.0, tmp_path) is None


def test_a_budget_that_is_used_up_leaves_the_rest_for_the_next_call(families, tmp_path):
    seconds = iter([0.0, 0.0, 30.0, 30.0, 30.0, 90.0, 90.0])

    limits = []

    def fails(task, folder, limit):
        limits.append(limit)
        return attempt_here(replace(task, weights="/nowhere"), folder, limit)

    options = Options(
        tmp_path / "work", tmp_path / "records", budget=1.0, trials=("sft",), attempt=fails, clock=lambda: next(seconds)
    )
    results = onboard([str(families["experts"]), str(families["hybrid"])], options)
    assert [each.status for each in results] == ["not verified", "unfinished"]
    assert "refused: there is no model '/nowhere'" in results[0].why
    assert "budget" in results[1].why and limits == [30.0], "what is left of the budget is less than the limit"


def test_an_interrupted_onboarding_of_several_models_goes_on_with_the_next_remedy(families, tmp_path):
    tried = []

    def too_slow(task, folder, seconds):
        tried.append((Path(task.weights).name, task.value("rollout", "max_tokens", 8)))
        if len(tried) == 5:
            raise KeyboardInterrupt
        return failed_outcome(folder, task, "time_out", "too slow")

    options = Options(tmp_path / "work", tmp_path / "records", trials=("sft",), attempt=too_slow)
    names = [str(families["experts"]), str(families["hybrid"])]
    with pytest.raises(KeyboardInterrupt):
        onboard(names, options)
    assert tried == [("experts", 8), ("experts", 4), ("experts", 2), ("hybrid", 8), ("hybrid", 4)]
    results = onboard(names, options)
    assert tried[5:] == [("hybrid", 4), ("hybrid", 2)]
    for result in results:
        assert result.changes == ("fewer_tokens", "fewer_tokens_again") and "time_out: too slow" in result.why
        assert result.attempts == 3


def test_a_result_counts_for_the_same_files_and_options_only(families, tmp_path):
    tried = []

    def fails(task, folder, seconds):
        tried.append(task)
        return failed_outcome(folder, task, "exception", "as planted")

    folder = copy(families["experts"], tmp_path / "model")
    options = Options(tmp_path / "work", tmp_path / "records", trials=("sft",), attempt=fails)
    for expected in (1, 1):
        onboard([str(folder)], options)
        assert len(tried) == expected
    change(folder / "generation_config.json", temperature=0.5)
    onboard([str(folder)], options)
    onboard([str(folder)], replace(options, memory=64.0))
    assert len(tried) == 3


def test_models_of_the_same_name_get_a_record_each(families, tmp_path):
    record = json.loads((RECORDS / "tiny.json").read_text())
    names = [str(copy(families[family], tmp_path / family / "model")) for family in ("experts", "hybrid")]
    measured = {key: value for key, value in record.items() if key not in ("name", "source", "command", "digest")}
    worked = Options(tmp_path / "work", tmp_path / "records", attempt=lambda *_: Outcome(measured, None))
    first, second = onboard(names, worked)
    assert first.record.name == "model.json" and second.record.name.startswith("model-")
    assert [json.loads(each.record.read_text())["source"] for each in (first, second)] == names
    assert onboard(names[:1], replace(worked, again=True))[0].record == first.record


@pytest.mark.trains
def test_an_overflow_in_half_precision_is_cured_by_the_wider_type(tmp_path):
    folder = plain(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 1e6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    task = Task(str(folder), settings={"model": {"dtype": "float16"}}, trials=("sft",))
    failed = attempt_here(task, tmp_path / "failure", 0.0)
    assert failed.signal["kind"] == "non_finite"
    remedy, wider, _ = next_remedy("non_finite", task, [])
    assert (remedy.name, wider.settings["model"]) == ("wider_dtype", {"dtype": "bfloat16"})
    assert attempt_here(wider, tmp_path / "failure", 0.0).signal is None


def test_a_child_that_the_system_kills_is_a_failure_of_memory(tmp_path):
    (tmp_path / "outcome.json").write_text('{"record": {"problems": []}, "signal": null}')  # of an attempt before
    with ThreadPoolExecutor() as threads:
        attempt = threads.submit(attempt_in_child, Task("tiny", trials=("sft",)), tmp_path, HANG)
        wait_until(lambda: processes_of(tmp_path), "the child has started")
        os.kill(processes_of(tmp_path)[0], signal.SIGKILL)
        outcome = attempt.result()
    assert (outcome.record, outcome.signal["kind"]) == (None, "out_of_memory")


def processes_of(folder):
    """The attempts that were started for a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            if str(folder).encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


@pytest.mark.trains
def test_a_child_process_verifies_and_one_that_is_too_slow_is_ended(families, tmp_path):
    task = Task(str(families["experts"]), trials=("sft",))
    assert attempt_in_child(task, tmp_path / "slow", 0.0).signal["kind"] == "time_out"
    outcome = attempt_in_child(task, tmp_path / "child", 1e6)
    assert outcome.signal is None and outcome.record["problems"] == []
    assert outcome.record["sft"] == attempt_here(task, tmp_path / "here", 0.0).record["sft"]


@pytest.mark.trains
def test_an_attempt_ends_with_the_process_that_made_it(forks, tmp_path):
    """After a kill, the same command makes the attempt again: two at a time would take twice the memory."""
    forked = forks.start([(answer_calls, ())])
    forked.connection.send((attempt_tiny_in_child, (tmp_path,)))
    wait_until(lambda: processes_of(tmp_path), "the attempt has begun")
    forked.kill()
    wait_until(lambda: not processes_of(tmp_path), "the attempt has ended")
    assert not (tmp_path / "outcome.json").exists(), "it has not come to its end"


def test_every_remedy_changes_the_task_or_says_why_not():
    task = Task("tiny", settings={"model": {"dtype": "float16"}, "inference_engine": {"name": "vllm"}})
    for kind in REMEDIES:
        used, now = [], task
        while True:
            remedy, changed, skipped = next_remedy(kind, now, used)
            if remedy is None:
                break
            assert changed != now or remedy.name == "again"
            used.append(remedy.name)
            now = changed
        assert all(each["why_not"] for each in skipped)
        assert next_remedy(kind, now, [remedy.name for remedy in REMEDIES[kind]])[0] is None
    assert next_remedy("exception", task, [])[0] is None


def test_the_command_prints_one_result_per_model_and_fails_if_one_is_not_verified(families, tmp_path):
    arguments = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "records")]
    done = CliRunner().invoke(app, ["models", "onboard", str(families["encoder"]), "/nowhere", *arguments, "--json"])
    assert done.exit_code == 1
    encoder, nowhere = json.loads(done.stdout)
    assert "not a causal language model" in encoder["why"] and "there is no model '/nowhere'" in nowhere["why"]
    done = CliRunner().invoke(app, ["models", "onboard", "/nowhere", *arguments])
    assert "/nowhere: not verified (0 attempts)" in done.stdout
