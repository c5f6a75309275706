"""Sampling and training at the same time: the loop with a real vLLM server and a trainer in another thread."""

import threading
from types import SimpleNamespace

import anyio
import pytest

from oxrl.backends.distributed.queued import QueuedBackend
from oxrl.concurrency import task_group
from oxrl.data.buffer import DataBuffer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.generators.http import VLLMEngine
from oxrl.generators.pool import HTTPGenerator
from oxrl.loops import rollout_queue
from oxrl.loops.evaluate import sample_and_grade
from oxrl.loops.online import OnlineConfig, run_online
from oxrl.loops.rollout_queue import RolloutQueue, prefetching
from oxrl.rollouts.collect import RolloutSampler
from oxrl.run.checkpoint import load_checkpoint, save_checkpoint
from oxrl.types import Generation, GenerationConfig, Message, Rollout, Status, Turn, Weights
from tests.holding import Hold, holding
from tests.loops.test_online import SAMPLES, Setting, small_letters
from tests.waiting import HANG, wait_until, wait_until_async


class Collected:
    """How many batches were collected; a thread can wait for them."""

    def __init__(self):
        self.batches, self._changed = 0, threading.Condition()

    def one_more(self):
        with self._changed:
            self.batches += 1
            self._changed.notify_all()

    def wait_for(self, batches):
        with self._changed:
            assert self._changed.wait_for(lambda: self.batches >= batches, HANG), f"{self.batches}, not {batches}"


class Busy:
    """A backend that calls `meanwhile` in each of its updates, to simulate a long computation."""

    def __init__(self, backend, meanwhile):
        self.backend, self.meanwhile = backend, meanwhile

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def optim_step(self):
        self.meanwhile()
        return self.backend.optim_step()


class Overlapping(Setting):
    """GRPO on `tiny`, sampled by a vLLM server and trained in a thread."""

    def __init__(self, url, *, max_new_tokens=8, **parameters):
        super().__init__("grpo", correction="truncated", lr=1e-3, **parameters)
        self.generator = HTTPGenerator([VLLMEngine(url)], self.tokenizer)
        self.sampler = RolloutSampler(
            self.generator, self.render, GenerationConfig(max_new_tokens=max_new_tokens), seed=0
        )
        self.local, self.backend = self.backend, QueuedBackend(Busy(self.backend, lambda: self.meanwhile()))
        self.meanwhile, self.collected = lambda: None, Collected()

    def run(self, steps, manager=None, *, config=None, **rest):
        manager = manager or self.manager(batch_size=4, n_samples_per_prompt=4)
        collect = manager.collect

        async def counted(*arguments):
            batch = await collect(*arguments)
            self.collected.one_more()
            return batch

        manager.collect = counted
        return super().run(
            steps,
            manager,
            generators=[self.generator],
            shares_weights=False,
            config={"lag": 1, **(config or {})},
            **rest,
        )

    async def until_held(self, hold, answers, ended=()):
        """Wait until so many are held and the server's frontend has their tokens, which precede the next reply."""
        await wait_until_async(lambda: hold.reached == answers or ended, f"{answers} answers are held")
        assert not ended
        await self.generator.engines[0].prompt_logprobs((1, 2))

    def trains_until_the_next_batch_is_collected(self, batches, waiting=0):
        """Each update lasts until one more of the `batches` to come is collected; some are `waiting` already."""
        needed = iter(range(2 - waiting, 100))
        self.meanwhile = lambda: self.collected.wait_for(min(next(needed), batches))


