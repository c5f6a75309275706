"""Rollouts are written and read without loss; rollouts of one prompt stay together."""

import json

import pytest

import oxrl
from oxrl.rollouts.record import digest_of
from oxrl.testing import fake_rollout
from oxrl.types import Generation, Message, Rollout, Sample, Score, Turn


def rich(number=0):
    """A rollout with something in every field."""
    sample = Sample(
        f"s{number}",
        messages=(Message("system", "Be\u2028brief."), Message("user", [{"type": "text", "text": "é🙂?"}])),
        answer="4",
        chosen=(Message("assistant", "a"),),
        rejected=(Message("assistant", "b"),),
        label=True,
        responses=((Message("assistant", "c"),),),
        rewards=(0.1,),
        tools=({"type": "function", "function": {"name": "f"}},),
        metadata={"level": [1, {"x": None}]},
        conversational=True,
    )
    message = Message("assistant", "", {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]})
    turns = (
        Turn((1, 2), Generation((3,), (-0.1,), "stop", 4, "x", 0.25), (message, Message("tool", "7"))),
        Turn(
            (1, 2, 3),
            Generation((5, 6), (-1e-7, -2.5), "length", 5, "y", versions=(5, 6), allowed_tokens=(5, 6, 7)),
            (Message("assistant", "y"),),
        ),
    )
    score = Score(1 / 3, {"right": 1 / 3}, per_turn=(1 / 3, 0.0), per_token=(1 / 3, 0.0, 0.0))
    shown = (Message("user", "An observation."),)
    more = {"greedy": True, "kl_divergence": 0.125, "metadata": {"ended": "stop"}, "prompt_messages": shown}
    return Rollout(sample, turns, number, 2, score, **more)


def test_what_is_written_is_read_back_without_loss(tmp_path):
    file = tmp_path / "deep" / "rollouts.jsonl"
    failed = Rollout(Sample("f"), error="reward x failed")
    oxrl.write_rollouts(file, [rich(), failed])
    oxrl.write_rollouts(file, [rich(1)])
    back = oxrl.read_rollouts(file)
    assert back == [rich(), failed, rich(1)]
    assert [each.sample.conversational for each in back] == [True, False, True]
    assert back[0].messages[0] == Message("user", "An observation.") and back[0].prompt == "An observation."
    assert digest_of(back) == digest_of([rich(), failed, rich(1)])
    assert len(file.read_text().split("\n")) == 4


def test_errors_name_the_line_when_reading_and_the_rollout_when_writing(tmp_path):
    file = tmp_path / "r.jsonl"
    oxrl.write_rollouts(file, [rich()])
    file.write_text(file.read_text() + json.dumps({"step": 1}) + "\n")
    with pytest.raises(ValueError, match="line 2 is not a rollout"):
        oxrl.read_rollouts(file)
    with pytest.raises(ValueError, match="fake#0/0 cannot be written: .*set"):
        oxrl.write_rollouts(file, [fake_rollout("a", metadata={"seen": {1}})])


def several(prompts, answers):
    return [fake_rollout(f"{group}{index}", group=group, index=index) for index in range(answers) for group in prompts]


def test_answers_are_grouped_by_prompt():
    groups = oxrl.group_rollouts(several([4, 2], answers=3))
    assert [[each.response for each in group] for group in groups] == [["40", "41", "42"], ["20", "21", "22"]]


def test_merging_keeps_groups_of_different_calls_apart():
    merged = oxrl.merge_rollouts(several([0, 1], 2), several([0], 3))
    assert [len(group) for group in oxrl.group_rollouts(merged)] == [2, 2, 3]
    assert [group[0].group for group in oxrl.group_rollouts(merged)] == [0, 1, 2]


def test_a_split_keeps_all_answers_to_a_prompt_on_one_side():
    rollouts = several(range(10), 4)
    kept, held_out = oxrl.split_rollouts(rollouts, 0.8, seed=3)
    sides = [{rollout.group for rollout in side} for side in (kept, held_out)]
    assert [len(side) for side in sides] == [8, 2] and not sides[0] & sides[1]
    assert len(kept) + len(held_out) == 40
    assert oxrl.split_rollouts(rollouts, 0.8, seed=3)[0] == kept != oxrl.split_rollouts(rollouts, 0.8, seed=4)[0]
    with pytest.raises(ValueError, match="share is 8"):
        oxrl.split_rollouts(rollouts, 8)
