"""One model over several ranks by DeepSpeed: ZeRO stages 0 to 3, with the sections `deepspeed` and `deepspeed_ref`.

A rank's worker is the local backend over a DeepSpeed engine: forward and loss are the same code, the update is
DeepSpeed's, with the optimizer, schedule, clipping and precision of the training settings. The sections are passed to
DeepSpeed unchanged; keys that the training settings define are rejected. In stage 3 a model is sharded while it is
loaded, weight by weight. Losses are divided by the counts of the whole step, so DeepSpeed's mean over ranks is undone,
and every backward accumulates until the update. A checkpoint is DeepSpeed's (`shards/`), for the same number of ranks.
The communication between ranks is in `ranks`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oxrl.backends.distributed.ranked import RankedBackend
from oxrl.backends.distributed.ranks import WorkerGroup
from oxrl.backends.distributed.shards import SHARDS, check_reference
from oxrl.backends.distributed.worker import (
    Broadcast,
    Load,
    RankWorker,
    Settings,
    ShardedModel,
    random_state,
    restore_random_state,
    shard_model,
    tensors_of,
)
from oxrl.backends.forward import HEADS, LanguageModel
from oxrl.backends.local import NonFiniteError, copy_parameters
from oxrl.backends.optimizer import decay_groups, trainable
from oxrl.names import did_you_mean
from oxrl.parsing import read_json
from oxrl.types import ImmediateTrainFuture, Outputs, TrainFuture

TAG = "deepspeed"  # the folder of DeepSpeed's files in `shards/`
ABOUT = "deepspeed.json"
ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # PyTorch's: no `torch.load` unpickles arbitrary classes
Section = Mapping[str, Any]
"""A section of the config, with DeepSpeed's keys: `{"zero_optimization": {"stage": 3}}`."""


class DeepSpeedTrainingBackend(RankedBackend):
    """`DeepSpeedTrainingBackend(ranks, partial(load_model, "tiny"), deepspeed={"zero_optimization": {"stage": 2}})`.

    On rank 0, while the other ranks serve. The default stage is 3. Frozen models are sharded according to
    `deepspeed_ref` (stage 3, or 0 for a full copy on each rank); by default if the policy's weights are sharded.
    """

    def __init__(
        self,
        ranks: WorkerGroup,
        load: Load,
        *,
        deepspeed: Section = MappingProxyType({}),
        deepspeed_ref: Section = MappingProxyType({}),
        others: Mapping[str, Load] = MappingProxyType({}),
        heads: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        chosen = Settings(heads=tuple(heads), **settings)
        build = partial(build_worker, load, dict(others), chosen, dict(deepspeed), dict(deepspeed_ref))
        super().__init__(ranks, build)


def build_worker(
    load: Load, others: Mapping[str, Load], settings: Settings, section: Section, ref_section: Section
) -> DeepSpeedWorker:
    """Shard the model and those it is compared with one after the other; both sections are checked first."""
    if settings.compiles:
        raise ValueError("model.compile: true does not work with DeepSpeed, which gathers weights inside the layers")
    settings = settings._replace(compiles=False)
    join_deepspeed()
    stage = _stage(training_config(section, settings, torch.float32))
    ref_section = ref_section or {"zero_optimization": {"stage": 3 if stage == 3 else 0}}
    if others:
        frozen_config(ref_section, torch.float32)
    configure = partial(training_config, section, settings)
    trained = shard_model(load, settings.heads, settings.temperature, partial(materialize, configure))
    configure_frozen = partial(frozen_config, ref_section)
    compared = {
        name: shard_model(each, (), settings.temperature, partial(materialize, configure_frozen), frozen=True)
        for name, each in others.items()
    }
    engines = [_frozen_engine(other.module, configure_frozen(other.dtype)) for other in compared.values()]
    modules = {name: other.module for name, other in compared.items()}
    return DeepSpeedWorker(trained, modules, settings, load, configure(trained.dtype), engines)


def join_deepspeed() -> None:
    """Let DeepSpeed use the existing process group, without compiling anything on a CPU."""
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    import deepspeed

    if deepspeed.comm.is_initialized():
        return
    # DeepSpeed calls collectives by names that PyTorch has deprecated.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning, "torch.distributed")
    if not on_gpu:
        # The compatibility check runs compilers and builds extensions: minutes, for a small gain between processes.
        vars(deepspeed.ops)["__compatible_ops__"] = defaultdict(bool)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)


