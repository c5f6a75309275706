"""KL, advantages and losses as plain functions of tensors: thin wrappers of the algorithm table's functions.

Each wrapper's signature names its extension points. The computation itself is in the functions of the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from oxrl.algorithms import algorithm, find, kl, policy, preference
from oxrl.algorithms import credit as crediting
from oxrl.algorithms.advantages import accepted
from oxrl.algorithms.assemble import best_and_worst
from oxrl.algorithms.custom import as_loss, call_loss
from oxrl.algorithms.kl import KLFn
from oxrl.algorithms.online import one_row_each
from oxrl.algorithms.policy import Distilled, Policy
from oxrl.algorithms.policy_recipes import policy_view
from oxrl.algorithms.preference import Pairs
from oxrl.algorithms.recipes import pair_view
from oxrl.algorithms.supervised import Scores, Tokens
from oxrl.algorithms.unpaired import Labelled
from oxrl.backends.forward import LanguageModel
from oxrl.backends.layout import prepare_layout
from oxrl.backends.local import shares_of
from oxrl.data.pack import collate
from oxrl.loops.online import NO_TEXT, prepare_grpo_batch
from oxrl.names import kind_of
from oxrl.primitives.stages import (
    as_advantages,
    as_items,
    check_view,
    rewards_by_group,
    rollouts_of,
    rows_by_entry,
)
from oxrl.rollouts.batches import compute_reward, group_rollouts
from oxrl.rollouts.buffer import Group
from oxrl.tensors import label_logprobs
from oxrl.types import Batch, Counts, Item, Outputs, Rollout, Row, Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LogProbs: TypeAlias = Tensor | Sequence[float]
"""`[T]`, as a tensor or as the numbers that a `Generation` holds."""


def compute_forward_kl(logprobs: LogProbs, ref_logprobs: LogProbs, *, kl_fn: KLFn = kl.forward_k3) -> Tensor:
    """Return KL(ref || policy), mean per token, estimated from tokens of the policy.

    A `kl_fn` that returns one number for the sequence is used as it is, here and in the other functions.
    """
    return kl_of(logprobs, ref_logprobs, kl_fn).mean()


def compute_reverse_kl(logprobs: LogProbs, ref_logprobs: LogProbs, *, kl_fn: KLFn = kl.k3) -> Tensor:
    """Return KL(policy || ref), mean per token, estimated from tokens of the policy."""
    return kl_of(logprobs, ref_logprobs, kl_fn).mean()


def compute_per_token_kl(logprobs: LogProbs, ref_logprobs: LogProbs, *, kl_fn: KLFn = kl.k1) -> Tensor:
    """Return the KL of each token, `[T]`; a `kl_fn` that returns one number is called with each token."""
    own, ref = _as_tensors(logprobs, ref_logprobs)
    values = kl_of(own, ref, kl_fn)
    if values.shape == own.shape:
        return values
    tokens = [slice(index, index + 1) for index in range(len(own))]
    return torch.stack([kl_of(own[token], ref[token], kl_fn).reshape(()) for token in tokens])


def compute_batch_kl(logprobs: Sequence[LogProbs], ref_logprobs: Sequence[LogProbs], *, kl_fn: KLFn = kl.k1) -> Tensor:
    """Return the KL of each of N sequences, summed over its tokens: `[N]`."""
    return torch.stack([kl_of(own, ref, kl_fn).sum() for own, ref in zip(logprobs, ref_logprobs, strict=True)])


def kl_of(logprobs: LogProbs, ref_logprobs: LogProbs, kl_fn: KLFn) -> Tensor:
    """Return `kl_fn` of two sequences of log-probs as a tensor: `[T]`, or one number."""
    return torch.as_tensor(kl_fn(*_as_tensors(logprobs, ref_logprobs)))


def _as_tensors(logprobs: LogProbs, ref_logprobs: LogProbs) -> tuple[Tensor, Tensor]:
    for given in (logprobs, ref_logprobs):
        if not isinstance(given, Tensor | Sequence) or rollouts_of(given):
            raise ValueError(
                f"log-probs are a tensor or numbers, not {kind_of(given)}; those of a rollout by its sampler are "
                "rollout.generation.logprobs, those of a model get_reference_logprobs(model, [rollout])[0]"
            )
    own, ref = torch.as_tensor(logprobs), torch.as_tensor(ref_logprobs)
    if own.shape != ref.shape:
        raise ValueError(
            f"log-probs of {tuple(own.shape)} and {tuple(ref.shape)} tokens; give those of the same tokens"
        )
    return own, ref


def token_logprobs_of(model: PreTrainedModel, rows: Sequence[Row]) -> list[Tensor]:
    """Return the log-probs of each row's trained tokens."""
    batch = collate([(row,) for row in rows], model.device)
    values = _frozen_logprobs(model, batch)
    spans = zip(batch.borders[:-1], batch.borders[1:], strict=True)
    return [values[start:end][batch.mask[start:end]] for start, end in spans]


