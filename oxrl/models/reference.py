"""The reference of a policy: a frozen copy, and functions that update it from the policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UpdateFn: TypeAlias = Callable[["PreTrainedModel", "PreTrainedModel"], "PreTrainedModel"]
"""(reference, policy) -> reference."""


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).requires_grad_(False).eval()


def keep_reference(ref: PreTrainedModel, policy: PreTrainedModel) -> PreTrainedModel:  # noqa: ARG001 - one signature
    """Return the reference unchanged."""
    return ref


def create_reference_model(
    model: PreTrainedModel, *, ref_model_fn: Callable[[PreTrainedModel], PreTrainedModel] = frozen_copy
) -> PreTrainedModel:
    """Return the reference of a policy: by default a frozen copy of it."""
    return ref_model_fn(model)


def update_reference_model(
    ref: PreTrainedModel, policy: PreTrainedModel, *, update_fn: UpdateFn = keep_reference
) -> PreTrainedModel:
    """Return the reference after a step of the policy; by default unchanged."""
    return update_fn(ref, policy)


def create_ema_updater(decay: float = 0.999) -> UpdateFn:
    """ref <- decay * ref + (1 - decay) * policy, in place."""
    if not 0 <= decay <= 1:
        raise ValueError(f"decay is {decay}; it is the share of the old reference that is kept, from 0 to 1")

    def update(ref: PreTrainedModel, policy: PreTrainedModel) -> PreTrainedModel:
        import torch

        with torch.no_grad():
            for old, new in zip(ref.parameters(), policy.parameters(), strict=True):
                old.lerp_(new.to(old.dtype), 1 - decay)
        return ref

    return update


def create_periodic_updater(update_every: int = 10) -> UpdateFn:
    """Copy the policy's weights at every `update_every`-th call."""
    if update_every < 1:
        raise ValueError(f"update_every is {update_every}; it must be 1 or more")
    copy_policy, calls = create_ema_updater(decay=0.0), 0

    def update(ref: PreTrainedModel, policy: PreTrainedModel) -> PreTrainedModel:
        nonlocal calls
        calls += 1
        return copy_policy(ref, policy) if calls % update_every == 0 else ref

    return update
