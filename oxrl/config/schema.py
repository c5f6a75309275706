"""The config schema: types, defaults and a description of each key.

Validates single keys; combinations of keys are checked in `checks`. `run.spec` and `run.build` act on the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from oxrl.algorithms import algorithm, find
from oxrl.config.registry import (
    BACKENDS,
    DEFAULT_BACKEND,
    DEFAULT_ENGINE,
    ENGINES,
    ROLLOUT_ENGINE,
    choices,
    find_backend,
    find_engine,
    shardings,
)
from oxrl.config.tasks import fill_task, find_task
from oxrl.data.actions import action_codec
from oxrl.data.fill import TEMPLATED, placeholders
from oxrl.guard.table import actions_of
from oxrl.machine.secrets import secrets_in
from oxrl.models.chat_templates import TEMPLATES
from oxrl.rollouts.environments.table import find_kind, known_names, suggestion


class Choices(NamedTuple):
    """The names that a key accepts, for the documentation; a custom record is an import path."""

    names: tuple[str, ...]

    def json_schema(self) -> WithJsonSchema:
        return WithJsonSchema({"anyOf": [{"enum": list(self.names)}, {"pattern": ":"}], "type": "string"})


def _known(find: Callable[[str], Any]) -> AfterValidator:
    def check(name: str) -> str:
        if name != "auto":
            find(name)
        return name

    return AfterValidator(check)


def _find_sharding(name: str) -> None:
    if find_backend(name).build_worker is None:
        raise ValueError(f"the backend {name} does not shard a model; there are: {', '.join(shardings())}")


_BACKENDS, _SHARDINGS, _ENGINES = (Choices(("auto", *names)) for names in (BACKENDS, shardings(), ENGINES))
Backend = Annotated[str, _known(find_backend), _BACKENDS, _BACKENDS.json_schema()]
Sharding = Annotated[str, _known(_find_sharding), _SHARDINGS, _SHARDINGS.json_schema()]
Engine = Annotated[str, _known(find_engine), _ENGINES, _ENGINES.json_schema()]


def _known_env(name: str) -> str:
    if name not in ENVIRONMENTS and ":" not in name:
        known = ", ".join((*ENVIRONMENTS, *known_names()))
        raise ValueError(f"{name!r:.200} is not one of {known}, or FILE.py:FUNCTION for a custom one{suggestion(name)}")
    find_kind(name)
    return name


ENVIRONMENTS = ("single_turn", "tools", "dialogue")
Env = Annotated[str, AfterValidator(_known_env), Choices(ENVIRONMENTS), Choices(ENVIRONMENTS).json_schema()]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Open(_Section):
    """A section that accepts any key; DeepSpeed or vLLM validates the extra ones."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    @property
    def others(self) -> dict[str, Any]:
        """The keys that are not fields of the section."""
        return dict(self.model_extra or {})


