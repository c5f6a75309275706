"""The schema of a config: strict types, defaults, and each key in a few words.

Validation only: what a key does is done by whoever reads it (`inputs`, `wiring`); what keys mean together is judged in
`checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from oxrl.algorithms import algorithm, find
from oxrl.config.tasks import fill_task, find_task


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Open(_Section):
    """Any key: whoever the section is for checks it."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    @property
    def others(self) -> dict[str, Any]:
        """The keys that have no field of their own."""
        return dict(self.model_extra or {})


class Run(_Section):
    """The run as a whole: its name, where it goes, what it runs on."""

    experiment_id: str = Field("run", pattern=r"^[\w.-]+$", description="names the run's folder")
    seed: int = Field(42, ge=0, description="fixes data order, dropout and new weights")
    checkpoint_dir: str | None = Field(None, description="where runs go; default $OXRL_CHECKPOINT_DIR or ./checkpoints")
    task: str | None = Field(
        None, description="math, math-hard, code, reasoning, instruct or chat: fills in what is not set"
    )
    backend: Literal["auto", "local", "fsdp", "deepspeed", "ray"] = Field(
        "auto", description="what trains; auto: local on one device, on several DeepSpeed if installed, else FSDP2"
    )
    sharding: Literal["auto", "fsdp", "deepspeed"] = Field(
        "auto", description="what spreads the model over devices where backend does not say it: auto and ray"
    )
    training_gpus: int | None = Field(
        None, ge=0, description="devices that train; default what there is, 0 is the processor; without GPUs, processes"
    )
    rollout_gpus: int | None = Field(
        None, ge=0, description="devices that only sample; the embedded engine samples where training happens"
    )
    ray_address: str | None = Field(
        None, description="a Ray cluster to run on, such as auto or HOST:PORT; default one that lives with the run"
    )
    rank_time_limit: float = Field(600.0, gt=0, description="seconds before a silent rank or engine counts as lost")
    max_restarts: int = Field(3, ge=0, description="times that a run which lost a rank goes on from its checkpoint")
    trackers: list[Literal["mlflow", "tensorboard", "wandb", "trackio"]] = Field(
        [], description="where metrics go besides metrics.jsonl"
    )
    tracking_uri: str | None = Field(
        None, description="MLflow's store; default $MLFLOW_TRACKING_URI or mlflow.db beside the run's folder"
    )

    @field_validator("task")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        return None if name is None else find_task(name).name


class Switch(_Section):
    """Another algorithm from a step on."""

    step: int = Field(ge=2, description="the first step that runs it")
    alg_name: str = Field(description="see `oxrl algorithms`")
    alg_params: dict[str, Any] = Field({}, description="its parameters")

    @model_validator(mode="after")
    def _known(self) -> Switch:
        algorithm(self.alg_name, **self.alg_params)
        return self


class Train(_Section):
    """What is learnt how: algorithm, optimizer, batches, and how often what happens."""

    alg_name: str = Field("sgrpo", description="see `oxrl algorithms`")
    alg_params: dict[str, Any] = Field({}, description="its parameters, as `oxrl algorithms NAME` lists them")
    alg_schedule: list[Switch] = Field(
        [], description="others from later steps on: [{step: 100, alg_name: dpo, alg_params: {beta: 0.3}}]"
    )
    lr: float = Field(1e-5, gt=0, description="peak learning rate")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.95], min_length=2, max_length=2, description="AdamW's two decay rates"
    )
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's term against division by zero")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's pull of the weights towards 0")
    warmup_steps_ratio: float = Field(0.1, ge=0, lt=1, description="share of the steps that warms up")
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="the learning rate after warm-up; wsd: constant, then down in the last fifth"
    )
    clip_grad_norm: float = Field(1.0, ge=0, description="largest gradient norm; 0 does not clip")
    total_number_of_epochs: int = Field(1, ge=1, description="passes over the data, or times train_steps_per_epoch")
    train_steps_per_epoch: int | None = Field(None, ge=1, description="optimizer steps; default one pass over the data")
    train_batch_size_per_gpu: int = Field(8, ge=1, description="rows (or pairs) per accumulation step")
    gradient_accumulation_steps: int = Field(1, ge=1, description="multiplies the rows of an optimizer step")
    micro_batch_tokens: int = Field(1024, ge=1, description="tokens run at once; sets memory, never the result")
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0 with val_files_path: ten per run")
    patience: int = Field(0, ge=0, description="evaluations without a new best before stopping; 0 never stops")
    checkpoint_every: int = Field(0, ge=0, description="steps between checkpoints; 0 only at the end and at a new best")
    keep_last: int = Field(2, ge=1, description="checkpoints kept besides the best")
    log_every: int = Field(1, ge=1, description="steps between two lines of metrics")
    iterations: int = Field(1, ge=1, description="passes over each batch of rollouts")
    mini_batches: int = Field(1, ge=1, description="optimizer steps per pass over a batch of rollouts")
    max_logprob_gap: float | None = Field(
        None, gt=0, description="between sampler and trainer on the same weights; default 0.05, in half precision 2"
    )

    @field_validator("alg_name")
    @classmethod
    def _known(cls, name: str) -> str:
        return name if ":" in name else find(name).name

    @model_validator(mode="after")
    def _known_parameters(self) -> Train:
        if self.alg_params:
            algorithm(self.alg_name, **self.alg_params)
        return self


