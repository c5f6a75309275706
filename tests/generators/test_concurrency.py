"""Many tasks, one engine: no task waits forever, nothing is lost, and no result depends on the order of arrival."""

import anyio
import pytest

from oxrl.concurrency import task_group
from oxrl.generators.embedded.captured import Capture
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.models.load import load_model
from oxrl.types import Generation, GenerationConfig, Request, Weights
from tests.waiting import HANG

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])]
SAMPLING = GenerationConfig(max_new_tokens=12, seed=4)


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny[0])


@pytest.fixture(params=[Capture(), Capture(capture=True, span=4)], ids=["steps", "spans"])
def generator(request, model, tiny):
    return EmbeddedGenerator(model, tiny[1], slots=3, capture=request.param)


async def test_tasks_share_the_engine_and_each_gets_its_own_results(generator, anyio_backend):
    prompts = [[index, 7, 9] for index in range(8)]
    expected = generator.complete(prompts, SAMPLING)
    answers = {}

    async def ask(index):
        (answers[index],) = await generator.generate([Request(tuple(prompts[index]), seed=index)], SAMPLING)

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            for index in range(8):
                tasks.start_soon(ask, index)
    assert [answers[index].token_ids for index in range(8)] == [one.token_ids for one in expected]


async def test_a_call_returns_in_the_order_of_its_requests(generator, anyio_backend):
    requests = [Request((9 - index,), seed=index) for index in range(7)]
    answers = await generator.generate(requests, SAMPLING)
    for request, answer in zip(requests, answers, strict=True):
        assert (await generator.generate([request], SAMPLING))[0].token_ids == answer.token_ids
    assert await generator.generate([], SAMPLING) == []


async def test_conversations_of_different_length_do_not_wait_for_each_other(model, tiny, anyio_backend):
    """A task that is done submits a longer prompt while others are in flight; greedy and sampled in one batch."""
    generator = EmbeddedGenerator(model, tiny[1], slots=4)
    dialogues, order = {}, []

    async def converse(index, sampling):
        context = [index, 7]
        for turn in range(3):
            (answer,) = await generator.generate([Request(tuple(context), seed=10 * index + turn)], sampling)
            context += [*answer.token_ids, 5]
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
    assert dialogues[0][2:5] == list(generator.complete([[0, 7]], sampling)[0].token_ids)


async def test_the_batch_does_not_depend_on_the_order_of_scheduling(model, tiny, anyio_backend):
    """Trio shuffles its tasks; which requests share a pass must not depend on it."""
    passes = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _module, inputs, _output: passes[-1].append(inputs[0].flatten().tolist())
    )

    async def converse(generator, index):
        context = [index, 7]
        for turn in range(3):
            (answer,) = await generator.generate(
                [Request(tuple(context), seed=turn)], SAMPLING._replace(max_new_tokens=2)
            )
            context += answer.token_ids

    with anyio.fail_after(HANG):
        for _ in range(5):
            passes.append([])
            generator = EmbeddedGenerator(model, tiny[1], slots=4)
            async with task_group() as tasks:
                for index in range(6):
                    tasks.start_soon(converse, generator, index)
    hook.remove()
    assert all(one == passes[0] for one in passes)


async def test_cancelling_the_driving_task_does_not_affect_the_others(generator, anyio_backend):
    answers, scopes = {}, {}
    expected = generator.complete([[index, 7] for index in range(6)], SAMPLING)

    async def ask(index):
        with anyio.CancelScope() as scopes[index]:
            answers[index] = await generator.generate([Request((index, 7), seed=index)], SAMPLING)

    async def cancel_the_driver_twice():
        for _ in range(2):
            while generator._driver is None:
                await anyio.lowlevel.checkpoint()
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            (index,) = [job.request.tokens[0] for job in generator._driver.jobs]
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
    assert generator._driver is None and generator._calls == [] and not any(generator._engine.rows)


async def test_a_waiting_tasks_cancellation_frees_its_slot(generator, anyio_backend):
    scope, answers = anyio.CancelScope(), []

    async def ask_for_long():
        with scope:
            requests = [Request((1,), seed=seed) for seed in range(3)]
            await generator.generate(requests, SAMPLING._replace(max_new_tokens=2000))

    async def ask():
        answers.extend(await generator.generate([Request((5, 6), seed=1)], SAMPLING))

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            tasks.start_soon(ask_for_long)
            tasks.start_soon(ask)
            for _ in range(8):
                await anyio.lowlevel.checkpoint()
            assert not answers
            scope.cancel()
    assert len(answers[0].token_ids) == 12
    assert not generator._engine.rows and not generator._engine.waiting


