"""KL, advantages and losses as plain functions of tensors: thin wrappers of the algorithm table's functions.

Each wrapper's signature names its extension points. The computation itself is in the functions of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from oxrl.algorithms import algorithm, find, kl, policy, preference
from oxrl.algorithms import credit as crediting
from oxrl.algorithms.assemble import best_and_worst
from oxrl.algorithms.kl import Estimator
from oxrl.algorithms.policy import Policy
from oxrl.algorithms.policy_recipes import policy_view
from oxrl.algorithms.preference import Pairs
from oxrl.backends.forward import LanguageModel, prepare_layout
from oxrl.data.pack import collate
from oxrl.tensors import label_logprobs
from oxrl.types import Item, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compute_forward_kl(logprobs: Tensor, ref_logprobs: Tensor, *, kl_fn: Estimator = kl.forward_k3) -> Tensor:
    """Return KL(ref || policy), mean per token, estimated from tokens of the policy."""
    return kl_fn(logprobs, ref_logprobs).mean()


def compute_reverse_kl(logprobs: Tensor, ref_logprobs: Tensor, *, kl_fn: Estimator = kl.k3) -> Tensor:
    """Return KL(policy || ref), mean per token, estimated from tokens of the policy."""
    return kl_fn(logprobs, ref_logprobs).mean()


def compute_per_token_kl(logprobs: Tensor, ref_logprobs: Tensor, *, kl_fn: Estimator = kl.k1) -> Tensor:
    """Return the KL of each token, `[T]`, by any estimator of (log-prob, reference log-prob)."""
    return kl_fn(logprobs, ref_logprobs)


def compute_batch_kl(logprobs: Sequence[Tensor], ref_logprobs: Sequence[Tensor], *, kl_fn: Estimator = kl.k1) -> Tensor:
    """Return the KL of each of N sequences, summed over its tokens: `[N]`."""
    return torch.stack([kl_fn(own, ref).sum() for own, ref in zip(logprobs, ref_logprobs, strict=True)])


def token_logprobs_of(model: PreTrainedModel, rows: Sequence[Row]) -> list[Tensor]:
    """Return the log-probs of each row's trained tokens."""
    batch = collate([(row,) for row in rows], model.device)
    module = LanguageModel(model).eval()
    prepare_layout(module)
    with torch.no_grad():
        values = module(batch).logprob
    spans = zip(batch.borders[:-1], batch.borders[1:], strict=True)
    return [values[start:end][batch.mask[start:end]] for start, end in spans]


def create_policy_batch(model: PreTrainedModel, items: Sequence[Item], *, temperature: float = 1.0) -> Policy:
    """`create_policy_batch(model, prepare_grpo_batch(rollouts))`: log-probs with gradient, for a custom loss.

    A single pass, so that memory limits the number of items; `temperature` is the sampler's.
    """
    batch = collate(items, model.device)
    module = LanguageModel(model, temperature=temperature)
    prepare_layout(module)
    return policy_view(module(batch), batch)


def get_reference_logprobs(
    ref_model: PreTrainedModel,
    rows: Sequence[Row],
    *,
    logprob_extractor: Callable[[PreTrainedModel, Sequence[Row]], list[Tensor]] = token_logprobs_of,
) -> list[Tensor]:
    """Return the reference's log-probs of each row's trained tokens."""
    return logprob_extractor(ref_model, rows)


def compute_grpo_advantages(
    rewards: Sequence[Tensor], *, advantage_fn: Callable[[Tensor], Tensor] = crediting.zscore
) -> list[Tensor]:
    """Return the advantages of each group from its rewards."""
    return [advantage_fn(group) for group in rewards]


def compute_grpo_loss(
    batch: Policy, advantages: Tensor | None = None, *, loss_fn: Callable[..., Tensor] = policy.grpo, **parameters: Any
) -> Tensor:
    """Return the mean of `loss_fn` over sequences; `advantages` are per token or per sequence."""
    return loss_fn(_with_advantages(batch, advantages), **parameters).sum() / batch.num_sequences


def compute_ppo_advantages(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    value_fn: Callable[[Tensor], Tensor] = torch.zeros_like,
    gamma: float = 1.0,
    lam: float = 0.95,
    ended: bool = True,
    last_value: float | None = None,
) -> Tensor:
    """Return GAE over one row's tokens; `values` default to `value_fn(rewards)`."""
    known = value_fn(rewards) if values is None else values
    return crediting.gae(rewards, known, ended=ended, last_value=last_value, gamma=gamma, lam=lam)