class Model(_Section):
    """The model that is trained, and those that it is compared with."""

    name: str = Field(description="hub id, local folder, .gguf file, or a built-in: smollm2-135m, tiny")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPU, else bf16"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="how attention is computed"
    )
    gradient_checkpointing: bool = Field(False, description="less memory for about a third more time")
    ref_model: str | None = Field(None, description="what the policy is compared with; default the model as it starts")
    ref_update: Literal["fixed", "ema", "periodic"] = Field("fixed", description="whether the reference follows")
    ref_decay: float = Field(0.99, ge=0, le=1, description="ema: the share of the old reference that stays each step")
    ref_every: int = Field(10, ge=1, description="periodic: steps between two resets to the policy")
    teacher: str | None = Field(None, description="the model to learn from, for kd and opd")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    device: str = Field("auto", description="auto: the first GPU, else the CPU")


class Lora(_Section):
    """An adapter is trained instead of all weights."""

    enabled: bool = Field(False, description="train an adapter")
    r: int = Field(16, ge=1, description="its rank")
    alpha: int = Field(32, gt=0, description="its scale is alpha / r")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="share of its input that is dropped; not where log-probs are compared"
    )
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="which layers get one: all linear ones, or those with these names"
    )


class LengthPenalty(_Section):
    """0 up to `limit - margin` sampled tokens, then in a straight line down to `-weight` at `limit`."""

    limit: int = Field(ge=1, description="sampled tokens")
    margin: int = Field(ge=1, description="tokens before the limit at which it begins")
    weight: float = Field(1.0, gt=0, description="what is lost at the limit")

    @model_validator(mode="after")
    def _margin_fits(self) -> LengthPenalty:
        if self.margin > self.limit:
            raise ValueError(f"margin {self.margin} is more than limit {self.limit}")
        return self


class Reward(_Section):
    """What an answer is worth, for algorithms that sample; unset, the dataset, the task or the rows tell."""

    reward_func: str | dict[str, float] | None = Field(
        None, description="name from the table, module:function, FILE.py:function, or several with weights"
    )
    params: dict[str, Any] = Field({}, description="its parameters; of several, by name")
    length_penalty: LengthPenalty | None = Field(
        None, description="what answers lose near a length: {limit: 512, margin: 128, weight: 1.0}"
    )
    clamp: list[float] | None = Field(
        None, min_length=2, max_length=2, description="[lowest, highest] of the reward, after all else but normalize"
    )
    model: str | None = Field(None, description="a reward model, trained by `rm` or any sequence classifier")
    judge: str | None = Field(None, description="a model that grades answers when asked to")
    rubric: str | None = Field(None, description="what the judge is asked to look at")
    normalize: Literal["none", "batch"] = Field("none", description="batch: mean 0 and std 1 over each step")
    time_limit: float = Field(30.0, gt=0, description="seconds before an answer counts as ungraded")
    allow_unsandboxed: bool = Field(
        False, description="run programs that a model wrote even where they cannot be isolated (`code_reward_func`)"
    )

    @field_validator("clamp")
    @classmethod
    def _low_to_high(cls, borders: list[float] | None) -> list[float] | None:
        if borders is not None and not borders[0] < borders[1]:
            raise ValueError(f"clamp is [lowest, highest], not {borders}")
        return borders


