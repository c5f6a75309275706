"""One model over several ranks by DeepSpeed: ZeRO stages 0 to 3, with the sections `deepspeed` and `deepspeed_ref`.

A rank's worker is the local backend over a DeepSpeed engine: the passes and the loss are the same code, the update is
DeepSpeed's, with the optimizer, schedule, clipping and precision of the training settings. The sections go to DeepSpeed
as they are; what the training settings say cannot be said there a second time. In stage 3 a model is sharded as it is
loaded, weight by weight. Denominators are those of the whole
step, so DeepSpeed's mean over ranks is undone, and every backward adds to the step until it is told to update. A
checkpoint is DeepSpeed's own (`shards/`), for the same number of ranks. Who calls whom is in `ranks`.
"""

from __future__ import annotations

import json
import math
import os
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
    spread,
    tensors_of,
)
from oxrl.backends.forward import HEADS, LanguageModel
from oxrl.backends.local import NonFiniteError, copy_parameters
from oxrl.backends.optimizer import decay_groups, trainable
from oxrl.names import did_you_mean
from oxrl.types import ImmediateTrainFuture, Outputs, TrainFuture

TAG = "deepspeed"  # the folder of DeepSpeed's files in `shards/`
ABOUT = "deepspeed.json"
Section = Mapping[str, Any]
"""A section of the config, in DeepSpeed's own words: `{"zero_optimization": {"stage": 3}}`."""


