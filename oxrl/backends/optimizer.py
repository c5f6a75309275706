"""AdamW with float32 master weights, and learning-rate schedules that count optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

Schedule: TypeAlias = Callable[[int], float]
"""Optimizer steps done so far -> factor on the base learning rate for the next one."""


class AdamW(torch.optim.AdamW):
    """AdamW that steps and accumulates gradients in float32, whatever the model's precision.

    A bf16 weight of 1.0 does not notice an update below 0.004: training would stall silently. So each half-precision
    parameter gets a float32 master; autograd hooks move each gradient to the master as soon as it is accumulated.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], weight_decay: float, **options: Any) -> None:
        self.masters: dict[str, nn.Parameter] = {name: _master(parameter) for name, parameter in named.items()}
        self.parameters = dict(named)
        super().__init__(decay_groups(self.masters.values(), weight_decay), fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.copy_to_model()
        return result

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Copy the model's weights to the masters, after the model's were replaced."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(self.parameters[name])

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the master weights to the model, after the masters changed."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Return all state by parameter name, for a checkpoint: `layer.weight:exp_avg`, `...:step`, `...:master`."""
        state = {
            f"{name}:{key}": value for name, master in self.masters.items() for key, value in self.state[master].items()
        }
        masters = {f"{n}:master": m.detach() for n, m in self.masters.items() if m is not self.parameters[n]}
        return {**state, **masters}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned, exactly."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, part = key.rpartition(":")
            by_name.setdefault(name, {})[part] = value
        if unknown := sorted(by_name.keys() - self.masters.keys()):
            raise ValueError(f"the optimizer state is of another model: {unknown[0]} is not a trained parameter")
        for name, parts in by_name.items():
            master = self.masters[name]
            if "master" in parts:
                master.copy_(parts.pop("master"))
                self.parameters[name].copy_(master)
            # The step count of fused AdamW is a float32 tensor; the moments are on the device of their parameter.
            self.state[master] = {key: value.clone().to(master.device) for key, value in parts.items()}


def decay_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float, dimensions: Callable[[Tensor], int] = Tensor.dim
) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay: norms and biases are not decayed."""
    flat: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for parameter in parameters:
        flat[dimensions(parameter) < 2].append(parameter)
    groups = [{"params": flat[False], "weight_decay": weight_decay}, {"params": flat[True], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def move_gradient(low: Tensor) -> None:
        assert low.grad is not None, "autograd calls this after it has accumulated a gradient"
        master.grad = low.grad.float() if master.grad is None else master.grad.add_(low.grad)
        low.grad = None

    parameter.register_post_accumulate_grad_hook(move_gradient)  # type: ignore[no-untyped-call]
    return master


def create_adamw_optimizer(
    model: nn.Module,
    lr: float = 1e-5,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> AdamW:
    """Create AdamW over the parameters of `model` that require gradients."""
    return AdamW(trainable(model), weight_decay, lr=lr, betas=betas, eps=eps)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError("no parameter of the model requires a gradient, so there is nothing to train")
    return found


def full_rate(_done: int) -> float:
    """The default schedule: a constant factor of 1."""
    return 1.0


def constant(step: int, total: int) -> float:  # noqa: ARG001 - all shapes share one signature
    return 1.0


def linear(step: int, total: int) -> float:
    return max(0.0, 1.0 - step / max(1, total))


def cosine(step: int, total: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(1, total))))


def wsd(step: int, total: int, decay: float = 0.2) -> float:
    """Warm-up, stable, decay: constant, then linear to zero over the last fifth."""
    return min(1.0, max(0.0, (total - step) / max(1.0, decay * total)))


SCHEDULES: Mapping[str, Callable[[int, int], float]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "wsd": wsd,
}


def schedule(name: str, total_steps: int, warmup_steps: int = 0) -> Schedule:
    """Return a linear warm-up (the first step has a rate above 0), then the named shape over the remaining steps."""
    shape = SCHEDULES[name]

    def factor(done: int) -> float:
        if done < warmup_steps:
            return (done + 1) / (warmup_steps + 1)
        return shape(done - warmup_steps, total_steps - warmup_steps)

    return factor


@overload
def create_warmup_cosine_scheduler(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int
) -> LambdaLR: ...


@overload
def create_warmup_cosine_scheduler(optimizer: int, num_warmup_steps: int) -> Schedule: ...


@overload
def create_warmup_cosine_scheduler(*, num_warmup_steps: int, num_training_steps: int) -> Schedule: ...


def create_warmup_cosine_scheduler(
    optimizer: torch.optim.Optimizer | int | None = None, num_warmup_steps: int = 0, num_training_steps: int = 0
) -> LambdaLR | Schedule:
    """Return linear warm-up, then half a cosine down to 0: a torch scheduler of `optimizer` with `step()`.

    Without an optimizer, `create_warmup_cosine_scheduler(10, 100)` is the schedule as a function of the step, which
    `PyTorchTrainingBackend` takes (it takes the torch scheduler, too, and steps it itself).
    """
    if isinstance(optimizer, int):
        return schedule("cosine", num_warmup_steps, optimizer)
    factor = schedule("cosine", num_training_steps, num_warmup_steps)
    return factor if optimizer is None else LambdaLR(optimizer, factor)


def as_schedule(scheduler: Schedule | LambdaLR) -> Schedule:
    """Return the function of a torch scheduler; the backend sets the learning rate by it."""
    if isinstance(scheduler, LambdaLR):
        factor: Schedule = scheduler.lr_lambdas[0]
        return factor
    if not callable(scheduler):
        raise ValueError(
            f"{type(scheduler).__name__} has no function of the step: pass one, (steps done) -> factor of the learning "
            "rate, as create_warmup_cosine_scheduler(10, 100)"
        )
    return scheduler
