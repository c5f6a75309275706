"""What every `Backend` must do, run over each implementation; some also on rows with images."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.distributed.queued import QueuedBackend
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.media_features import example
from oxrl.data.pack import collate, count_units
from oxrl.loops.step import train_step
from oxrl.models.load import load_model
from oxrl.tensors import entropy
from oxrl.types import ModelConfig, Read, Row
from oxrl.weights.checkpoint_names import read_weights, source_of
from tests.contracts import together
from tests.engines import need

pytestmark = pytest.mark.anyio
SFT = algorithm("sft")


@pytest.fixture
def anyio_backend():
    return "asyncio"


def load_tiny(**options):
    return load_model(ModelConfig("tiny", **options))


def local(**options):
    return create_pytorch_backend(load_tiny(), **{"lr": 1e-3, **options})


def fsdp(**options):
    from oxrl.backends.distributed.fsdp import FSDPTrainingBackend

    load = options.pop("load", load_tiny)
    return FSDPTrainingBackend(together.ranks(), load, **{"lr": 1e-3, **options})


def queued(**options):
    return QueuedBackend(local(**options))


def ray(ranks, *, others=(), **options):
    from oxrl.backends.distributed.fsdp import build_worker
    from oxrl.backends.distributed.ray import create_ray_backend
    from oxrl.backends.distributed.worker import Settings

    settings = Settings(**{"lr": 1e-3, **options})
    return create_ray_backend(ranks, partial(build_worker, load_tiny, dict(others), settings))


def deepspeed(stage, **options):
    from oxrl.backends.distributed.deepspeed import DeepSpeedTrainingBackend

    need("deepspeed")
    section = {"zero_optimization": {"stage": stage}}
    load = options.pop("load", load_tiny)
    return DeepSpeedTrainingBackend(together.ranks(), load, **{"deepspeed": section, "lr": 1e-3, **options})


def load_vlm():
    return load_model(ModelConfig("tiny-vlm"))


IMAGES = {"lr": 1e-3, "eps": 1e-6}  # with a smaller eps, a gradient that is nothing but rounding becomes a step


def local_with_images(**options):
    return create_pytorch_backend(load_vlm(), **{**IMAGES, **options})


BACKENDS = {
    "local": local,
    "queued": queued,
    "fsdp": fsdp,
    "zero2": partial(deepspeed, 2),
    "zero3": partial(deepspeed, 3),
    "ray": ray,
    "local with images": local_with_images,
    "fsdp with images": partial(fsdp, load=load_vlm, **IMAGES),
}


OVER_RANKS = ("fsdp", "zero2", "zero3", "fsdp with images")
ENGINES = {"ray": "ray_ranks", **dict.fromkeys(OVER_RANKS, "ranks")}


def marked(*names):
    """Return the names as parameters, each marked with the engine that it runs on."""
    return [pytest.param(name, marks=[pytest.mark.engine(ENGINES[name])] if name in ENGINES else []) for name in names]


@pytest.fixture(params=marked(*BACKENDS))
def kind(request):
    return request.param


@pytest.fixture
def make(request, kind):
    """Create backends of one kind; they are closed after the test."""
    create = BACKENDS[kind]
    if kind == "ray":
        create = partial(create, request.getfixturevalue("ray_ranks"))
    created = []

    def create_one(**options):
        created.append(create(**options))
        return created[-1]

    yield create_one
    for backend in created:
        if hasattr(backend, "close"):
            backend.close()


def some_items(lengths=(30, 7, 19, 4, 25, 11, 9, 16)):
    random = np.random.default_rng(0)
    return [(Row(f"row{i}", random.integers(0, 256, n), np.arange(n) > n // 2),) for i, n in enumerate(lengths)]


@pytest.fixture
def rows(kind):
    return rows_with_images if kind.endswith("with images") else some_items


def rows_with_images(lengths=(30, 7, 19, 4, 25, 11, 9, 16)):
    """The same rows; of four after each other, one has an image, one two others, and two have none."""
    small, wide, high = (example("image", *size) for size in ((56, 56), (112, 56), (56, 84)))
    placeholders = {small: 4, wide: 8, high: 6}
    items = []
    for number, (row,) in enumerate(some_items(lengths)):
        media = ((small,), (), (wide, high), ())[number % 4]
        ids = [token for medium in media for token in (260, *[262] * placeholders[medium], 261)]
        mask = np.concatenate([np.zeros(len(ids), np.bool_), row.mask])
        items.append((Row(row.id, np.array([*ids, *row.tokens]), mask, media=media),))
    return items


def split(items, size):
    return [collate(items[start : start + size]) for start in range(0, len(items), size)]


async def weights_of(backend):
    """Return weights by name, as an engine gets them."""
    with TemporaryDirectory() as folder:
        source_of(await backend.get_weights()).write(Path(folder))
        return {name: tensor.clone() for name, tensor in read_weights(Path(folder))}


def plain_model(folder, rows):
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    kind = AutoModelForMultimodalLM if rows is rows_with_images else AutoModelForCausalLM
    return kind.from_pretrained(folder)


async def parameters_of(backend, rows):
    """Return the weights that an engine gets by their names in transformers' model, which reads them."""
    with TemporaryDirectory() as folder:
        source_of(await backend.get_weights()).write(Path(folder))
        return {name: weight.detach().clone() for name, weight in plain_model(folder, rows).named_parameters()}


