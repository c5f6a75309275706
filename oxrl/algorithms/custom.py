"""A loss function of the user: how it is called, and what it may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor

from oxrl.algorithms.policy import Policy
from oxrl.names import did_you_mean, kind_of


def call_loss(loss_fn: Callable[..., Any], view: Any, parameters: Mapping[str, Any]) -> Tensor:
    """Return `loss_fn(view, **parameters)`, or `loss_fn(view, advantages, **parameters)` if it takes two arguments."""
    takes_advantages = isinstance(view, Policy) and len(_required(loss_fn, parameters)) == 2
    if not takes_advantages:
        _check_arguments(loss_fn, parameters, "(view), or (view, advantages)" if isinstance(view, Policy) else "(view)")
    _check_parameters(loss_fn, parameters)
    arguments = (view, view.advantage) if takes_advantages else (view,)
    return as_loss(loss_fn(*arguments, **parameters), loss_name(loss_fn))


def checked_loss(loss_fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a loss for the table: the same function, 0 for untrained tokens.

    Raise if it takes something else, or does not return one number per pair or token: a mean would be divided twice.
    """
    _check_arguments(loss_fn, {}, "(view)")
    name = loss_name(loss_fn)

    @wraps(loss_fn)
    def checked(view: Any, **parameters: Any) -> Tensor:
        losses = as_loss(loss_fn(view, **parameters), name)
        if losses.shape != view[0].shape:
            raise ValueError(
                f"{name} returned a tensor of shape {list(losses.shape)}; return one number per pair or token, here "
                f"{list(view[0].shape)}: the trainer takes the mean over the whole step"
            )
        mask = getattr(view, "mask", None)
        return losses if mask is None else losses.masked_fill(~mask, 0.0)

    checked.__name__ = name
    return checked


def as_loss(found: Any, name: str) -> Tensor:
    """Raise if a loss returned something else than a tensor."""
    if isinstance(found, Tensor):
        return found
    raise ValueError(
        f"{name} returned {kind_of(found)}, which has no gradient; return a tensor: a loss for each token (or pair), "
        "or one number without .item()"
    )


def loss_name(loss_fn: Callable[..., Any]) -> str:
    return getattr(loss_fn, "__name__", "loss_fn")


def _by_position(loss_fn: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each for each in inspect.signature(loss_fn).parameters.values() if each.kind in kinds]


def _required(loss_fn: Callable[..., Any], parameters: Mapping[str, Any]) -> list[inspect.Parameter]:
    """The arguments without a default that are not among `parameters`."""
    return [each for each in _by_position(loss_fn) if each.default is each.empty and each.name not in parameters]


def _check_arguments(loss_fn: Callable[..., Any], parameters: Mapping[str, Any], allowed: str) -> None:
    signature = inspect.signature(loss_fn)
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values())
    if len(_required(loss_fn, parameters)) > 1 or not (_by_position(loss_fn) or takes_any):
        raise ValueError(
            f"{loss_name(loss_fn)}{signature} cannot be called as a loss: its arguments are {allowed}, and parameters "
            "with defaults; the advantages are view.advantage, the trained tokens view.mask"
        )


def _check_parameters(loss_fn: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    known = inspect.signature(loss_fn).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    options = [each.name for each in known.values() if each.default is not each.empty]
    if unknown := next((each for each in parameters if each not in known), None):
        hint = did_you_mean(unknown, options, f"; it takes: {', '.join(options) or 'none'}")
        raise ValueError(f"{loss_name(loss_fn)} has no parameter {unknown}{hint}")
