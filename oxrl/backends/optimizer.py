"""Gradients to new weights: AdamW with float32 master weights, learning-rate schedules that count optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Schedule: TypeAlias = Callable[[int], float]
"""Optimizer steps done so far -> factor on the base learning rate for the next one."""


class AdamW(torch.optim.AdamW):
    """AdamW that steps in float32 whatever the model's precision, and accumulates gradients in float32 too.

    A bf16 weight of 1.0 does not notice an update below 0.004: training would stall silently. So each half-precision
    parameter gets a float32 master; gradients move to the master as soon as autograd has finished with them.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], weight_decay: float, **options: Any) -> None:
        self.masters: dict[str, nn.Parameter] = {name: _master(parameter) for name, parameter in named.items()}
        self.parameters = dict(named)
        # Norms and biases are not decayed: pulling a gain to zero is not regularisation.
        decayed = [master for master in self.masters.values() if master.ndim >= 2]
        others = [master for master in self.masters.values() if master.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        super().__init__([group for group in groups if group["params"]], fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.give_weights()
        return result

    @torch.no_grad()
    def take_weights(self) -> None:
        """Follow the model's weights after they were replaced from outside."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(self.parameters[name])

    @torch.no_grad()
    def give_weights(self) -> None:
        """Have the model follow the master weights after those were replaced."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """All state by parameter name, for a checkpoint: `layer.weight:exp_avg`, `...:step`, `...:master`."""
        state = {
            f"{name}:{key}": value for name, master in self.masters.items() for key, value in self.state[master].items()
        }
        masters = {f"{n}:master": m.detach() for n, m in self.masters.items() if m is not self.parameters[n]}
        return {**state, **masters}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave, exactly."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, part = key.rpartition(":")
            by_name.setdefault(name, {})[part] = value
        if unknown := sorted(by_name.keys() - self.masters.keys()):
            raise ValueError(f"the optimizer state is of another model: it has {unknown[0]}, which is not trained here")
        for name, parts in by_name.items():
            master = self.masters[name]
            if "master" in parts:
                master.copy_(parts.pop("master"))
                self.parameters[name].copy_(master)
            # The step count of fused AdamW is a float32 tensor; the moments live beside their parameter.
            self.state[master] = {key: value.clone().to(master.device) for key, value in parts.items()}


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
    """AdamW over the parameters of `model` that require gradients."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
    return AdamW(trainable, weight_decay, lr=lr, betas=betas, eps=eps)


def full_rate(_done: int) -> float:
    """The schedule of a backend that was given none."""
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
    """Warm-up from zero (the first step already moves), then the named shape over what is left."""
    shape = SCHEDULES[name]

    def factor(done: int) -> float:
        if done < warmup_steps:
            return (done + 1) / (warmup_steps + 1)
        return shape(done - warmup_steps, total_steps - warmup_steps)

    return factor


def create_warmup_cosine_scheduler(num_warmup_steps: int, num_training_steps: int) -> Schedule:
    """Up in a straight line over the warm-up, then down to 0 as half a cosine."""
    return schedule("cosine", num_training_steps, num_warmup_steps)
