"""What every `Generator` must do, run over each implementation."""

import copy
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import pytest
import torch

from oxrl.concurrency import task_group
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
HELD = 4  # tokens; four requests that come one after the other have at most four times as many


LOOPS = ("asyncio", "trio")


@pytest.fixture
def anyio_backend(request):
    return request.param


def on_both_loops(test):
    """Also with the engines that take long: it is about what tasks do side by side."""
    test.loops = LOOPS
    return test


def pytest_generate_tests(metafunc):
    """Every test runs over every generator: on both event loops, or, with real engines, mostly on one in turn."""
    tests = [name for name in vars(metafunc.module) if name.startswith("test_")]
    number, cases = tests.index(metafunc.function.__name__), []
    for place, (name, generator) in enumerate(GENERATORS.items()):
        turn = LOOPS[(number + place) % 2 :][:1]
        loops = getattr(metafunc.function, "loops", turn if name.startswith("vllm") else LOOPS)
        cases += [pytest.param(loop, generator.fixture, marks=generator.marks, id=f"{loop}-{name}") for loop in loops]
    metafunc.parametrize(("anyio_backend", "voice"), cases, indirect=True)


class Engine(NamedTuple):
    """A generator, and what holds its sequences once they have so many tokens: see `tests.holding`."""

    generator: Any
    hold: Callable[[int], Any]


@pytest.fixture(scope="session")
def sglang(tiny):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as server:
        yield Engine(HTTPGenerator([SGLangEngine(server.url)], tiny[1]), partial(holding_embedded, server.speaker))


@pytest.fixture(scope="session")
def vllm_over_http(vllm_url, tiny):
    return Engine(HTTPGenerator([VLLMEngine(vllm_url)], tiny[1]), holding)


@pytest.fixture
def vllm_here(vllm_in_process):
    return Engine(vllm_in_process, holding)


@pytest.fixture
def vllm_in_actor(ray_replicas):
    return Engine(ray_replicas, holding)


class Made(NamedTuple):
    """A generator by the fixture that has it, and the marks of the engine behind that."""

    fixture: str | None
    marks: Any = ()


GENERATORS = {
    "embedded": Made(None),
    "vllm over http": Made("vllm_over_http", pytest.mark.engine("vllm_url")),
    "vllm in process": Made("vllm_here", pytest.mark.engine("vllm_in_process")),
    "vllm in a ray actor": Made("vllm_in_actor", pytest.mark.engine("ray_replicas")),
    "sglang stand-in": Made("sglang"),
}


class Voice(NamedTuple):
    """A generator and the trainer's module whose weights it is to have."""

    generator: Any
    hold: Callable[[int], Any]
    model: Any
    first: int  # the version that it starts with

    async def sync(self, version):
        await self.generator.update_weights(Weights(self.model, version))

    @asynccontextmanager
    async def under_way(self, requests):
        """Each of these has some tokens, and gets no more until the weights change; the answers come with the end."""
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
                    if isinstance(engine, VLLMEngine):  # the answer to this comes behind the tokens of those
                        await engine.prompt_logprobs((1, 2))
                yield answers, tasks


@pytest.fixture
async def voice(request, anyio_backend, tiny):
    model = load_model(tiny[0])
    if request.param is None:
        generator = EmbeddedGenerator(model, tiny[1], slots=4)
        engine = Engine(generator, partial(holding_embedded, generator))
    else:
        engine = request.getfixturevalue(request.param)
    voice = Voice(*engine, model, engine.generator.version + 1)
    await voice.sync(voice.first)
    return voice


def logprobs(model, prompt, answer, temperature=1.0):
    """Of the answer's tokens, by a plain forward pass."""
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        p = (model(ids).logits.double() / temperature).log_softmax(-1)[0]
    return [float(p[len(prompt) + i - 1, token]) for i, token in enumerate(answer)]


def move(model, amount=0.05):
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += amount * torch.randn_like(weight)


