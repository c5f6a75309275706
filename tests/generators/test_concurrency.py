"""Many tasks, one engine: nobody waits for ever, nothing is lost, and no answer depends on who came first."""

import anyio
import pytest

from oxrl.concurrency import task_group
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.models.load import load_model
from oxrl.types import Generation, GenerationConfig, Request, Weights
from tests.waiting import HANG

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])]
SAMPLING = GenerationConfig(max_new_tokens=12, seed=4)


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny[0])


@pytest.fixture
def speaker(model, tiny):
    return EmbeddedGenerator(model, tiny[1], slots=3)


async def test_tasks_share_the_engine_and_each_gets_its_own(speaker, anyio_backend):
    prompts = [[index, 7, 9] for index in range(8)]
    expected = speaker.complete(prompts, SAMPLING)
    answers = {}

    async def ask(index):
        (answers[index],) = await speaker.generate([Request(tuple(prompts[index]), seed=index)], SAMPLING)

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            for index in range(8):
                tasks.start_soon(ask, index)
    assert [answers[index].token_ids for index in range(8)] == [one.token_ids for one in expected]


async def test_a_call_returns_in_the_order_of_its_requests(speaker, anyio_backend):
    requests = [Request((9 - index,), seed=index) for index in range(7)]
    answers = await speaker.generate(requests, SAMPLING)
    for request, answer in zip(requests, answers, strict=True):
        assert (await speaker.generate([request], SAMPLING))[0].token_ids == answer.token_ids
    assert await speaker.generate([], SAMPLING) == []


async def test_conversations_of_different_length_do_not_wait_for_each_other(model, tiny, anyio_backend):
    """Whoever finishes comes back with a longer prompt while others are under way; greedy and drawn side by side."""
    speaker = EmbeddedGenerator(model, tiny[1], slots=4)
    dialogues, order = {}, []

    async def converse(index, sampling):
        context = [index, 7]
        for turn in range(3):
            (said,) = await speaker.generate([Request(tuple(context), seed=10 * index + turn)], sampling)
            context += [*said.token_ids, 5]
            order.append((index, turn))
        dialogues[index] = context

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            for index in range(4):
                sampling = SAMPLING._replace(max_new_tokens=3 + 10 * index, temperature=min(index, 1))
                tasks.start_soon(converse, index, sampling)
    assert order.index((0, 2)) < order.index((2, 0))
    for index, context in dialogues.items():
        assert len(context) == 2 + 3 * (3 + 10 * index + 1)
    sampling = SAMPLING._replace(max_new_tokens=3, temperature=0)
    assert dialogues[0][2:5] == list(speaker.complete([[0, 7]], sampling)[0].token_ids)


async def test_the_batch_is_the_same_whoever_is_scheduled_first(model, tiny, anyio_backend):
    """Trio shuffles its tasks; which requests meet in a pass must not show it."""
    passes = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _module, inputs, _output: passes[-1].append(inputs[0].flatten().tolist())
    )

    async def converse(speaker, index):
        context = [index, 7]
        for turn in range(3):
            (said,) = await speaker.generate([Request(tuple(context), seed=turn)], SAMPLING._replace(max_new_tokens=2))
            context += said.token_ids

    with anyio.fail_after(HANG):
        for _ in range(5):
            passes.append([])
            speaker = EmbeddedGenerator(model, tiny[1], slots=4)
            async with task_group() as tasks:
                for index in range(6):
                    tasks.start_soon(converse, speaker, index)
    hook.remove()
    assert all(one == passes[0] for one in passes)


async def test_the_drivers_cancellation_costs_nobody_else_anything(speaker, anyio_backend):
    answers, scopes = {}, {}
    expected = speaker.complete([[index, 7] for index in range(6)], SAMPLING)

    async def ask(index):
        with anyio.CancelScope() as scopes[index]:
            answers[index] = await speaker.generate([Request((index, 7), seed=index)], SAMPLING)

    async def cancel_the_driver_twice():
        for _ in range(2):
            while speaker._driver is None:
                await anyio.lowlevel.checkpoint()
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            (index,) = [job.request.tokens[0] for job in speaker._driver.jobs]
            scopes[index].cancel()
            await anyio.lowlevel.checkpoint()

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            for index in range(6):
                tasks.start_soon(ask, index)
            tasks.start_soon(cancel_the_driver_twice)
    assert len(answers) == 4
    for index, (answer,) in answers.items():
        assert answer.token_ids == expected[index].token_ids
    assert speaker._driver is None and speaker._calls == [] and not any(speaker._engine.rows)


