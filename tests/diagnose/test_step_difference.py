"""Records of real steps, in which one number is changed: the stage that has it is named, and where it is."""

import copy
from functools import partial

import anyio
import pytest

from oxrl.data.buffer import DataBuffer
from oxrl.diagnose.step_difference import STAGES, first_difference, first_digest
from oxrl.loops.offline import OfflineConfig, run_offline
from oxrl.tracking.step_files import StepRecord, read_step
from oxrl.types import Row
from tests.loops.test_online import Setting
from tests.loops.test_step_record import recorded, recorder_of


def by_index(rollout):
    return float(rollout.index)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    setting = Setting(kl_coef=0.1)
    manager = setting.manager(batch_size=2, n_samples_per_prompt=2, reward_fn=by_index)
    return recorded(setting, tmp_path_factory.mktemp("sampled"), 1, manager)[0]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder, setting = tmp_path_factory.mktemp("rows"), Setting("sft")
    items = [(Row(f"r{number}", [1, 10, 11, 12], [0, 0, 1, 1], scalars={"weight": 0.5}),) for number in range(2)]
    quiet = {"recorder": recorder_of(setting, folder, "full"), "log": lambda step, metrics: None}
    anyio.run(partial(run_offline, setting.backend, setting.algorithm, DataBuffer(items), OfflineConfig(1, 2), **quiet))
    return read_step(folder, 1)


def changed(record, path, change):
    """A copy with another value at a path, which begins with a number if it is of an answer, else of the step."""
    edited = StepRecord(*copy.deepcopy(tuple(record)))
    holder = edited.answers if isinstance(path[0], int) else edited.step
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = change(holder[path[-1]])
    return edited


def plus_one(value):
    return value + 1


def another(value):
    return f"{value}?"


def shorter(value):
    return value[:-1]


EDITS = {
    ("digests", "weights_before"): (another, "weights before the step"),
    ("groups", 1, "sample_id"): (another, "data"),
    ("groups",): (shorter, "data"),
    ("digests", "prompts"): (another, "prompt"),
    (1, "tokens", "version", -1): (plus_one, "version"),
    (1, "tokens", "ids", -1): (plus_one, "sampling"),
    (1, "tokens", "rows", 0): (plus_one, "sampling"),
    (1, "tokens", "mask", -1): (lambda value: 1 - value, "sampling"),
    (1, "tokens", "pieces", 0): (another, "sampling"),
    (1, "tokens", "sampler_logprob", -1): (plus_one, "sampler log-prob"),
    (1, "error"): (another, "reward"),
    (1, "parts"): (lambda parts: {**parts, "right": 1.0}, "reward"),
    ("groups", 0, "left_out"): (another, "reward"),
    (1, "tokens", "ref_logprob", -1): (plus_one, "reference log-prob"),
    (1, "tokens", "advantage", -1): (plus_one, "advantage"),
    ("digests", "credit"): (another, "advantage"),
    (1, "tokens", "policy_logprob", -1): (plus_one, "log-prob"),
    (1, "tokens", "ratio", -1): (plus_one, "ratio"),
    (1, "tokens", "clipped", -1): (lambda value: 1 - value, "ratio"),
    ("metrics", "grad_norm"): (plus_one, "loss"),
    (1, "tokens", "gradient", -1): (plus_one, "gradient"),
    ("totals", "trained"): (plus_one, "sums over the step"),
    ("digests", "weights"): (another, "weights"),
    (1, "status"): (another, "conversation"),
}


@pytest.mark.parametrize("path", EDITS, ids=lambda path: ".".join(map(str, path)))
def test_a_number_that_differs_is_found_at_its_stage(path, sampled):
    change, stage = EDITS[path]
    edited = changed(sampled, path, change)
    found = first_difference(sampled, edited)
    assert found is not None and found.stage == stage
    assert first_difference(edited, sampled).stage == stage, "either way round"
    if isinstance(path[0], int):
        answer = sampled.answers[path[0]]
        assert found.where.startswith(f"group {answer['group']}, answer {answer['index']}")


def test_equal_records_have_no_difference(sampled, rows):
    assert first_difference(sampled, copy.deepcopy(sampled)) is None and first_difference(rows, rows) is None


def test_of_several_differences_the_one_that_is_computed_first_is_named(sampled):
    """Whatever was edited later in the list, the stages before it hide it."""
    edited, order = sampled, []
    for path, (change, stage) in reversed(EDITS.items()):
        if path == ("groups",):
            continue
        edited = changed(edited, path, change)
        order.append(first_difference(sampled, edited).stage)
        assert order[-1] == stage
    names = [stage.name for stage in STAGES]
    assert [names.index(stage) for stage in order] == sorted((names.index(stage) for stage in order), reverse=True)


def test_times_and_memory_are_not_compared(sampled):
    for name in ("generate_seconds", "record_seconds", "memory_gib"):
        with_it = StepRecord({**sampled.step, "metrics": {**sampled.step["metrics"], name: 1.0}}, sampled.answers)
        assert first_difference(with_it, changed(with_it, ("metrics", name), plus_one)) is None


def test_the_first_token_that_differs_is_named_or_how_many_there_are(sampled):
    middle = len(sampled.answers[0]["tokens"]["ids"]) // 2
    ids = sampled.answers[0]["tokens"]["ids"]

    def from_the_middle(value):
        return [*value[:middle], *(each + 5 for each in value[middle:])]

    found = first_difference(sampled, changed(sampled, (0, "tokens", "ids"), from_the_middle))
    assert (found.where, found.before, found.now, found.gap) == (
        f"group 0, answer 0, ids {middle}",
        ids[middle],
        ids[middle] + 5,
        5,
    )
    cut = first_difference(sampled, changed(sampled, (0, "tokens", "ids"), shorter))
    assert (cut.where, cut.before, cut.now) == ("group 0, answer 0, ids: how many", len(ids), len(ids) - 1)


def test_rows_are_named_by_item_and_their_scalars_compared(rows):
    found = first_difference(rows, changed(rows, (1, "weight"), plus_one))
    assert (found.stage, found.where, found.gap) == ("advantage", "item 1, row 0, weight", 1.0)


def test_a_run_that_samples_and_one_on_rows_are_of_another_kind(sampled, rows):
    found = first_difference(sampled, rows)
    assert str(found) == "kind of run: one samples its answers, the other trains on rows"
    assert found.gap is None


INDEXED = dict.fromkeys(("data", "prompts", "tokens", "rewards", "weights_before", "weights"), "0" * 16)


@pytest.mark.parametrize(
    ("changes", "stage", "where"),
    [
        ({}, None, None),
        ({"lr": 2.0, "digests": {**INDEXED, "weights": "1"}}, "loss", "lr"),
        ({"loss": 2.0, "lr": 2.0}, "loss", "loss"),
        ({"lr": 2.0, "digests": {**INDEXED, "rewards": "1"}}, "reward", "reward"),
        ({"digests": {**INDEXED, "weights": "1"}}, "weights", "weights"),
        ({"digests": {**INDEXED, "weights": None}}, None, None),
    ],
)
def test_lines_of_an_index_are_compared_in_the_same_order(changes, stage, where):
    line = {"digests": INDEXED, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0}
    found = first_digest(line, {**line, **changes})
    assert (found and found.stage, found and found.where) == (stage, where)