def _frozen_logprobs(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> Tensor:
    module = LanguageModel(model, temperature=temperature).eval()
    prepare_layout(module)
    with torch.no_grad():
        logprob: Tensor = module(batch).logprob
    return logprob


def create_policy_batch(
    model: PreTrainedModel,
    items: Sequence[Item] | Sequence[Row] | Sequence[Rollout] | Sequence[Group],
    *,
    temperature: float = 1.0,
) -> Policy:
    """`create_policy_batch(model, prepare_grpo_batch(rollouts))`: log-probs with gradient, for a custom loss.

    Graded rollouts are converted by `prepare_grpo_batch`. A single pass, so that memory limits the number of items;
    `temperature` is the sampler's.
    """
    batch = collate(_policy_items(items), model.device)
    module = LanguageModel(model, temperature=temperature)
    prepare_layout(module)
    return policy_view(module(batch), batch)


def _policy_items(data: Any) -> list[Item]:
    if isinstance(data, list | tuple) and data and all(isinstance(each, Row) for each in data):
        data = [(row,) for row in data]  # how rows are grouped makes no difference here
    return as_items(data, "create_policy_batch", prepare_grpo_batch)


def create_pair_batch(
    model: PreTrainedModel,
    pairs: Sequence[Item] | Sequence[Rollout] | Sequence[Group],
    *,
    ref_model: PreTrainedModel | None = None,
    temperature: float = 1.0,
) -> Pairs:
    """`create_pair_batch(model, compute_dapo_pairs(rollouts), ref_model=ref_model)`: rows to summed log-probs of pairs.

    Each item is (chosen, rejected); graded rollouts are converted by `compute_dapo_pairs`. Without a reference model
    its log-probs are 0. A single pass, with gradient.
    """
    pairs = as_items(pairs, "create_pair_batch", compute_dapo_pairs)
    if wrong := next((item for item in pairs if len(item) != 2), None):
        raise ValueError(f"an item with {len(wrong)} rows ({wrong[0].id}); each item is a pair: (chosen, rejected)")
    batch = collate(pairs, model.device)
    if ref_model is not None:
        reference = _frozen_logprobs(ref_model, batch, temperature)
        batch = replace(batch, streams={**batch.streams, "ref_logprob": reference})
    module = LanguageModel(model, temperature=temperature)
    prepare_layout(module)
    return pair_view(module(batch), batch)


def get_reference_logprobs(
    ref_model: PreTrainedModel,
    rows: Sequence[Row] | Sequence[Rollout],
    *,
    logprob_extractor: Callable[[PreTrainedModel, Sequence[Row]], list[Tensor]] = token_logprobs_of,
) -> list[Tensor]:
    """Return the reference's log-probs of the trained tokens of each row, or of the sampled tokens of each rollout."""
    if not callable(ref_model):
        raise ValueError(f"ref_model is {kind_of(ref_model)}; the order is get_reference_logprobs(ref_model, rows)")
    entries = rows_by_entry(rows, "get_reference_logprobs")
    flat = [row for entry in entries for row in entry]
    found = iter(logprob_extractor(ref_model, flat) if flat else [])
    return [
        torch.cat([torch.zeros(0), *parts]) if len(parts) != 1 else parts[0]
        for parts in [[next(found) for _ in entry] for entry in entries]
    ]


def compute_grpo_advantages(
    rewards: Sequence[Tensor | Sequence[float]] | Sequence[Rollout] | Sequence[Group],
    *,
    advantage_fn: Callable[[Tensor], Tensor] = crediting.zscore,
) -> list[Tensor]:
    """Return the advantages of each group from its rewards, or from graded rollouts, grouped by prompt."""
    return [advantage_fn(group) for group in rewards_by_group(rewards)]


def compute_grpo_loss(
    batch: Policy,
    advantages: Tensor | Sequence[Tensor] | None = None,
    *,
    loss_fn: Callable[..., Tensor] = policy.grpo,
    **parameters: Any,
) -> Tensor:
    """Return the mean of `loss_fn` over sequences; `advantages` are per token or per sequence.

    `loss_fn` is a function of the batch, or of the batch and the advantages per token. A loss that is one number is
    returned as it is, here and by the other losses.
    """
    view = _with_advantages(batch, advantages, "compute_grpo_loss")
    return _mean(call_loss(loss_fn, view, parameters), batch, "sequence")


def compute_ppo_advantages(
    rewards: Tensor | Sequence[float] | Sequence[Sequence[float]],
    values: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
    dones: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
    gamma: float = 1.0,
    gae_lambda: float | None = None,
    *,
    value_fn: Callable[[Tensor], Tensor] = torch.zeros_like,
    lam: float = 0.95,
    ended: bool = True,
    last_value: float | Tensor | None = None,
) -> Tensor:
    """Return GAE over the tokens of one row, `[T]`, or of several, `[B, T]`; `values` default to `value_fn(rewards)`.

    `dones` marks the last token of each response, and padding. `values` may have one column more: `last_value`, the
    value after the last token. `gae_lambda` is another name of `lam`.
    """
    if rollouts_of(rewards):
        raise ValueError(
            "compute_ppo_advantages takes the rewards of each token, [T] or [B, T], not rollouts; the algorithm ppo "
            "makes them of rollouts: create_loss_batch(state, rollouts, create_algorithm_config('ppo'))"
        )
    rewards = torch.as_tensor(rewards)
    known = value_fn(rewards) if values is None else torch.as_tensor(values)
    dones = None if dones is None else torch.as_tensor(dones)
    if known.shape[-1] == rewards.shape[-1] + 1:
        known, last_value, ended = known[..., :-1], known[..., -1], False
    lam = lam if gae_lambda is None else gae_lambda
    return crediting.gae(rewards, known, ended=ended, last_value=last_value, dones=dones, gamma=gamma, lam=lam)


def compute_ppo_loss(
    batch: Policy,
    advantages: Tensor | Sequence[Tensor] | None = None,
    *,
    clip_range: float = 0.2,
    loss_fn: Callable[..., Tensor] = policy.clipped,
) -> Tensor:
    """Return the mean of the clipped surrogate over trained tokens."""
    clips = _taken_by(loss_fn, {"clip_low": clip_range, "clip_high": clip_range})
    view = _with_advantages(batch, advantages, "compute_ppo_loss")
    return _mean(call_loss(loss_fn, view, clips), batch, "token")


def compute_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float = 0.2
) -> Tensor:
    """Return PPO's clipped value loss, mean over trained tokens."""
    return policy.ppo_value(values, old_values, returns, mask, clip=clip).sum() / mask.sum()