class Run(_Section):
    """The run: its name, output folder and devices."""

    experiment_id: str = Field(
        "run",
        pattern=r"^[\w.-]*[\w-][\w.-]*$",
        max_length=200,
        description="name of the run's folder; a number is added if it has a run",
    )
    seed: int = Field(
        42, ge=0, lt=2**32, description="random seed for data order, dropout and newly initialised weights"
    )
    checkpoint_dir: str | None = Field(None, description="output root; default $OXRL_CHECKPOINT_DIR or ./checkpoints")
    task: str | None = Field(
        None, description="math, math-hard, code, reasoning, instruct or chat: sets defaults for unset keys"
    )
    backend: Backend = Field(
        "auto",
        description=f"{choices(BACKENDS)}; auto: local on one device, on several DeepSpeed if installed, else FSDP2",
    )
    sharding: Sharding = Field("auto", description="how the model is sharded over devices, with backend auto or ray")
    training_gpus: int | None = Field(
        None,
        ge=0,
        description="training devices; default all available, 0 is the CPU; without GPUs, the number of processes",
    )
    rollout_gpus: int | None = Field(
        None, ge=0, description="devices for sampling only; the embedded engine samples on the training devices"
    )
    ray_address: str | None = Field(
        None, description="a Ray cluster to connect to, such as auto or HOST:PORT; default: start one for the run"
    )
    rank_time_limit: float = Field(
        600.0, gt=0, description="seconds without a response after which a rank or engine counts as lost"
    )
    max_restarts: int = Field(3, ge=0, description="restarts from the last checkpoint after a lost rank")
    trackers: list[Literal["mlflow", "tensorboard", "wandb", "trackio"]] = Field(
        [], description="metrics trackers besides metrics.jsonl"
    )
    tracking_uri: str | None = Field(
        None, description="MLflow's store; default $MLFLOW_TRACKING_URI or mlflow.db next to the run's folder"
    )

    checks: dict[str, Literal["stop", "warn", "off"]] = Field(
        {}, description="action of single checks, or of all: {entropy: stop, reward_by_length: off}; see docs/checks.md"
    )

    @field_validator("task")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        return None if name is None else find_task(name).name

    @field_validator("checks")
    @classmethod
    def _known_checks(cls, chosen: dict[str, Any]) -> dict[str, Any]:
        actions_of(chosen)
        return chosen


class Switch(_Section):
    """A switch to another algorithm at a given step."""

    step: int = Field(ge=2, description="the first step with this algorithm")
    alg_name: str = Field(description="see `oxrl algorithms`")
    alg_params: dict[str, Any] = Field({}, description="algorithm parameters")

    @model_validator(mode="after")
    def _known(self) -> Switch:
        algorithm(self.alg_name, **self.alg_params)
        return self


class Train(_Section):
    """Algorithm, optimizer, batch sizes and intervals."""

    alg_name: str = Field("sgrpo", description="see `oxrl algorithms`")
    alg_params: dict[str, Any] = Field({}, description="algorithm parameters, listed by `oxrl algorithms NAME`")
    alg_schedule: list[Switch] = Field(
        [], description="switches to other algorithms: [{step: 100, alg_name: dpo, alg_params: {beta: 0.3}}]"
    )
    lr: float = Field(1e-5, gt=0, description="peak learning rate")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.95], min_length=2, max_length=2, description="AdamW's decay rates of the first and second moment"
    )
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay")
    warmup_steps_ratio: float = Field(0.1, ge=0, lt=1, description="fraction of all steps used for warm-up")
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="learning rate schedule after warm-up; wsd: constant, then linear decay in the last fifth"
    )
    clip_grad_norm: float = Field(1.0, ge=0, description="maximum gradient norm; 0 disables clipping")
    total_number_of_epochs: int = Field(
        1, ge=1, description="passes over the data, or multiples of train_steps_per_epoch"
    )
    train_steps_per_epoch: int | None = Field(
        None, ge=1, description="optimizer steps per epoch; default one pass over the data"
    )
    train_batch_size_per_gpu: int = Field(
        8, ge=1, description="rows, pairs or prompts per device and accumulation step"
    )
    gradient_accumulation_steps: int = Field(1, ge=1, description="accumulation steps per optimizer step")
    micro_batch_tokens: int = Field(1024, ge=1, description="tokens per micro-batch; affects memory, not the result")
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0 with val_files_path: ten per run")
    eval_at_start: bool = Field(
        True, description="evaluate before the first step too, logged as step 0; needs val_files_path"
    )
    patience: int = Field(0, ge=0, description="early stopping: evaluations without improvement; 0 disables it")
    checkpoint_every: int = Field(
        0, ge=0, description="steps between checkpoints; 0: only at the end and at a new best evaluation"
    )
    keep_last: int = Field(2, ge=1, description="number of latest checkpoints kept, in addition to the best one")
    log_every: int = Field(1, ge=1, description="steps between logged metrics")
    iterations: int = Field(1, ge=1, description="passes over each batch of rollouts")
    mini_batches: int = Field(1, ge=1, description="optimizer steps per pass over a batch of rollouts")
    max_logprob_gap: float | None = Field(
        None,
        gt=0,
        description="maximum log-prob difference between sampler and trainer; default 0.05, 2 in half precision",
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
    """The trained model, the reference and the teacher."""

    name: str = Field(min_length=1, description="hub id, name from `oxrl models list`, local folder, or .gguf file")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPU, else bf16"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="attention implementation"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations: less memory, about a third more time"
    )
    freeze: Literal["towers", "language_model", "nothing"] = Field(
        "towers", description="models that read images or audio: the part that is not trained; no effect with lora"
    )
    compile: Literal["auto"] | bool = Field(
        "auto", description="compile the decoder layers for training on a GPU; auto: in long runs"
    )
    ref_model: str | None = Field(None, description="reference model; default the initial policy")
    ref_update: Literal["fixed", "ema", "periodic"] = Field("fixed", description="how the reference follows the policy")
    ref_decay: float = Field(0.99, ge=0, le=1, description="ema: decay of the reference per step")
    ref_every: int = Field(10, ge=1, description="periodic: steps between copies of the policy")
    teacher: str | None = Field(None, description="teacher model for kd and opd")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    chat_template: str | None = Field(
        None,
        min_length=1,
        description=f"{', '.join(TEMPLATES)}, a file, or a Jinja template; default the tokenizer's own",
    )
    trust_remote_code: bool = Field(False, description="run Python code from the model repository")
    device: str = Field("auto", description="auto: the first GPU, else the CPU")