async def test_there_is_one_generation_per_request_in_order(voice):
    requests = [Request(prompt, seed=index) for index, prompt in enumerate(PROMPTS)]
    answers = await voice.generator.generate(requests, SAMPLING)
    assert len(answers) == len(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) <= 12
        assert answer.finish_reason == ("length" if len(answer.token_ids) == 12 else "stop")
        assert answer.version == voice.first == voice.generator.version
        assert answer.text == voice.generator.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        (alone,) = await voice.generator.generate([request], SAMPLING)
        assert alone.token_ids == answer.token_ids
    assert await voice.generator.generate([], SAMPLING) == []


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_log_probs_are_the_trainers_at_the_sampling_temperature(voice, temperature):
    move(voice.model)  # random weights are nearly uniform at every temperature
    await voice.sync(voice.first + 1)
    sampling = SAMPLING._replace(temperature=temperature)
    for answer, prompt in zip(
        await voice.generator.generate([Request(prompt) for prompt in PROMPTS], sampling), PROMPTS, strict=True
    ):
        assert answer.logprobs == pytest.approx(
            logprobs(voice.model, prompt, answer.token_ids, temperature or 1.0), abs=2e-4
        )


async def test_seeds_decide_what_is_drawn(voice):
    requests = [Request(PROMPTS[0], seed=seed) for seed in range(4)]
    answers = await voice.generator.generate(requests, SAMPLING)
    assert len({answer.token_ids for answer in answers}) == 4, "n samples of one prompt differ by their seeds"
    again = await voice.generator.generate(requests[::-1], SAMPLING)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers[::-1]]
    (other,) = await voice.generator.generate(requests[:1], SAMPLING._replace(seed=5))
    assert other.token_ids != answers[0].token_ids


