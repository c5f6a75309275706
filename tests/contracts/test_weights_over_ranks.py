"""Weights of a sharded model, for engines and for checkpoints. Each test runs in rank 0 of two."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from oxrl.algorithms import algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.pack import collate
from oxrl.generators.http import SGLangEngine
from oxrl.generators.pool import HTTPGenerator
from oxrl.generators.probe import probe_tokens
from oxrl.loops.step import train_step
from oxrl.models.load import builds_empty, load_model, load_tokenizer
from oxrl.models.lora import LoraSettings, attach_lora, attach_reference, save_adapter
from oxrl.types import ModelConfig
from oxrl.weights.broadcast import TransferError, receive, rendezvous
from oxrl.weights.checkpoint_names import (
    ModuleWeights,
    plain_weights,
    read_weights,
    source_of,
    trainer_logprobs,
)
from tests.contracts.test_backend import BACKENDS, load_tiny, some_items, train
from tests.engines import sglang_stand_in
from tests.waiting import EXPIRES, HANG

pytestmark = [pytest.mark.anyio, pytest.mark.engine("ranks")]
CLOSE = {"atol": 1e-5, "rtol": 0}
VOCABULARY = 320


ON_EVERY_ENGINE = pytest.mark.parametrize("sharded", ["fsdp", "zero3"], indirect=True)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(params=["fsdp"])
def sharded(request):
    created = []

    def make(load=load_tiny, **options):
        created.append(BACKENDS[request.param](load=load, **options))
        return created[-1]

    yield make
    for backend in created:
        backend.close()


def local(load=load_tiny, **options):
    return create_pytorch_backend(load(), **{"lr": 1e-3, **options})


def with_adapter():
    return attach_lora(load_tiny(), LoraSettings(r=4), seed=1)


def with_moving_reference():
    return attach_reference(with_adapter())


def half():
    return load_tiny(dtype="bfloat16")


def untied():
    """As in many models, the projection to the vocabulary is a separate weight."""
    model = load_tiny()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() * 0.5)
    return model


async def written(backend, folder):
    source_of(await backend.get_weights()).write(folder)
    return dict(read_weights(folder))


async def test_a_handle_makes_no_copy_until_it_is_used(sharded):
    backend = sharded()
    weights = await backend.get_weights()
    assert weights.module is None and weights.version == 0
    source = weights.source
    assert (source.vocabulary, source.dtype, source.adapted) == (VOCABULARY, torch.float32, False)
    assert backend.ranks.here(backend._number).full_model is None, "no unsharded copy was made"


@pytest.mark.parametrize(
    ("sharded", "load"),
    [("fsdp", load_tiny), ("fsdp", half), ("fsdp", untied), ("zero3", half), ("zero3", untied)],
    indirect=["sharded"],
)
async def test_weights_written_one_by_one_equal_those_of_the_unsharded_model(sharded, tmp_path, load):
    load().save_pretrained(tmp_path / "whole")
    backend = sharded(load, heads=("value",))
    await written(backend, tmp_path / "written")
    await backend.save(tmp_path / "saved")
    for folder in ("written", "saved"):
        assert (tmp_path / folder / "model.safetensors").read_bytes() == (
            tmp_path / "whole" / "model.safetensors"
        ).read_bytes()
    kept = {path.name for path in (tmp_path / "whole").iterdir()}
    assert kept | {"heads.safetensors", "shards"} == {path.name for path in (tmp_path / "saved").iterdir()}
    again = load_model(ModelConfig(str(tmp_path / "saved"), dtype="auto" if load is not half else "bfloat16"))
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), load().parameters(), strict=True))


@pytest.mark.parametrize(
    ("load", "heads"), [(with_adapter, ("value",)), (untied, ())], ids=["adapter and value head", "untied"]
)
@ON_EVERY_ENGINE
async def test_names_and_weights_are_those_of_the_local_backend(sharded, tmp_path, load, heads):
    one, two = local(load, heads=heads), sharded(load, heads=heads)
    for backend in (one, two):
        await train_step(backend, algorithm("sft"), some_items(), 60)
        backend.set_temperature(0.5)  # of sampling; weights are verified at 1
    expected = dict(plain_weights(one.model))
    found = await written(two, tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The first step of Adam moves a weight by 1e-3 towards the sign of its gradient, however small that is.
        torch.testing.assert_close(found[name], tensor.detach(), atol=1e-4, rtol=0)
    tokens = probe_tokens(VOCABULARY)
    logprobs = (await two.get_weights()).source.logprobs(tokens)
    assert logprobs == pytest.approx(trainer_logprobs(one.model, tokens), abs=1e-4)
    assert logprobs == pytest.approx(trainer_logprobs(load_model(str(tmp_path)), tokens), abs=1e-4)


async def test_a_server_gets_the_weights_of_the_ranks_and_they_are_verified(sharded, tmp_path):
    tokenizer = load_tokenizer("tiny")
    with sglang_stand_in(load_tiny(), tokenizer) as server:
        generator = HTTPGenerator([SGLangEngine(server.url)], tokenizer, folder=tmp_path)
        for load in (load_tiny, with_adapter):
            backend = sharded(load)
            await train_step(backend, algorithm("sft"), some_items(), 60)
            await generator.update_weights(await backend.get_weights())
            assert generator.version == 1 and generator.gap < 1e-4
        server.ignores_updates = True
        await train_step(backend, algorithm("sft"), some_items(), 60)
        with pytest.raises(RuntimeError, match="weights"):
            await generator.update_weights(await backend.get_weights())
    assert not list(tmp_path.iterdir())


async def test_newer_weights_are_not_written_for_older_ones(sharded, tmp_path):
    backend = sharded()
    weights = await backend.get_weights()
    await train(backend, some_items(), 8, steps=1)
    with pytest.raises(RuntimeError, match="version 0 .* have version 1"):
        weights.source.write(tmp_path)


async def test_an_unsharded_copy_is_updated_from_its_first_use(sharded):
    backend = sharded(untied)
    whole = backend.model
    await train(backend, some_items(), 8, steps=2)
    weights = await backend.get_weights()
    assert weights.module is whole
    tokens = probe_tokens(VOCABULARY)
    assert ModuleWeights(whole).logprobs(tokens) == pytest.approx(weights.source.logprobs(tokens), abs=1e-4)


@ON_EVERY_ENGINE
async def test_weights_are_sent_as_they_are_written(sharded, tmp_path):
    backend = sharded(with_adapter)
    await train(backend, some_items(), 8, steps=1)
    source = (await backend.get_weights()).source
    source.write(tmp_path)
    received = {}
    with rendezvous(["127.0.0.1"], 1) as address:
        listener = threading.Thread(target=lambda: received.update(receive(address, 1)))
        listener.start()
        source.send(address)
        listener.join(HANG)
    written = dict(read_weights(tmp_path))
    assert received.keys() == written.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in written.items())


async def test_a_failed_transfer_leaves_the_ranks_unchanged(sharded):
    backend = sharded()
    with (
        pytest.raises(TransferError, match="2 processes at 127.0.0.1"),
        rendezvous(["127.0.0.1"], 1, time_limit=EXPIRES) as address,
    ):
        (await backend.get_weights()).source.send(address)
    await train(backend, some_items(), 8, steps=1)


@ON_EVERY_ENGINE
async def test_an_adapter_and_its_base_are_each_written_alone(sharded, tmp_path):
    one, two = local(with_adapter), sharded(with_adapter)
    for backend in (one, two):
        await train_step(backend, algorithm("sft"), some_items(), 60)
    save_adapter(one.model, tmp_path / "one")
    (await two.get_weights()).source.write_adapter(tmp_path / "two")
    await two.save(tmp_path / "saved")
    expected = load_file(tmp_path / "one" / "adapter_model.safetensors")
    for folder in ("two", "saved"):
        found = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, **CLOSE)
    assert any(tensor.abs().max() > 0 for name, tensor in expected.items() if "lora_B" in name)
    (await two.get_weights()).source.write_base(tmp_path / "base")
    base = dict(read_weights(tmp_path / "base"))
    for name, tensor in plain_weights(load_tiny()):
        torch.testing.assert_close(base[name], tensor)


def only_on_the_first():
    assert builds_empty() or dist.get_rank() == 0, "this rank has no memory for an unsharded model"
    return load_tiny()


@ON_EVERY_ENGINE
async def test_only_rank_0_ever_has_an_unsharded_model(sharded):
    backend = sharded(only_on_the_first, others={"ref": only_on_the_first})
    (one,), (two,) = (
        await backend.logprobs([collate(some_items())]),
        await backend.logprobs([collate(some_items())], "ref"),
    )
    (expected,) = await local().logprobs([collate(some_items())])
    for outputs in (one, two):
        torch.testing.assert_close(outputs.logprob, expected.logprob, **CLOSE)


def missing_on_one(rank):
    if dist.get_rank() == rank:
        raise ValueError("there is no such model here")
    return load_tiny()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_model_that_cannot_be_loaded_is_refused_and_training_still_works(sharded, rank):
    with pytest.raises(ValueError, match="no such model here"):
        sharded(partial(missing_on_one, rank))
    await train(sharded(), some_items(), 8, steps=1)


@pytest.mark.parametrize(
    ("sharded", "head"), [("fsdp", "value"), ("fsdp", "score"), ("zero3", "value")], indirect=["sharded"]
)
async def test_heads_of_a_checkpoint_are_loaded(sharded, tmp_path, head):
    one, two = local(heads=(head,)), sharded(heads=(head,))
    with torch.no_grad():
        nn.init.normal_(one.module.heads[head].weight)
    one.module.save_heads(tmp_path)
    two.load_heads(tmp_path)
    batch = collate(some_items())
    (expected,), (found,) = await one.logprobs([batch]), await two.logprobs([batch])
    torch.testing.assert_close(getattr(found, head), getattr(expected, head), **CLOSE)


@pytest.mark.parametrize(
    ("resumed_in", "load"),
    [
        ("ranks", load_tiny),
        ("ranks", half),
        ("ranks", with_moving_reference),
        ("one process", half),
        ("one process", with_moving_reference),
    ],
)
async def test_a_run_is_resumed_over_ranks_or_in_one_process(sharded, tmp_path, load, resumed_in):
    common = {"lr_scheduler": "cosine", "num_steps": 3, "heads": ("value",)}
    write = {"write_model": save_adapter} if load is with_moving_reference else {}
    makes = [partial(local, load, **common, **write), partial(sharded, load, **common)]
    first, second = makes if resumed_in == "ranks" else makes[::-1]
    through, saved, resumed = first(), first(), second()
    expected = (await train(through, some_items(), 3, steps=3))[0]
    await train(saved, some_items(), 3, steps=1)
    if load is with_moving_reference:
        await saved.update_reference(0.5)
    await saved.save(tmp_path)
    await resumed.load(tmp_path)
    if load is with_moving_reference:
        batch = collate(some_items())
        (one,), (two,) = await saved.logprobs([batch], "ref"), await resumed.logprobs([batch], "ref")
        torch.testing.assert_close(two.logprob, one.logprob, **CLOSE)
    assert (await resumed.get_weights()).version == 1
    found = (await train(resumed, some_items(), 3, steps=2))[0]
    assert found == pytest.approx(expected[1:], abs=1e-5 if load is not half else 0.03)


async def test_a_folder_without_training_state_is_refused_with_what_to_do(sharded, tmp_path):
    backend = sharded()
    await written(backend, tmp_path)
    for each in (backend, local()):
        with pytest.raises(ValueError, match="start a new run with .* as the model"):
            await each.load(Path(tmp_path))