class Lora(_Section):
    """Train a LoRA adapter instead of all weights."""

    enabled: bool = Field(False, description="train a LoRA adapter; unset, it is true for models from 7B parameters up")
    r: int = Field(16, ge=1, description="rank")
    alpha: int = Field(32, gt=0, description="scaling numerator; the scale is alpha / r")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout of the adapter input; off for algorithms that compare log-probs"
    )
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="layers with an adapter: all linear layers, or those with these names"
    )


class LengthPenalty(_Section):
    """0 up to `limit - margin` sampled tokens, then linear down to `-weight` at `limit`."""

    limit: int = Field(ge=1, description="maximum sampled tokens")
    margin: int = Field(ge=1, description="tokens before the limit at which the penalty starts")
    weight: float = Field(1.0, gt=0, description="penalty at the limit")

    @model_validator(mode="after")
    def _margin_fits(self) -> LengthPenalty:
        if self.margin > self.limit:
            raise ValueError(f"margin {self.margin} exceeds limit {self.limit}: lower it")
        return self


class Reward(_Section):
    """The reward, for algorithms that sample; default: derived from the dataset, the task or the rows."""

    reward_func: str | dict[str, float] | None = Field(
        None, description="built-in name, module:function, FILE.py:function, or several with weights"
    )
    params: dict[str, Any] = Field({}, description="parameters of the reward; with several rewards, a mapping by name")
    length_penalty: LengthPenalty | None = Field(
        None, description="penalty for long completions: {limit: 512, margin: 128, weight: 1.0}"
    )
    clamp: list[float] | None = Field(
        None, min_length=2, max_length=2, description="[min, max] of the reward, applied last before normalize"
    )
    model: str | None = Field(None, description="reward model: a run of `rm` or any sequence classifier")
    judge: str | None = Field(None, description="a language model that grades completions")
    rubric: str | None = Field(None, description="grading criteria for the judge")
    normalize: Literal["none", "batch"] = Field("none", description="batch: mean 0 and std 1 over each step")
    time_limit: float = Field(
        30.0,
        gt=0,
        description="seconds to grade one completion; after it, the completion is left out; a program earns 0",
    )
    allow_unsandboxed: bool = Field(
        False, description="run generated programs even without a sandbox (`code_reward_func`)"
    )

    @field_validator("clamp")
    @classmethod
    def _min_below_max(cls, bounds: list[float] | None) -> list[float] | None:
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ValueError(f"clamp is [min, max], not {bounds}")
        return bounds


