"""The training loop as plain functions: training improves the reward, and every part can be replaced."""

import json

import anyio
import pytest

import oxrl
from oxrl import GenerationConfig, create_algorithm_config, quick_start_training, train
from oxrl.models.reference import create_ema_updater, frozen_copy
from oxrl.primitives.training import create_training_state, training_iteration
from oxrl.rollouts.envs import dialogue
from tests.loops.test_online import small_letters

PROMPTS = [f"say {number}" for number in range(16)]
SHORT = GenerationConfig(max_new_tokens=4)


def fresh(**options):
    model, tokenizer = oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny")
    return create_training_state(model, tokenizer, lr=3e-3, weight_decay=0.0, **options)


@pytest.mark.trains
def test_a_quick_start_learns():
    rewards = []
    state = quick_start_training(
        "tiny",
        PROMPTS,
        small_letters,
        num_iterations=20,
        gen_config=SHORT,
        lr=3e-3,
        logger=lambda step, metrics: rewards.append(metrics["reward"]),
    )
    assert len(rewards) == 20 and state.state.step == 20
    assert rewards[-1] > 0.5 > 0.2 > rewards[0]


def test_every_part_of_a_run_can_be_replaced():
    seen = {"loaded": [], "stepped": 0, "followed": 0, "saved": [], "evaluated": 0, "logged": []}

    def prompt_loader(iteration):
        seen["loaded"].append(iteration)
        return PROMPTS[:4]

    def optimizer_step(backend):
        seen["stepped"] += 1
        return backend.optim_step()

    follow = create_ema_updater(decay=0.5)

    def update_reference(ref, policy):
        seen["followed"] += 1
        return follow(ref, policy)

    def evaluate(state):
        seen["evaluated"] += 1
        return {"eval_reward": 0.5}

    def algorithm_at(iteration):
        if iteration < 3:
            return create_algorithm_config("grpo", {"kl_coef": 0.2})
        return create_algorithm_config("dapo", {"beta": 0.1})

    start = fresh(ref_model=frozen_copy(oxrl.load_model("tiny")))
    final = train(
        initial_state=start,
        prompt_loader=prompt_loader,
        num_iterations=4,
        gen_config=SHORT,
        algorithm_config=algorithm_at,
        reward_fn=small_letters,
        optimizer_step_fn=optimizer_step,
        ref_model_update_fn=update_reference,
        checkpoint_fn=lambda state: seen["saved"].append(state.state.step),
        eval_fn=evaluate,
        logger=lambda step, metrics: seen["logged"].append((step, metrics["eval_reward"])),
    )
    assert seen == {
        "loaded": [1, 2, 3, 4],
        "stepped": 4,
        "followed": 4,
        "saved": [1, 2, 3, 4],
        "evaluated": 4,
        "logged": [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)],
    }
    assert final.state.version == 4 and final.policy is start.policy and final.reference is not None


def test_an_iteration_compares_at_the_sampling_temperature():
    _, stats = training_iteration(
        fresh(), PROMPTS[:4], GenerationConfig(4, temperature=0.5), create_algorithm_config("grpo"), small_letters
    )
    assert stats.metrics["logprob_gap"] < 1e-5 and stats.reward == stats.metrics["reward"]


def test_the_loop_also_runs_inside_a_running_event_loop():
    async def notebook():
        return training_iteration(fresh(), PROMPTS[:2], SHORT, create_algorithm_config("grpo"), small_letters)

    _, stats = anyio.run(notebook)
    assert stats.metrics["grad_norm"] >= 0


def test_offline_algorithms_are_refused():
    with pytest.raises(ValueError, match="sft trains on files.*online algorithm"):
        training_iteration(fresh(), PROMPTS[:2], SHORT, create_algorithm_config("sft"), small_letters)


@pytest.mark.parametrize("prompts", [[], (), "Say hello."])
def test_prompts_are_a_list_with_something_in_it(prompts):
    with pytest.raises(ValueError, match="give a list with at least one prompt"):
        quick_start_training("tiny", prompts, small_letters, num_iterations=1)