async def train(backend, items, size, steps=2):
    losses = []
    for _ in range(steps):
        metrics = await backend.forward_backward(split(items, size), SFT, count_units(items))
        losses.append(metrics["loss"])
        await backend.optim_step()
    return losses, await weights_of(backend)


async def test_the_split_into_micro_batches_changes_nothing(make, rows):
    """1 x 8 = 2 x 4 = 8 x 1, with rows of unequal length: a mean of means would differ in the first step."""
    items = rows()
    whole, weights = await train(make(), items, 8)
    for size in (4, 1):
        losses, others = await train(make(), items, size)
        assert losses == pytest.approx(whole, abs=2e-5)
        for name, tensor in others.items():
            torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=1e-4)


async def test_row_order_changes_nothing(make, rows):
    items = rows()
    assert (await train(make(), items, 3))[0] == pytest.approx((await train(make(), items[::-1], 3))[0], abs=2e-5)


async def test_each_term_is_divided_by_the_count_of_its_own_unit(make, rows):
    """ORPO: one term over chosen tokens, one over pairs (Hong et al. 2024), in float64 from the log-probs."""
    backend, own = make(), [row for (row,) in rows()]
    pairs = list(zip(own[::2], own[1::2], strict=True))
    (outputs,) = await backend.logprobs([collate([(row,) for row in own])])
    sums = [part.double().sum() for part in outputs.logprob.split([len(row.tokens) for row in own])]
    chosen = sum(int(row.mask.sum()) for row, _ in pairs)
    means = torch.stack(sums) / torch.tensor([int(row.mask.sum()) for row in own])
    odds = means - torch.log1p(-means.exp())
    penalty = -0.1 * torch.nn.functional.logsigmoid(odds[::2] - odds[1::2]).mean()
    metrics = await backend.forward_backward(split(pairs, 2), algorithm("orpo"), count_units(pairs))
    assert metrics["loss"] == pytest.approx(float(penalty - sum(sums[::2]) / chosen), rel=1e-4)


async def test_only_trained_tokens_have_a_log_prob_and_prompts_get_no_gradient(make, rows):
    backend = make()
    (batch,) = split(rows((12,)), 1)
    (outputs,) = await backend.logprobs([batch], reads={"entropy": Read(entropy)})
    assert (outputs.logprob[batch.mask] < 0).all()
    assert not outputs.logprob[~batch.mask].any()
    assert (outputs.statistics["entropy"][batch.mask] > 0).all()


async def test_the_version_counts_updates(make, rows):
    backend = make()
    assert (await backend.get_weights()).version == 0
    await train(backend, rows(), 8, steps=2)
    assert (await backend.get_weights()).version == 2


async def test_a_resumed_backend_is_the_same_to_the_bit_as_one_that_was_never_saved(make, rows, tmp_path):
    items, schedule = rows(), {"lr_scheduler": "cosine", "num_steps": 3}
    _, expected = await train(make(**schedule), items, 3, steps=3)
    saved = make(**schedule)
    await train(saved, items, 3, steps=1)
    await saved.save(tmp_path)
    resumed = make(**schedule)
    await resumed.load(tmp_path)
    assert (await resumed.get_weights()).version == 1
    _, found = await train(resumed, items, 3, steps=2)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("name", "head"), [("rm", "score"), ("ppo", "value")])
async def test_heads_are_trained_saved_and_loaded(make, rows, tmp_path, name, head):
    items = rows()
    pairs = [
        tuple(
            replace(row, scalars={"score": 0.0, "margin": 0.0, "reward": 1.0, "ended": 1.0})
            for (row,) in items[i : i + 2]
        )
        for i in range(0, 8, 2)
    ]
    trained = make(heads=(head,), others={})
    for _ in range(2):
        await train_step(trained, algorithm(name), pairs, 1000)
    batch = collate(pairs)
    (before,) = await trained.logprobs([batch])
    read = getattr(before, head)
    assert read.abs().max() > 0, "a head that starts at zero must have moved"
    await trained.save(tmp_path)
    fresh = make(heads=(head,), others={})
    await fresh.load(tmp_path)
    (after,) = await fresh.logprobs([batch])
    assert torch.equal(getattr(after, head), read)


async def test_a_saved_model_is_a_plain_transformers_folder(make, rows, tmp_path):
    backend = make()
    await train(backend, rows(), 8, steps=1)
    await backend.save(tmp_path)
    expected = await parameters_of(backend, rows)
    for name, parameter in plain_model(tmp_path, rows).named_parameters():
        assert torch.equal(expected[name], parameter)


async def test_weights_of_another_model_are_refused(make):
    with pytest.raises(ValueError, match="another model"):
        await make().load_weights({"no.such.weight": torch.zeros(2)})


async def test_loaded_weights_are_used_by_the_next_pass(make, rows):
    backend, donor = make(), make()
    await train(donor, rows(), 8, steps=1)
    await backend.load_weights(await parameters_of(donor, rows))
    batches = split(rows(), 8)
    assert torch.equal((await backend.logprobs(batches))[0].logprob, (await donor.logprobs(batches))[0].logprob)