class Rollout(_Section):
    """How completions are sampled.

    A step takes `train_batch_size_per_gpu x gradient_accumulation_steps` prompts per training device.
    """

    n_samples: int = Field(8, ge=1, description="completions per prompt")
    max_tokens: int = Field(256, ge=1, description="maximum new tokens per completion, or per turn")
    temperature: float = Field(1.0, gt=0, description="sampling temperature for training")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling: cumulative probability")
    top_k: int = Field(0, ge=0, description="sample from the k most probable tokens; 0: all")
    min_p: float = Field(0.0, ge=0, lt=1, description="minimum probability relative to the most probable token")
    stop: list[str] = Field([], description="strings that end a completion")
    eval_temperature: float = Field(0.0, ge=0, description="sampling temperature for evaluation; 0 is greedy")
    over_sampling_factor: float = Field(
        1.0, ge=1, description="prompts started per prompt needed; the slowest are deferred"
    )
    partial_rollouts: bool = Field(
        False, description="continue aborted completions with the next weights instead of restarting them"
    )
    filter: str | None = Field(None, description="filter of groups, such as check_min_reward or FILE.py:FUNCTION")
    filter_params: dict[str, Any] = Field({}, description="parameters of the filter")
    sampler: Literal["uniform", "solve_rate"] = Field(
        "uniform", description="solve_rate: prompts whose last groups all earned the same are drawn less often"
    )
    sampler_params: dict[str, Any] = Field({}, description="of solve_rate: groups, low, high, solved, unsolved")
    max_draws: int | None = Field(
        None, ge=1, description="maximum prompts sampled per step; default ten times the batch"
    )
    lag: int = Field(0, ge=0, description="maximum weight versions between sampling and training; 0 is on-policy")
    force_strict_on_policy: bool = Field(False, description="reject settings that train on samples of older weights")
    tensor_parallel_size: int = Field(1, ge=1, description="rollout devices per replica; the embedded engine uses one")
    mode: Literal["shrinking", "fixed"] = Field("shrinking", description="fixed: batch-invariant, bit for bit")
    slots: int = Field(64, ge=1, description="completions sampled concurrently")
    env: Env = Field(
        "single_turn",
        description="tools: the model may call rollout.tools; dialogue: env_args.reply answers; "
        f"{', '.join(known_names())}; or a custom one: FILE.py:FUNCTION",
    )
    env_args: dict[str, Any] = Field({}, description="arguments of the environment, listed in docs/environments.md")
    env_seconds: float = Field(
        300.0,
        gt=0,
        description="seconds of an episode in its environment, without generation; after them, it is left out",
    )
    tools: list[str] = Field(
        [],
        description="functions the model may call: module:function or FILE.py:function; "
        "mcp:COMMAND or mcp:URL: the tools of a server",
    )
    tool_seconds: float = Field(30.0, gt=0, description="seconds of a tool call; after them, its result is an error")
    max_turns: int = Field(8, ge=1, description="maximum model turns per completion, or steps of an environment")
    log_samples: int = Field(4, ge=0, description="completions per step written to rollouts.jsonl")
    record: Literal["full", "groups", "samples", "off"] = Field(
        "groups",
        description="groups (or rows) of a step that record/ has token by token: all, or up to four that differ most; "
        "samples: only rollouts.jsonl; off: neither",
    )
    record_steps: int = Field(100, ge=1, description="the last steps that record/ keeps")

    @model_validator(mode="after")
    def _tools_need_the_tools_env(self) -> Rollout:
        if self.tools and self.env != "tools":
            raise ValueError("tools are set, but env is not: set rollout.env: tools")
        if self.env_args and self.env != "dialogue" and find_kind(self.env) is None:
            kinds = f"dialogue and {', '.join(known_names())}"
            raise ValueError(f"env_args are for {kinds}; {self.env} has no arguments{suggestion(self.env)}")
        return self


