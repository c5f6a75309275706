"""oxRL post-trains language models: supervised, preference and reinforcement learning.

Public names live here and are imported when they are first used, so that `import oxrl` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "oxrl.types": (
        "Algorithm Backend Batch Conversation DataSource Generation GenerationConfig ImmediateTrainFuture Item Losses "
        "Message MetricsLogger ModelConfig Outputs Row Sample Term TrainFuture TrainingBackend TrainingState Weights"
    ),
    "oxrl.algorithms": "ALGORITHMS algorithm",
    "oxrl.backends.local": ("NonFiniteError PyTorchTrainingBackend create_cross_entropy_loss create_pytorch_backend"),
    "oxrl.backends.optimizer": "create_adamw_optimizer create_warmup_cosine_scheduler",
    "oxrl.checkpoint": "best_checkpoint latest_checkpoint load_checkpoint save_checkpoint",
    "oxrl.config": "Config ConfigError load_config",
    "oxrl.data.buffer": "DataBuffer MixedBuffer",
    "oxrl.data.render": "Renderer compute_loss_mask tokenize_conversation",
    "oxrl.data.sources": "load_samples",
    "oxrl.generators.embedded": "EmbeddedGenerator",
    "oxrl.loops.evaluate": "evaluate_offline",
    "oxrl.loops.offline": "OfflineConfig SFTTrainingConfig run_offline run_sft_training",
    "oxrl.loops.step": "train_step",
    "oxrl.metrics": "JSONLLogger log_to_console",
    "oxrl.models.load": "load_hf_model load_model load_model_and_ref load_tokenizer",
    "oxrl.models.lora": "attach_lora merge_adapter save_adapter save_merged",
    "oxrl.models.reference": (
        "create_ema_updater create_periodic_updater create_reference_model update_reference_model"
    ),
    "oxrl.primitives": (
        "AlgorithmConfig compute_advantages compute_batch_kl compute_dapo_loss compute_dapo_pairs compute_forward_kl "
        "compute_grpo_advantages compute_grpo_loss compute_loss_by_algorithm compute_per_token_kl "
        "compute_ppo_advantages compute_ppo_loss compute_reverse_kl compute_value_loss create_adaptive_kl "
        "create_algorithm_config create_truncated_kl get_reference_logprobs grpo_loss ppo_loss"
    ),
    "oxrl.tensors": "token_logprobs",
    "oxrl.wiring": "RunResult train_run",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'oxrl' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
