"""The backend for one process and one device: forward, backward and AdamW; every future it returns is done."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from oxrl.algorithms import algorithm as named_algorithm
from oxrl.backends.compiled import compile_layers
from oxrl.backends.distributed.shards import OPTIMIZER, REFERENCE, SHARDS, check_reference, has_shards, load_shards
from oxrl.backends.forward import LanguageModel
from oxrl.backends.layout import prepare_layout
from oxrl.backends.optimizer import AdamW, Schedule, as_schedule, create_adamw_optimizer, full_rate, schedule
from oxrl.backends.plain_batch import plain_step
from oxrl.tensors import label_logprobs
from oxrl.types import (
    Algorithm,
    Batch,
    Counts,
    ImmediateTrainFuture,
    Item,
    Losses,
    Outputs,
    Read,
    Term,
    TrainFuture,
    Weights,
    merge_metrics,
)
from oxrl.weights.checkpoint_names import REFERENCE_ADAPTER, enable_gradient_checkpointing, followed_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not finite; `batches` are the micro-batches that may have caused it."""

    def __init__(self, what: str, batches: Sequence[Batch]) -> None:
        rows = ", ".join([row for batch in batches for row in batch.ids][:4])
        super().__init__(f"{what} is not finite (rows {rows}, ...); a lower learning rate is the usual remedy")
        self.what = what
        self.batches = list(batches)

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, list[Batch]]]:
        return NonFiniteError, (self.what, self.batches)  # pickled between processes


class Part(NamedTuple):
    """Result of one micro-batch: its share of the step's losses, `{"loss": 0.12, "nll": 0.12}`, and metrics as sums."""

    shares: Mapping[str, Tensor]
    metrics: Mapping[str, Term]


def shares_of(losses: Losses, counts: Counts) -> dict[str, Tensor]:
    """Return each term divided by the step's count of its unit; the loss is their sum."""
    return {name: term.total / counts[term.unit] for name, term in losses.terms.items()}


def sum_parts(parts: Sequence[Part], counts: Counts) -> dict[str, float]:
    """Return the losses and metrics of a step from those of its micro-batches."""
    totals: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.shares.items():
            totals.setdefault(name, []).append(value)
    summed = {name: float(torch.stack(values).sum()) for name, values in totals.items()}
    return {**summed, **merge_metrics([part.metrics for part in parts], counts)}


WriteModel: TypeAlias = Callable[[Any, Path], None]
ObservePass: TypeAlias = Callable[[Batch, Outputs, Mapping[str, Tensor]], None]
"""(micro-batch, its outputs, its shares of the loss), before their gradient: for records of a step."""


def no_observer(batch: Batch, outputs: Outputs, shares: Mapping[str, Tensor]) -> None:
    """For runs that record no step."""


def write_plain(model: PreTrainedModel, path: Path) -> None:
    model.save_pretrained(path)