def _fillable(template: Any) -> Any:
    if isinstance(template, Mapping):  # {Question} without quotes is a mapping in YAML
        raise ValueError('write a text with braces in quotes: "{Body} {Question}"')
    if isinstance(template, str):
        placeholders(template)
    if template == "":
        raise ValueError("it is empty: give a column or a text, or leave it out")
    return template


Template = Annotated[str | None, BeforeValidator(_fillable)]


class Data(_Section):
    """The dataset: a registered name, or files."""

    dataset: str | None = Field(None, description="a name from `oxrl data list`; prepared on first use")
    train_files_path: str | dict[str, str] | None = Field(
        None, description="file or hub id, or one per name of train_dnames"
    )
    val_files_path: str | dict[str, str] | None = Field(None, description="held-out rows for evaluation")
    train_dnames: list[str] | None = Field(None, description="names of the datasets to mix")
    train_ratios: dict[str, float] | None = Field(None, description="sampling ratio of each dataset; default by size")
    columns: dict[str, str] = Field({}, description="column name expected here -> column name in the file")
    prompt: Template = Field(
        None, description='the prompt from other columns: a name, or text with names in braces, "{Body} {Question}"'
    )
    response: Template = Field(None, description="the response, likewise")
    answer: Template = Field(None, description="the reference answer, likewise: a column name such as Answer")
    chosen: Template = Field(None, description="the better response, likewise")
    rejected: Template = Field(None, description="the worse response, likewise")
    system: Template = Field(
        None, description='a system message for every row; may have names of columns in braces, as in "Topic: {topic}"'
    )
    format: str | None = Field(None, description="name of the row format; default inferred from the columns")
    max_seq_len: int | None = Field(2048, ge=2, description="maximum tokens of a row, prompt and completion together")
    overlong: Literal["drop", "truncate", "error"] = Field("drop", description="handling of rows over max_seq_len")
    bad_rows: Literal["stop", "skip"] = Field("stop", description="handling of rows that cannot be read")
    template_kwargs: dict[str, Any] = Field(
        {},
        description="variables of the chat template: {enable_thinking: false}; in sampling and evaluation, too",
    )
    actions: dict[str, Any] | None = Field(
        None,
        description="tokens of actions in recorded episodes: {low: [-1, -1], high: [1, 1], bins: 64, chunk: 1}, or "
        "{words: [left, right]}; see docs/environments.md",
    )
    env_rows: int = Field(512, ge=1, description="rows that rollout.env makes itself, without files")
    env_val_rows: int = Field(0, ge=0, description="held-out rows that rollout.env makes, from other seeds")

    @field_validator("actions")
    @classmethod
    def _known_actions(cls, actions: dict[str, Any] | None) -> dict[str, Any] | None:
        action_codec(actions)
        return actions

    @field_validator("dataset")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        from oxrl.data.prepare import check_splits, find_dataset

        if name is not None:
            check_splits(find_dataset(name), ["train"])
        return name

    @model_validator(mode="after")
    def _names_agree(self) -> Data:
        if self.dataset is not None and self.train_files_path is not None:
            raise ValueError("dataset and train_files_path are both set: leave one out")
        if self.train_dnames is not None and set(self.train_dnames) != set(self.train_files):
            raise ValueError(
                f"train_dnames {self.train_dnames} and train_files_path name different datasets: "
                "set one path for one name, or a mapping name -> path"
            )
        if self.train_ratios is not None and set(self.train_ratios) != set(self.train_files):
            raise ValueError(f"train_ratios must name exactly the datasets {sorted(self.train_files)}")
        if twice := sorted(self.template.keys() & self.columns.keys()):
            raise ValueError(f"{twice[0]} and columns.{twice[0]} are both set: leave one out")
        ratios = (self.train_ratios or {"": 1.0}).values()
        if min(ratios) < 0 or max(ratios) == 0:
            raise ValueError(
                f"train_ratios must be 0 or more, and at least one greater than 0, not {self.train_ratios}"
            )
        return self

    @property
    def template(self) -> dict[str, str]:
        """The columns that are defined from others."""
        return {name: text for name in TEMPLATED if (text := getattr(self, name)) is not None}

    @property
    def has_source(self) -> bool:
        """Whether a dataset or files are named; some environments make their rows."""
        return self.dataset is not None or self.train_files_path is not None

    @property
    def train_files(self) -> dict[str, str]:
        """Name -> path; empty for a `dataset`, whose path is known once it is prepared."""
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
    """DeepSpeed settings for training on several devices, such as zero_optimization; not used on one device.

    Optimizer, schedule, precision and batch sizes are set in `train` and `model`.
    """


