"""The parts of a training run as plain functions in six categories, every one with extension points.

They are thin wrappers of the functions that the trainer uses. `CATEGORIES` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oxrl.algorithms.kl import create_adaptive_kl, create_truncated_kl
from oxrl.generators.pool import sglang_generator
from oxrl.models.load import load_model, load_tokenizer
from oxrl.models.reference import (
    create_ema_updater,
    create_periodic_updater,
    create_reference_model,
    update_reference_model,
)
from oxrl.models.reward_model import compute_reward_model_score, load_reward_model
from oxrl.primitives.algorithms import (
    AlgorithmConfig,
    LossBatch,
    compute_advantages,
    compute_batch_kl,
    compute_dapo_loss,
    compute_dapo_pairs,
    compute_forward_kl,
    compute_grpo_advantages,
    compute_grpo_loss,
    compute_loss_by_algorithm,
    compute_per_token_kl,
    compute_ppo_advantages,
    compute_ppo_loss,
    compute_reverse_kl,
    compute_value_loss,
    create_algorithm_config,
    create_pair_batch,
    create_policy_batch,
    get_reference_logprobs,
    grpo_loss,
    ppo_loss,
)
from oxrl.primitives.engines import vllm_generator
from oxrl.primitives.gradients import per_sample_grad_norms, per_sample_gradients
from oxrl.primitives.inference import (
    apply_chat_template,
    batch_generate,
    create_batch_rollouts,
    create_multiturn_rollout,
    create_rollout,
    generate,
    generate_conversation_turn,
    generate_with_logprobs,
)
from oxrl.primitives.training import (
    PolicyState,
    TrainingStats,
    create_checkpointer,
    create_loss_batch,
    create_training_state,
    load_checkpoint,
    quick_start_training,
    restore_training_state,
    save_checkpoint,
    train,
    training_iteration,
    training_step,
)
from oxrl.rewards.primitives import (
    aggregate_vector_rewards,
    apply_reward_shaping,
    compute_batch_rewards,
    compute_scalar_reward,
    compute_vector_reward,
    normalize_rewards,
    weighted_sum,
)
from oxrl.rollouts.batches import compute_reward
from oxrl.rollouts.tool_calls import extract_tool_calls, parse_tools, parse_xml_tools
from oxrl.rollouts.tools import execute_and_track_tools, execute_functions, execute_tools, track_tool_calls
from oxrl.tracking.metrics import log_to_console
from oxrl.tracking.wandb import log_to_wandb

CATEGORIES: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "inference": (
        load_model,
        load_tokenizer,
        generate,
        generate_with_logprobs,
        batch_generate,
        apply_chat_template,
        generate_conversation_turn,
        extract_tool_calls,
        execute_tools,
        vllm_generator,
        sglang_generator,
    ),
    "rewards": (
        compute_reward,
        compute_scalar_reward,
        compute_vector_reward,
        aggregate_vector_rewards,
        weighted_sum,
        compute_batch_rewards,
        normalize_rewards,
        apply_reward_shaping,
        load_reward_model,
        compute_reward_model_score,
    ),
    "kl divergence": (
        compute_forward_kl,
        compute_reverse_kl,
        compute_per_token_kl,
        compute_batch_kl,
        create_reference_model,
        update_reference_model,
        get_reference_logprobs,
        create_truncated_kl,
        create_adaptive_kl,
        create_ema_updater,
        create_periodic_updater,
    ),
    "rollouts": (
        create_rollout,
        create_batch_rollouts,
        create_multiturn_rollout,
        track_tool_calls,
        execute_and_track_tools,
        parse_tools,
        parse_xml_tools,
        execute_functions,
    ),
    "algorithms": (
        compute_advantages,
        create_policy_batch,
        create_pair_batch,
        create_loss_batch,
        compute_grpo_advantages,
        compute_grpo_loss,
        compute_ppo_advantages,
        compute_ppo_loss,
        compute_value_loss,
        compute_dapo_pairs,
        compute_dapo_loss,
        create_algorithm_config,
        compute_loss_by_algorithm,
        grpo_loss,
        ppo_loss,
        per_sample_gradients,
        per_sample_grad_norms,
    ),
    "training loop": (
        create_training_state,
        training_step,
        training_iteration,
        train,
        quick_start_training,
        log_to_console,
        log_to_wandb,
        create_checkpointer,
        restore_training_state,
        save_checkpoint,
        load_checkpoint,
    ),
}

__all__ = [
    "CATEGORIES",
    "AlgorithmConfig",
    "LossBatch",
    "PolicyState",
    "TrainingStats",
    *sorted(function.__name__ for functions in CATEGORIES.values() for function in functions),
]
