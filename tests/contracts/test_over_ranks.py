"""A sharded model computes the same as the local one. Each test runs in rank 0 of two."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.distributed.fsdp import build_worker
from oxrl.backends.distributed.ranked import RankedBackend
from oxrl.backends.distributed.worker import Settings
from oxrl.backends.local import NonFiniteError, create_pytorch_backend
from oxrl.config import check_config
from oxrl.data.assemble import assemble
from oxrl.data.media_features import example
from oxrl.data.pack import collate, count_units
from oxrl.data.render import Renderer
from oxrl.data.sources import load_samples
from oxrl.loops.step import train_step
from oxrl.models.load import builds_empty, load_model, load_tokenizer
from oxrl.models.lora import LoraSettings, attach_lora, attach_reference
from oxrl.run.backends import worker_of
from oxrl.run.prepare import resolve
from oxrl.types import ModelConfig, Row
from tests.algorithms.conftest import raw_rows
from tests.contracts import together
from tests.contracts.test_backend import BACKENDS, load_tiny, some_items, split, train
from tests.engines import need
from tests.rows import write_jsonl

pytestmark = [pytest.mark.anyio, pytest.mark.engine("ranks")]
NAMES = {"grpo": {"kl_coef": 0.1}, "ppo": {}, "tdpo": {}}
CLOSE = {"atol": 1e-5, "rtol": 0}
RATES = {"lr": 1e-3, "eps": 1e-6}  # with a smaller eps, a gradient that is nothing but rounding becomes a step


ON_ANY_ENGINE = pytest.mark.parametrize("sharded", ["fsdp"], indirect=True)  # what `ranks` does, not the engine


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(params=["fsdp", "zero3"])
def sharded(request):
    created = []

    def make(load=load_tiny, **options):
        created.append(BACKENDS[request.param](load=load, **{**RATES, **options}))
        return created[-1]

    yield make
    for backend in created:
        backend.close()


def with_adapter(dropout=0.0, base=load_tiny):
    return attach_lora(base(), LoraSettings(r=4, dropout=dropout), seed=1)


def with_moving_reference():
    return attach_reference(with_adapter())


def checkpointed(dtype="float32"):
    return load_tiny(dtype=dtype, gradient_checkpointing=True)


HALF = partial(checkpointed, "bfloat16")


def scaled_if_unsharded():
    """A model whose first layer has an output 1.5 times as large, but not if it is sharded."""
    model = load_tiny()
    if not builds_empty():
        model.model.layers[0].register_forward_hook(lambda _layer, _inputs, output: output * 1.5)
    return model


class Refused:
    """The error of a rank that refuses to build a worker."""

    def __init__(self):
        try:
            build_worker(scaled_if_unsharded, {}, Settings())
            self.error = ""
        except RuntimeError as error:
            self.error = str(error)

    def message(self):
        return self.error


def items_of(name, n=4):
    chosen = algorithm(name)
    samples = load_samples(raw_rows(chosen.assemble, n, seed=0)).samples
    return assemble(samples, chosen, Renderer(load_tokenizer("tiny"))).items


def local(load=load_tiny, others=None, **options):
    loaded = {name: each() for name, each in (others or {}).items()}
    return create_pytorch_backend(load(), others=loaded, **{**RATES, **options})


def test_shards_whose_log_probs_differ_are_refused_on_every_rank():
    target = together.ranks().start(Refused)
    for message in together.ranks().call(target, "message"):
        assert "sharded over 2 ranks, the log-probs of the model differ" in message


async def same_steps(one, two, built, items, steps=3):
    """Losses and gradients at each step, with micro-batches of another size each time."""
    for step in range(steps):
        budget = (120, 10_000)[step % 2]
        expected = await train_step(one, built, items, budget, {})
        found = await train_step(two, built, items, budget, {})
        for key in expected.keys() - {"tokens_per_second", "step_seconds", "memory_gib"}:
            assert found[key] == pytest.approx(expected[key], abs=1e-5, rel=1e-5), (step, key)
    await same_weights(one, two)


async def unsharded(backend):
    """A copy of the sharded model; from here on the backend keeps it up to date."""
    assert backend.model is not None
    return (await backend.get_weights()).module


async def same_weights(one, two, **allowed):
    expected = dict((await one.get_weights()).module.named_parameters())
    found = dict((await unsharded(two)).named_parameters())
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(
            found[name], parameter, **{**CLOSE, **allowed}, msg=lambda text, n=name: f"{n}: {text}"
        )


# SFT is below with checkpointed gradients, DPO with a reference that moves, and that over zero2 too.
STEPS = [*((engine, name) for engine in ("fsdp", "zero3") for name in NAMES), ("zero2", "ppo")]


@pytest.mark.parametrize(("sharded", "name"), STEPS, indirect=["sharded"])
async def test_steps_are_those_of_the_local_backend(sharded, name):
    built = algorithm(name, **NAMES[name])
    common = {
        "heads": built.heads,
        "others": dict.fromkeys(built.others, load_tiny),
        "lr_scheduler": "cosine",
        "num_steps": 3,
    }
    await same_steps(local(**common), sharded(**common), built, items_of(name))


@pytest.mark.parametrize(
    ("sharded", "head"), [("fsdp", "value"), ("fsdp", "score"), ("zero3", "value")], indirect=["sharded"]
)
async def test_heads_of_a_model_in_half_precision_stay_in_float32(sharded, head):
    backend = sharded(HALF, heads=(head,))
    (outputs,) = await backend.logprobs([collate(some_items())])
    assert getattr(outputs, head).dtype == torch.float32


async def test_an_uneven_number_of_micro_batches_gives_the_same_steps(sharded):
    """1, 3 and 5 micro-batches over two ranks: an even number is never needed."""
    items = some_items()
    for size in (8, 3, 2):
        one, two = local(), sharded()
        expected, found = await train(one, items[:-1], size), await train(two, items[:-1], size)
        assert found[0] == pytest.approx(expected[0], abs=1e-5)
        await same_weights(one, two)


@ON_ANY_ENGINE
async def test_log_probs_come_back_in_the_order_of_the_batches(sharded):
    batches = split(some_items(), 1)
    expected, found = await local().logprobs(batches), await sharded().logprobs(batches)
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(two.logprob, one.logprob, **CLOSE)


@pytest.mark.parametrize(
    ("sharded", "name"), [("fsdp", "dpo"), ("fsdp", "tdpo"), ("zero3", "tdpo")], indirect=["sharded"]
)
async def test_an_adapter_is_trained_against_its_own_base(sharded, tmp_path, name):
    load = partial(with_adapter, base=partial(load_model, "tiny"))  # which the saved adapter names
    one, two = local(load), sharded(load)
    await same_steps(one, two, algorithm(name), items_of(name), steps=2)
    await two.save(tmp_path)
    batch = collate(some_items())
    again = create_pytorch_backend(load_model(str(tmp_path)))
    torch.testing.assert_close(
        (await again.logprobs([batch]))[0].logprob, (await one.logprobs([batch]))[0].logprob, **CLOSE
    )


async def test_without_its_adapter_a_model_is_its_base_bit_for_bit(sharded):
    backend, base = sharded(with_adapter), sharded()
    batches = split(some_items(), 3)
    await train(backend, some_items(), 3, steps=1)
    for expected, found in zip(await base.logprobs(batches), await backend.logprobs(batches, "ref"), strict=True):
        assert torch.equal(found.logprob, expected.logprob)
    for expected, found in zip(await base.logprobs(batches), await backend.logprobs(batches), strict=True):
        assert not torch.equal(found.logprob, expected.logprob)


async def test_checkpointed_gradients_are_the_same(sharded):
    await same_steps(local(), sharded(checkpointed), algorithm("sft"), items_of("sft"), steps=3)


REFERENCES = {"a model": {"others": {"ref": load_tiny}}, "an adapter": {"load": with_moving_reference}}


@pytest.mark.parametrize("sharded", ["fsdp", "zero2", "zero3"], indirect=True)
@pytest.mark.parametrize("reference", REFERENCES)
async def test_a_moving_reference_is_updated_and_resumed_as_in_the_local_backend(sharded, reference, tmp_path):
    built, items, options = algorithm("dpo"), items_of("dpo"), REFERENCES[reference]
    one, two = local(**options), sharded(**options)
    for backend in (one, two):
        await train_step(backend, built, items, 90)
        await backend.update_reference(0.5)
    await same_steps(one, two, built, items, steps=1)
    await two.save(tmp_path)
    resumed = sharded(**options)
    await resumed.load(tmp_path)
    await same_steps(one, resumed, built, items, steps=2)
    for expected, found in zip(
        await one.logprobs(split(some_items(), 3), "ref"),
        await resumed.logprobs(split(some_items(), 3), "ref"),
        strict=True,
    ):
        torch.testing.assert_close(found.logprob, expected.logprob, **CLOSE)


async def test_a_moving_reference_changes_no_bit_of_the_trained_adapter(sharded, tmp_path):
    """It starts as the base: the first step is compared with the same reference."""
    alone, beside = sharded(with_adapter), sharded(with_moving_reference)
    for backend in (alone, beside):
        await train_step(backend, algorithm("tdpo"), items_of("tdpo"), 90)
    (expected,), (found,) = [await backend.logprobs([collate(some_items())]) for backend in (alone, beside)]
    assert torch.equal(found.logprob, expected.logprob)
    folders = [tmp_path / "alone", tmp_path / "beside"]
    for backend, folder in zip((alone, beside), folders, strict=True):
        (await backend.get_weights()).source.write_adapter(folder)
    one, two = ({file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()} for folder in folders)
    assert one == two


async def test_the_dropout_of_every_rank_is_resumed(sharded, tmp_path):
    load, items = partial(with_adapter, dropout=0.5), some_items()
    through = sharded(load)
    await train(through, items, 2, steps=1)
    await through.save(tmp_path)
    torch.manual_seed(0)  # of rank 0; that of the other rank has advanced
    await through.load(tmp_path)
    expected, _ = await train(through, items, 2, steps=2)
    torch.rand(7)
    resumed = sharded(load)
    await resumed.load(tmp_path)
    assert (await train(resumed, items, 2, steps=2))[0] == expected


def worker_with_dropout(folder, **run):
    """The worker of a run whose ranks draw random numbers in each step."""
    data = {"train_files_path": str(write_jsonl(folder / "rows.jsonl", [{"prompt": "Say 1.", "completion": "yes"}]))}
    lora = {"enabled": True, "r": 4, "dropout": 0.5}
    sections = {"model": {"name": "tiny"}, "train": {"alg_name": "sft", "lr": 1e-3}, "lora": lora, "data": data}
    return worker_of(resolve(check_config({**sections, "run": {"training_gpus": 2, **run}})))


async def assert_equal_when_repeated(create):
    """Train two backends: the second one in processes that have drawn random numbers before."""
    results = []
    for _ in range(2):
        backend = create()
        results.append(await train(backend, some_items(), 2))
        backend.close()
    (losses, weights), (others, found) = results
    assert losses == others
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
async def test_the_seed_of_a_run_fixes_the_dropout_of_every_rank(backend, tmp_path):
    if backend == "deepspeed":
        need("deepspeed")
    await assert_equal_when_repeated(
        partial(RankedBackend, together.ranks(), worker_with_dropout(tmp_path, backend=backend))
    )


async def test_half_precision_is_used_to_compute_and_float32_is_kept(sharded, tmp_path):
    one, two = local(HALF), sharded(HALF)
    items = some_items()
    expected, found = await train(one, items, 3, steps=4), await train(two, items, 3, steps=4)
    assert found[0] == pytest.approx(expected[0], abs=0.03)
    assert found[0][-1] < found[0][0] - 0.5
    await two.save(tmp_path)
    written = load_model(ModelConfig(str(tmp_path), dtype="bfloat16"))
    for name, parameter in (await unsharded(two)).named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(written.get_parameter(name), parameter)


async def test_weights_that_changed_after_a_pass_are_used_by_the_next(sharded):
    """Weights that a pass without gradients gathered must not be used after an update."""
    one, two = local(), sharded()
    batches, items = split(some_items(), 3), some_items()
    for backend in (one, two):
        await backend.forward_backward(batches, algorithm("sft"), count_units(items))
        await backend.logprobs(batches)
        await backend.optim_step()
    for expected, found in zip(await one.logprobs(batches), await two.logprobs(batches), strict=True):
        torch.testing.assert_close(found.logprob, expected.logprob, **CLOSE)


async def test_a_memory_warm_up_changes_nothing(sharded):
    one, two = local(), sharded()
    items = some_items()
    with two.memory_warm_up():
        await two.forward_backward(split(items, 8), algorithm("sft"), count_units(items))
    await same_steps(one, two, algorithm("sft"), items_of("sft"), steps=2)


@ON_ANY_ENGINE
async def test_a_loss_that_other_ranks_cannot_rebuild_is_refused(sharded):
    from dataclasses import replace

    own = replace(algorithm("sft"), loss=lambda outputs, batch: None)
    with pytest.raises(ValueError, match="other ranks cannot rebuild it"):
        await sharded().forward_backward(split(some_items(), 8), own, count_units(some_items()))


@ON_ANY_ENGINE
async def test_a_missing_reference_is_refused_and_training_still_works(sharded):
    backend = sharded()
    with pytest.raises(ValueError, match="compares with the model 'ref'"):
        await backend.logprobs(split(some_items(), 8), "ref")
    await train(backend, some_items(), 3, steps=1)


async def test_a_loss_that_is_not_finite_on_one_rank_is_reported_with_its_rows(sharded):
    from dataclasses import replace

    items = items_of("dpo")
    stamped = [
        tuple(replace(row, streams={"ref_logprob": row.mask.astype("float32") * -1.0}) for row in item)
        for item in items
    ]
    stamped[3] = tuple(
        replace(row, streams={"ref_logprob": np.where(row.mask, np.float32("nan"), 0.0)}) for row in items[3]
    )
    with pytest.raises(NonFiniteError, match="rank [01], add_gradients: the loss is not finite") as caught:
        await sharded().forward_backward(split(stamped, 1), algorithm("dpo"), count_units(stamped))
    assert [id for batch in caught.value.batches for id in batch.ids] == [row.id for row in items[3]]


NO_GRADIENT = """
from oxrl.algorithms.preference import Pairs