class DeepSpeedRef(_Open):
    """DeepSpeed settings for the reference model."""


class InferenceEngine(_Open):
    """The engine that samples; any other key is passed to it as a setting."""

    name: Engine = Field(
        "auto",
        description=f"{choices(ENGINES)}; auto: vllm if rollout_gpus is set, else embedded",
    )
    urls: list[str] = Field([], description="http: vLLM or SGLang servers, such as http://127.0.0.1:8000")
    replicas: int | None = Field(
        None,
        ge=1,
        description="vllm: number of replicas; default rollout_gpus / tensor_parallel_size, one per training device if "
        "colocated, else 1",
    )
    place: Literal["auto", "process", "server"] = Field(
        "auto",
        description="vllm: in the trainer's process, or separate servers; auto: servers with lag, several replicas or "
        "several ranks",
    )
    folder: str | None = Field(None, description="folder for weight transfer; default shared memory")
    transfer: Literal["files", "gloo", "nccl"] = Field(
        "files",
        description="http: weight transfer to the servers: files in folder; for vLLM also TCP (gloo) or GPU to GPU "
        "(nccl)",
    )
    adapter: bool = Field(False, description="vllm with lora: send the base weights once, then only the adapter")
    colocated: bool = Field(False, description="vllm: shares the training devices and sleeps during training")
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="embedded: precision of sampling; auto: that of the model. Another one samples from a copy "
        "of the weights in another precision: bfloat16 is faster on CPUs with bfloat16 instructions; set "
        "train.alg_params.correction",
    )
    capture: Literal["auto"] | bool = Field(
        "auto", description="embedded, on a GPU: decoding as CUDA graphs; auto: where the model allows it"
    )
    compile: Literal["auto"] | bool = Field(
        "auto", description="embedded, with capture: compile the decoding step first; auto: in runs that sample much"
    )
    cache_gib: float | None = Field(
        None, gt=0, description="embedded, with capture: memory for keys and values; default half of what is free"
    )


