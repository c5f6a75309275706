"""Names that users of earlier designs know, and where they are here; "dropped: why" where the capability moved."""

from importlib import import_module

import pytest

import oxrl

NAMES = {
    # loops and their records
    "run_sft_training": "oxrl.loops.offline",
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
    "JSONLLogger": "oxrl.metrics",
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
    "log_to_console": "oxrl.metrics",
    "save_checkpoint": "oxrl.checkpoint",
    "load_checkpoint": "oxrl.checkpoint",
    **dict.fromkeys(
        [
            "compute_forward_kl",
            "compute_reverse_kl",
            "compute_per_token_kl",
            "compute_batch_kl",
            "get_reference_logprobs",
            "create_truncated_kl",
            "create_adaptive_kl",
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
        "oxrl.primitives",
    ),
    **dict.fromkeys(
        ["create_reference_model", "update_reference_model", "create_ema_updater", "create_periodic_updater"],
        "oxrl.models.reference",
    ),
    # capabilities whose class became a function or another noun
    "PromptResponseDataset": "dropped: load_samples reads prompt and response files, assemble makes rows",
    "MixedRatioSampler": "dropped: MixedBuffer draws by ratio",
}


@pytest.mark.parametrize("name", [name for name, home in NAMES.items() if not home.startswith("dropped")])
def test_the_name_is_public_and_lives_where_the_table_says(name):
    assert getattr(oxrl, name) is getattr(import_module(NAMES[name]), name)


def test_get_prompts_and_the_fields_of_the_training_config_keep_their_names():
    config = oxrl.SFTTrainingConfig(num_steps=1, batch_size=2, log_every=3, checkpoint_every=4)
    buffer = oxrl.DataBuffer(["a", "b"], seed=1)
    assert len(buffer.get_prompts(3)) == 3
    assert (buffer.epoch_id, buffer.sample_offset) == (1, 1)
    assert (config.num_steps, config.batch_size, config.log_every, config.checkpoint_every) == (1, 2, 3, 4)


def test_extension_points_take_plain_functions():
    from oxrl.models.load import load_hf_model, load_hf_tokenizer

    asked = []

    def model_loader(*args, **kwargs):
        asked.append("model")
        return load_hf_model(*args, **kwargs)

    def tokenizer_loader(*args, **kwargs):
        asked.append("tokenizer")
        return load_hf_tokenizer(*args, **kwargs)

    oxrl.load_model("tiny", model_loader=model_loader)
    oxrl.load_tokenizer("tiny", tokenizer_loader=tokenizer_loader)
    assert asked == ["model", "tokenizer"]
