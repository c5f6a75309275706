"""Names that users of earlier designs know, and where they are here; "dropped: why" where the capability moved."""

from importlib import import_module

import pytest

import oxrl

NAMES = {
    # loops and their records
    "run_sft_training": "oxrl.run.loops",
    "SFTTrainingConfig": "oxrl.loops.offline",
    "Sample": "oxrl.types",
    "TrainFuture": "oxrl.types",
    "ImmediateTrainFuture": "oxrl.types",
    "TrainingBackend": "oxrl.types",
    "PyTorchTrainingBackend": "oxrl.backends.local",
    "create_pytorch_backend": "oxrl.backends.local",
    "create_cross_entropy_loss": "oxrl.backends.local",
    "create_adamw_optimizer": "oxrl.backends.optimizer",
    "create_warmup_cosine_scheduler": "oxrl.backends.optimizer",
    "load_hf_model": "oxrl.models.load",
    "load_model_and_ref": "oxrl.models.load",
    "DataBuffer": "oxrl.data.buffer",
    "compute_loss_mask": "oxrl.data.render",
    "tokenize_conversation": "oxrl.data.render",
    "MetricsLogger": "oxrl.types",
    "JSONLLogger": "oxrl.tracking.metrics",
    # primitives
    "ModelConfig": "oxrl.types",
    "GenerationConfig": "oxrl.types",
    "Message": "oxrl.types",
    "Conversation": "oxrl.types",
    "Generation": "oxrl.types",
    "Batch": "oxrl.types",
    "TrainingState": "oxrl.types",
    "load_model": "oxrl.models.load",
    "load_tokenizer": "oxrl.models.load",
    "log_to_console": "oxrl.tracking.metrics",
    "log_to_wandb": "oxrl.tracking.wandb",
    **dict.fromkeys(
        [
            "compute_forward_kl",
            "compute_reverse_kl",
            "compute_per_token_kl",
            "compute_batch_kl",
            "get_reference_logprobs",
            "compute_grpo_advantages",
            "compute_grpo_loss",
            "compute_ppo_advantages",
            "compute_ppo_loss",
            "compute_dapo_pairs",
            "compute_dapo_loss",
            "create_algorithm_config",
            "compute_loss_by_algorithm",
            "compute_value_loss",
            "compute_advantages",
            "grpo_loss",
            "ppo_loss",
        ],
        "oxrl.primitives.algorithms",
    ),
    **dict.fromkeys(["create_truncated_kl", "create_adaptive_kl"], "oxrl.algorithms.kl"),
    **dict.fromkeys(
        [
            "generate",
            "generate_with_logprobs",
            "batch_generate",
            "apply_chat_template",
            "generate_conversation_turn",
            "create_rollout",
            "create_batch_rollouts",
            "create_multiturn_rollout",
        ],
        "oxrl.primitives.inference",
    ),
    **dict.fromkeys(
        [
            "training_step",
            "training_iteration",
            "train",
            "quick_start_training",
            "TrainingStats",
            "save_checkpoint",
            "load_checkpoint",
        ],
        "oxrl.primitives.training",
    ),
    **dict.fromkeys(
        [
            "execute_tools",
            "track_tool_calls",
            "execute_and_track_tools",
            "execute_functions",
        ],
        "oxrl.rollouts.tools",
    ),
    **dict.fromkeys(["extract_tool_calls", "parse_tools", "parse_xml_tools"], "oxrl.rollouts.tool_calls"),
    **dict.fromkeys(
        [
            "compute_scalar_reward",
            "compute_vector_reward",
            "aggregate_vector_rewards",
            "compute_batch_rewards",
            "normalize_rewards",
            "apply_reward_shaping",
            "weighted_sum",
        ],
        "oxrl.rewards.primitives",
    ),
    **dict.fromkeys(["load_reward_model", "compute_reward_model_score"], "oxrl.models.reward_model"),
    "Rollout": "oxrl.types",
    # engines
    "InferenceEngine": "oxrl.generators.engines",
    **dict.fromkeys(["SGLangEngine", "VLLMEngine"], "oxrl.generators.http"),
    **dict.fromkeys(["sync_weights_to_engines", "sglang_generator"], "oxrl.generators.pool"),
    "VLLMRolloutEngine": "oxrl.generators.vllm.engine",
    "vllm_generator": "oxrl.primitives.engines",
    # reinforcement learning
    "Status": "oxrl.types",
    "run_rl_training": "oxrl.run.loops",
    **dict.fromkeys(["RLTrainingConfig", "prepare_grpo_batch"], "oxrl.loops.online"),
    **dict.fromkeys(["AsyncRolloutManager", "RolloutConfig", "generate_rollout_batches"], "oxrl.rollouts.collect"),
    **dict.fromkeys(
        [
            "RolloutBatch",
            "apply_sample_transforms",
            "convert_to_batch",
            "extract_sample_fields",
            "compute_response_lengths",
            "build_batch_metadata",
            "compute_reward",
        ],
        "oxrl.rollouts.batches",
    ),
    **dict.fromkeys(
        [
            "check_reward_nonzero_std",
            "check_min_reward",
            "check_response_diversity",
            "check_reasonable_length",
            "check_quality_and_diversity",
        ],
        "oxrl.rollouts.filters",
    ),
    **dict.fromkeys(["run_sft", "run_rl"], "oxrl.run.train"),
    "ReplayBuffer": "oxrl.rollouts.buffer",
    **dict.fromkeys(
        ["create_reference_model", "update_reference_model", "create_ema_updater", "create_periodic_updater"],
        "oxrl.models.reference",
    ),
    # capabilities whose class became a function or another noun
    "PromptResponseDataset": "dropped: load_samples reads prompt and response files, assemble makes rows",
    "MixedRatioSampler": "dropped: MixedBuffer draws by ratio",
    "PromptOnlyDataset": "dropped: load_samples reads files of prompts",
    "RolloutManager": "dropped: AsyncRolloutManager, and generate_rollout_batches for plain iteration",
}