class PyTorchTrainingBackend:
    """Trains `model` on its device. `version` counts the optimizer steps applied to its weights.

    `others` are frozen models to compare with, by the names algorithms use ("ref", "teacher"). The reference of a model
    with an adapter is the model with its adapter disabled, or with a second adapter that follows the policy. Pass a
    `LanguageModel` to train heads with the model.
    """

    def __init__(
        self,
        model: PreTrainedModel | LanguageModel,
        optimizer: AdamW,
        scheduler: Schedule | LambdaLR = full_rate,
        *,
        max_grad_norm: float = 1.0,
        others: Mapping[str, PreTrainedModel | LanguageModel] = MappingProxyType({}),
        write_model: WriteModel = write_plain,
        compiles: bool | None = False,
        expected_tokens: float = 0.0,
    ) -> None:
        self.module = model if isinstance(model, LanguageModel) else LanguageModel(model)
        self.model: PreTrainedModel = self.module.model
        self.others = {name: frozen(other, self.module.temperature) for name, other in others.items()}
        self.reference_moved = False
        self.write_model = write_model
        self.optimizer = optimizer
        self.scheduler = as_schedule(scheduler)
        self.base_rate: float = optimizer.defaults["lr"]
        self.max_grad_norm = max_grad_norm
        self.version = 0
        probed = self.module.probed or prepare_layout(self.module)
        self.layout = probed.layout
        self._unstepped: list[Batch] = []
        self._random_states: dict[str, Tensor] = {}  # before the first `forward_backward` since an optimizer step
        self.micro_batches_started: Callable[[int], None] = lambda _: None  # for a progress display
        self.micro_batch_done: Callable[[], None] = lambda: None
        self.observe_pass: ObservePass = no_observer
        logger.info("%s", probed.reason)
        if compile_layers(self.module, compiles, expected_tokens):
            for other in self.others.values():
                compile_layers(other, compiles, expected_tokens)

    parallel = 1  # micro-batches that run concurrently

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def set_temperature(self, temperature: float) -> None:
        """Compute log-probs of all models at this temperature from now on; it should be the sampler's."""
        for module in (self.module, *self.others.values()):
            module.temperature = temperature

    def logprobs(
        self, batches: Sequence[Batch], which: str = "policy", reads: Mapping[str, Read] = MappingProxyType({})
    ) -> TrainFuture[list[Outputs]]:
        self.module.eval()
        with torch.no_grad():
            here = [on_device(batch, self.device) for batch in batches]
            if which == "policy":
                return ImmediateTrainFuture([_on_cpu(self.outputs(batch, reads)) for batch in here])
            with self._model_for(which) as module:
                return ImmediateTrainFuture([_on_cpu(module(batch)) for batch in here])

    def outputs(self, batch: Batch, reads: Mapping[str, Read]) -> Outputs:
        """One forward pass of the policy over a batch on its device, with the statistics that `reads` names."""
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
                f"the algorithm compares with the model {which!r}: pass others={{{which!r}: ...}} to the backend"
            )

    def forward_backward(
        self,
        batches: Sequence[Batch] | Mapping[str, Any] | Sequence[Item],
        algorithm: Algorithm | None = None,
        counts: Counts | None = None,
    ) -> TrainFuture[dict[str, float]]:
        """Accumulate the gradients of a step's micro-batches; each term is divided by the step's count of its unit.

        Alone, a dict of `tokens`, `loss_mask` and optionally `labels` and `advantages` (`[B, S]` tensors or lists), or
        items with advantages (`prepare_grpo_batch`), is a step with the mean of -log p, times the advantage.
        """
        micro_batches: Any = batches
        if algorithm is None or counts is None:
            micro_batches, algorithm, counts = plain_step(micro_batches)
        if not self._unstepped:
            self._random_states = self._read_random_states()
        parts = self._backward_all(micro_batches, algorithm, counts)
        self.stop_unless_finite(parts, micro_batches)
        return ImmediateTrainFuture(sum_parts(parts, counts))

    def _backward_all(self, batches: Sequence[Batch], algorithm: Algorithm, counts: Counts) -> list[Part]:
        parts = []
        self.micro_batches_started(len(batches))
        for batch in batches:
            parts.append(self.backward(batch, algorithm, counts))
            self.micro_batch_done()
        return parts

    def backward(self, batch: Batch, algorithm: Algorithm, counts: Counts, weight: float = 1.0) -> Part:
        """Accumulate `weight` times the gradient of one micro-batch."""
        set_training_mode(self.model, dropout=not algorithm.compares_logprobs)
        part = self.losses(batch, algorithm, counts)
        loss = part.shares["loss"]
        self._add_gradient(loss if weight == 1.0 else loss * weight)
        return Part(
            {name: value.detach() for name, value in part.shares.items()},
            {name: Term(term.total.detach(), term.unit) for name, term in part.metrics.items()},
        )

    def losses(self, batch: Batch, algorithm: Algorithm, counts: Counts) -> Part:
        """Run one micro-batch; its losses have a gradient."""
        here = on_device(batch, self.device)
        outputs = self.outputs(here, algorithm.reads)
        losses = algorithm.loss(outputs, here)
        terms = shares_of(losses, counts)
        shares = {"loss": torch.stack(list(terms.values())).sum(), **terms}
        self.observe_pass(here, outputs, shares)
        return Part(shares, losses.metrics)

    def _add_gradient(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def stop_unless_finite(self, parts: Sequence[Part], batches: Sequence[Batch]) -> None:
        self._unstepped.extend(batches)
        finite = torch.stack([part.shares["loss"] for part in parts]).isfinite().tolist()
        if not all(finite):
            raise NonFiniteError("the loss", [batch for batch, fine in zip(batches, finite, strict=True) if not fine])

    def discard_gradients(self) -> bool:
        """Undo a `forward_backward` that failed: drop its gradients, and restore the random states from before it.

        False if gradients of an earlier call have been accumulated, which cannot be separated.
        """
        if self._unstepped:
            return False
        self.optimizer.zero_grad(set_to_none=True)
        self.module.zero_grad(set_to_none=True)  # gradients in half precision that have not reached their master
        if self._random_states:
            torch.set_rng_state(self._random_states["cpu"])
        if "cuda" in self._random_states:
            torch.cuda.set_rng_state(self._random_states["cuda"], self.device)
        self._random_states = {}
        return True

    def _read_random_states(self) -> dict[str, Tensor]:
        on_gpu = self.device.type == "cuda"
        return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state(self.device)} if on_gpu else {})

    def enable_gradient_checkpointing(self) -> bool:
        """Recompute activations in the backward pass from now on; False if that is so already, or not supported."""
        inner = self.module.inner
        if inner.is_gradient_checkpointing or not inner.supports_gradient_checkpointing:
            return False
        enable_gradient_checkpointing(self.model)
        return True

    def optim_step(self) -> TrainFuture[dict[str, float]]:
        rate = self.base_rate * self.scheduler(self.version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = self._update()
        self.version += 1
        self._unstepped.clear()
        self._random_states = {}
        return ImmediateTrainFuture({"grad_norm": norm, "lr": rate})

    def _update(self) -> float:
        """Clip and step; return the norm before clipping. If it is not finite, raise without changing a weight."""
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
        """Allocate gradients and optimizer state inside the block, as in later steps; free them afterwards."""
        masters = list(self.optimizer.masters.values())
        without_state = [master for master in masters if not self.optimizer.state.get(master)]
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            # Filled: on a CPU, pages of zeros are not allocated.
            state = [torch.full_like(master, 1.0) for master in without_state for _ in range(2)]
            for master in masters:
                master.grad = torch.full_like(master, 0.0)
            try:
                yield
            finally:
                del state
                self.optimizer.zero_grad(set_to_none=True)
                self._unstepped.clear()
                self._random_states = {}

    def release_memory(self) -> TrainFuture[None]:
        """Return torch's cached memory to the device, for other processes on it."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return ImmediateTrainFuture(None)

    def get_weights(self) -> TrainFuture[Weights]:
        return ImmediateTrainFuture(Weights(self.model, self.version))

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Copy tensors by parameter name into the model (and into its master weights)."""
        if not isinstance(weights, Mapping):
            raise ValueError(
                f"load_weights takes tensors by name, not {type(weights).__name__}: get_weights returns a handle of "
                "the current weights, not a copy; copy them with {name: weight.detach().clone() for name, weight in "
                "handle.module.named_parameters()}, or use save and load"
            )
        copy_parameters(weights, self.model)
        self.optimizer.copy_from_model()
        return ImmediateTrainFuture(None)

    def reference_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights that can follow the policy, by name: those of a reference model or of a second adapter."""
        if "ref" in self.others:
            return dict(self.others["ref"].model.named_parameters())
        return {name: weight for name, weight in self.model.named_parameters() if followed_name(name) is not None}

    @torch.no_grad()
    def update_reference(self, decay: float) -> TrainFuture[None]:
        """ref <- decay * ref + (1 - decay) * policy; 0 copies. The reference is then part of the checkpoint."""
        policy, reference = dict(self.model.named_parameters()), self.reference_weights()
        if not reference:
            raise ValueError(
                "there is no reference model that can follow the policy: pass others={'ref': ...}, or attach a "
                "reference adapter"
            )
        followed = {name: followed_name(name) or name for name in reference}
        if unknown := sorted(followed.values() - policy.keys()):
            raise ValueError(f"the reference does not have the architecture of the policy, which has no {unknown[0]}")
        if not self.reference_moved:
            _warn_if_coarse(reference.values(), 1 - decay)
        for name, weight in reference.items():
            self._move(weight, policy[followed[name]], 1 - decay)
        self.reference_moved = True
        return ImmediateTrainFuture(None)

    def _move(self, weight: Tensor, towards: Tensor, share: float) -> None:
        weight.lerp_(towards.to(weight.dtype), share)

    def save(self, path: Path) -> TrainFuture[None]:
        """Write the weights as transformers (or PEFT) files to `path`, with optimizer state and version."""
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
        """Restore weights, optimizer and version from `path`, bit for bit; also from shards that FSDP ranks saved."""
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
                f"{path} has neither {OPTIMIZER} nor {SHARDS}/ written by FSDP: resume with the backend that saved it, "
                "or start a new run with this folder as the model"
            )
        load_shards(self, path, {}, distributed=False)

    def load_heads(self, path: Path) -> None:
        """Load the heads of a model that was trained with heads."""
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
    compiles: bool | None = False,
    expected_tokens: float = 0.0,
) -> PyTorchTrainingBackend:
    """Create optimizer, schedule and backend in one call.

    `temperature` is the sampler's, so that its log-probs and the trainer's are of the same distribution. `compiles` and
    `expected_tokens` are explained in `compile_layers`.
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
        compiles=compiles,
        expected_tokens=expected_tokens,
    )


