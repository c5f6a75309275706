"""The backend of one process and one device: forward, backward and AdamW in place, every future already done."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from oxrl.algorithms import algorithm as named_algorithm
from oxrl.backends.distributed.shards import OPTIMIZER, REFERENCE, SHARDS, check_reference, has_shards, load_shards
from oxrl.backends.forward import LanguageModel, prepare_layout
from oxrl.backends.optimizer import AdamW, Schedule, create_adamw_optimizer, full_rate, schedule
from oxrl.types import (
    Algorithm,
    Batch,
    Counts,
    ImmediateTrainFuture,
    LossFn,
    Outputs,
    Read,
    Term,
    TrainFuture,
    Weights,
    merge_metrics,
)
from oxrl.weights.checkpoint_names import REFERENCE_ADAPTER, followed_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not a number; `batches` are the suspects, for the loop to save."""

    def __init__(self, what: str, batches: Sequence[Batch]) -> None:
        rows = ", ".join([row for batch in batches for row in batch.ids][:4])
        super().__init__(f"{what} is not finite (rows {rows}, ...); a lower learning rate is the usual remedy")
        self.what = what
        self.batches = list(batches)

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, list[Batch]]]:
        return NonFiniteError, (self.what, self.batches)  # it may have to travel between processes


class Part(NamedTuple):
    """What one micro-batch came to: `{"loss": 0.12, "nll": 0.12}`, its share of the step, and metrics as sums."""

    shares: Mapping[str, Tensor]
    metrics: Mapping[str, Term]


def sum_parts(parts: Sequence[Part], counts: Counts) -> dict[str, float]:
    """The losses and metrics of a step from those of its micro-batches."""
    totals: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.shares.items():
            totals.setdefault(name, []).append(value)
    summed = {name: float(torch.stack(values).sum()) for name, values in totals.items()}
    return {**summed, **merge_metrics([part.metrics for part in parts], counts)}


WriteModel: TypeAlias = Callable[[Any, Path], None]


def write_plain(model: PreTrainedModel, path: Path) -> None:
    model.save_pretrained(path)