def compute_ppo_loss(
    batch: Policy,
    advantages: Tensor | None = None,
    *,
    clip_range: float = 0.2,
    loss_fn: Callable[..., Tensor] = policy.clipped,
) -> Tensor:
    """Return the mean of the clipped surrogate over trained tokens."""
    view = _with_advantages(batch, advantages)
    return loss_fn(view, clip_low=clip_range, clip_high=clip_range).sum() / batch.mask.sum()


def compute_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float = 0.2
) -> Tensor:
    """Return PPO's clipped value loss, mean over trained tokens."""
    return policy.ppo_value(values, old_values, returns, mask, clip=clip).sum() / mask.sum()


def compute_dapo_pairs(
    groups: Sequence[Item], *, pair_selector: Callable[[list[Item]], list[Item]] = best_and_worst
) -> list[Item]:
    """Return (chosen, rejected) pairs from groups of scored rows."""
    return pair_selector(list(groups))


def compute_dapo_loss(
    pairs: Pairs, *, beta: float = 0.1, loss_fn: Callable[..., Tensor] = preference.dapo_pairs
) -> Tensor:
    """Return the mean loss over pairs; by default that of `dapo_pairs`."""
    return loss_fn(pairs, beta=beta).mean()


class AlgorithmConfig(NamedTuple):
    """`AlgorithmConfig("grpo", {"kl_coef": 0.2})`: a name of the table and its parameters, checked."""

    name: str
    parameters: Mapping[str, Any]


def create_algorithm_config(name: str, parameters: Mapping[str, Any] | None = None) -> AlgorithmConfig:
    """Check name and parameters. `clip_range` sets both clips; `dapo` with `beta` means its pair form, `dapo_pairs`."""
    given = dict(parameters or {})
    if "clip_range" in given:
        both = given.pop("clip_range")
        given |= {"clip_low": both, "clip_high": both}
    if name.lower() == "dapo" and "beta" in given:
        name = "dapo_pairs"
    built = algorithm(name, **given)
    return AlgorithmConfig(built.name, given)


def compute_loss_by_algorithm(batch: Policy | Pairs, config: AlgorithmConfig) -> Tensor:
    """Return the named loss, mean over sequences (a `Policy`) or pairs, without KL and entropy terms."""
    loss = find(config.name).loss
    parameters = {name: value for name, value in config.parameters.items() if name in find(config.name).own()}
    losses: Tensor = loss(batch, **parameters)
    return losses.mean() if isinstance(batch, Pairs) else losses.sum() / batch.num_sequences


def _with_advantages(batch: Policy, advantages: Tensor | None) -> Policy:
    if advantages is None:
        return batch
    if len(advantages) == batch.num_sequences != len(batch.logprob):
        advantages = advantages[batch.segment]
    return batch._replace(advantage=advantages)


def compute_advantages(rewards: Tensor | Sequence[float], baseline: float | Tensor = 0.0) -> Tensor:
    """Return reward minus baseline."""
    return torch.as_tensor(rewards) - baseline


def grpo_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:
    """Return the policy gradient loss -log p * advantage over masked tokens, from `[B, S, V]` logits."""
    view = _from_logits(logits, labels, loss_mask, advantages)
    return policy.reinforce(view).sum() / view.mask.sum()


def ppo_loss(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    clip_range: float = 0.2,
) -> Tensor:
    """Return the clipped surrogate over masked tokens; `old_log_probs[b, s]` is the log-prob of `labels[b, s]`."""
    view = _from_logits(logits, labels, loss_mask, advantages)
    return compute_ppo_loss(view._replace(sampler_logprob=old_log_probs[:, 1:].reshape(-1)), clip_range=clip_range)


def _from_logits(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor) -> Policy:
    """Shift once: logits at a position predict the next label, and the view is aligned with labels."""
    logprob, mask = label_logprobs(logits, labels), loss_mask[:, 1:].bool()
    segment = torch.arange(len(labels), device=labels.device)[:, None].expand_as(mask).reshape(-1)
    flat = logprob.reshape(-1)
    return Policy(flat, flat.detach(), advantages[segment], mask.reshape(-1), segment, len(labels))