class DeepSpeedTrainingBackend(RankedBackend):
    """`DeepSpeedTrainingBackend(ranks, partial(load_model, "tiny"), deepspeed={"zero_optimization": {"stage": 2}})`.

    On rank 0, while the other ranks serve. Without a stage it is 3. Frozen models are sharded as `deepspeed_ref` says
    (stage 3, or 0 for a whole copy on each rank); without that, where the policy's weights are.
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
    """The model and what it is compared with, one after the other; a mistake in a section is told before that."""
    join_deepspeed()
    stage = _stage(training_config(section, settings, torch.float32))
    ref_section = ref_section or {"zero_optimization": {"stage": 3 if stage == 3 else 0}}
    if others:
        frozen_config(ref_section, torch.float32)
    configure = partial(training_config, section, settings)
    trained = spread(load, settings.heads, settings.temperature, partial(place, configure))
    configure_frozen = partial(frozen_config, ref_section)
    compared = {
        name: spread(each, (), settings.temperature, partial(place, configure_frozen), frozen=True)
        for name, each in others.items()
    }
    engines = [_frozen_engine(other.module, configure_frozen(other.dtype)) for other in compared.values()]
    modules = {name: other.module for name, other in compared.items()}
    return DeepSpeedWorker(trained, modules, settings, load, configure(trained.dtype), engines)


def join_deepspeed() -> None:
    """Let DeepSpeed use the process group that is there, without compiling anything on a CPU."""
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    import deepspeed

    if deepspeed.comm.is_initialized():
        return
    # DeepSpeed calls collectives by names that PyTorch has given up since.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning, "torch.distributed")
    if not on_gpu:
        # Asking what can be built runs compilers, and what can is built: minutes, for a small gain between processes.
        vars(deepspeed.ops)["__compatible_ops__"] = defaultdict(bool)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)


def place(
    configure: Callable[[torch.dtype], dict[str, Any]], empty: ShardedModel, device: torch.device, bring: Broadcast
) -> None:
    """Give an empty module its weights, one after the other; in stage 3 each is sharded before the next one comes."""
    config = configure(empty.dtype)
    made: dict[int, Tensor] = {}
    first = None
    tensors = tensors_of(empty.module)
    for name, tensor in tensors.items():
        whole = bring(name, tensor.shape, device)
        if isinstance(tensor, nn.Parameter):
            # DeepSpeed holds all weights in one precision; what it trains, it also has in float32.
            whole = nn.Parameter(whole.to(empty.dtype), requires_grad=tensor.requires_grad)
            if _stage(config) == 3:
                _shard(whole, first, config)
                first = first if first is not None else whole
        made[id(tensor)] = whole
    for part in empty.module.modules():
        for held in (part._parameters, part._buffers):
            for key, old in held.items():
                if old is not None:
                    held[key] = made[id(old)]  # type: ignore[assignment]


def _shard(parameter: nn.Parameter, sharded: Any, config: dict[str, Any]) -> None:
    """As the one that was sharded before it, if there is one."""
    import deepspeed

    if sharded is not None:
        sharded.convert_to_zero_parameters([parameter])
    else:
        deepspeed.zero.Init(nn.ParameterList([parameter]), config_dict_or_path=config, dtype=parameter.dtype)


OWNED = {
    *("optimizer", "scheduler", "gradient_clipping", "bf16", "fp16", "managed_gradient_accumulation"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
}


def training_config(section: Section, settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's config: the section, and what the training settings say."""
    zero = _zero("deepspeed", section)
    clipped = math.isfinite(settings.max_grad_norm) and zero["stage"] != 0  # without ZeRO we clip ourselves
    own: dict[str, Any] = {
        "gradient_clipping": settings.max_grad_norm if clipped else 0.0,
        "managed_gradient_accumulation": False,
        # Our AdamW, wherever its state lies; DeepSpeed's own for CPUs is compiled on the first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == torch.bfloat16 and zero["stage"] == 0:
        # DeepSpeed divides by a loss scale that it has not multiplied with.
        raise ValueError("deepspeed: stage 0 trains in float32 only; in bfloat16 set zero_optimization.stage to 1")
    if dtype == torch.bfloat16 and zero["stage"] in (2, 3):
        # Stage 1 can add micro-batches up in the model's precision only.
        own["data_types"] = {"grad_accum_dtype": "fp32"}
    if zero["stage"] == 1:
        zero.setdefault("overlap_comm", False)  # it is for a boundary that DeepSpeed decides on
    return _checked("deepspeed", {**own, **section, "zero_optimization": zero}, section, dtype)


def _checked(place: str, config: dict[str, Any], section: Section, dtype: torch.dtype) -> dict[str, Any]:
    """With what holds for every engine; what DeepSpeed does not like is told in its words, before anything is built."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    if twice := sorted(OWNED & section.keys()):
        raise ValueError(f"{place}.{twice[0]} is not set here: the training settings say it, once for all backends")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{place}: models are trained in float32 or bfloat16 here, not in {dtype}: set model.dtype")
    half = {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True}
    complete = config | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": half}
    complete.pop("world_size", None)  # the number of ranks is what it is; the config has compared them
    asked = _Asked(complete)
    try:
        DeepSpeedConfig(asked)
    except (DeepSpeedConfigError, ValueError, AssertionError, TypeError, KeyError) as error:
        words = "; ".join(line.strip() for line in str(error).splitlines() if "further information" not in line)
        raise ValueError(f"DeepSpeed does not take the section {place}: {words}") from None
    if unread := sorted(section.keys() - asked.keys_read - {"world_size"}):
        hint = did_you_mean(unread[0], asked.keys_read)
        raise ValueError(f"{place}.{unread[0]} is no setting of DeepSpeed, which does not look at it{hint}")
    return complete


class _Asked(dict[str, Any]):
    """Knows which of its keys somebody asked for. DeepSpeed passes over a top-level key that it does not know."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.keys_read: set[str] = set()

    def __copy__(self) -> _Asked:
        return self  # DeepSpeed reads from a copy

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)


def _zero(place: str, section: Section) -> dict[str, Any]:
    zero = section.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ValueError(f"{place}.zero_optimization holds settings, such as {{stage: 3}}, and is not {zero!r}")
    return {"stage": 3, **zero}


def _stage(config: Section) -> int:
    return int(config["zero_optimization"]["stage"])


def frozen_config(section: Section, dtype: torch.dtype) -> dict[str, Any]:
    zero = _zero("deepspeed_ref", section)
    if zero["stage"] in (1, 2):
        raise ValueError(
            f"deepspeed_ref: stage {zero['stage']} shards gradients or optimizer state, and a frozen model has "
            "neither: set zero_optimization.stage to 3 (its weights are sharded) or 0 (each rank has a copy)"
        )
    return _checked("deepspeed_ref", {**section, "zero_optimization": zero}, section, dtype)


