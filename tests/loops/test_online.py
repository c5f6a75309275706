"""The online loop: it learns, bounds the age of samples, and stops when sampler and trainer disagree."""

from functools import partial
from itertools import groupby

import anyio
import pytest

from oxrl.algorithms import algorithm
from oxrl.backends.distributed.queued import QueuedBackend
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.buffer import DataBuffer
from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.loops.evaluate import evaluate_online
from oxrl.loops.online import (
    OnlineConfig,
    RLTrainingConfig,
    normalised,
    run_online,
    sleeping_engine,
)
from oxrl.models.load import load_model, load_tokenizer
from oxrl.rollouts.collect import RolloutConfig, RolloutSampler, sampling_manager
from oxrl.run.checkpoint import load_checkpoint, save_checkpoint
from oxrl.run.loops import run_rl_training
from oxrl.types import GenerationConfig, Message, Rollout, Sample, Score
from tests.rollouts.scripted import Scripted

SAMPLES = [Sample(f"s{number}", (Message("user", f"say {number}"),)) for number in range(32)]
FAST = 1e-2  # a learning rate by which `tiny` learns to generate small letters in a few steps


def small_letters(rollout: Rollout) -> float:
    """The share of small letters among the sampled bytes: 26 of 320 for an untrained model."""
    tokens = rollout.generation.token_ids
    return sum(97 <= token < 123 for token in tokens) / max(1, len(tokens))


async def by_small_letters(rollout: Rollout) -> float:
    """The same as an async reward, which needs no thread."""
    return small_letters(rollout)


class Setting:
    """`tiny` with everything around it, small enough to run in seconds."""

    def __init__(self, name="grpo", *, lr=3e-3, seed=0, max_new_tokens=4, others=(), sampling=None, **parameters):
        self.algorithm = algorithm(name, **parameters)
        self.model, self.tokenizer = load_model("tiny"), load_tokenizer("tiny")
        self.others = {role: load_model("tiny") for role in self.algorithm.others}
        self.backend = create_pytorch_backend(
            self.model, lr=lr, weight_decay=0.0, heads=self.algorithm.heads, others=self.others
        )
        self.generator = EmbeddedGenerator(self.model, self.tokenizer)
        self.render = Renderer(self.tokenizer)
        self.sampler = RolloutSampler(
            self.generator, self.render, GenerationConfig(max_new_tokens=max_new_tokens), seed=seed
        )
        self.seed = seed

    def manager(self, samples=SAMPLES, **config):
        online = self.algorithm.online
        config = {
            "batch_size": 8,
            "n_samples_per_prompt": 8,
            "reward_fn": by_small_letters,
            "greedy": online.greedy,
            "min_group_size": online.min_group_size,
        } | config
        return sampling_manager(DataBuffer(samples, seed=self.seed), self.sampler, RolloutConfig(**config))

    def run(self, steps, manager=None, *, backend="asyncio", algorithm=None, generators=None, config=None, **rest):
        manager = manager or self.manager()
        rest.setdefault("log", lambda step, metrics: None)

        async def go():
            return await run_online(
                self.backend,
                algorithm or self.algorithm,
                manager,
                generators or [self.generator],
                self.render,
                OnlineConfig(num_steps=steps, **(config or {})),
                **rest,
            )

        return anyio.run(go, backend=backend)


@pytest.mark.trains
@pytest.mark.parametrize("name", ["grpo", "ppo", "rloo", "dapo", "cispo", "gspo"])
def test_reward_climbs_from_chance_to_above_nine_tenths(name):
    history = Setting(name, lr=FAST).run(10)
    assert history[0]["reward"] < 0.15
    assert history[-1]["reward"] > 0.9


@pytest.mark.trains
def test_shuffled_rewards_teach_nothing():
    def unrelated(rollout):
        return float((rollout.group * 31 + rollout.index * 17) % 7 < 3)

    setting = Setting(lr=FAST)
    seen = []
    setting.run(10, setting.manager(reward_fn=unrelated), observe=lambda step, groups: seen.append(groups))
    last = [small_letters(rollout) for group in seen[-1] for rollout in group]
    assert sum(last) / len(last) < 0.3