def compute_dapo_pairs(
    groups: Sequence[Item] | Sequence[Rollout] | Sequence[Group],
    *,
    pair_selector: Callable[[list[Item]], list[Item]] = best_and_worst,
) -> list[Item]:
    """Return (chosen, rejected) pairs from graded rollouts, or from groups of scored rows."""
    return pair_selector(as_items(groups, "compute_dapo_pairs", _scored_rows))


def _scored_rows(rollouts: Sequence[Rollout]) -> list[Item]:
    return [item for group in group_rollouts(rollouts) for item in one_row_each(group, NO_TEXT)]


def compute_dapo_loss(
    pairs: Pairs, *, beta: float = 0.1, loss_fn: Callable[..., Tensor] = preference.dapo_pairs
) -> Tensor:
    """Return the mean loss over pairs; by default that of `dapo_pairs`."""
    check_view(pairs, Pairs, "compute_dapo_loss")
    return _mean(call_loss(loss_fn, pairs, _taken_by(loss_fn, {"beta": beta})), pairs, "pair")


class AlgorithmConfig(NamedTuple):
    """`AlgorithmConfig("grpo", {"kl_coef": 0.2})`: a name of the table (or `FILE.py:loss`) and its parameters, checked.

    `loss` is a custom loss that was given as a function.
    """

    name: str
    parameters: Mapping[str, Any]
    loss: Callable[..., Tensor] | None = None

    @property
    def source(self) -> str | Callable[..., Tensor]:
        """What `algorithm` builds it from."""
        return self.name if self.loss is None else self.loss