@pytest.mark.parametrize("name", [name for name, home in NAMES.items() if not home.startswith("dropped")])
def test_the_name_is_public_and_defined_in_the_listed_module(name):
    assert getattr(oxrl, name) is getattr(import_module(NAMES[name]), name)


def test_get_prompts_and_the_fields_of_the_training_config_keep_their_names():
    config = oxrl.SFTTrainingConfig(num_steps=1, batch_size=2, log_every=3, checkpoint_every=4)
    buffer = oxrl.DataBuffer(["a", "b"], seed=1)
    assert len(buffer.get_prompts(3)) == 3
    assert (buffer.epoch_id, buffer.sample_offset) == (1, 1)
    assert (config.num_steps, config.batch_size, config.log_every, config.checkpoint_every) == (1, 2, 3, 4)


def test_extension_points_take_plain_functions():
    from oxrl.models.load import load_hf_model, load_hf_tokenizer

    called = []

    def model_loader(*args, **kwargs):
        called.append("model")
        return load_hf_model(*args, **kwargs)

    def tokenizer_loader(*args, **kwargs):
        called.append("tokenizer")
        return load_hf_tokenizer(*args, **kwargs)

    oxrl.load_model("tiny", model_loader=model_loader)
    oxrl.load_tokenizer("tiny", tokenizer_loader=tokenizer_loader)
    assert called == ["model", "tokenizer"]


def test_a_rollout_has_the_fields_that_samples_and_rollouts_had():
    turn = oxrl.Turn((1, 2), oxrl.Generation((3, 4), (-0.5, -0.25), "stop", version=2, text="4"))
    sample = oxrl.Sample("a", (oxrl.Message("user", "2+2?"),))
    rollout = oxrl.Rollout(sample, (turn,), group=7, score=oxrl.Score(1.0, {"right": 1.0, "short": 0.5}))
    assert (rollout.prompt, rollout.response, rollout.generation.text) == ("2+2?", "4", "4")
    assert (rollout.tokens, rollout.loss_mask) == ([1, 2, 3, 4], [0.0, 0.0, 1.0, 1.0])
    assert rollout.rollout_log_probs == [0.0, 0.0, -0.5, -0.25]
    assert (rollout.reward, rollout.rewards, rollout.group_index) == (1.0, [1.0, 0.5], 7)
    assert rollout.status is oxrl.Status.COMPLETED and rollout.kl_divergence is None


def test_the_fields_of_the_rl_configs_keep_their_names():
    config = oxrl.RLTrainingConfig(num_steps=1, sync_every=1, baseline=0.5, log_every=3, checkpoint_every=4)
    assert (config.num_steps, config.sync_every, config.baseline) == (1, 1, 0.5)
    rollouts = oxrl.RolloutConfig(batch_size=4, n_samples_per_prompt=2, over_sampling_factor=1.5)
    assert (rollouts.generate_fn, rollouts.reward_fn) == (None, None) and rollouts.filter_fn([])