class PyTorchTrainingBackend:
    """Trains `model` on the device it is on. `version` counts the updates that its weights have seen.

    `others` are frozen models to compare with, by the names algorithms use ("ref", "teacher"); the reference of a model
    with an adapter is the model with its adapter switched off, or with a second one that can follow the policy. Pass a
    `LanguageModel` to train heads with the model.
    """

    def __init__(
        self,
        model: PreTrainedModel | LanguageModel,
        optimizer: AdamW,
        scheduler: Schedule = full_rate,
        *,
        max_grad_norm: float = 1.0,
        others: Mapping[str, PreTrainedModel | LanguageModel] = MappingProxyType({}),
        write_model: WriteModel = write_plain,
    ) -> None:
        self.module = model if isinstance(model, LanguageModel) else LanguageModel(model)
        self.model: PreTrainedModel = self.module.model
        self.others = {name: frozen(other, self.module.temperature) for name, other in others.items()}
        self.reference_moved = False
        self.write_model = write_model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.base_rate: float = optimizer.defaults["lr"]
        self.max_grad_norm = max_grad_norm
        self.version = 0
        probed = self.module.probed or prepare_layout(self.module)
        self.layout = probed.layout
        self._unstepped: list[Batch] = []
        logger.info("%s", probed.reason)

    parallel = 1  # micro-batches that run side by side

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def set_temperature(self, temperature: float) -> None:
        """Speak of the distribution at this temperature from now on, as the sampler does."""
        for module in (self.module, *self.others.values()):
            module.temperature = temperature

    def logprobs(
        self, batches: Sequence[Batch], which: str = "policy", reads: Mapping[str, Read] = MappingProxyType({})
    ) -> TrainFuture[list[Outputs]]:
        self.module.eval()
        with torch.no_grad():
            here = [on_device(batch, self.device) for batch in batches]
            if which == "policy":
                return ImmediateTrainFuture([_on_cpu(self._pass(batch, reads)) for batch in here])
            with self._model_for(which) as module:
                return ImmediateTrainFuture([_on_cpu(module(batch)) for batch in here])

    def _pass(self, batch: Batch, reads: Mapping[str, Read]) -> Outputs:
        compared = {read.of for read in reads.values() if read.of}
        assert len(compared) <= 1, f"one pass compares with one other model, not with {sorted(compared)}"
        other = None
        for name in compared:
            with self._model_for(name) as module:
                other = module.as_other(batch)
        return self._forward(batch, {name: read.statistic for name, read in reads.items()}, other)

    def _forward(self, *arguments: Any) -> Outputs:
        outputs: Outputs = self.module(*arguments)
        return outputs

    @contextmanager
    def _model_for(self, which: str) -> Iterator[LanguageModel]:
        if which in self.others:
            yield self.others[which]
        elif which == "ref" and hasattr(self.model, "peft_config"):
            with as_reference(self.model):
                yield self.module
        else:
            raise ValueError(
                f"the algorithm compares with the model {which!r}: give the backend others={{{which!r}: ...}}"
            )

    def forward_backward(
        self, batches: Sequence[Batch], algorithm: Algorithm, counts: Counts
    ) -> TrainFuture[dict[str, float]]:
        """Add the gradients of one step's micro-batches; each term is divided by the step's count of its unit."""
        parts = [self.backward(batch, algorithm, counts) for batch in batches]
        self.stop_unless_finite(parts, batches)
        return ImmediateTrainFuture(sum_parts(parts, counts))

    def backward(self, batch: Batch, algorithm: Algorithm, counts: Counts, weight: float = 1.0) -> Part:
        """Add the gradient of one micro-batch, `weight` times."""
        set_training_mode(self.model, dropout=not algorithm.compares_logprobs)
        here = on_device(batch, self.device)
        losses = algorithm.loss(self._pass(here, algorithm.reads), here)
        shares = {name: term.total / counts[term.unit] for name, term in losses.terms.items()}
        loss = torch.stack(list(shares.values())).sum()
        self._add_gradient(loss if weight == 1.0 else loss * weight)
        return Part(
            {name: value.detach() for name, value in {"loss": loss, **shares}.items()},
            {name: Term(term.total.detach(), term.unit) for name, term in losses.metrics.items()},
        )

    def _add_gradient(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def stop_unless_finite(self, parts: Sequence[Part], batches: Sequence[Batch]) -> None:
        self._unstepped.extend(batches)
        finite = torch.stack([part.shares["loss"] for part in parts]).isfinite().tolist()
        if not all(finite):
            raise NonFiniteError("the loss", [batch for batch, fine in zip(batches, finite, strict=True) if not fine])

    def optim_step(self) -> TrainFuture[dict[str, float]]:
        rate = self.base_rate * self.scheduler(self.version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = self._update()
        self.version += 1
        self._unstepped.clear()
        return ImmediateTrainFuture({"grad_norm": norm, "lr": rate})

    def _update(self) -> float:
        """Clip and step; returns the norm before clipping. Where that is not finite, no weight has changed."""
        norm = float(self._clip_gradients())
        if not math.isfinite(norm):
            raise NonFiniteError("the gradient", self._unstepped)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _clip_gradients(self) -> Tensor:
        return nn.utils.clip_grad_norm_(list(self.optimizer.masters.values()), self.max_grad_norm)

    @contextmanager
    def memory_warm_up(self) -> Iterator[None]:
        """Inside, memory is as full as in later steps, with gradients and optimizer state; then all is as it was."""
        masters = list(self.optimizer.masters.values())
        unstated = [master for master in masters if not self.optimizer.state.get(master)]
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            # Filled, because a page of zeros takes no memory on a CPU.
            state = [torch.full_like(master, 1.0) for master in unstated for _ in range(2)]
            for master in masters:
                master.grad = torch.full_like(master, 0.0)
            try:
                yield
            finally:
                del state
                self.optimizer.zero_grad(set_to_none=True)
                self._unstepped.clear()

    def release_memory(self) -> TrainFuture[None]:
        """Leave to others on this device what torch keeps for later."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return ImmediateTrainFuture(None)

    def get_weights(self) -> TrainFuture[Weights]:
        return ImmediateTrainFuture(Weights(self.model, self.version))

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Copy tensors by parameter name into the model (and into its master weights)."""
        copy_parameters(weights, self.model)
        self.optimizer.take_weights()
        return ImmediateTrainFuture(None)

    def reference_weights(self) -> dict[str, nn.Parameter]:
        """What can follow the policy, by name: a model, or an adapter beside the policy's; nothing of a base can."""
        if "ref" in self.others:
            return dict(self.others["ref"].model.named_parameters())
        return {name: weight for name, weight in self.model.named_parameters() if followed_name(name) is not None}

    @torch.no_grad()
    def update_reference(self, decay: float) -> TrainFuture[None]:
        """ref <- decay * ref + (1 - decay) * policy; 0 makes it a copy. From then on it is part of the checkpoint."""
        policy, reference = dict(self.model.named_parameters()), self.reference_weights()
        if not reference:
            raise ValueError("there is no reference model of its own that could follow the policy")
        followed = {name: followed_name(name) or name for name in reference}
        if strangers := sorted(followed.values() - policy.keys()):
            raise ValueError(f"the reference is of another make than the policy, which has no {strangers[0]}")
        if not self.reference_moved:
            _tell_if_coarse(reference.values(), 1 - decay)
        for name, weight in reference.items():
            self._move(weight, policy[followed[name]], 1 - decay)
        self.reference_moved = True
        return ImmediateTrainFuture(None)

    def _move(self, weight: Tensor, towards: Tensor, share: float) -> None:
        weight.lerp_(towards.to(weight.dtype), share)

    def save(self, path: Path) -> TrainFuture[None]:
        """Weights as plain transformers (or PEFT) files in `path`, optimizer and version beside them."""
        from safetensors.torch import save_file

        self.write_model(self.model, path)
        self.module.save_heads(path)
        state = {key: value.contiguous() for key, value in self.optimizer.tensors().items()}
        state["backend:version"] = torch.tensor(self.version)
        save_file(state, path / OPTIMIZER)
        if self.reference_moved:
            moved = {name: weight.detach().contiguous() for name, weight in self.reference_weights().items()}
            save_file(moved, path / REFERENCE)
        return ImmediateTrainFuture(None)

    def load(self, path: Path) -> TrainFuture[None]:
        """Take weights, optimizer and version back from `path`, to the bit; also what ranks saved by FSDP."""
        from safetensors.torch import load_file

        if not (path / OPTIMIZER).is_file():
            self._load_shards(path)
            return ImmediateTrainFuture(None)
        self.load_weights(_saved_weights(self.model, path))
        self.module.load_heads(path)
        state = load_file(path / OPTIMIZER)
        self.version = int(state.pop("backend:version"))
        self.optimizer.restore(state)
        self.reference_moved = (path / REFERENCE).exists()
        if self.reference_moved:
            saved, weights = load_file(path / REFERENCE), self.reference_weights()
            check_reference(saved, weights, path)
            for name, weight in weights.items():
                weight.copy_(saved[name])
        return ImmediateTrainFuture(None)

    def _load_shards(self, path: Path) -> None:
        if not has_shards(path):
            raise ValueError(
                f"{path} has no {OPTIMIZER}, and no {SHARDS}/ that FSDP saved: go on with the backend that saved it, "
                "or begin anew with its weights by naming it as the model"
            )
        load_shards(self, path, {}, alone=True)

    def load_heads(self, path: Path) -> None:
        """A model that was trained with heads goes on with them."""
        self.module.load_heads(path)


def create_pytorch_backend(
    model: PreTrainedModel,
    *,
    lr: float = 1e-5,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    lr_scheduler: str = "constant",
    num_steps: int = 0,
    warmup_steps: int = 0,
    max_grad_norm: float = 1.0,
    heads: Sequence[str] = (),
    others: Mapping[str, PreTrainedModel] = MappingProxyType({}),
    write_model: WriteModel = write_plain,
    temperature: float = 1.0,
) -> PyTorchTrainingBackend:
    """Optimizer, schedule and backend in one line; each piece can also be made by hand.

    `temperature` is that of the sampler whose log-probs are compared with: both speak of the same distribution then.
    """
    module = LanguageModel(model, heads, temperature=temperature)
    optimizer = create_adamw_optimizer(module, lr, weight_decay=weight_decay, betas=betas, eps=eps)
    return PyTorchTrainingBackend(
        module,
        optimizer,
        schedule(lr_scheduler, num_steps, warmup_steps),
        max_grad_norm=max_grad_norm,
        others=others,
        write_model=write_model,
    )


@torch.no_grad()
def copy_parameters(
    weights: Mapping[str, Tensor],
    model: nn.Module,
    inside: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """By name, and only where every name is known; each while it is `inside`, where it can be written to."""
    parameters = dict(model.named_parameters())
    if unknown := sorted(weights.keys() - parameters.keys()):
        raise ValueError(f"these weights are of another model: it has no parameter {unknown[0]}")
    for name, tensor in weights.items():
        with inside(parameters[name]):
            parameters[name].copy_(tensor)


def frozen(model: PreTrainedModel | LanguageModel, temperature: float) -> LanguageModel:
    """A model to compare with; one that was made ready before, a sharded one say, stays as it is."""
    if isinstance(model, LanguageModel):
        return model
    module = LanguageModel(model, temperature=temperature).eval().requires_grad_(False)
    prepare_layout(module)
    return module


@contextmanager
def as_reference(model: Any) -> Iterator[None]:
    """Inside, the reference of an adapter speaks: the adapter that follows it, or the base if there is none.

    What requires a gradient stays as it is, which PEFT's own switches change: a sharded weight that is first gathered
    while it requires none would never get one.
    """
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "_disable_adapters")]
    assert layers, "a model with peft_config has layers with adapters"
    follows = REFERENCE_ADAPTER in model.peft_config
    switch, position = ("_active_adapter", [REFERENCE_ADAPTER]) if follows else ("_disable_adapters", True)
    before = [getattr(layer, switch) for layer in layers]
    for layer in layers:
        setattr(layer, switch, position)
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            setattr(layer, switch, was)


def _tell_if_coarse(weights: Iterable[Tensor], share: float) -> None:
    """Half precision rounds small steps away, so an average that is kept in it stops on its way."""
    coarse = next((weight.dtype for weight in weights if torch.finfo(weight.dtype).bits < 32), None)
    if coarse is not None and share < 1:
        logger.warning(
            "the reference is kept in %s, where a weight that is within %.0f%% of the policy's does not notice a step "
            "of %.2g of the way: set model.ref_update: periodic, a smaller model.ref_decay, or model.dtype: float32",
            str(coarse).removeprefix("torch."),
            100 * torch.finfo(coarse).eps / 2 / share,
            share,
        )


def create_cross_entropy_loss() -> LossFn:
    """The loss of supervised fine-tuning: negative log-likelihood of the trained tokens."""
    return named_algorithm("sft").loss


def set_training_mode(model: nn.Module, *, dropout: bool) -> None:
    """Training mode; without dropout where log-probs are compared with another pass, which dropout would falsify.

    Gradient checkpointing asks its layers, and only them, whether they train: they keep saying yes.
    """
    model.train(dropout)
    if not dropout:
        for layer in model.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = True


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch there; itself where it is there already."""
    if batch.tokens.device == device:
        return batch
    moved: dict[str, Any] = {
        name: getattr(batch, name).to(device, non_blocking=True) for name in ("tokens", "mask", "positions", "segments")
    }
    for name in ("streams", "scalars"):
        moved[name] = {key: value.to(device, non_blocking=True) for key, value in getattr(batch, name).items()}
    return replace(batch, **moved)


def _on_cpu(outputs: Outputs) -> Outputs:
    """What leaves the backend is of the size of its tokens, and whoever reads it has no device."""
    return Outputs(
        outputs.logprob.cpu(),
        {name: value.cpu() for name, value in outputs.statistics.items()},
        *(None if each is None else each.cpu() for each in (outputs.value, outputs.last_value, outputs.score)),
    )


def _saved_weights(model: Any, path: Path) -> dict[str, Tensor]:
    """Parameters by name from a checkpoint folder, through transformers' own reader, or the adapter's file."""
    from safetensors.torch import load_file

    if not hasattr(model, "peft_config"):
        return dict(type(model).from_pretrained(path, dtype=model.dtype).named_parameters())
    # PEFT leaves the adapter's name ("default") out of its files.
    names = {name.replace(".default", ""): name for name, _ in model.named_parameters()}
    return {names[key]: tensor for key, tensor in load_file(path / "adapter_model.safetensors").items()}
