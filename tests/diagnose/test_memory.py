"""Memory estimates match published figures, and chosen settings fit the device."""

import pytest

from oxrl.diagnose.memory import (
    GIB,
    GenerationLoad,
    ModelFacts,
    Work,
    fitting_batch,
    generation,
    gradient_traffic,
    logits,
    memory,
    sharded_memory,
    sharded_states,
    sync_traffic,
    training_flops,
)

LLAMA_3_8B = ModelFacts(
    parameters=8_030_261_248,
    trained=8_030_261_248,
    active=8_030_261_248,
    weight_bytes=2 * 8_030_261_248,
    masters=8_030_261_248,
    layers=32,
    hidden=4096,
    vocabulary=128_256,
    kept=32 * 2 * (11 * 4096 + 4 * 14336),
    kept_checkpointed=32 * 2 * 4096,
    kept_keys=32 * 2 * 2 * 4096,
    cache=2 * 32 * 8 * 128 * 2,
)
ADAPTED = LLAMA_3_8B._replace(trained=41_943_040, masters=0, head_trained=False)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_sharding_gives_the_figures_of_the_zero_paper(stage, gigabytes):
    """Rajbhandari et al. 2019, figure 1: 7.5 B parameters on 64 devices."""
    states = sharded_states(7_500_000_000, 7_500_000_000, gpus=64, stage=stage)
    assert states.total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_mixed_precision_adamw_takes_sixteen_bytes_per_parameter():
    assert sharded_states(7_000_000_000, 7_000_000_000, gpus=1, stage=0).total == 16 * 7_000_000_000


def test_the_cache_of_llama_3_8b_takes_128_kib_per_token():
    assert LLAMA_3_8B.cache == 128 * 1024
    one = generation(LLAMA_3_8B, GenerationLoad(slots=1, length=8192)) - generation(LLAMA_3_8B, GenerationLoad(1, 0))
    assert one == pytest.approx(1.25 * GIB)  # a GiB at a context of 8192, and a quarter more


def test_a_wrong_stage_is_an_error_with_the_allowed_ones():
    with pytest.raises(ValueError, match="0, 1, 2 or 3"):
        sharded_states(1, 1, gpus=2, stage=4)


def test_gradients_of_a_full_step_cost_twice_their_size_and_stage_three_half_as_much_again():
    """Ring all-reduce moves 2 (N - 1) / N of the data; the ZeRO paper has 1.5 times that for stage 3."""
    plain = gradient_traffic(1000, gpus=4, stage=0)
    assert plain == 2 * 2 * 1000 * 3 / 4
    assert gradient_traffic(1000, gpus=4, stage=3) == 1.5 * plain
    assert gradient_traffic(1000, gpus=1, stage=0) == 0


def test_each_engine_with_its_own_weights_is_sent_all_of_them():
    assert sync_traffic(16_000, rollout_gpus=4) == 64_000


def test_the_local_backend_takes_eighteen_bytes_in_half_precision_and_sixteen_in_float32():
    """Its gradients are float32 in both, and float32 weights are their own masters."""
    work = Work(1, 1)
    half = memory(LLAMA_3_8B, work, "cuda", 0)
    states = half.weights + half.gradients + half.optimizer
    assert states == 18 * LLAMA_3_8B.parameters
    single = LLAMA_3_8B._replace(weight_bytes=4 * LLAMA_3_8B.parameters, masters=0)
    full = memory(single, work, "cpu", 0)
    assert full.weights + full.gradients + full.optimizer == 16 * LLAMA_3_8B.parameters


def test_only_the_larger_of_training_and_generation_counts():
    training = memory(LLAMA_3_8B, Work(1024, 1024), "cuda", 0)
    small = memory(LLAMA_3_8B, Work(1024, 1024, generating=GenerationLoad(1, 64)), "cuda", 0)
    assert small.peak == training.peak
    large = memory(LLAMA_3_8B, Work(1024, 1024, generating=GenerationLoad(512, 8192)), "cuda", 0)
    assert large.peak == training.peak - training.training + large.generation