async def test_temperature_0_takes_the_likeliest(voice):
    (answer,) = await voice.generator.generate([Request((1, 50, 51))], SAMPLING._replace(temperature=0))
    ids = [1, 50, 51]
    for token in answer.token_ids:
        with torch.no_grad():
            assert token == int(voice.model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


async def test_a_stop_token_ends_an_answer_and_belongs_to_it(voice):
    (free,) = await voice.generator.generate([Request((1, 2))], SAMPLING)
    stop = free.token_ids[5]
    (answer,) = await voice.generator.generate([Request((1, 2))], SAMPLING._replace(stop_token_ids=(stop,)))
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert answer.finish_reason == "stop"


async def test_a_stop_text_ends_an_answer_and_belongs_to_it(voice):
    sampling = SAMPLING._replace(max_new_tokens=16)
    for seed in range(16):
        (free,) = await voice.generator.generate([Request((1, 2), seed=seed)], sampling)
        letters = [i for i, token in enumerate(free.token_ids[:-1]) if 33 <= token < 127]
        if letters:
            break
    letter = chr(free.token_ids[letters[0]])
    (answer,) = await voice.generator.generate([Request((1, 2), seed=seed)], sampling._replace(stop=(letter,)))
    assert answer.token_ids == free.token_ids[: letters[0] + 1]
    assert answer.finish_reason == "stop" and letter in answer.text


async def test_an_answer_ends_where_the_models_context_does(voice):
    prompt = tuple(index % 250 for index in range(2040))
    (answer,) = await voice.generator.generate([Request(prompt)], SAMPLING._replace(max_new_tokens=16))
    assert (len(answer.token_ids), answer.finish_reason) == (8, "length")


@pytest.mark.parametrize(
    ("tokens", "sampling", "told"),
    [
        ((), SAMPLING, "at least one token"),
        ((1, 9999), SAMPLING, "vocabulary"),
        ((1,) * 2048, SAMPLING, "2048"),
        ((1,), SAMPLING._replace(temperature=-1.0), "temperature"),
        ((1,), SAMPLING._replace(top_p=0.0), "top_p"),
    ],
)
async def test_what_cannot_be_done_is_refused(voice, tokens, sampling, told):
    with pytest.raises(ValueError, match=told):
        await voice.generator.generate([Request((1, 2)), Request(tokens)], sampling)
    (answer,) = await voice.generator.generate([Request((1, 2))], SAMPLING)
    assert answer.token_ids, "and whoever asks properly is served"


@on_both_loops
async def test_tasks_share_the_engine_and_each_gets_its_own(voice):
    answers = {}

    async def ask(index):
        (answers[index],) = await voice.generator.generate([Request((index, 7, 9), seed=index)], SAMPLING)

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            for index in range(8):
                tasks.start_soon(ask, index)
    together = await voice.generator.generate([Request((index, 7, 9), seed=index) for index in range(8)], SAMPLING)
    assert [answers[index].token_ids for index in range(8)] == [answer.token_ids for answer in together]


@on_both_loops
async def test_what_is_aborted_returns_what_it_has_and_can_be_resumed(voice):
    async with voice.under_way([Request(p, seed=i) for i, p in enumerate(PROMPTS)]) as (answers, _):
        await voice.generator.abort()
    assert [each.finish_reason for each in answers] == ["aborted"] * len(PROMPTS)
    assert all(HELD <= len(each.token_ids) == len(each.logprobs) < LONG.max_new_tokens for each in answers)
    index, begun = 2, answers[2]
    await voice.sync(voice.first + 1)
    more = SAMPLING._replace(max_new_tokens=len(begun.token_ids) + 5)
    (whole,) = await voice.generator.generate([Request(PROMPTS[index], seed=index, begun=begun)], more)
    assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
    assert whole.logprobs[: len(begun.logprobs)] == begun.logprobs
    assert whole.version == voice.first, "that of the oldest weights which had a part in it"
    drawn_now = len(whole.token_ids) - len(begun.token_ids)
    assert whole.token_versions == (voice.first,) * len(begun.token_ids) + (voice.first + 1,) * drawn_now
    assert whole.finish_reason == ("length" if len(whole.token_ids) == len(begun.token_ids) + 5 else "stop")
    assert whole.logprobs == pytest.approx(logprobs(voice.model, PROMPTS[index], whole.token_ids), abs=2e-4)


async def test_only_what_was_aborted_can_be_resumed(voice):
    (ended,) = await voice.generator.generate([Request((1, 2))], SAMPLING)
    with pytest.raises(ValueError, match="only an aborted generation"):
        await voice.generator.generate([Request((1, 2), begun=ended)], SAMPLING)


async def test_new_weights_answer_from_then_on(voice):
    (before,) = await voice.generator.generate([Request((1, 2, 3))], SAMPLING)
    move(voice.model)
    await voice.sync(voice.first + 7)
    assert voice.generator.version == voice.first + 7
    (after,) = await voice.generator.generate([Request((1, 2, 3))], SAMPLING)
    assert after.version == voice.first + 7
    assert after.logprobs == pytest.approx(logprobs(voice.model, (1, 2, 3), after.token_ids), abs=2e-4)
    assert after.token_ids != before.token_ids


@on_both_loops
async def test_weights_can_change_while_answers_are_under_way(voice):
    """No cache of the old weights survives: the tail has the new ones' log-probs, given the whole text before it."""
    old, prompt = copy.deepcopy(voice.model), (5, 6)
    async with voice.under_way([Request(prompt, seed=seed) for seed in range(3)]) as (answers, _):
        move(voice.model, 0.02)
        await voice.sync(voice.first + 1)
    answer = max(answers, key=lambda one: len(one.token_ids))
    by_old, by_new = (
        (torch.tensor(answer.logprobs) - torch.tensor(logprobs(model, prompt, answer.token_ids))).abs() < 1e-3
        for model in (old, voice.model)
    )
    switch = int(by_old.int().cumprod(0).sum())
    assert HELD <= switch < len(answer.token_ids), "the change fell into the middle"
    assert answer.version == voice.first
    assert by_new[switch:].all(), f"the new weights have a part from token {switch} on"
    if any(isinstance(each, SGLangEngine) for each in getattr(voice.generator, "engines", ())):
        assert not answer.versions, "SGLang does not tell"
        return
    first_new = answer.token_versions.index(voice.first + 1)
    assert set(answer.token_versions) == {voice.first, voice.first + 1} and first_new >= HELD
    assert by_old[:first_new].all() and by_new[first_new:].all(), "each token has the version that drew it"


@on_both_loops
async def test_a_cancelled_call_costs_others_nothing(voice):
    async with voice.under_way([Request((3,), seed=seed) for seed in range(3)]) as (cancelled, tasks):
        tasks.cancel_scope.cancel()
    assert not cancelled
    with anyio.fail_after(HANG):
        (answer,) = await voice.generator.generate([Request((1, 2))], SAMPLING)
    assert answer.token_ids