def planted(pairs: Pairs):
    return (pairs.chosen * 0).abs().sqrt()  # 0, and its slope is not a number
"""


async def test_a_gradient_that_is_not_finite_changes_no_weight(sharded, tmp_path):
    file = tmp_path / "planted.py"
    file.write_text(NO_GRADIENT)
    built, items = algorithm(f"{file}:planted"), items_of("dpo")
    backend, untouched = sharded(others={"ref": load_tiny}), local()
    with pytest.raises(NonFiniteError, match="optim_step: the gradient is not finite"):
        await train_step(backend, built, items, 90)
    await same_weights(untouched, backend, atol=0)


def reads_images(freeze):
    return load_model(ModelConfig("tiny-vlm", dtype="float32", device="cpu", freeze=freeze))


@pytest.mark.parametrize("freeze", ["towers", "nothing"])
async def test_a_rank_whose_rows_have_no_images_takes_part_in_the_passes_of_the_tower(sharded, freeze):
    """Two micro-batches, one for each rank: in every other step only one of them has images."""
    load = partial(reads_images, freeze)
    one, two = local(load), sharded(load)
    model = one.module.inner
    wide, high = example("image", 112, 56), example("image", 56, 112)
    pad = model.media_towers.placeholders(model, wide)
    mask = np.arange(len(pad) + 8) >= len(pad) + 4

    def row(name, *media):
        middle = pad if media else [65] * len(pad)
        return (Row(name, [257, 260, *middle, 261, 66, 67, 68, 69, 70], mask, media=media),)

    steps = (
        [row("a", wide), row("b")],
        [row("c"), row("d")],
        [row("e"), row("f", high)],
        [row("g", wide), row("h", high)],
    )
    sft = algorithm("sft")
    for items in steps:
        counts = count_units(items)
        found = [
            (await backend.forward_backward([collate([item]) for item in items], sft, counts))["loss"]
            for backend in (one, two)
        ]
        assert found[1] == pytest.approx(found[0], abs=1e-5)
        assert (await two.optim_step())["grad_norm"] == pytest.approx((await one.optim_step())["grad_norm"], abs=1e-4)
    await same_weights(one, two)