class Rollout(_Section):
    """How answers are sampled.

    A step takes `train_batch_size_per_gpu x gradient_accumulation_steps` prompts for each device that trains.
    """

    n_samples: int = Field(8, ge=1, description="answers per prompt")
    max_tokens: int = Field(256, ge=1, description="new tokens per answer, or per turn of it")
    temperature: float = Field(1.0, gt=0, description="of the draws that are trained on")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens of this mass")
    top_k: int = Field(0, ge=0, description="draw from this many likeliest tokens; 0: all")
    min_p: float = Field(0.0, ge=0, lt=1, description="least probability, as a share of the likeliest token's")
    stop: list[str] = Field([], description="texts that end an answer")
    eval_temperature: float = Field(0.0, ge=0, description="for held-out prompts; 0 takes the likeliest token")
    over_sampling_factor: float = Field(1.0, ge=1, description="prompts begun per prompt wanted; the slowest wait")
    partial_rollouts: bool = Field(False, description="what was aborted goes on with the next weights, else anew")
    filter: str | None = Field(None, description="which groups are worth training on, such as check_min_reward")
    filter_params: dict[str, Any] = Field({}, description="its parameters")
    max_draws: int | None = Field(None, ge=1, description="most prompts one step may cost; default ten times a batch")
    lag: int = Field(0, ge=0, description="versions that sampling may be behind training; 0 is on-policy")
    force_strict_on_policy: bool = Field(
        False, description="refuse settings that train on anything but fresh samples of the newest weights"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="rollout devices that share one copy of the model; the embedded engine takes one"
    )
    mode: Literal["shrinking", "fixed"] = Field("shrinking", description="fixed: bits do not depend on the company")
    slots: int = Field(64, ge=1, description="answers that are sampled side by side")
    env: Literal["single_turn", "tools"] = Field("single_turn", description="tools: the model may call rollout.tools")
    tools: list[str] = Field([], description="functions the model may call: module:function or FILE.py:function")
    max_turns: int = Field(8, ge=1, description="turns of the model in one answer, with tools")
    log_samples: int = Field(4, ge=0, description="answers per step that are written to rollouts.jsonl")

    @model_validator(mode="after")
    def _tools_have_their_environment(self) -> Rollout:
        if self.tools and self.env != "tools":
            raise ValueError("tools are given, but env is not tools: set rollout.env: tools to let the model call them")
        return self


class Data(_Section):
    """The rows: a known dataset, or files of one's own."""

    dataset: str | None = Field(None, description="a name from `oxrl data list`; prepared when it is first used")
    train_files_path: str | dict[str, str] | None = Field(
        None, description="file or hub id, or one per name of train_dnames"
    )
    val_files_path: str | dict[str, str] | None = Field(None, description="held-out rows for evaluation")
    train_dnames: list[str] | None = Field(None, description="names of the datasets to mix")
    train_ratios: dict[str, float] | None = Field(None, description="share of each dataset; default by size")
    columns: dict[str, str] = Field({}, description="our column name -> the file's")
    format: str | None = Field(None, description="name of the row format; default told from the columns")
    max_seq_len: int | None = Field(2048, ge=2, description="longest row in tokens, prompt and answer together")
    overlong: Literal["drop", "truncate", "error"] = Field("drop", description="what happens to rows over max_seq_len")
    bad_rows: Literal["stop", "skip"] = Field("stop", description="what happens to rows that cannot be read")

    @field_validator("dataset")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        from oxrl.data.prepare import check_splits, find_dataset

        if name is not None:
            check_splits(find_dataset(name), ["train"])
        return name

    @model_validator(mode="after")
    def _names_agree(self) -> Data:
        if self.dataset is None and self.train_files_path is None:
            raise ValueError("data.train_files_path is missing, or data.dataset with a name from `oxrl data list`")
        if self.dataset is not None and self.train_files_path is not None:
            raise ValueError("dataset and train_files_path are both set: rows come from one of them")
        if self.train_dnames is not None and set(self.train_dnames) != set(self.train_files):
            raise ValueError(
                f"train_dnames {self.train_dnames} and train_files_path name different datasets: "
                "give one path to one name, or a mapping name -> path"
            )
        if self.train_ratios is not None and set(self.train_ratios) != set(self.train_files):
            raise ValueError(f"train_ratios must name exactly the datasets {sorted(self.train_files)}")
        return self

    @property
    def train_files(self) -> dict[str, str]:
        """Name -> path; a `dataset` has its path once it is prepared."""
        return {} if self.train_files_path is None else _by_name(self.train_files_path, self.train_dnames)

    @property
    def val_files(self) -> dict[str, str]:
        return {} if self.val_files_path is None else _by_name(self.val_files_path, None)


def _by_name(paths: str | dict[str, str], names: list[str] | None) -> dict[str, str]:
    if isinstance(paths, dict):
        return paths
    name = names[0] if names and len(names) == 1 else Path(paths).name.split(".")[0]
    return {name: paths}


