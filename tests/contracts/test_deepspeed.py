"""What is specific to DeepSpeed: its stages and sections. Each test runs in rank 0 of two."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from oxrl.algorithms import algorithm
from tests.backends.test_shards import MakesFolder
from tests.contracts import together
from tests.contracts.test_backend import deepspeed, load_tiny, some_items, split, train
from tests.contracts.test_over_ranks import HALF, RATES, items_of, local, same_steps

pytestmark = [pytest.mark.anyio, pytest.mark.engine("ranks")]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def zero():
    """Create DeepSpeed backends, each with its own section."""
    created = []

    def make(section, load=load_tiny, **options):
        created.append(deepspeed(3, load=load, deepspeed=section, **{**RATES, **options}))
        return created[-1]

    yield make
    for backend in created:
        backend.close()


def engine_of(backend):
    return together.ranks().here(backend._number).engine


@pytest.mark.parametrize("stage", [0, 1])
async def test_steps_without_sharded_gradients_are_those_of_the_local_backend(zero, stage):
    common = {"lr_scheduler": "cosine", "num_steps": 3, "max_grad_norm": 0.5}
    backend = zero({"zero_optimization": {"stage": stage}}, **common)
    await same_steps(local(**common), backend, algorithm("sft"), items_of("sft"))


@pytest.mark.parametrize("stage", [2, 3])
async def test_an_offloaded_optimizer_state_changes_nothing_and_compiles_nothing(zero, stage):
    section = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    backend = zero(section)
    assert engine_of(backend).zero_use_cpu_optimizer()
    await same_steps(local(), backend, algorithm("sft"), items_of("sft"), steps=3)
    assert not list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("*.ninja")), "a build takes minutes"


async def test_a_section_is_passed_to_deepspeed_and_a_reference_can_be_unsharded(zero):
    others, built = {"ref": load_tiny}, algorithm("dpo")
    section = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 12_345}}
    backend = zero(section, others=others, deepspeed_ref={"zero_optimization": {"stage": 0}})
    assert engine_of(backend).zero_reduce_bucket_size() == 12_345
    worker = together.ranks().here(backend._number)
    assert hasattr(next(worker.module.parameters()), "ds_tensor")
    assert not hasattr(next(worker.others["ref"].parameters()), "ds_tensor")
    await same_steps(local(others=others), backend, built, items_of("dpo"), steps=2)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"deepspeed": {"zero_optimization": {"reduce_bucket": 5}}}, "section deepspeed: .*reduce_bucket; Extra"),
        ({"deepspeed": {"zero_optimization": {"stage": 7}}}, "section deepspeed: .*Input should be 0, 1, 2, 3"),
        ({"deepspeed": {"zero_optimization": 3}}, "zero_optimization must be a mapping, such as {stage: 3}"),
        (
            {"deepspeed": {"zero_optimisation": {"stage": 2}}},
            "not a setting of DeepSpeed.*mean zero_optimization",
        ),
        ({"deepspeed": {"gradient_clipping": 3}}, "gradient_clipping cannot be set"),
        ({"deepspeed_ref": {"zero_optimization": {"stage": 2}}}, "stage 2 shards gradients or optimizer state"),
        ({"deepspeed": {"zero_optimization": {"stage": 0}}, "load": HALF}, "stage 0 supports float32 only"),
    ],
)
async def test_a_section_that_cannot_work_is_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        deepspeed(3, others={"ref": load_tiny}, **sections)


async def test_ranks_that_refused_a_section_serve_the_next_one(zero):
    with pytest.raises(ValueError, match="must be a mapping"):
        deepspeed(3, deepspeed={"zero_optimization": 3})
    await zero({}).logprobs(split(some_items(), 8))


async def test_a_checkpoint_of_another_stage_is_refused(zero, tmp_path):
    saved, other = zero({"zero_optimization": {"stage": 2}}), zero({"zero_optimization": {"stage": 3}})
    await saved.save(tmp_path)
    with pytest.raises(ValueError, match="saved with zero_optimization.stage 2, not 3"):
        await other.load(tmp_path)


async def test_a_stage_without_sharding_is_resumed_bit_for_bit(zero, tmp_path):
    through, resumed = (zero({"zero_optimization": {"stage": 0}}) for _ in range(2))
    await train(through, some_items(), 3, steps=1)
    await through.save(tmp_path)
    await resumed.load(tmp_path)
    expected, _ = await train(through, some_items(), 3, steps=2)
    found, _ = await train(resumed, some_items(), 3, steps=2)
    assert found == expected


async def test_a_file_that_would_run_code_is_refused(zero, tmp_path):
    backend = zero({"zero_optimization": {"stage": 2}})
    await backend.save(tmp_path)
    for file in (tmp_path / "shards" / "deepspeed").glob("*.pt"):
        torch.save({"module": MakesFolder(tmp_path / "made")}, file)
    with pytest.raises(ValueError, match="is not what DeepSpeed writes .* was not loaded"):
        await backend.load(tmp_path)
    assert not (tmp_path / "made").exists()