async def abort_after(generator, requests, sampling, steps):
    """Start these requests, let the engine run for some steps, and abort."""
    partials = []

    async def ask():
        partials.extend(await generator.generate(requests, sampling))

    async with task_group() as tasks:
        tasks.start_soon(ask)
        while not any(job and len(job.tokens) >= steps for job in generator._engine.rows):
            await anyio.lowlevel.checkpoint()
        await generator.abort()
    return partials


async def test_an_abort_returns_partial_results(generator, anyio_backend):
    requests = [Request((index, 3), seed=index) for index in range(5)]
    with anyio.fail_after(HANG):
        partials = await abort_after(generator, requests, SAMPLING, 4)
    assert [one.finish_reason for one in partials] == ["aborted"] * 5
    lengths = [len(one.token_ids) for one in partials]
    assert max(sorted(lengths)[:2]) <= 1  # there were three slots; spans prefill others ahead
    assert all(4 <= length < 12 for length in sorted(lengths)[2:])
    assert all(len(one.token_ids) == len(one.logprobs) for one in partials)
    assert partials[0].text == generator.tokenizer.decode(partials[0].token_ids, skip_special_tokens=True)
    await generator.abort()  # nothing is in flight: no effect
    assert (await generator.generate(requests, SAMPLING))[0].finish_reason == "length"


@pytest.mark.parametrize("mode", ["shrinking", "fixed"])
async def test_resuming_after_an_abort_samples_the_same_tokens(model, tiny, mode, anyio_backend):
    generator = EmbeddedGenerator(model, tiny[1], slots=3, mode=mode)
    requests = [Request((index, 3), seed=index) for index in range(4)]
    sampling = SAMPLING._replace(top_k=40)
    with anyio.fail_after(HANG):
        whole = await generator.generate(requests, sampling)
        partials = await abort_after(generator, requests, sampling, 5)
        await generator.update_weights(Weights(model, 1))
        partial_requests = [request._replace(partial=one) for request, one in zip(requests, partials, strict=True)]
        resumed = await generator.generate(partial_requests, sampling)
    assert [one.token_ids for one in resumed] == [one.token_ids for one in whole]
    for one, partial, expected in zip(resumed, partials, whole, strict=True):
        assert one.logprobs[: len(partial.logprobs)] == partial.logprobs
        assert one.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert one.cut_mass == pytest.approx(expected.cut_mass, abs=1e-5)
        assert one.version == (0 if partial.token_ids else 1)


async def test_requests_in_flight_continue_with_new_weights_after_a_fresh_prefill(tiny_model, tiny, anyio_backend):
    generator = EmbeddedGenerator(tiny_model, tiny[1], slots=2)
    answers: list[Generation] = []
    widths: list[int] = []
    tiny_model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].numel()))

    async def ask():
        answers.extend(await generator.generate([Request((index, 3), seed=1) for index in range(3)], SAMPLING))

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            tasks.start_soon(ask)
            while not any(job and len(job.tokens) >= 4 for job in generator._engine.rows):
                await anyio.lowlevel.checkpoint()
            before = len(widths)
            await generator.update_weights(Weights(tiny_model, 5))
    assert widths[before] >= 2 * (2 + 4)  # both contexts whole, not one token each
    assert sorted(one.version for one in answers) == [0, 0, 5]
    assert [len(one.token_ids) for one in answers] == [12] * 3


async def test_a_failing_callback_does_not_affect_other_requests(generator, anyio_backend):
    """The callback of one request raises in a step that serves others, too."""
    expected = generator.complete([[1, 2], [3, 4]], SAMPLING)

    def fail(_prompt, _token):
        raise KeyError("from the callback")

    answers = []

    async def ask():
        answers.extend(await generator.generate([Request((1, 2), seed=0), Request((3, 4), seed=1)], SAMPLING))

    with anyio.fail_after(HANG):
        async with task_group() as tasks:
            tasks.start_soon(ask)
            while not any(job and len(job.tokens) >= 4 for job in generator._engine.rows):
                await anyio.lowlevel.checkpoint()
            with pytest.raises(KeyError, match="from the callback"):
                generator.complete([[7, 7]], SAMPLING, on_token=fail)
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]


async def test_closing_ends_all_generations(generator, anyio_backend):
    with anyio.fail_after(HANG):
        partials = await abort_after(generator, [Request((1,))], SAMPLING, 2)
        await generator.close()
    assert partials[0].finish_reason == "aborted"