async def test_a_waiting_tasks_cancellation_frees_its_slot(speaker, anyio_backend):
    scope, answers = anyio.CancelScope(), []

    async def ask_for_long():
        with scope:
            requests = [Request((1,), seed=seed) for seed in range(3)]
            await speaker.generate(requests, SAMPLING._replace(max_new_tokens=2000))

    async def ask():
        answers.extend(await speaker.generate([Request((5, 6), seed=1)], SAMPLING))

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            tasks.start_soon(ask_for_long)
            tasks.start_soon(ask)
            for _ in range(8):
                await anyio.lowlevel.checkpoint()
            assert not answers
            scope.cancel()
    assert len(answers[0].token_ids) == 12
    assert not speaker._engine.rows and not speaker._engine.waiting


async def abort_after(speaker, requests, sampling, steps):
    """Start these, let the engine run for some steps, and abort."""
    partials = []

    async def ask():
        partials.extend(await speaker.generate(requests, sampling))

    async with task_group() as tasks:
        tasks.start_soon(ask)
        while not any(job and len(job.tokens) >= steps for job in speaker._engine.rows):
            await anyio.lowlevel.checkpoint()
        await speaker.abort()
    return partials


async def test_an_abort_returns_what_there_is(speaker, anyio_backend):
    requests = [Request((index, 3), seed=index) for index in range(5)]
    with anyio.fail_after(HANG):
        partials = await abort_after(speaker, requests, SAMPLING, 4)
    assert [one.finish_reason for one in partials] == ["aborted"] * 5
    lengths = [len(one.token_ids) for one in partials]
    assert sorted(lengths)[:2] == [0, 0]  # there were three slots
    assert all(4 <= length < 12 for length in sorted(lengths)[2:])
    assert all(len(one.token_ids) == len(one.logprobs) for one in partials)
    assert partials[0].text == speaker.tokenizer.decode(partials[0].token_ids, skip_special_tokens=True)
    await speaker.abort()  # nothing is under way: nothing happens
    assert (await speaker.generate(requests, SAMPLING))[0].finish_reason == "length"


@pytest.mark.parametrize("mode", ["shrinking", "fixed"])
async def test_going_on_after_an_abort_draws_what_would_have_been_drawn(model, tiny, mode, anyio_backend):
    speaker = EmbeddedGenerator(model, tiny[1], slots=3, mode=mode)
    requests = [Request((index, 3), seed=index) for index in range(4)]
    sampling = SAMPLING._replace(top_k=40)
    with anyio.fail_after(HANG):
        whole = await speaker.generate(requests, sampling)
        partials = await abort_after(speaker, requests, sampling, 5)
        await speaker.update_weights(Weights(model, 1))
        begun = [request._replace(begun=one) for request, one in zip(requests, partials, strict=True)]
        resumed = await speaker.generate(begun, sampling)
    assert [one.token_ids for one in resumed] == [one.token_ids for one in whole]
    for one, partial, expected in zip(resumed, partials, whole, strict=True):
        assert one.logprobs[: len(partial.logprobs)] == partial.logprobs
        assert one.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert one.cut_mass == pytest.approx(expected.cut_mass, abs=1e-5)
        assert one.version == (0 if partial.token_ids else 1)


async def test_new_weights_reach_what_is_under_way_through_a_fresh_prefill(tiny_model, tiny, anyio_backend):
    speaker = EmbeddedGenerator(tiny_model, tiny[1], slots=2)
    answers: list[Generation] = []
    widths: list[int] = []
    tiny_model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].numel()))

    async def ask():
        answers.extend(await speaker.generate([Request((index, 3), seed=1) for index in range(3)], SAMPLING))

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            tasks.start_soon(ask)
            while not any(job and len(job.tokens) >= 4 for job in speaker._engine.rows):
                await anyio.lowlevel.checkpoint()
            before = len(widths)
            await speaker.update_weights(Weights(tiny_model, 5))
    assert widths[before] >= 2 * (2 + 4)  # both contexts whole, not one token each
    assert sorted(one.version for one in answers) == [0, 0, 5]
    assert [len(one.token_ids) for one in answers] == [12] * 3


async def test_who_fails_fails_alone(speaker, anyio_backend):
    """Somebody's callback stumbles in a step that serves others, too."""
    expected = speaker.complete([[1, 2], [3, 4]], SAMPLING)

    def stumble(_prompt, _token):
        raise KeyError("from the callback")

    answers = []

    async def ask():
        answers.extend(await speaker.generate([Request((1, 2), seed=0), Request((3, 4), seed=1)], SAMPLING))

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            tasks.start_soon(ask)
            while not any(job and len(job.tokens) >= 4 for job in speaker._engine.rows):
                await anyio.lowlevel.checkpoint()
            with pytest.raises(KeyError, match="from the callback"):
                speaker.complete([[7, 7]], SAMPLING, on_token=stumble)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]


async def test_closing_ends_everything(speaker, anyio_backend):
    with anyio.fail_after(HANG):
        partials = await abort_after(speaker, [Request((1,))], SAMPLING, 2)
        await speaker.close()
    assert partials[0].finish_reason == "aborted"