@torch.no_grad()
def copy_parameters(
    weights: Mapping[str, Tensor],
    model: nn.Module,
    inside: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Copy weights by parameter name, each inside the context `inside(parameter)`; raise if a name is unknown."""
    parameters = dict(model.named_parameters())
    if unknown := sorted(weights.keys() - parameters.keys()):
        raise ValueError(f"the weights are of another model: this one has no parameter {unknown[0]}")
    for name, tensor in weights.items():
        with inside(parameters[name]):
            parameters[name].copy_(tensor)


def frozen(model: PreTrainedModel | LanguageModel, temperature: float) -> LanguageModel:
    """Return a frozen `LanguageModel` to compare with; a prepared one (e.g. sharded) is returned unchanged."""
    if isinstance(model, LanguageModel):
        return model
    module = LanguageModel(model, temperature=temperature).eval().requires_grad_(False)
    prepare_layout(module)
    return module


@contextmanager
def as_reference(model: Any) -> Iterator[None]:
    """Use the reference of an adapter inside the block: the reference adapter, or the base model if there is none.

    `requires_grad` does not change, unlike with PEFT's own switches: a sharded weight that is first gathered while it
    requires no gradient would never get one.
    """
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "_disable_adapters")]
    assert layers, "a model with peft_config has layers with adapters"
    follows = REFERENCE_ADAPTER in model.peft_config
    attribute, value = ("_active_adapter", [REFERENCE_ADAPTER]) if follows else ("_disable_adapters", True)
    before = [getattr(layer, attribute) for layer in layers]
    for layer in layers:
        setattr(layer, attribute, value)
    try:
        yield
    finally:
        for layer, previous in zip(layers, before, strict=True):
            setattr(layer, attribute, previous)


def _warn_if_coarse(weights: Iterable[Tensor], share: float) -> None:
    """Warn if the reference is in half precision, which rounds small steps of a moving average to zero."""
    coarse = next((weight.dtype for weight in weights if torch.finfo(weight.dtype).bits < 32), None)
    if coarse is not None and share < 1:
        logger.warning(
            "the reference is kept in %s, which rounds a step of %.2g of the gap to zero for weights within %.0f%% of "
            "the policy's: set model.ref_update: periodic, a smaller model.ref_decay, or model.dtype: float32",
            str(coarse).removeprefix("torch."),
            share,
            100 * torch.finfo(coarse).eps / 2 / share,
        )


def create_cross_entropy_loss() -> Callable[..., Any]:
    """Return the loss of supervised fine-tuning, `loss_fn(logits, labels, loss_mask)`: mean NLL of the masked tokens.

    For a plain torch loop: logits `[B, S, V]` at a position predict the label after it (the shift happens inside),
    labels `[B, S]` are tokens or -100. With the `Outputs` of a backend and a `Batch`, it is the loss of an `Algorithm`.
    """
    sft = named_algorithm("sft").loss

    def loss(logits: Tensor | Outputs, labels: Tensor | Batch, loss_mask: Tensor | None = None) -> Tensor | Losses:
        if isinstance(logits, Outputs) or isinstance(labels, Batch):
            return sft(cast("Outputs", logits), cast("Batch", labels))
        trained = labels[:, 1:] >= 0
        if loss_mask is not None:
            trained = trained & loss_mask[:, 1:].bool()
        if not trained.any():
            raise ValueError("no token is trained on: loss_mask is 0 everywhere, or 1 for first tokens only")
        return -label_logprobs(logits, labels)[trained].mean()

    return loss


def set_training_mode(model: nn.Module, *, dropout: bool) -> None:
    """Set training mode, without dropout where log-probs are compared with those of another pass.

    Layers with gradient checkpointing stay in training mode: otherwise they would not checkpoint.
    """
    model.train(dropout)
    if not dropout:
        for layer in model.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = True


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on `device`; the same object if it is there already."""
    if batch.tokens.device == device:
        return batch
    moved: dict[str, Any] = {
        name: getattr(batch, name).to(device, non_blocking=True) for name in ("tokens", "mask", "positions", "segments")
    }
    for name in ("streams", "scalars"):
        moved[name] = {key: value.to(device, non_blocking=True) for key, value in getattr(batch, name).items()}
    return replace(batch, **moved)


def _on_cpu(outputs: Outputs) -> Outputs:
    """Return outputs on the CPU: they are small (one number per token), and callers use no device."""
    return Outputs(
        outputs.logprob.cpu(),
        {name: value.cpu() for name, value in outputs.statistics.items()},
        *(None if each is None else each.cpu() for each in (outputs.value, outputs.last_value, outputs.score)),
    )


def _saved_weights(model: Any, path: Path) -> dict[str, Tensor]:
    """Read parameters by name from a checkpoint folder: by transformers, or from the adapter's file."""
    from safetensors.torch import load_file

    if not hasattr(model, "peft_config"):
        options = {"dtype": model.dtype, "use_safetensors": True, "output_loading_info": True}
        loaded, report = type(model).from_pretrained(path, **options)
        found, missing = dict(loaded.named_parameters()), set(report["missing_keys"])
    else:
        # PEFT omits the adapter's name ("default") in its files.
        names = {name.replace(".default", ""): name for name, _ in model.named_parameters()}
        found = {names[key]: tensor for key, tensor in load_file(path / "adapter_model.safetensors").items()}
        missing = {name for name in names.values() if ".default." in name} - found.keys()
    if missing:
        raise ValueError(f"the checkpoint {path} lacks {len(missing)} tensors of the model, such as {min(missing)}")
    return found