class Config(_Section):
    """A whole config: `load_config("config.yaml")`, or `Config.model_validate({"model": {...}, "data": {...}})`."""

    model_config = ConfigDict(hide_input_in_errors=True)  # it may hold what `_no_secrets` refuses

    model: Model
    data: Data = Data.model_validate({})
    run: Run = Run.model_validate({})
    train: Train = Train.model_validate({})
    lora: Lora = Lora.model_validate({})
    reward: Reward = Reward.model_validate({})
    rollout: Rollout = Rollout.model_validate({})
    deepspeed: DeepSpeed = DeepSpeed.model_validate({})
    deepspeed_ref: DeepSpeedRef = DeepSpeedRef.model_validate({})
    inference_engine: InferenceEngine = InferenceEngine.model_validate({})

    @property
    def has_custom_env(self) -> bool:
        """Whether rollouts come from an environment of the user, which may score them itself."""
        kind = find_kind(self.rollout.env)
        return ":" in self.rollout.env and (kind is None or kind.reward is None)

    @property
    def makes_rows(self) -> bool:
        """Whether the environment makes the rows of the run; files or a dataset take precedence."""
        return not self.data.has_source and find_kind(self.rollout.env) is not None

    @property
    def has_held_out(self) -> bool:
        return bool(self.data.val_files) or (self.makes_rows and self.data.env_val_rows > 0)

    @property
    def ranks(self) -> int:
        """Number of training processes; more than one only after `run.placement.placed` has set the devices."""
        return 1 if self.processes == "one" else max(1, self.run.training_gpus or 1)

    @property
    def processes(self) -> Literal["one", "ranks", "actors"]:
        """Where training runs; "one" as long as `run.placement.placed` has not resolved `run.backend: auto`."""
        return "one" if self.run.backend == "auto" else find_backend(self.run.backend).processes

    @property
    def engine(self) -> str:
        """Name of the engine: `inference_engine.name` with auto resolved."""
        if self.inference_engine.name != "auto":
            return self.inference_engine.name
        return ROLLOUT_ENGINE if self.run.rollout_gpus else DEFAULT_ENGINE

    @property
    def replicas(self) -> int:
        """Number of engine replicas with a separate copy of the weights."""
        if not find_engine(self.engine).replicated:
            return 0
        by_devices = (self.run.rollout_gpus or 0) // self.rollout.tensor_parallel_size
        by_ranks = self.ranks if self.inference_engine.colocated else 1
        return self.inference_engine.replicas or by_devices or by_ranks

    @property
    def in_process(self) -> bool:
        """Whether vLLM runs in the trainer's process: no overlap, and a single training process."""
        engine = self.inference_engine
        alone = self.run.backend == DEFAULT_BACKEND and self.replicas == 1 and not self.run.rollout_gpus
        alone = alone and self.rollout.tensor_parallel_size == 1
        return engine.place == "process" or (engine.place == "auto" and alone and self.rollout.lag == 0)

    def allowed_gap(self, itemsize: int) -> float:
        """Maximum log-prob difference between sampler and trainer, for weights of `itemsize` bytes each."""
        half = itemsize < 4 or self.inference_engine.precision in ("bfloat16", "float16")
        return self.train.max_logprob_gap or (2.0 if half else 0.05)

    @property
    def batch_size(self) -> int:
        """Rows, pairs or prompts per optimizer step, over all devices."""
        return self.train.train_batch_size_per_gpu * self.train.gradient_accumulation_steps * self.ranks

    @model_validator(mode="before")
    @classmethod
    def _no_secrets(cls, raw: Any) -> Any:
        """A config is copied to the run folder, to failure records and to trackers."""
        if found := list(secrets_in(raw)):
            raise ValueError(
                f"{' and '.join(found)} looks like a secret, and a config is copied to the run folder and to trackers: "
                "set an environment variable to it, and write the variable's name here (llm_judge reads api_key_env; "
                "a reward of your own can read os.environ)"
            )
        return raw

    @model_validator(mode="after")
    def _has_rows(self) -> Config:
        if not self.data.has_source and not self.makes_rows:
            raise ValueError(
                "data.train_files_path is missing, or data.dataset with a name from `oxrl data list`, or a rollout.env "
                "that makes its rows"
            )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _fill_task(cls, raw: Any, validate: Callable[[Any], Config]) -> Config:
        run = raw.get("run") if isinstance(raw, Mapping) else None
        task = run.get("task") if isinstance(run, Mapping) else None
        if not isinstance(task, str):
            return validate(raw)
        try:
            filled = fill_task(raw, task)
        except ValueError:  # reported with its key when `run` is validated
            filled = {"data": {"train_files_path": "?"}, **raw}
        config = validate(filled)
        if "lr" not in (raw.get("train") or {}):
            config.train.model_fields_set.discard("lr")  # the default of the task, which depends on the tuning
        return config