def numbers(groups):
    return [group[0].group for group in groups]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_batches_are_sampled_and_graded_while_the_trainer_computes(vllm_url, loop, monkeypatch):
    """Each update lasts until the next batch is graded, so only the first one is waited for: 16 rewards of a second."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rollout_queue, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def takes_a_second(rollout):
        await anyio.lowlevel.checkpoint()
        clock.now += 1.0
        return small_letters(rollout)

    setting = Overlapping(vllm_url)
    setting.trains_until_the_next_batch_is_collected(4)
    seen = []
    manager = setting.manager(batch_size=4, n_samples_per_prompt=4, reward_fn=takes_a_second)
    history = setting.run(4, manager, backend=loop, observe=lambda step, groups: seen.append(numbers(groups)))
    assert [line["age"] for line in history] == [0, 1, 1, 1]
    assert seen == [list(range(start, start + 4)) for start in range(0, 16, 4)], "nothing twice, nothing skipped"
    assert setting.generator.version == setting.local.version == 4
    assert [line["wait_seconds"] for line in history] == [16, 0, 0, 0]


def test_tokens_sampled_across_an_update_have_both_versions_and_a_bounded_age(vllm_url):
    """The second batch has eight tokens of each answer at the first update, and gets the others after it."""
    setting, hold, graded, rollouts = Overlapping(vllm_url, max_new_tokens=24), Hold(), [], []

    def grade(rollout):
        graded.append(rollout)
        if len(graded) == 2:  # the first batch: what is sampled next is held
            hold.start(8)
        return small_letters(rollout)

    def until_the_second_batch_is_held():
        if hold.wanted is not None:
            wait_until(lambda: hold.reached == 2, "both answers of the second batch are held")

    setting.meanwhile = until_the_second_batch_is_held
    try:
        history = setting.run(
            3,
            setting.manager(batch_size=1, n_samples_per_prompt=2, reward_fn=grade),
            observe=lambda step, groups: rollouts.extend(each for group in groups for each in group),
        )
    finally:
        hold.release()
    assert len(rollouts) == 6
    for each in rollouts[2:4]:
        assert each.versions == (0,) * 8 + (1,) * (len(each.versions) - 8) and len(each.versions) > 8
    assert all(list(each.versions) == sorted(each.versions) and each.version == each.versions[0] for each in rollouts)
    assert max(line["age"] for line in history) == 1
    assert 0 < history[1]["age_mean"] < history[1]["age"]


def test_over_sampling_partial_rollouts_and_evaluation_work_while_training_overlaps(vllm_url):
    """Two of the first six prompts are held, so that four others make the first batch and these two are resumed."""
    setting = Overlapping(vllm_url, max_new_tokens=24)
    held_out = RolloutSampler(setting.generator, setting.render, GenerationConfig(max_new_tokens=24, temperature=0.0))
    evaluated, seen, resumed, hold = [], [], [], Hold()
    generate = setting.generator.generate
    first = DataBuffer(SAMPLES, seed=setting.seed).get_prompts(6)
    held = [list(map(int, setting.render.prompt(sample.messages))) for sample in first[1:3]]

    async def generate_and_hold(requests, sampling):
        if not hold.started:
            hold.start(8, held)
        resumed.extend(len(each.partial.token_ids) for each in requests if each.partial is not None)
        return await generate(requests, sampling)

    async def evaluate():
        rollouts = await sample_and_grade(held_out, SAMPLES[:2], small_letters)
        evaluated.extend(rollouts)
        return {"eval_reward": 0.0}

    setting.generator.generate = generate_and_hold
    manager = setting.manager(
        batch_size=4, n_samples_per_prompt=2, over_sampling_factor=1.5, partial_rollouts=True, max_age=3
    )
    abort = manager.abort

    async def abort_when_held():
        await setting.until_held(hold, 4)  # two answers to each of two prompts
        await abort()

    manager.abort = abort_when_held
    try:
        history = setting.run(
            4,
            manager,
            config={"max_age": 2, "eval_every": 1},
            evaluate=evaluate,
            observe=lambda step, groups: seen.extend(numbers(groups)),
        )
    finally:
        hold.release()
    assert history[0]["carried"] == 2 and resumed[:4] == [8] * 4
    assert len(seen) == len(set(seen)) == 16, "every step has its batch, and no group comes twice"
    assert max(line["age"] for line in history) <= 2 and history[-1]["expired_groups"] == 0
    assert {each.status for each in evaluated} <= {Status.COMPLETED, Status.TRUNCATED}


def test_an_evaluation_resumes_requests_that_others_abort(vllm_url):
    setting = Overlapping(vllm_url)
    held_out = RolloutSampler(setting.generator, setting.render, GenerationConfig(max_new_tokens=40, temperature=0.0))
    rollouts = []

    async def go():
        async def evaluate():
            rollouts.extend(await sample_and_grade(held_out, SAMPLES[:2], small_letters))

        await setting.generator.update_weights(Weights(setting.model, 1))
        with holding(8) as hold:
            async with task_group() as tasks:
                tasks.start_soon(evaluate)
                for held in (2, 4, 6):
                    await setting.until_held(hold, held, rollouts)
                    await setting.generator.abort()
                hold.release()

    anyio.run(go)
    assert {each.status for each in rollouts} <= {Status.COMPLETED, Status.TRUNCATED}
    lengths = [len(each.generation.token_ids) for each in rollouts]
    assert all(24 < length <= 40 for length in lengths) and len(lengths) == 2


def test_a_run_with_lag_is_resumed_with_its_queued_batches(vllm_url, tmp_path):
    first = Overlapping(vllm_url)
    first.trains_until_the_next_batch_is_collected(3)
    seen = []

    async def save(state, best_step):
        await save_checkpoint(tmp_path, first.backend, state, keep_last=9)

    observe = lambda step, groups: seen.append(groups)  # noqa: E731
    first.run(3, config={"checkpoint_every": 1}, save=save, observe=observe)
    done_again = seen.pop()
    second = Overlapping(vllm_url)
    state = anyio.run(load_checkpoint, tmp_path / "step_0002", second.backend)
    assert len(state.cursor["waiting"]) == 1 and second.local.version == 2
    second.trains_until_the_next_batch_is_collected(2, waiting=1)
    history = second.run(5, state=state, observe=observe)
    assert [line["age"] for line in history] == [1, 1, 1]
    assert seen[2] == done_again, "what was sampled before is not sampled again, to the last bit of its log-probs"
    assert [numbers(groups) for groups in seen] == [list(range(start, start + 4)) for start in range(0, 20, 4)]


def test_a_lag_too_small_for_the_queued_batches_is_refused(tmp_path):
    first = Setting("grpo", correction="truncated", lr=1e-3)

    async def save(state, best_step):
        await save_checkpoint(tmp_path, first.backend, state, keep_last=9)

    first.run(3, first.manager(batch_size=2), config={"lag": 3, "checkpoint_every": 1}, save=save)
    state = anyio.run(load_checkpoint, tmp_path / "step_0001", first.backend)
    with pytest.raises(ValueError, match="2 batches .* lag=0 .* lag 1 or more"):
        first.run(4, first.manager(batch_size=2), state=state)


def test_several_optimizer_steps_a_batch_age_it_by_one_step(tiny):
    """A version is an optimizer step; `lag` counts steps of the loop."""
    setting = Setting("grpo", correction="truncated", lr=1e-3)
    history = setting.run(3, setting.manager(batch_size=4), config={"lag": 1, "mini_batches": 2})
    assert [line["age"] for line in history] == [0, 2, 2] and history[-1]["expired_groups"] == 0


@pytest.mark.parametrize(("oldest", "expired"), [(1, 1), (2, 0)])
def test_a_partial_rollout_is_resumed_only_within_the_maximum_age(oldest, expired):
    setting = Setting("grpo", max_new_tokens=6)
    manager = setting.manager(batch_size=1, n_samples_per_prompt=2, partial_rollouts=True, max_age=9)
    prompt = tuple(map(int, setting.render.prompt(SAMPLES[0].messages)))
    partial = Turn(prompt, Generation((97, 98), (-1.0, -1.0), "aborted", 3), (Message("assistant", "ab"),))
    manager.partial_samples = [tuple(Rollout(SAMPLES[0], (partial,), group=0, index=index) for index in range(2))]
    (group,), counts, _ = anyio.run(manager.collect, 5, oldest)
    assert counts["expired"] == expired
    assert all((each.generation.token_ids[:2] == (97, 98)) is not bool(expired) for each in group)


def test_a_batch_that_starts_now_is_older_by_the_lag_when_it_is_trained_on():
    setting = Setting("grpo")
    queue = RolloutQueue(setting.manager(), setting.generator, lag=1, max_age=6, updates=2, shares_weights=False)
    assert queue.max_partial_age == 4


class Counted:
    """A collector whose batches are available immediately; it counts them."""

    def __init__(self):
        self.batches = 0

    async def collect(self, version, max_age):
        self.batches += 1
        return [(Rollout(SAMPLES[0], group=self.batches),)], {}, []

    def state(self):
        return {"batches": self.batches}

    def restore(self, state):
        self.batches = state["batches"]


async def sampled_ahead(batches: RolloutQueue, *synced: bool) -> list[int]:
    """How many batches there are before any was trained on, and after each that was, with or without a sync."""
    counts = []
    async with prefetching(batches, 10):
        for each in (*synced, False):
            await anyio.wait_all_tasks_blocked()
            counts.append(batches.manager.batches)
            batches.trained(synced=each)
    return counts


def with_lag(lag):
    bounds = {"lag": lag, "max_age": 9, "updates": 1, "shares_weights": False}
    return RolloutQueue(Counted(), SimpleNamespace(version=0), **bounds)


def test_no_more_than_the_lag_and_one_batch_are_sampled_ahead_also_after_a_resume():
    async def twice():
        first = with_lag(2)
        counts = [await sampled_ahead(first, True)]
        resumed = with_lag(3)
        await resumed.restore(first.state(first.waiting[-1]))
        return [*counts, await sampled_ahead(resumed, True)]

    assert anyio.run(twice) == [[3, 4], [4, 5]]


def test_batches_trained_on_since_the_last_sync_are_replaced_after_the_next_one():
    async def run():
        return await sampled_ahead(with_lag(2), False, True)

    assert anyio.run(run) == [3, 3, 5]


class Recorded:
    """A generator that returns the recorded generation of a request, whatever its weights are."""

    def __init__(self, generations):
        self.generations, self.version = generations, 0

    async def generate(self, requests, sampling):
        await anyio.lowlevel.checkpoint()
        return [self.generations[request.tokens, request.seed] for request in requests]

    async def abort(self):
        pass

    async def update_weights(self, weights):
        self.version = weights.version

    async def close(self):
        pass


class Recording(Recorded):
    """Records the generations of another generator."""

    def __init__(self, generator):
        super().__init__({})
        self.generator = generator

    async def generate(self, requests, sampling):
        answers = await self.generator.generate(requests, sampling)
        self.generations |= {(each.tokens, each.seed): answer for each, answer in zip(requests, answers, strict=True)}
        return answers

    async def update_weights(self, weights):
        await self.generator.update_weights(weights)
        self.version = weights.version


def without_timings(history):
    return [{k: v for k, v in line.items() if "second" not in k and k != "memory_gib"} for line in history]


def with_engine(setting, engine, **how):
    setting.sampler = RolloutSampler(engine, setting.render, GenerationConfig(max_new_tokens=8), seed=0)
    manager = setting.manager(batch_size=4, n_samples_per_prompt=4)

    async def go():
        nothing = lambda step, metrics: None  # noqa: E731
        config = OnlineConfig(num_steps=5)
        return await run_online(
            setting.backend, setting.algorithm, manager, [engine], setting.render, config, log=nothing, **how
        )

    return without_timings(anyio.run(go))


def weights(setting):
    return dict(setting.model.named_parameters())


@pytest.mark.parametrize("recorded_by", [pytest.param("vllm", marks=pytest.mark.engine("vllm_url")), "embedded"])
def test_on_the_same_rollouts_both_kinds_of_run_have_the_same_rewards_losses_and_weights(recorded_by, request):
    """At lag 0; rollouts that one kind of run recorded are trained on in both, with bit-identical results."""
    apart, own = Setting(lr=1e-3), Setting(lr=1e-3)  # an engine with its own weights, and the embedded one
    apart.backend = QueuedBackend(apart.backend)
    if recorded_by == "vllm":
        recording = Recording(HTTPGenerator([VLLMEngine(request.getfixturevalue("vllm_url"))], apart.tokenizer))
        history = with_engine(apart, recording, shares_weights=False)
        again = with_engine(own, Recorded(recording.generations))
    else:
        recording = Recording(EmbeddedGenerator(own.model, own.tokenizer))
        history = with_engine(own, recording)
        again = with_engine(apart, Recorded(recording.generations), shares_weights=False)
    assert history == again and history[-1]["reward"] != history[0]["reward"]
    assert all(weight.equal(weights(own)[name]) for name, weight in weights(apart).items())
    assert max(line["logprob_gap"] for line in history) < 1e-4