def create_algorithm_config(
    name: str | Callable[..., Tensor], parameters: Mapping[str, Any] | None = None
) -> AlgorithmConfig:
    """Check name and parameters. `clip_range` sets both clips; `dapo` with `beta` means its pair form, `dapo_pairs`.

    `name` is one of `oxrl algorithms`, a custom loss (a function whose first argument is annotated with `Pairs` or
    `Policy`), or its path, `FILE.py:loss`.
    """
    given = dict(parameters or {})
    if "clip_range" in given:
        both = given.pop("clip_range")
        given |= {"clip_low": both, "clip_high": both}
    if isinstance(name, str) and name.lower() == "dapo" and "beta" in given:
        name = "dapo_pairs"
    built = algorithm(name, **given)
    if not isinstance(name, str):
        return AlgorithmConfig(built.name, given, name)
    return AlgorithmConfig(name if ":" in name else built.name, given)


def as_algorithm_config(given: AlgorithmConfig | str) -> AlgorithmConfig:
    """Return a config as it is, and a name as a config with default parameters."""
    if isinstance(given, AlgorithmConfig):
        return given
    if isinstance(given, str):
        return create_algorithm_config(given)
    raise ValueError(
        f"the algorithm config is {kind_of(given)}; give create_algorithm_config(NAME, parameters), or a name"
    )


class LossBatch(NamedTuple):
    """A forward pass with gradient over rows with all that the loss of one algorithm needs: of `create_loss_batch`."""

    config: AlgorithmConfig
    outputs: Outputs
    batch: Batch
    counts: Counts


View: TypeAlias = Policy | Pairs | Labelled | Distilled | Scores | Tokens


def compute_loss_by_algorithm(batch: LossBatch | View, config: AlgorithmConfig | str) -> Tensor:
    """Return the loss of any algorithm on a `LossBatch`, or the mean of its loss on the view that it takes.

    On a view (`Policy`, `Pairs`, `Labelled`, `Distilled`, `Scores`, `Tokens`) that is the named loss alone, without
    terms for KL, entropy, value and NLL.
    """
    config = as_algorithm_config(config)
    if isinstance(batch, LossBatch):
        return _loss_of(batch, config)
    on_view = find(config.source).on_view
    if on_view is None or not isinstance(batch, on_view.view):
        takes = "a LossBatch" if on_view is None else f"{on_view.view.__name__} or a LossBatch"
        raise ValueError(
            f"the batch is {kind_of(batch)}, and {config.name} takes {takes}; "
            "create_loss_batch(state, samples or rollouts, config) makes one for any algorithm"
        )
    found = on_view.loss(batch, **accepted(on_view.loss, config.parameters))
    return _mean(as_loss(found, config.name), batch, on_view.unit)


def _loss_of(batch: LossBatch, config: AlgorithmConfig) -> Tensor:
    if batch.config != config:
        made, wanted = (f"{each.name} {dict(each.parameters)}" for each in (batch.config, config))
        raise ValueError(f"the batch was made for {made}, not for {wanted}: make another one by create_loss_batch")
    losses = algorithm(config.source, **config.parameters).loss(batch.outputs, batch.batch)
    return torch.stack(list(shares_of(losses, batch.counts).values())).sum()


def _mean(losses: Tensor, batch: View, unit: Unit) -> Tensor:
    if losses.ndim == 0:
        return losses
    if isinstance(batch, Policy | Distilled | Tokens) and unit == "token":
        return losses.sum() / batch.mask.sum()
    return losses.sum() / batch.num_sequences if isinstance(batch, Policy) else losses.mean()


def _taken_by(function: Callable[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `parameters` that a custom loss takes; all if it takes any."""
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    return dict(parameters) if takes_any else accepted(function, parameters)


def _with_advantages(batch: Policy, advantages: Tensor | Sequence[Tensor] | None, owner: str) -> Policy:
    check_view(batch, Policy, owner)
    return batch if advantages is None else batch._replace(advantage=as_advantages(advantages, batch))


def compute_advantages(rewards: Tensor | Sequence[float] | Sequence[Rollout], baseline: float | Tensor = 0.0) -> Tensor:
    """Return reward minus baseline, of rewards or of graded rollouts."""
    if rollouts := rollouts_of(rewards):
        rewards = [compute_reward(rollout) for rollout in rollouts]
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
