"""The contract of a `Generator`, run over each implementation, and over most also with images or with sounds."""

import copy
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
import torch

from oxrl.concurrency import task_group
from oxrl.data.media_features import MediaRow, example, media_towers, own_inputs
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.generators.http import SGLangEngine, VLLMEngine
from oxrl.generators.pool import HTTPGenerator
from oxrl.models.load import load_model
from oxrl.types import GenerationConfig, Request, Weights
from tests.engines import holding_embedded, sglang_stand_in
from tests.holding import holding
from tests.waiting import HANG, wait_until_async

pytestmark = pytest.mark.anyio
SAMPLING = GenerationConfig(max_new_tokens=12, seed=4)
PROMPTS = [(1, 50, 51), (7,), (200, 100, 3, 4, 5, 6), (9, 9)]
LONG = SAMPLING._replace(max_new_tokens=48)
HELD = 4  # tokens; four requests that arrive one after the other have at most four times as many


LOOPS = ("asyncio", "trio")


@pytest.fixture
def anyio_backend(request):
    return request.param


def on_both_loops(test):
    """Also with slow engines: the test is about concurrent tasks."""
    test.loops = LOOPS
    return test


def pytest_generate_tests(metafunc):
    """Every test runs over every generator: on both event loops, or, with real engines, mostly on one in turn."""
    tests = [name for name in vars(metafunc.module) if name.startswith("test_")]
    number, cases = tests.index(metafunc.function.__name__), []
    for index, (name, generator) in enumerate(GENERATORS.items()):
        turn = LOOPS[(number + index) % 2 :][:1]
        loops = getattr(metafunc.function, "loops", turn if generator.on_one_loop else LOOPS)
        cases += [pytest.param(loop, name, marks=generator.marks, id=f"{loop}-{name}") for loop in loops]
    metafunc.parametrize(("anyio_backend", "policy"), cases, indirect=True)


class Engine(NamedTuple):
    """A generator, and a context that holds its sequences after a number of tokens: see `tests.holding`."""

    generator: Any
    hold: Callable[[int], Any]


@pytest.fixture(scope="session")
def sglang(tiny):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as server:
        yield Engine(HTTPGenerator([SGLangEngine(server.url)], tiny[1]), partial(holding_embedded, server.generator))


@pytest.fixture(scope="session")
def vllm_over_http(vllm_url, tiny):
    return Engine(HTTPGenerator([VLLMEngine(vllm_url)], tiny[1]), holding)


@pytest.fixture(scope="session")
def vllm_with_images_over_http(vllm_images_url, tiny_vlm):
    return Engine(HTTPGenerator([VLLMEngine(vllm_images_url)], tiny_vlm[1]), holding)


class Case(NamedTuple):
    """The fixture of a generator, and the marks of its engine; or the model of an embedded engine."""

    fixture: str | None
    marks: Any = ()
    model: str = "tiny"

    @classmethod
    def of_vllm(cls, fixture, *, generator=None, model="tiny"):
        return cls(generator or fixture, pytest.mark.engine(fixture), model)

    @property
    def on_one_loop(self):
        return bool(self.marks) or self.model != "tiny"


GENERATORS = {
    "embedded": Case(None),
    "embedded with images": Case(None, model="tiny_vlm"),
    "embedded with sounds": Case(None, model="tiny_audio"),
    "vllm over http": Case.of_vllm("vllm_url", generator="vllm_over_http"),
    "vllm over http with images": Case.of_vllm(
        "vllm_images_url", generator="vllm_with_images_over_http", model="tiny_vlm"
    ),
    "vllm in process": Case.of_vllm("vllm_in_process"),
    "vllm in process with images": Case.of_vllm("vllm_images", model="tiny_vlm"),
    "vllm in process with sounds": Case.of_vllm("vllm_sounds", model="audio_for_vllm"),
    "vllm in a ray actor": Case.of_vllm("ray_replicas"),
    "vllm in a ray actor with images": Case.of_vllm("ray_images", model="tiny_vlm"),
    "sglang stand-in": Case("sglang"),
}