def materialize(
    configure: Callable[[torch.dtype], dict[str, Any]], empty: ShardedModel, device: torch.device, broadcast: Broadcast
) -> None:
    """Give an empty module its weights, one after the other; in stage 3 each is sharded before the next is sent."""
    config = configure(empty.dtype)
    weights: dict[int, Tensor] = {}
    first = None
    tensors = tensors_of(empty.module)
    for name, tensor in tensors.items():
        weight = broadcast(name, tensor.shape, device)
        if isinstance(tensor, nn.Parameter):
            # DeepSpeed keeps all weights in one precision, and those it trains also in float32.
            weight = nn.Parameter(weight.to(empty.dtype), requires_grad=tensor.requires_grad)
            if _stage(config) == 3:
                _shard(weight, first, config)
                first = first if first is not None else weight
        weights[id(tensor)] = weight
    for module in empty.module.modules():
        for registered in (module._parameters, module._buffers):
            for key, old in registered.items():
                if old is not None:
                    registered[key] = weights[id(old)]  # type: ignore[assignment]


def _shard(parameter: nn.Parameter, sharded: Any, config: dict[str, Any]) -> None:
    """Shard a parameter, like the one that was sharded before it if there is one."""
    import deepspeed

    if sharded is not None:
        sharded.convert_to_zero_parameters([parameter])
    else:
        deepspeed.zero.Init(nn.ParameterList([parameter]), config_dict_or_path=config, dtype=parameter.dtype)