def test_rows_are_refused_as_prompts():
    with pytest.raises(ValueError, match=r"prompt 1 is a dict; .*load_samples\(rows\)"):
        quick_start_training("tiny", ["a", {"prompt": "b"}], small_letters, num_iterations=1)


def test_a_reward_has_a_name_or_the_message_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean number_match"):
        quick_start_training("tiny", ["2+2?"], "number_mtch", num_iterations=1)
    with pytest.raises(ValueError, match="number_match cannot grade 1 of 1 samples"):
        quick_start_training("tiny", ["2+2?"], "number_match", num_iterations=1)
    seen = []
    quick_start_training(
        "tiny",
        oxrl.fill_prompts("What is {a}?", [{"a": "1 + 1", "answer": "2"}]),
        "number_match",
        num_iterations=1,
        gen_config=SHORT,
        prompts_per_iteration=1,
        logger=lambda step, metrics: seen.append(metrics["reward"]),
    )
    assert len(seen) == 1 and 0 <= seen[0] <= 1


def test_a_missing_reference_is_named_before_anything_is_sampled():
    with pytest.raises(ValueError, match="needs a reference model, and the state has none"):
        training_iteration(fresh(), PROMPTS, SHORT, create_algorithm_config("grpo", {"kl_coef": 0.1}), small_letters)


def test_equal_rewards_do_not_change_the_weights_of_an_algorithm_that_needs_variance():
    pairs = create_algorithm_config("dapo", {"beta": 0.1})
    start = fresh(ref_model=frozen_copy(oxrl.load_model("tiny")))
    state, stats = training_iteration(start, PROMPTS[:2], SHORT, pairs, lambda rollout: 1.0)
    assert stats.loss == 0 and stats.metrics["flat_groups"] == 2 and state.state.version == 0
    mixed = {PROMPTS[0]: 1.0, PROMPTS[1]: None}
    state, stats = training_iteration(
        state, PROMPTS[:2], SHORT, pairs, lambda rollout: mixed[rollout.prompt] or float(rollout.index)
    )
    assert stats.metrics["flat_groups"] == 1 and state.state.version == 1


@pytest.mark.trains
def test_a_run_resumed_from_its_checkpoint_gets_the_same_weights(tmp_path):
    grpo = create_algorithm_config("grpo")

    def run(state, iterations):
        silent = {"logger": lambda step, metrics: None, "checkpoint_fn": oxrl.create_checkpointer(tmp_path, every=2)}
        return train(state, lambda _: PROMPTS[:2], iterations, SHORT, grpo, small_letters, **silent)

    complete = run(fresh(), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0002"]
    resumed = oxrl.restore_training_state(fresh(), tmp_path / "step_0002")
    assert (resumed.state.step, resumed.generator.version) == (2, 2)
    resumed = run(resumed, 1)
    assert resumed.state.step == 3
    for one, other in zip(complete.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert one.equal(other)
    (tmp_path / "step_0002").rename(tmp_path / "step_0009")
    state_file = tmp_path / "step_0009" / "training_state.json"
    changed = {**json.loads(state_file.read_text()), "step": 9}
    del changed["files"], changed["seal"]  # these checksums would detect the change first
    state_file.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="step_0009 is of another run"):
        run(fresh(), 2)


def test_a_run_uses_the_given_environment():
    episodes, turns = [], []

    async def twice(sample, policy):
        episodes.append(sample.id)
        return await dialogue(lambda conversation: "Go on.", max_turns=2)(sample, policy)

    one_token = SHORT._replace(stop_token_ids=tuple(range(256)))
    train(
        fresh(),
        lambda _: PROMPTS[:2],
        1,
        one_token,
        create_algorithm_config("grpo"),
        small_letters,
        n_samples_per_prompt=3,
        env=twice,
        logger=lambda step, metrics: turns.append(metrics["turns"]),
    )
    assert len(episodes) == 6 and turns[0] > 1.5