def test_sharding_does_not_change_activations():
    single = memory(LLAMA_3_8B, Work(4096, 4096), "cuda", GIB)
    shard = sharded_memory(single, LLAMA_3_8B, gpus=8, stage=2)
    assert shard.activations == single.activations
    assert shard.optimizer == 12 * LLAMA_3_8B.parameters // 8
    assert shard.weights == single.weights


def test_the_heap_of_ranks_on_a_cpu_holds_the_gathered_layers_too():
    """Measured, in GiB: SFT of SmolLM2-135M in float32 over two ranks, 280 tokens per micro-batch, three steps."""
    size = 134_515_008
    smollm2 = ModelFacts(size, size, size, 4 * size, 0, 30, 576, 49_152, 1_504_000, 100_000, 46_080, 46_080)
    single = memory(smollm2, Work(280, 280), "cpu", framework=int(0.53 * GIB))
    rank = sharded_memory(single, smollm2, gpus=2, stage=3)
    for fsdp_or_deepspeed in (4.15, 4.71):
        assert rank.peak / GIB == pytest.approx(fsdp_or_deepspeed, rel=0.2)
    gathers_nothing = sharded_memory(single, smollm2, gpus=2, stage=2)
    assert gathers_nothing.allocator == single.allocator
    on_gpu = memory(smollm2, Work(280, 280), "cuda", framework=0)
    assert sharded_memory(on_gpu, smollm2, gpus=2, stage=3).allocator == 0
    large = memory(LLAMA_3_8B, Work(280, 280), "cpu", framework=0)
    assert sharded_memory(large, LLAMA_3_8B, gpus=2, stage=3).allocator == large.allocator, "its blocks are returned"


def test_logits_never_take_more_than_a_chunk():
    few, many = (logits(LLAMA_3_8B, Work(tokens, tokens), "cpu") for tokens in (100, 100_000))
    head = 4 * LLAMA_3_8B.vocabulary * LLAMA_3_8B.hidden
    assert few < many < head + 4 * 2**26 * 1.2


def test_a_frozen_weight_has_no_gradient():
    full, low = (training_flops(facts, 1000, row=0) for facts in (LLAMA_3_8B, ADAPTED))
    assert full == 6 * LLAMA_3_8B.active * 1000
    assert low == pytest.approx(4 / 6 * full)


def test_a_large_device_needs_no_checkpointing():
    fit = fitting_batch(LLAMA_3_8B, 400 * GIB, longest=1024)
    assert fit.fits and not fit.gradient_checkpointing
    assert fit.micro_batch_tokens == 16384
    assert "all activations fit" in fit.reasons[0]


def test_a_smaller_device_checkpoints_before_it_shortens_micro_batches():
    fit = fitting_batch(ADAPTED, 24 * GIB, longest=1024)
    assert fit.fits and fit.gradient_checkpointing
    assert fit.micro_batch_tokens >= 2048
    work = Work(fit.micro_batch_tokens, fit.micro_batch_tokens, gradient_checkpointing=True)
    assert memory(ADAPTED, work, "cuda", GIB).peak <= 0.85 * 24 * GIB


def test_a_device_that_is_too_small_is_reported():
    fit = fitting_batch(LLAMA_3_8B, 24 * GIB, longest=512)
    assert not fit.fits
    assert "LoRA" in fit.reasons[1]


def test_slots_are_halved_until_their_cache_fits():
    fit = fitting_batch(ADAPTED, 24 * GIB, longest=4096, answers=2048, slots=256)
    assert fit.fits and 1 <= fit.slots < 256
    generating = GenerationLoad(fit.slots, 4096)
    work = Work(fit.micro_batch_tokens, fit.micro_batch_tokens, fit.gradient_checkpointing, generating=generating)
    assert memory(ADAPTED, work, "cuda", GIB).peak <= 0.85 * 24 * GIB