def _frozen_engine(module: LanguageModel, config: dict[str, Any]) -> Any:
    """What brings the weights together for each pass; None where each rank has all of them."""
    import deepspeed

    return deepspeed.initialize(model=module, config=config)[0] if _stage(config) == 3 else None


class DeepSpeedWorker(RankWorker):
    """One rank's part, with the engine that DeepSpeed made of it."""

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
            self.optimizer.register_step_pre_hook(self._clip_whole_gradients)
        self._norm = 0.0
        self._pending = False  # whether gradients wait for a step
        self._rehearsing = False
        engines = [engine for engine in (self.engine, *frozen_engines) if engine is not None]
        weakref.finalize(self, _let_go, *engines).atexit = False

    def _forward(self, *arguments: Any) -> Outputs:
        outputs: Outputs = self.engine(*arguments)
        return outputs

    def _add_gradient(self, loss: Tensor) -> None:
        # The counts are those of the whole step: gradients are to be summed over ranks, and DeepSpeed takes their mean.
        self.engine.backward(loss * (math.nan if self._rehearsing else dist.get_world_size()))
        self._pending = True

    def _update(self) -> float:
        self._step()
        if not self.engine.was_step_applied():
            raise NonFiniteError("the gradient", self._unstepped)
        return self._norm if self.stage == 0 else float(self.engine.get_global_grad_norm())

    def _step(self) -> None:
        self.engine.step()
        self._pending = False

    def _clip_whole_gradients(self, *_: Any) -> None:
        """Without ZeRO, DeepSpeed neither tells the norm nor stops at one that is not finite."""
        masters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._norm = float(nn.utils.clip_grad_norm_(masters, self.max_grad_norm))
        if not math.isfinite(self._norm):
            raise NonFiniteError("the gradient", self._unstepped)

    def _in_one_piece(self, parameter: Tensor) -> Tensor:
        if not _is_sharded(parameter):
            return parameter
        with gathered(parameter):
            return parameter.detach().clone()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        copy_parameters(weights, self.model, partial(gathered, changed=True))  # every rank was given all of them
        self._take_weights()
        return ImmediateTrainFuture(None)

    @torch.no_grad()
    def load_heads(self, path: Path) -> None:
        from safetensors.torch import load_file

        copy_parameters(load_file(path / HEADS), self.module.heads, partial(gathered, changed=True))
        self._take_weights()

    def _take_weights(self) -> None:
        """Have the float32 weights of the optimizer follow the model's."""
        if self.stage:
            self.engine.optimizer.refresh_fp32_params()

    def _move(self, weight: Tensor, towards: Tensor, share: float) -> None:
        policy = self._in_one_piece(towards)
        with gathered(weight, changed=True):
            super()._move(weight, policy, share)

    def save_shards(self, path: Path) -> None:
        """DeepSpeed's checkpoint without what is frozen, and what it knows nothing of beside it."""
        from safetensors.torch import save_file

        shards, rank = path / SHARDS, dist.get_rank()
        self.engine.save_checkpoint(str(shards), TAG, save_latest=False, exclude_frozen_parameters=True)
        save_file(random_state(), shards / f"random_{rank}.safetensors")
        if self.reference_moved and rank == self._reference_rank:
            slices = {name: _own(weight) for name, weight in self.reference_weights().items()}
            save_file(slices, shards / f"reference_{rank}.safetensors")
        if rank == 0:
            (shards / ABOUT).write_text(json.dumps(self._about()), encoding="utf-8")

    @torch.no_grad()
    def load_shards(self, path: Path) -> None:
        """Take back what as many ranks saved, to the bit."""
        from safetensors.torch import load_file

        shards = path / SHARDS
        about = _read_about(shards, self._about())
        # Not strict: what is frozen is not in it, and what is trained has been compared.
        self.engine.load_checkpoint(str(shards), TAG, load_module_strict=False)
        restore_random_state(load_file(shards / f"random_{dist.get_rank()}.safetensors"))
        self.version, self.reference_moved = about["version"], about["reference_moved"]
        if self.reference_moved:
            weights: Mapping[str, Any] = self.reference_weights()
            slices = load_file(shards / f"reference_{self._reference_rank}.safetensors")
            check_reference(slices, weights, path)
            for name, weight in weights.items():
                if _is_sharded(weight):
                    weight.partition()  # small ones stay whole beside their slices
                _own(weight).copy_(slices[name])

    def _about(self) -> dict[str, Any]:
        """What must be the same where a run goes on, and where it is."""
        return {
            "ranks": dist.get_world_size(),
            "stage": self.stage,
            "weights": {name: list(_shape(weight)) for name, weight in trainable(self.module).items()},
            "version": self.version,
            "reference_moved": self.reference_moved,
        }

    @property
    def _reference_rank(self) -> int:
        """Whose file has what this rank needs of the reference: its own slices, or rank 0's copy."""
        sharded = any(map(_is_sharded, self.reference_weights().values()))
        return dist.get_rank() if sharded else 0

    @contextmanager
    def memory_warm_up(self) -> Iterator[None]:
        """What is rehearsed is worth NaN, so that DeepSpeed itself drops the gradients and updates nothing."""
        share = sum(math.prod(_shape(weight)) for weight in trainable(self.module).values())
        share = 0 if self.optimizer.state else share // (dist.get_world_size() if self.stage else 1)
        offloaded = self.engine.zero_cpu_offload() if self.stage else False
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            # Filled, because a page of zeros takes no memory on a CPU.
            state = torch.full((2 * share,), 1.0, device="cpu" if offloaded else self.device)
            self._rehearsing = True
            try:
                yield
            finally:
                del state
                self._rehearsing = False
                self._drop_gradients()

    def _drop_gradients(self) -> None:
        if self.stage == 0:
            self.engine.zero_grad()
        elif self._pending:
            with _unheard():
                self._step()
            assert not self.engine.was_step_applied(), "a step of gradients that are not numbers was applied"
        self._unstepped.clear()


