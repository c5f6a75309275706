"""oxRL post-trains language models: supervised, preference and reinforcement learning.

Public names live here and are imported when they are first used, so that `import oxrl` stays quick.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "oxrl.types": (
        "Algorithm Backend Batch Conversation DataSource Episode Generation GenerationConfig Generator "
        "ImmediateTrainFuture Item Losses Media Message MetricsLogger ModelConfig Online Outputs Request Rollout Row "
        "Sample PolicyClient Score Status Term TrainFuture TrainingBackend TrainingState Turn Weights"
    ),
    "oxrl.algorithms": "ALGORITHMS algorithm",
    "oxrl.algorithms.policy": "Policy",
    "oxrl.algorithms.preference": "Pairs",
    "oxrl.algorithms.supervised": "Tokens",
    "oxrl.backends.local": ("NonFiniteError PyTorchTrainingBackend create_cross_entropy_loss create_pytorch_backend"),
    "oxrl.backends.distributed.deepspeed": "DeepSpeedTrainingBackend",
    "oxrl.backends.distributed.fsdp": "FSDPTrainingBackend",
    "oxrl.backends.optimizer": "create_adamw_optimizer create_warmup_cosine_scheduler",
    "oxrl.run.checkpoint": "best_checkpoint intact_checkpoint latest_checkpoint",
    "oxrl.weights.integrity": "CorruptCheckpointError",
    "oxrl.concurrency": "run_blocking",
    "oxrl.config": "Config ConfigError load_config load_stages",
    "oxrl.evaluation.evaluate": "Evaluation evaluate",
    "oxrl.data.actions": "ActionTokens ActionWords",
    "oxrl.data.buffer": "DataBuffer MixedBuffer",
    "oxrl.data.media": "load_audio load_image",
    "oxrl.data.prepare": "prepare",
    "oxrl.data.prompts": "fill_prompts",
    "oxrl.data.render": "Renderer compute_loss_mask tokenize_conversation",
    "oxrl.data.sources": "load_samples",
    "oxrl.run.export": "export_model merge_run push_model",
    "oxrl.generators.connection": "EngineError",
    "oxrl.generators.embedded.generator": "EmbeddedGenerator",
    "oxrl.generators.engines": "InferenceEngine",
    "oxrl.generators.http": "SGLangEngine VLLMEngine",
    "oxrl.generators.pool": "HTTPGenerator sglang_generator sync_weights_to_engines",
    "oxrl.generators.servers": "served_at serving",
    "oxrl.generators.probe": "StaleEngineError",
    "oxrl.generators.vllm.server": "vllm_server",
    "oxrl.generators.vllm.engine": "VLLMRolloutEngine",
    "oxrl.loops.callbacks": "StopTraining",
    "oxrl.loops.evaluate": "evaluate_offline evaluate_online",
    "oxrl.loops.offline": "OfflineConfig SFTTrainingConfig run_offline",
    "oxrl.loops.online": "OnlineConfig RLTrainingConfig prepare_grpo_batch run_online",
    "oxrl.loops.step": "train_step",
    "oxrl.tracking.metrics": "JSONLLogger log_to_console",
    "oxrl.models.load": "load_hf_model load_model load_model_and_ref load_tokenizer",
    "oxrl.models.lora": "attach_lora merge_adapter save_adapter save_merged",
    "oxrl.models.reward_model": "compute_reward_model_score load_reward_model",
    "oxrl.models.reference": (
        "create_ema_updater create_periodic_updater create_reference_model update_reference_model"
    ),
    "oxrl.primitives.algorithms": (
        "AlgorithmConfig LossBatch compute_advantages compute_batch_kl compute_dapo_loss compute_dapo_pairs "
        "compute_forward_kl compute_grpo_advantages compute_grpo_loss compute_loss_by_algorithm compute_per_token_kl "
        "compute_ppo_advantages compute_ppo_loss compute_reverse_kl compute_value_loss create_algorithm_config "
        "create_pair_batch create_policy_batch get_reference_logprobs grpo_loss ppo_loss"
    ),
    "oxrl.tracking.plot": "plot_history plot_run",
    "oxrl.algorithms.kl": "create_adaptive_kl create_truncated_kl",
    "oxrl.primitives.engines": "vllm_generator",
    "oxrl.primitives.gradients": "per_sample_grad_norms per_sample_gradients",
    "oxrl.primitives.inference": (
        "apply_chat_template batch_generate create_batch_rollouts create_multiturn_rollout create_rollout generate "
        "generate_conversation_turn generate_with_logprobs"
    ),
    "oxrl.primitives.training": (
        "PolicyState TrainingStats create_checkpointer create_loss_batch create_training_state load_checkpoint "
        "quick_start_training restore_training_state save_checkpoint train training_iteration training_step"
    ),
    "oxrl.rewards": (
        "REWARDS Reward check_samples grade group_reward judge_reward reasoning_gym_samples reward weighted"
    ),
    "oxrl.rewards.primitives": (
        "aggregate_vector_rewards apply_reward_shaping compute_batch_rewards compute_scalar_reward "
        "compute_vector_reward normalize_rewards weighted_sum"
    ),
    "oxrl.rollouts.agents": "rollout_from_messages",
    "oxrl.rollouts.batches": (
        "RolloutBatch apply_sample_transforms build_batch_metadata compute_response_lengths compute_reward "
        "convert_to_batch extract_sample_fields group_rollouts merge_rollouts split_rollouts"
    ),
    "oxrl.rollouts.buffer": "ReplayBuffer",
    "oxrl.rollouts.collect": (
        "AsyncRolloutManager RolloutConfig RolloutSampler generate_rollout_batches sampling_manager"
    ),
    "oxrl.rollouts.endpoint": "recording_endpoint",
    "oxrl.rollouts.envs": "dialogue gym_env single_turn with_tools",
    "oxrl.rollouts.filters": (
        "check_min_reward check_quality_and_diversity check_reasonable_length check_response_diversity "
        "check_reward_nonzero_std"
    ),
    "oxrl.rollouts.record": "read_rollouts write_rollouts",
    "oxrl.rollouts.tools": "calculator execute_and_track_tools execute_functions execute_tools track_tool_calls",
    "oxrl.rollouts.tool_calls": "extract_tool_calls parse_json_tools parse_tools parse_xml_tools",
    "oxrl.tensors": "token_logprobs",
    "oxrl.tracking.mlflow": "log_to_mlflow",
    "oxrl.tracking.tensorboard": "log_to_tensorboard",
    "oxrl.tracking.wandb": "log_to_wandb",
    "oxrl.run.spec": "Choice",
    "oxrl.trainer": "Trainer TrainingResult",
    "oxrl.testing": "ScriptedGenerator check_reward fake_rollout",
    "oxrl.run.loops": "run_rl_training run_sft_training",
    "oxrl.run.train": "RunResult run_rl run_sft train_run",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

# Former names; each still works, with a DeprecationWarning.
_RENAMED = {"Answers": "RolloutSampler", "Talk": "PolicyClient"}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"oxrl.{name} is now oxrl.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _HOME_OF:
        raise AttributeError(f"module 'oxrl' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