OWNED = {
    *("optimizer", "scheduler", "gradient_clipping", "bf16", "fp16", "managed_gradient_accumulation"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
}
# The other top-level keys of DeepSpeed 0.19, which ignores unknown ones. Keys inside sections it checks itself.
KEYS = {
    *("activation_checkpointing", "aio", "amp", "autotuning", "bfloat16", "checkpoint", "comet", "comms_logger"),
    *("communication_data_type", "compile", "compression_training", "csv_monitor", "curriculum_learning"),
    *("data_efficiency", "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather"),
    *("disable_python_gc", "dump_state", "eigenvalue", "elasticity", "expert_parallel", "flops_profiler"),
    *("gradient_allreduce_op", "gradient_predivide_factor", "graph_harvesting", "hybrid_engine", "log_level"),
    *("memory_breakdown", "nebula", "pipeline", "prescale_gradients", "progressive_layer_drop", "quantize_training"),
    *("seq_parallel_communication_data_type", "sparse_attention", "sparse_gradients", "steps_per_print"),
    *("tensor_parallel", "tensorboard", "timers", "torch_autocast", "use_data_before_expert_parallelism"),
    *("vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization", "world_size"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization"),
}


def training_config(section: Section, settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """Return DeepSpeed's config: the section, and the training settings."""
    zero = _zero("deepspeed", section)
    clipped = math.isfinite(settings.max_grad_norm) and zero["stage"] != 0  # stage 0: `_clip_gradients_of_stage_0`
    own: dict[str, Any] = {
        "gradient_clipping": settings.max_grad_norm if clipped else 0.0,
        "managed_gradient_accumulation": False,
        # PyTorch's AdamW, also with offloaded state; DeepSpeed's for CPUs is compiled on the first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == torch.bfloat16 and zero["stage"] == 0:
        # DeepSpeed divides by a loss scale that it has not multiplied by.
        raise ValueError("deepspeed: stage 0 supports float32 only; for bfloat16 set zero_optimization.stage to 1")
    if dtype == torch.bfloat16 and zero["stage"] in (2, 3):
        # Stage 1 can accumulate micro-batches in the model's precision only.
        own["data_types"] = {"grad_accum_dtype": "fp32"}
    if zero["stage"] == 1:
        zero.setdefault("overlap_comm", False)  # it needs an accumulation boundary that DeepSpeed determines
    return _checked("deepspeed", {**own, **section, "zero_optimization": zero}, section, dtype)


def _checked(name: str, config: dict[str, Any], section: Section, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config with the settings that all engines share; raise on an invalid one before anything is built."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    if owned := sorted(OWNED & section.keys()):
        raise ValueError(f"{name}.{owned[0]} cannot be set: it follows from the train and model sections")
    if unknown := sorted(section.keys() - KEYS):
        raise ValueError(f"{name}.{unknown[0]} is not a setting of DeepSpeed{did_you_mean(unknown[0], KEYS | OWNED)}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name}: training supports float32 and bfloat16, not {dtype}: set model.dtype")
    half = {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True}
    complete = config | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": half}
    complete.pop("world_size", None)  # the config check has compared it with the number of ranks
    try:
        DeepSpeedConfig(dict(complete))
    except (DeepSpeedConfigError, ValueError, AssertionError, TypeError, KeyError) as error:
        message = "; ".join(line.strip() for line in str(error).splitlines() if "further information" not in line)
        raise ValueError(f"DeepSpeed rejects the section {name}: {message}") from None
    return complete


def _zero(name: str, section: Section) -> dict[str, Any]:
    zero = section.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ValueError(f"{name}.zero_optimization must be a mapping, such as {{stage: 3}}, not {zero!r}")
    return {"stage": 3, **zero}


def _stage(config: Section) -> int:
    return int(config["zero_optimization"]["stage"])


def frozen_config(section: Section, dtype: torch.dtype) -> dict[str, Any]:
    zero = _zero("deepspeed_ref", section)
    if zero["stage"] in (1, 2):
        raise ValueError(
            f"deepspeed_ref: stage {zero['stage']} shards gradients or optimizer state, which a frozen model does not "
            "have: set zero_optimization.stage to 3 (sharded weights) or 0 (a copy on each rank)"
        )
    return _checked("deepspeed_ref", {**section, "zero_optimization": zero}, section, dtype)


def _frozen_engine(module: LanguageModel, config: dict[str, Any]) -> Any:
    """Return the engine that gathers the weights for each pass; None where each rank has all of them."""
    import deepspeed

    return deepspeed.initialize(model=module, config=config)[0] if _stage(config) == 3 else None


class DeepSpeedWorker(RankWorker):
    """One rank's worker, with its DeepSpeed engine."""

    def __init__(
        self,
        trained: ShardedModel,
        others: Mapping[str, LanguageModel],
        settings: Settings,
        load: Load,
        config: dict[str, Any],
        frozen_engines: Sequence[Any],
    ) -> None:
        import deepspeed

        self.stage = _stage(config)
        groups = decay_groups(trainable(trained.module).values(), settings.weight_decay, _dimensions)
        options: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
        adamw: Any = partial(torch.optim.AdamW, fused=True)
        if config["zero_force_ds_cpu_optimizer"]:
            adamw = deepspeed.ops.adam.DeepSpeedCPUAdam
        self.engine, *_ = deepspeed.initialize(model=trained.module, optimizer=adamw(groups, **options), config=config)
        super().__init__(trained, self.engine.basic_optimizer, others, settings, load)
        if self.stage == 0:
            self.optimizer.register_step_pre_hook(self._clip_gradients_of_stage_0)
        self._norm = 0.0
        self._pending = False  # whether gradients are accumulated
        self._warming_up = False
        engines = [engine for engine in (self.engine, *frozen_engines) if engine is not None]
        weakref.finalize(self, _destroy_engines, *engines).atexit = False

    def _forward(self, *arguments: Any) -> Outputs:
        outputs: Outputs = self.engine(*arguments)
        return outputs

    def _add_gradient(self, loss: Tensor) -> None:
        # Losses are divided by the counts of the whole step, so gradients must be summed; DeepSpeed averages.
        self.engine.backward(loss * (math.nan if self._warming_up else dist.get_world_size()))
        self._pending = True

    def _update(self) -> float:
        self._step()
        if not self.engine.was_step_applied():
            raise NonFiniteError("the gradient", self._unstepped)
        return self._norm if self.stage == 0 else float(self.engine.get_global_grad_norm())

    def _step(self) -> None:
        self.engine.step()
        self._pending = False

    def _clip_gradients_of_stage_0(self, *_: Any) -> None:
        """Clip before a step of stage 0, where DeepSpeed neither reports the norm nor stops if it is not finite."""
        masters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._norm = float(nn.utils.clip_grad_norm_(masters, self.max_grad_norm))
        if not math.isfinite(self._norm):
            raise NonFiniteError("the gradient", self._unstepped)

    def _full_tensor(self, parameter: Tensor) -> Tensor:
        if not _is_sharded(parameter):
            return parameter
        with gathered(parameter):
            return parameter.detach().clone()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        copy_parameters(weights, self.model, partial(gathered, changed=True))  # every rank has the full weights
        self._copy_from_model()
        return ImmediateTrainFuture(None)

    @torch.no_grad()
    def load_heads(self, path: Path) -> None:
        from safetensors.torch import load_file

        copy_parameters(load_file(path / HEADS), self.module.heads, partial(gathered, changed=True))
        self._copy_from_model()

    def _copy_from_model(self) -> None:
        """Copy the model's weights to the float32 weights of the optimizer."""
        if self.stage:
            self.engine.optimizer.refresh_fp32_params()

    def _move(self, weight: Tensor, towards: Tensor, share: float) -> None:
        policy = self._full_tensor(towards)
        with gathered(weight, changed=True):
            super()._move(weight, policy, share)

    def save_shards(self, path: Path) -> None:
        """Write DeepSpeed's checkpoint without frozen weights, and next to it random states, reference and metadata."""
        from safetensors.torch import save_file

        shards, rank = path / SHARDS, dist.get_rank()
        self.engine.save_checkpoint(str(shards), TAG, save_latest=False, exclude_frozen_parameters=True)
        save_file(random_state(), shards / f"random_{rank}.safetensors")
        if self.reference_moved and rank == self._reference_rank:
            reference = {name: _local_part(weight) for name, weight in self.reference_weights().items()}
            save_file(reference, shards / f"reference_{rank}.safetensors")
        if rank == 0:
            (shards / ABOUT).write_text(json.dumps(self._about()), encoding="utf-8")

    @torch.no_grad()
    def load_shards(self, path: Path) -> None:
        """Restore what the same number of ranks saved, bit for bit."""
        from safetensors.torch import load_file

        shards = path / SHARDS
        about = _read_about(shards, self._about())
        # Not strict: frozen weights are not saved, and the names of trained ones were compared above.
        with _restricted_unpickling(shards):
            self.engine.load_checkpoint(str(shards), TAG, load_module_strict=False)
        restore_random_state(load_file(shards / f"random_{dist.get_rank()}.safetensors"))
        self.version, self.reference_moved = about["version"], about["reference_moved"]
        if self.reference_moved:
            weights: Mapping[str, Any] = self.reference_weights()
            reference = load_file(shards / f"reference_{self._reference_rank}.safetensors")
            check_reference(reference, weights, path)
            for name, weight in weights.items():
                if _is_sharded(weight):
                    weight.partition()  # small weights stay gathered after use
                _local_part(weight).copy_(reference[name])

    def _about(self) -> dict[str, Any]:
        """Return the metadata: what must be equal on resume, and the progress."""
        return {
            "ranks": dist.get_world_size(),
            "stage": self.stage,
            "weights": {name: list(_shape(weight)) for name, weight in trainable(self.module).items()},
            "version": self.version,
            "reference_moved": self.reference_moved,
        }

    @property
    def _reference_rank(self) -> int:
        """The rank whose file has this rank's reference weights: itself if they are sharded, else rank 0."""
        sharded = any(map(_is_sharded, self.reference_weights().values()))
        return dist.get_rank() if sharded else 0

    @contextmanager
    def memory_warm_up(self) -> Iterator[None]:
        """Run with a loss of NaN inside the block, so that DeepSpeed drops the gradients and updates nothing."""
        share = sum(math.prod(_shape(weight)) for weight in trainable(self.module).values())
        share = 0 if self.optimizer.state else share // (dist.get_world_size() if self.stage else 1)
        offloaded = self.engine.zero_cpu_offload() if self.stage else False
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            # Filled: on a CPU, pages of zeros are not allocated.
            state = torch.full((2 * share,), 1.0, device="cpu" if offloaded else self.device)
            self._warming_up = True
            try:
                yield
            finally:
                del state
                self._warming_up = False
                self._drop_gradients()

    def _drop_gradients(self) -> None:
        if self.stage == 0:
            self.engine.zero_grad()
        elif self._pending:
            with _without_deepspeed_log():
                self._step()
            assert not self.engine.was_step_applied(), "DeepSpeed applied a step with gradients that are not finite"
        self._unstepped.clear()


@contextmanager
def _without_deepspeed_log() -> Iterator[None]:
    """Disable DeepSpeed's log inside the block, for its warning about a skipped step."""
    from deepspeed.utils import logger as deepspeed_logger

    before, deepspeed_logger.disabled = deepspeed_logger.disabled, True
    try:
        yield
    finally:
        deepspeed_logger.disabled = before


@contextmanager
def _restricted_unpickling(shards: Path) -> Iterator[None]:
    """Let DeepSpeed's files, which are pickles, hold only tensors, plain values and the classes that it writes."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(ONLY_WEIGHTS)
    os.environ[ONLY_WEIGHTS] = "1"  # DeepSpeed loads with weights_only=False
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error))
        raise ValueError(
            f"a file in {shards} is not what DeepSpeed writes ({reason}), and was not loaded: a pickle can run code. "
            f"Restore it, or start a new run with {shards.parent} as the model"
        ) from error
    finally:
        if before is None:
            del os.environ[ONLY_WEIGHTS]
        else:
            os.environ[ONLY_WEIGHTS] = before


def _read_about(shards: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    if not (shards / ABOUT).is_file():
        raise ValueError(
            f"{shards} has no {ABOUT}, so DeepSpeed did not save this checkpoint: resume with the backend that did, or "
            f"start a new run with {shards.parent} as the model"
        )
    about = read_json(shards / ABOUT)
    for key, setting in (("ranks", "ranks"), ("stage", "zero_optimization.stage")):
        if about[key] != expected[key]:
            raise ValueError(
                f"the checkpoint in {shards} was saved with {setting} {about[key]}, not {expected[key]}, and cannot "
                f"be converted: resume with {about[key]}, or start a new run with {shards.parent} as the model"
            )
    if different := sorted(
        name
        for name in about["weights"].keys() | expected["weights"].keys()
        if about["weights"].get(name) != expected["weights"].get(name)
    ):
        raise ValueError(f"the checkpoint in {shards} is of another model: the shape of {different[0]} differs")
    return about


def _is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_tensor")


def _local_part(parameter: Tensor) -> Tensor:
    """Return what this rank stores of a weight: its shard, or the full weight."""
    local: Tensor = getattr(parameter, "ds_tensor", parameter)
    return local.detach()


def _shape(parameter: Tensor) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _dimensions(parameter: Tensor) -> int:
    return len(_shape(parameter))


def _destroy_engines(*engines: Any) -> None:
    """Destroy engines, and remove their modules from a global list in which DeepSpeed would keep them."""
    from deepspeed.runtime.zero import parameter_offload

    for engine in engines:
        engine.destroy()
        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [module for module in stack if module is not engine.module]


@contextmanager
def gathered(parameter: Tensor, *, changed: bool = False) -> Iterator[None]:
    """Gather a weight on every rank inside the block; with `changed`, rank 0's value is then broadcast."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if changed else None):
        yield