@contextmanager
def _unheard() -> Iterator[None]:
    """Without DeepSpeed's warning of a step that was skipped, where that is what was wanted."""
    from deepspeed.utils import logger as theirs

    before, theirs.disabled = theirs.disabled, True
    try:
        yield
    finally:
        theirs.disabled = before


def _read_about(shards: Path, here: Mapping[str, Any]) -> dict[str, Any]:
    if not (shards / ABOUT).is_file():
        raise ValueError(
            f"{shards} has no {ABOUT}, so DeepSpeed did not save it and cannot go on from it: use the backend that "
            "did; to begin anew with its weights, name it as the model"
        )
    about: dict[str, Any] = json.loads((shards / ABOUT).read_text(encoding="utf-8"))
    for key, words in (("ranks", "ranks"), ("stage", "zero_optimization.stage")):
        if about[key] != here[key]:
            raise ValueError(
                f"the checkpoint in {shards} was saved with {words} {about[key]}, and here it is {here[key]}: its "
                "slices fit no other; go on as it was saved, or begin anew from the plain weights beside it"
            )
    if different := sorted(
        name
        for name in about["weights"].keys() | here["weights"].keys()
        if about["weights"].get(name) != here["weights"].get(name)
    ):
        raise ValueError(f"the checkpoint in {shards} is of another model: {different[0]} is not the same in both")
    return about


def _is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_tensor")


def _own(parameter: Tensor) -> Tensor:
    """What this rank keeps of a weight."""
    own: Tensor = getattr(parameter, "ds_tensor", parameter)
    return own.detach()


def _shape(parameter: Tensor) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _dimensions(parameter: Tensor) -> int:
    return len(_shape(parameter))


def _let_go(*engines: Any) -> None:
    """DeepSpeed keeps every sharded module in a list of its own, for ever."""
    from deepspeed.runtime.zero import parameter_offload

    for engine in engines:
        engine.destroy()
        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [module for module in stack if module is not engine.module]


@contextmanager
def gathered(parameter: Tensor, *, changed: bool = False) -> Iterator[None]:
    """Inside, a weight is whole on every rank; what rank 0 has changed, all have afterwards."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if changed else None):
        yield