class Policy(NamedTuple):
    """A generator and the trainer's module whose weights it gets."""

    generator: Any
    hold: Callable[[int], Any]
    model: Any
    first: int  # the version that it starts with

    def request(self, tokens, **fields):
        """A request; for a model that reads media, with one of three after its first token."""
        towers = media_towers(self.model)
        if towers is None or not tokens:
            return Request(tokens, **fields)
        medium = example(towers.kinds[0], *((56, 56), (112, 56), (56, 84))[tokens[0] % 3])
        tokens = (*tokens[:1], *towers.placeholders(self.model, medium), *tokens[1:])
        return Request(tokens, media=(medium,), **fields)

    async def sync(self, version):
        await self.generator.update_weights(Weights(self.model, version))

    @asynccontextmanager
    async def in_flight(self, requests):
        """Each request has some tokens, and gets no more until the weights change; answers are complete at the end."""
        for engine in getattr(self.generator, "engines", ()):
            await engine.abort()  # what another test cancelled
        answers = []

        async def ask():
            answers.extend(await self.generator.generate(requests, LONG))

        with anyio.fail_after(HANG), self.hold(HELD) as hold:
            async with task_group() as tasks:
                tasks.start_soon(ask)
                await wait_until_async(lambda: answers or hold.reached >= len(requests), "some tokens of each answer")
                assert not answers
                for engine in getattr(self.generator, "engines", ()):
                    if isinstance(engine, VLLMEngine):  # its response comes after the tokens of those
                        await engine.prompt_logprobs((1, 2))
                yield answers, tasks


@pytest.fixture
async def policy(request, anyio_backend):
    case = GENERATORS[request.param]
    config, tokenizer = request.getfixturevalue(case.model)
    model = load_model(config)
    if case.fixture is None:
        generator = EmbeddedGenerator(model, tokenizer, slots=4)
        engine = Engine(generator, partial(holding_embedded, generator))
    else:
        engine = request.getfixturevalue(case.fixture)
        engine = engine if isinstance(engine, Engine) else Engine(engine, holding)
    policy = Policy(*engine, model, engine.generator.version + 1)
    await policy.sync(policy.first)
    return policy


def logits(model, request, answer=()):
    """Return logits by a plain forward pass of the model itself."""
    row = MediaRow("by itself", np.array([*request.tokens, *answer]), request.media)
    with torch.no_grad():
        return model(**own_inputs(model, row)).logits[0].double()


def logprobs(model, request, answer, temperature=1.0):
    """Return log-probs of the answer's tokens."""
    p = (logits(model, request, answer) / temperature).log_softmax(-1)
    return [float(p[len(request.tokens) + i - 1, token]) for i, token in enumerate(answer)]


def move(model, amount=0.05):
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += amount * torch.randn_like(weight)


async def test_there_is_one_generation_per_request_in_order(policy):
    requests = [policy.request(prompt, seed=index) for index, prompt in enumerate(PROMPTS)]
    answers = await policy.generator.generate(requests, SAMPLING)
    assert len(answers) == len(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) <= 12
        assert answer.finish_reason == ("length" if len(answer.token_ids) == 12 else "stop")
        assert answer.version == policy.first == policy.generator.version
        assert answer.text == policy.generator.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        (alone,) = await policy.generator.generate([request], SAMPLING)
        assert alone.token_ids == answer.token_ids
    assert await policy.generator.generate([], SAMPLING) == []


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_log_probs_are_the_trainers_at_the_sampling_temperature(policy, temperature):
    move(policy.model)  # random weights are nearly uniform at every temperature
    await policy.sync(policy.first + 1)
    sampling = SAMPLING._replace(temperature=temperature)
    requests = [policy.request(prompt) for prompt in PROMPTS]
    for answer, request in zip(await policy.generator.generate(requests, sampling), requests, strict=True):
        expected = logprobs(policy.model, request, answer.token_ids, temperature or 1.0)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)