class DeepSpeed(_Open):
    """DeepSpeed's own settings for training on several devices, such as zero_optimization; not used on one device.

    Optimizer, schedule, precision and batch sizes stand in `train` and `model`, once.
    """


class DeepSpeedRef(_Open):
    """The same for the reference model."""


class InferenceEngine(_Open):
    """What answers are sampled with; any other key is a setting of that engine."""

    name: Literal["auto", "embedded", "vllm", "http"] = Field(
        "auto",
        description="embedded: the trainer's own weights; vllm: started for the run; http: servers at urls; "
        "auto: vllm where rollout_gpus are set apart, else embedded",
    )
    urls: list[str] = Field([], description="http: vLLM or SGLang servers, such as http://127.0.0.1:8000")
    replicas: int | None = Field(
        None,
        ge=1,
        description="vllm: copies that sample; default rollout_gpus / tensor_parallel_size, one per training device "
        "where colocated, else 1",
    )
    place: Literal["auto", "process", "server"] = Field(
        "auto",
        description="vllm: in the trainer's process, or servers of its own; auto: servers if lag, several copies or "
        "several ranks",
    )
    folder: str | None = Field(None, description="where weights are handed over; default this machine's memory")
    transfer: Literal["files", "gloo", "nccl"] = Field(
        "files",
        description="http: how weights reach the servers: files in folder; vLLM's also over TCP (gloo) or between "
        "GPUs (nccl)",
    )
    adapter: bool = Field(
        False, description="vllm, with lora: the base goes to the engine once, and then the adapter alone"
    )
    colocated: bool = Field(False, description="vllm: shares the trainer's devices and sleeps while it computes")


class Config(_Section):
    """`load_config("config.yaml")`; `Config.model_validate({"model": {...}, "data": {...}})` from Python."""

    model: Model
    data: Data
    run: Run = Run.model_validate({})
    train: Train = Train.model_validate({})
    lora: Lora = Lora.model_validate({})
    reward: Reward = Reward.model_validate({})
    rollout: Rollout = Rollout.model_validate({})
    deepspeed: DeepSpeed = DeepSpeed.model_validate({})
    deepspeed_ref: DeepSpeedRef = DeepSpeedRef.model_validate({})
    inference_engine: InferenceEngine = InferenceEngine.model_validate({})

    @property
    def ranks(self) -> int:
        """Processes that train; several only once it is decided where the run goes (`devices.placed`)."""
        return max(1, self.run.training_gpus or 1) if self.run.backend in ("fsdp", "deepspeed", "ray") else 1

    @property
    def engine(self) -> str:
        """The engine by name: `inference_engine.name`, or what auto comes to where the devices are there."""
        if self.inference_engine.name != "auto":
            return self.inference_engine.name
        return "vllm" if self.run.rollout_gpus else "embedded"

    @property
    def replicas(self) -> int:
        """Copies of the model that sample with weights of their own."""
        if self.engine != "vllm":
            return 0
        by_devices = (self.run.rollout_gpus or 0) // self.rollout.tensor_parallel_size
        by_places = self.ranks if self.inference_engine.colocated else 1
        return self.inference_engine.replicas or by_devices or by_places

    @property
    def in_process(self) -> bool:
        """Whether vLLM shares the trainer's process: where nothing is to overlap, and no other process trains."""
        engine = self.inference_engine
        alone = self.run.backend == "local" and self.replicas == 1 and not self.run.rollout_gpus
        alone = alone and self.rollout.tensor_parallel_size == 1
        return engine.place == "process" or (engine.place == "auto" and alone and self.rollout.lag == 0)

    def allowed_gap(self, itemsize: int) -> float:
        """Between sampler and trainer in a token's log-prob, for weights of so many bytes each."""
        return self.train.max_logprob_gap or (2.0 if itemsize < 4 else 0.05)

    @property
    def batch_size(self) -> int:
        """Rows, pairs or prompts of an optimizer step, over all devices."""
        return self.train.train_batch_size_per_gpu * self.train.gradient_accumulation_steps * self.ranks

    @model_validator(mode="before")
    @classmethod
    def _with_its_task(cls, raw: Any) -> Any:
        run = raw.get("run") if isinstance(raw, Mapping) else None
        task = run.get("task") if isinstance(run, Mapping) else None
        if not isinstance(task, str):
            return raw
        try:
            return fill_task(raw, task)
        except ValueError:  # told with its place when `run` is checked
            return {"data": {"train_files_path": "?"}, **raw}