def test_on_policy_sampler_and_trainer_agree_to_rounding():
    history = Setting(lr=1e-3).run(6)
    assert max(line["logprob_gap"] for line in history) < 1e-5
    assert {line["age"] for line in history} == {0.0}
    assert history[0]["ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_at_another_temperature_they_agree_if_the_trainer_knows_it(temperature):
    def run(trainer_temperature):
        setting = Setting(lr=1e-3)
        setting.backend = create_pytorch_backend(setting.model, lr=1e-3, temperature=trainer_temperature)
        setting.sampler.sampling = GenerationConfig(max_new_tokens=4, temperature=temperature)
        return setting.run(2)

    assert max(line["logprob_gap"] for line in run(temperature)) < 1e-5
    with pytest.raises(RuntimeError, match="logprob_gap: sampler and trainer differ by .* another temperature"):
        run(1.0)


def test_a_generator_with_other_weights_is_detected():
    setting = Setting()
    other = load_model("tiny")
    with_noise = next(iter(other.parameters()))
    with_noise.data.mul_(3.0)
    setting.generator = EmbeddedGenerator(other, setting.tokenizer)
    setting.sampler = RolloutSampler(setting.generator, setting.render, GenerationConfig(max_new_tokens=4))

    class IgnoresUpdates:
        version = 0

        async def update_weights(self, weights):
            """A sync that silently does nothing."""

    with pytest.raises(RuntimeError, match="logprob_gap"):
        setting.run(2, generators=[IgnoresUpdates()])


def test_metrics_count_ungraded_rollouts_and_truncated_completions():
    def sometimes(rollout):
        if rollout.index == 3:
            raise ValueError("no idea")
        return Score(float(rollout.index % 2), {"odd": float(rollout.index % 2)})

    setting = Setting(lr=1e-3)
    (line,) = setting.run(1, setting.manager(reward_fn=sometimes))
    assert line["ungraded"] == 8 and line["flat_groups"] == 0
    assert line["reward"] == pytest.approx(3 / 7) and line["reward_odd"] == pytest.approx(3 / 7)
    assert line["truncated"] > 0.9 and line["length"] <= 4 and 0 < line["entropy"] < 6
    expected = ("age", "grad_norm", "logprob_gap", "generated_tokens", "generate_seconds", "train_seconds", "expired")
    assert all(name in line for name in expected)


def test_groups_without_variance_are_counted_and_teach_nothing(caplog):
    setting = Setting()
    (line,) = setting.run(1, setting.manager(reward_fn=lambda rollout: 1.0))
    assert line["flat_groups"] == 8 and line["grad_norm"] == 0
    assert "nothing was learned" in caplog.text


@pytest.mark.trains
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_with_lag_samples_are_at_most_that_old_and_every_step_has_its_batch(backend):
    setting = Setting("grpo", correction="truncated", lr=1e-3)
    seen = []
    history = setting.run(
        6, backend=backend, config={"lag": 2}, observe=lambda step, groups: seen.append([g[0].group for g in groups])
    )
    assert [line["age"] for line in history] == [0, 1, 2, 2, 2, 2]
    assert seen == [list(range(start, start + 8)) for start in range(0, 48, 8)], "nothing twice, nothing skipped"


def test_with_a_separate_engine_the_next_batch_is_sampled_while_this_one_trains():
    """The engine generates the second batch before the first one has been trained on."""
    setting = Setting("grpo", correction="truncated", lr=1e-3)
    engine = Scripted(lambda request: [97 + request.seed % 26, 259])
    setting.sampler = RolloutSampler(engine, setting.render, GenerationConfig(max_new_tokens=4))
    collected_at = []
    history = setting.run(
        4,
        generators=[engine],
        shares_weights=False,
        config={"lag": 1, "max_logprob_gap": 100.0},
        observe=lambda step, groups: collected_at.append((step, len(engine.requests))),
    )
    assert len(history) == 4 and max(line["age"] for line in history) <= 1
    assert collected_at[0] == (1, 128), "two batches of 64 had been requested when the first was done"


class ColocatedEngine(Scripted):
    """An engine on the trainer's device."""

    def __init__(self, events):
        super().__init__(lambda request: [97 + request.seed % 26, 259])
        self.events = events

    async def generate(self, requests, sampling):
        self.events.append("sample")
        return await super().generate(requests, sampling)

    async def sleep(self):
        self.events.append("sleep")

    async def update_weights(self, weights):
        self.events.append("weights")
        await super().update_weights(weights)


class RecordingBackend(QueuedBackend):
    def __init__(self, backend, events):
        super().__init__(backend)
        self.events = events

    def logprobs(self, *arguments):
        self.events.append("train")
        return super().logprobs(*arguments)

    def forward_backward(self, *arguments):
        self.events.append("train")
        return super().forward_backward(*arguments)

    def update_reference(self, decay):
        self.events.append("train")
        return super().update_reference(decay)

    def release_memory(self):
        self.events.append("release memory")
        return super().release_memory()


def test_an_engine_on_the_trainers_device_sleeps_while_a_step_trains_and_wakes_to_its_weights():
    events, setting = [], Setting("grpo", kl_coef=0.1, lr=1e-3)
    engine, backend = ColocatedEngine(events), RecordingBackend(setting.backend, events)
    setting.backend, setting.sampler = (
        backend,
        RolloutSampler(engine, setting.render, GenerationConfig(max_new_tokens=4)),
    )

    async def move_reference(step):
        await backend.update_reference(0.5)

    setting.run(
        2,
        generators=[engine],
        shares_weights=False,
        config={"max_logprob_gap": 100.0},
        move_reference=move_reference,
        offload_engine=partial(sleeping_engine, engine, backend),
    )
    backend.close()
    step = ["sample", "sleep", "train", "release memory", "weights"]
    assert [event for event, _ in groupby(events)] == ["weights", *step, *step]


def test_a_step_may_take_several_optimizer_steps_over_its_batch():
    setting = Setting(lr=1e-3)
    history = setting.run(2, config={"iterations": 2, "mini_batches": 4})
    assert setting.backend.version == 16
    assert history[0]["logprob_gap"] < 1e-5, "the gap is that of the first optimizer step"
    assert history[1]["age"] == 0, "what was sampled after the update is of the newest version"


def test_an_algorithm_without_a_ratio_refuses_to_use_a_batch_twice():
    setting = Setting("reinforce")
    with pytest.raises(ValueError, match="reinforce .* one optimizer step per batch"):
        setting.run(1, config={"iterations": 2})


def test_a_sync_interval_beyond_the_lag_is_refused():
    with pytest.raises(ValueError, match="sync_every=3 .* lag=1"):
        OnlineConfig(num_steps=1, lag=1, sync_every=3)
    with pytest.raises(ValueError, match="always in sync: set sync_every to 1"):
        Setting().run(1, config={"lag": 1, "sync_every": 2})


@pytest.mark.trains
def test_the_algorithm_can_change_during_a_run():
    setting = Setting(lr=1e-3)
    schedule = {1: algorithm("grpo"), 3: algorithm("rloo")}
    history = setting.run(4, algorithm=lambda step: schedule[3 if step >= 3 else 1])
    assert [line.get("algorithm_switched") for line in history] == [None, None, 1.0, None]


@pytest.mark.trains
def test_a_resumed_run_is_bit_identical_also_with_partial_rollouts(tmp_path):
    def fresh():
        return Setting(lr=1e-3, max_new_tokens=12)

    def manager(setting):
        return setting.manager(over_sampling_factor=1.5, partial_rollouts=True, max_age=1)

    def facts(history):
        return [{k: v for k, v in line.items() if "second" not in k and k != "memory_gib"} for line in history]

    config = {"max_age": 1}
    whole = fresh()
    expected = whole.run(6, manager(whole), config=config)
    assert any(line["carried"] for line in expected), "no group was carried over: the test proves nothing"
    first = fresh()

    async def save(state, best_step):
        await save_checkpoint(tmp_path, first.backend, state)

    done = first.run(3, manager(first), config=config, save=save)
    second = fresh()
    state = anyio.run(load_checkpoint, tmp_path / "step_0003", second.backend)
    done += second.run(6, manager(second), config=config, state=state)
    assert facts(done) == facts(expected)
    for name, weight in whole.model.named_parameters():
        assert weight.equal(dict(second.model.named_parameters())[name])


@pytest.mark.trains
def test_resuming_with_lag_trains_nothing_twice_and_keeps_ages(tmp_path):
    def fresh():
        return Setting("grpo", correction="truncated", lr=1e-3)

    seen = []
    first = fresh()

    async def save(state, best_step):
        await save_checkpoint(tmp_path, first.backend, state)

    observe = lambda step, groups: seen.append([g[0].group for g in groups])  # noqa: E731
    first.run(3, config={"lag": 1, "checkpoint_every": 2}, save=save, observe=observe)
    del seen[2]  # the third step is done again
    second = fresh()
    state = anyio.run(load_checkpoint, tmp_path / "step_0002", second.backend)
    history = second.run(5, config={"lag": 1}, state=state, observe=observe)
    assert [line["age"] for line in history] == [1, 1, 1]
    assert seen == [list(range(start, start + 8)) for start in range(0, 40, 8)]


def test_evaluation_is_greedy_repeatable_and_has_an_interval():
    setting = Setting()
    held_out = RolloutSampler(setting.generator, setting.render, GenerationConfig(max_new_tokens=4, temperature=0.0))
    first = anyio.run(evaluate_online, held_out, SAMPLES, small_letters)
    assert first == anyio.run(evaluate_online, held_out, SAMPLES, small_letters)
    assert first["eval_reward_low"] <= first["eval_reward"] <= first["eval_reward_high"]


@pytest.mark.trains
def test_the_best_evaluation_is_the_highest_reward_and_patience_ends_the_run():
    rewards = iter([0.1, 0.5, 0.4, 0.3, 0.2])

    async def evaluate():
        return {"eval_reward": next(rewards)}

    saved = []

    async def save(state, best_step):
        saved.append((state.step, best_step))

    setting = Setting(lr=1e-4)
    history = setting.run(5, config={"eval_every": 1, "patience": 2}, evaluate=evaluate, save=save)
    assert len(history) == 4 and saved[-1] == (4, 2)


def test_normalised_rewards_have_mean_0_and_std_1_over_the_step():
    groups = [tuple(Rollout(SAMPLES[0], score=Score(float(x))) for x in values) for values in ((1, 2), (3, 6))]
    scores = [rollout.reward for group in normalised(groups) for rollout in group]
    assert sum(scores) == pytest.approx(0) and sum(s * s for s in scores) / 4 == pytest.approx(1)


@pytest.mark.parametrize("moment", ["between steps", "while answers are awaited", "during an update"])
def test_an_interrupt_saves_what_is_done(moment):
    """Two steps of eight prompts are done, whatever the third one was doing."""
    setting = Setting(lr=1e-4)
    saved = []

    async def save(state, best_step):
        saved.append((state.step, setting.backend.version))

    async def go():
        with anyio.CancelScope() as scope:

            def log(step, metrics):
                if moment == "between steps" and step == 2:
                    scope.cancel()

            async def reward(rollout):
                if moment == "while answers are awaited" and rollout.group == 20:
                    scope.cancel()
                return float(rollout.index)

            async def move_reference(step):
                if moment == "during an update" and step == 2:
                    scope.cancel()

            await run_online(
                setting.backend,
                setting.algorithm,
                setting.manager(reward_fn=reward),
                [setting.generator],
                setting.render,
                OnlineConfig(num_steps=50),
                log=log,
                move_reference=move_reference,
                save=save,
            )

    anyio.run(go)
    assert saved == [(2, 2)]


@pytest.mark.trains
def test_run_rl_training_rewards_minus_a_baseline():
    setting = Setting("reinforce", lr=FAST)
    manager = setting.manager()
    config = RLTrainingConfig(num_steps=9, baseline=0.1, log_every=3)
    logged = []
    history = anyio.run(
        lambda: run_rl_training(
            setting.backend,
            manager.data_buffer,
            manager,
            [setting.generator],
            config,
            lambda step, metrics: logged.append(step),
        )
    )
    assert logged == [3, 6, 9]
    assert history[-1]["reward"] > 0.6


def test_a_batch_without_rows_is_skipped(caplog):
    setting = Setting("rft", threshold=2.0)
    (line,) = setting.run(1)
    assert line["trained_tokens"] == 0 and setting.backend.version == 0
    assert "nothing was learned" in caplog.text