async def test_allowed_tokens_are_normalised_over_or_refused(policy):
    move(policy.model)
    await policy.sync(policy.first + 1)
    allowed, requests = (65, 80, 81, 200), [policy.request(prompt, seed=2) for prompt in PROMPTS]
    sampling = SAMPLING._replace(allowed_tokens=allowed, temperature=0.8)
    if any(isinstance(engine, SGLangEngine) for engine in getattr(policy.generator, "engines", ())):
        with pytest.raises(ValueError, match=r"allowed_tokens.*over the whole vocabulary"):
            await policy.generator.generate(requests, sampling)
        return
    for request, answer in zip(requests, await policy.generator.generate(requests, sampling), strict=True):
        assert answer.allowed_tokens == allowed
        assert set(answer.token_ids) <= set(allowed)
        expected = []
        over = (logits(policy.model, request, answer.token_ids) / 0.8)[:, list(allowed)].log_softmax(-1)
        for index, token in enumerate(answer.token_ids, len(request.tokens)):
            expected.append(float(over[index - 1, allowed.index(token)]))
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)


async def test_seeds_determine_what_is_sampled(policy):
    requests = [policy.request(PROMPTS[0], seed=seed) for seed in range(4)]
    answers = await policy.generator.generate(requests, SAMPLING)
    assert len({answer.token_ids for answer in answers}) == 4, "n samples of one prompt differ by their seeds"
    again = await policy.generator.generate(requests[::-1], SAMPLING)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers[::-1]]
    (other,) = await policy.generator.generate(requests[:1], SAMPLING._replace(seed=5))
    assert other.token_ids != answers[0].token_ids


async def test_temperature_0_takes_the_likeliest(policy):
    request = policy.request((1, 50, 51))
    (answer,) = await policy.generator.generate([request], SAMPLING._replace(temperature=0))
    for index, token in enumerate(answer.token_ids):
        assert token == int(logits(policy.model, request, answer.token_ids[:index])[-1].argmax())


async def test_a_stop_token_ends_an_answer_and_belongs_to_it(policy):
    (free,) = await policy.generator.generate([policy.request((1, 2))], SAMPLING)
    stop = free.token_ids[5]
    (answer,) = await policy.generator.generate([policy.request((1, 2))], SAMPLING._replace(stop_token_ids=(stop,)))
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert answer.finish_reason == "stop"


async def test_a_stop_text_ends_an_answer_and_belongs_to_it(policy):
    sampling = SAMPLING._replace(max_new_tokens=16)
    for seed in range(16):
        (free,) = await policy.generator.generate([policy.request((1, 2), seed=seed)], sampling)
        letters = [i for i, token in enumerate(free.token_ids[:-1]) if 33 <= token < 127]
        if letters:
            break
    letter = chr(free.token_ids[letters[0]])
    (answer,) = await policy.generator.generate([policy.request((1, 2), seed=seed)], sampling._replace(stop=(letter,)))
    assert answer.token_ids == free.token_ids[: letters[0] + 1]
    assert answer.finish_reason == "stop" and letter in answer.text


async def test_an_answer_ends_where_the_models_context_does(policy):
    prompt = tuple(index % 250 for index in range(2040))
    more = len(policy.request(prompt).tokens) - len(prompt)
    request = policy.request(prompt[: len(prompt) - more])
    (answer,) = await policy.generator.generate([request], SAMPLING._replace(max_new_tokens=16))
    assert (len(answer.token_ids), answer.finish_reason) == (8, "length")


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ((), SAMPLING, "at least one token"),
        ((1, 9999), SAMPLING, "vocabulary"),
        ((1,) * 2048, SAMPLING, "2048"),
        ((1,), SAMPLING._replace(temperature=-1.0), "temperature"),
        ((1,), SAMPLING._replace(top_p=0.0), "top_p"),
    ],
)
async def test_invalid_requests_are_rejected(policy, tokens, sampling, message):
    with pytest.raises(ValueError, match=message):
        await policy.generator.generate([policy.request((1, 2)), policy.request(tokens)], sampling)
    (answer,) = await policy.generator.generate([policy.request((1, 2))], SAMPLING)
    assert answer.token_ids, "a valid request is served afterwards"


@on_both_loops
async def test_tasks_share_the_engine_and_each_gets_its_own_results(policy):
    answers = {}

    async def ask(index):
        (answers[index],) = await policy.generator.generate([policy.request((index, 7, 9), seed=index)], SAMPLING)

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            for index in range(8):
                tasks.start_soon(ask, index)
    together = await policy.generator.generate(
        [policy.request((index, 7, 9), seed=index) for index in range(8)], SAMPLING
    )
    assert [answers[index].token_ids for index in range(8)] == [answer.token_ids for answer in together]


@on_both_loops
async def test_an_aborted_generation_returns_its_tokens_and_can_be_resumed(policy):
    async with policy.in_flight([policy.request(p, seed=i) for i, p in enumerate(PROMPTS)]) as (answers, _):
        await policy.generator.abort()
    assert [each.finish_reason for each in answers] == ["aborted"] * len(PROMPTS)
    assert all(HELD <= len(each.token_ids) == len(each.logprobs) < LONG.max_new_tokens for each in answers)
    index, aborted = 2, answers[2]
    await policy.sync(policy.first + 1)
    more = SAMPLING._replace(max_new_tokens=len(aborted.token_ids) + 5)
    (whole,) = await policy.generator.generate([policy.request(PROMPTS[index], seed=index, partial=aborted)], more)
    assert whole.token_ids[: len(aborted.token_ids)] == aborted.token_ids
    assert whole.logprobs[: len(aborted.logprobs)] == aborted.logprobs
    assert whole.version == policy.first, "that of the oldest weights which sampled a part of it"
    new_tokens = len(whole.token_ids) - len(aborted.token_ids)
    assert whole.token_versions == (policy.first,) * len(aborted.token_ids) + (policy.first + 1,) * new_tokens
    assert whole.finish_reason == ("length" if len(whole.token_ids) == len(aborted.token_ids) + 5 else "stop")
    assert whole.logprobs == pytest.approx(
        logprobs(policy.model, policy.request(PROMPTS[index]), whole.token_ids), abs=2e-4
    )


async def test_only_an_aborted_generation_can_be_resumed(policy):
    (ended,) = await policy.generator.generate([policy.request((1, 2))], SAMPLING)
    with pytest.raises(ValueError, match="only an aborted generation"):
        await policy.generator.generate([policy.request((1, 2), partial=ended)], SAMPLING)


async def test_new_weights_are_used_after_an_update(policy):
    (before,) = await policy.generator.generate([policy.request((1, 2, 3))], SAMPLING)
    move(policy.model)
    await policy.sync(policy.first + 7)
    assert policy.generator.version == policy.first + 7
    (after,) = await policy.generator.generate([policy.request((1, 2, 3))], SAMPLING)
    assert after.version == policy.first + 7
    assert after.logprobs == pytest.approx(logprobs(policy.model, policy.request((1, 2, 3)), after.token_ids), abs=2e-4)
    assert after.token_ids != before.token_ids


@on_both_loops
async def test_weights_can_change_while_requests_are_in_flight(policy):
    """No cache of the old weights survives: the tail has the new ones' log-probs, given the whole text before it."""
    old, prompt = copy.deepcopy(policy.model), (5, 6)
    async with policy.in_flight([policy.request(prompt, seed=seed) for seed in range(3)]) as (answers, _):
        move(policy.model, 0.02)
        await policy.sync(policy.first + 1)
    answer = max(answers, key=lambda one: len(one.token_ids))
    by_old, by_new = (
        (torch.tensor(answer.logprobs) - torch.tensor(logprobs(model, policy.request(prompt), answer.token_ids))).abs()
        < 1e-3
        for model in (old, policy.model)
    )
    switch = int(by_old.int().cumprod(0).sum())
    assert HELD <= switch < len(answer.token_ids), "the change fell into the middle"
    assert answer.version == policy.first
    assert by_new[switch:].all(), f"the new weights sampled from token {switch} on"
    if any(isinstance(each, SGLangEngine) for each in getattr(policy.generator, "engines", ())):
        assert not answer.versions, "SGLang does not report versions"
        return
    first_new = answer.token_versions.index(policy.first + 1)
    assert set(answer.token_versions) == {policy.first, policy.first + 1} and first_new >= HELD
    assert by_old[:first_new].all() and by_new[first_new:].all(), "each token has the version that sampled it"


@on_both_loops
async def test_a_cancelled_call_does_not_affect_others(policy):
    async with policy.in_flight([policy.request((3,), seed=seed) for seed in range(3)]) as (cancelled, tasks):
        tasks.cancel_scope.cancel()
    assert not cancelled
    with anyio.fail_after(HANG):
        (answer,) = await policy.generator.generate([policy.request((1, 2))], SAMPLING)
    assert answer.token_ids
