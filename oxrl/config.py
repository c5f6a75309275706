"""YAML to a checked `Config`: strict types, keys explained, wrong input answered with its line and the nearest key.

Validation only: what a key does is done by whoever reads it (`wiring`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from oxrl.algorithms import algorithm, find


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Run(_Section):
    experiment_id: str = Field("run", pattern=r"^[\w.-]+$", description="names the run's folder")
    seed: int = Field(42, ge=0, description="fixes data order, dropout and new weights")
    checkpoint_dir: str | None = Field(None, description="where runs go; default $OXRL_CHECKPOINT_DIR or ./checkpoints")
    trackers: list[Literal["mlflow", "tensorboard", "wandb", "trackio"]] = Field(
        [], description="where metrics go besides metrics.jsonl"
    )
    tracking_uri: str | None = Field(
        None, description="MLflow's store; default $MLFLOW_TRACKING_URI or mlflow.db beside the run's folder"
    )


class Switch(_Section):
    step: int = Field(ge=2, description="the first step that runs it")
    alg_name: str
    alg_params: dict[str, Any] = {}

    @model_validator(mode="after")
    def _known(self) -> Switch:
        algorithm(self.alg_name, **self.alg_params)
        return self


class Train(_Section):
    alg_name: str = Field("sft", description="see `oxrl algorithms`")
    alg_params: dict[str, Any] = Field({}, description="its parameters, as `oxrl algorithms NAME` lists them")
    alg_schedule: list[Switch] = Field([], description="other algorithms or parameters from later steps on")
    lr: float = Field(1e-5, gt=0, description="peak learning rate")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.95], min_length=2, max_length=2, description="AdamW's two decay rates"
    )
    adam_epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup_steps_ratio: float = Field(0.1, ge=0, lt=1, description="share of the steps that warms up")
    lr_scheduler: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    clip_grad_norm: float = Field(1.0, ge=0, description="largest gradient norm; 0 does not clip")
    total_number_of_epochs: int = Field(1, ge=1)
    train_steps_per_epoch: int | None = Field(None, ge=1, description="optimizer steps; default one pass over the data")
    train_batch_size_per_gpu: int = Field(8, ge=1, description="rows (or pairs) per accumulation step")
    gradient_accumulation_steps: int = Field(1, ge=1, description="multiplies the rows of an optimizer step")
    micro_batch_tokens: int = Field(1024, ge=1, description="tokens run at once; sets memory, never the result")
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0 with val_files_path: ten per run")
    patience: int = Field(0, ge=0, description="evaluations without a new best before stopping; 0 never stops")
    checkpoint_every: int = Field(0, ge=0, description="steps between checkpoints; 0 only at the end and at a new best")
    keep_last: int = Field(2, ge=1, description="checkpoints kept besides the best")
    log_every: int = Field(1, ge=1)
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

    @property
    def batch_size(self) -> int:
        return self.train_batch_size_per_gpu * self.gradient_accumulation_steps


class Model(_Section):
    name: str = Field(description="hub id, local folder, .gguf file, or a built-in: smollm2-135m, tiny")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPU, else bf16"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
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
    enabled: bool = False
    r: int = Field(16, ge=1)
    alpha: int = Field(32, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | list[str] = "all-linear"


class LengthPenalty(_Section):
    """0 up to `limit - margin` sampled tokens, then in a straight line down to `-weight` at `limit`."""

    limit: int = Field(ge=1)
    margin: int = Field(ge=1)
    weight: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _margin_fits(self) -> LengthPenalty:
        if self.margin > self.limit:
            raise ValueError(f"margin {self.margin} is more than limit {self.limit}")
        return self


class Reward(_Section):
    """What an answer is worth, for algorithms that sample."""

    reward_func: str | dict[str, float] | None = Field(
        None, description="name from the table, module:function, FILE.py:function, or several with their weights"
    )
    params: dict[str, Any] = Field({}, description="its parameters; of several, by name")
    length_penalty: LengthPenalty | None = Field(None, description="what answers lose near a length")
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
    """How answers are sampled; a step takes `train_batch_size_per_gpu x gradient_accumulation_steps` prompts."""

    n_samples: int = Field(8, ge=1, description="answers per prompt")
    max_tokens: int = Field(256, ge=1, description="new tokens per answer, or per turn of it")
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: no limit")
    min_p: float = Field(0.0, ge=0, lt=1)
    stop: list[str] = Field([], description="texts that end an answer")
    eval_temperature: float = Field(0.0, ge=0, description="for held-out prompts; 0 takes the likeliest token")
    over_sampling_factor: float = Field(1.0, ge=1, description="prompts begun per prompt wanted; the slowest wait")
    partial_rollouts: bool = Field(False, description="what was aborted goes on with the next weights, else anew")
    filter: str | None = Field(None, description="which groups are worth training on, such as check_min_reward")
    filter_params: dict[str, Any] = {}
    max_draws: int | None = Field(None, ge=1, description="most prompts one step may cost; default ten times a batch")
    lag: int = Field(0, ge=0, description="versions that sampling may be behind training; 0 is on-policy")
    mode: Literal["shrinking", "fixed"] = Field("shrinking", description="fixed: bits do not depend on the company")
    slots: int = Field(64, ge=1, description="answers that are sampled side by side")
    env: Literal["single_turn", "tools"] = Field("single_turn")
    tools: list[str] = Field([], description="functions the model may call: module:function or FILE.py:function")
    max_turns: int = Field(8, ge=1, description="with tools")
    log_samples: int = Field(4, ge=0, description="answers per step that are written to rollouts.jsonl")

    @model_validator(mode="after")
    def _tools_have_their_environment(self) -> Rollout:
        if self.tools and self.env != "tools":
            raise ValueError("tools are given, but env is not tools: set rollout.env: tools to let the model call them")
        return self


class Data(_Section):
    dataset: str | None = Field(None, description="a name from `oxrl data list`; prepared when it is first used")
    train_files_path: str | dict[str, str] | None = Field(
        None, description="file or hub id, or one per name of train_dnames"
    )
    val_files_path: str | dict[str, str] | None = Field(None, description="held-out rows for evaluation")
    train_dnames: list[str] | None = Field(None, description="names of the datasets to mix")
    train_ratios: dict[str, float] | None = Field(None, description="share of each dataset; default by size")
    columns: dict[str, str] = Field({}, description="our column name -> the file's")
    format: str | None = Field(None, description="name of the row format; default told from the columns")
    max_seq_len: int | None = Field(2048, ge=2)
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


class Config(_Section):
    """`load_config("config.yaml")`; `Config.model_validate({"model": {...}, "data": {...}})` from Python."""

    model: Model
    data: Data
    run: Run = Run.model_validate({})
    train: Train = Train.model_validate({})
    lora: Lora = Lora.model_validate({})
    reward: Reward = Reward.model_validate({})
    rollout: Rollout = Rollout.model_validate({})

    @model_validator(mode="after")
    def _reference_can_follow(self) -> Config:
        if self.model.ref_update != "fixed" and self.lora.enabled and self.model.ref_model is None:
            raise ValueError(
                "the reference of an adapter is its base, which cannot follow the policy: set model.ref_model to have "
                "a copy that can, or model.ref_update: fixed"
            )
        return self


class ConfigError(ValueError):
    """Wrong input, said in words: one line per mistake."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A YAML file (or nothing), with overrides such as `train.lr=1e-4` laid over it."""
    stages = load_stages(path, overrides)
    if list(stages) != [""]:
        raise ConfigError(f"{path} has the stages {', '.join(stages)}: use load_stages")
    return stages[""]


STAGES = {"sft": {}, "rl": {"train": {"alg_name": "sgrpo"}}}
"""Sections that make a run of several stages, and what is different in each unless the file says otherwise."""


def load_stages(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Config]:
    """The stages of a file in the order they run; a file without `sft:` or `rl:` has one, called "".

    A stage's section holds sections of its own (`rl: {train: ..., reward: ...}`), laid over those of the whole file.
    """
    raw, lines = _parse("" if path is None else _read(Path(path)), str(path))
    for override in overrides:
        _lay_over(raw, override)
    shared = {section: keys for section, keys in raw.items() if section not in STAGES}
    stages: dict[str, Config] = {}
    for name in [stage for stage in STAGES if stage in raw] or [""]:
        own = raw.get(name) or {}
        if not isinstance(own, dict):
            raise ConfigError(f"{name} must hold sections such as `train:` and `data:`, not {own!r}")
        own_lines = {place[1:]: line for place, line in lines.items() if place[0] == name}
        stages[name] = check_config(_merged(_merged(shared, STAGES.get(name, {})), own), {**lines, **own_lines})
    return stages


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Section by section, `above` wins."""
    merged = dict(below)
    for section, keys in above.items():
        both = isinstance(keys, dict) and isinstance(merged.get(section), dict)
        merged[section] = {**merged[section], **keys} if both else keys
    return merged


def check_config(raw: Mapping[str, Any], lines: Mapping[tuple[str, ...], int] | None = None) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_in_words(mistake, lines or {}) for mistake in error.errors())) from None


def _read(path: Path) -> str:
    if not path.is_file():
        near = get_close_matches(path.name, [other.name for other in path.parent.glob("*.y*ml")], n=1)
        raise ConfigError(f"there is no config file {path}" + (f"; did you mean {near[0]}?" if near else ""))
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-5` as text; people mean a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _parse(text: str, where: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        raw = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    if raw is None:
        return {}, {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must hold sections such as `model:` and `data:`, not {type(raw).__name__}")
    return raw, dict(_lines(node))


def _lines(node: yaml.Node | None, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*above, str(key.value))
            yield place, key.start_mark.line + 1
            yield from _lines(value, place)


def _lay_over(raw: dict[str, Any], override: str) -> None:
    place, equals, value = override.partition("=")
    *sections, key = place.strip().split(".")
    if not equals or not sections:
        raise ConfigError(f"an override looks like train.lr=1e-4, not {override!r}")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):
            raise ConfigError(f"{section} must be a section with keys, such as {key}, not {raw!r}")
    try:
        raw[key] = yaml.load(value, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError:
        raise ConfigError(f"{override!r}: what stands behind = is not valid YAML") from None


def _in_words(mistake: Any, lines: Mapping[tuple[str, ...], int]) -> str:
    place = tuple(str(part) for part in mistake["loc"])
    line = next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), None)
    where = f"line {line}: " if line is not None else ""
    name = ".".join(place)
    if mistake["type"] == "extra_forbidden":
        near = get_close_matches(place[-1], _keys_at(place[:-1]), n=1)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(_keys_at(place[:-1]))}"
        return f"{where}{name} is not a key; {hint}"
    if mistake["type"] == "missing":
        return f"{where}{name} is missing"
    message = mistake["msg"].removeprefix("Value error, ")
    if mistake["type"] == "value_error":  # our own words, which say what was wrong
        return f"{where}{name}: {message}" if place else f"{where}{message}"
    return f"{where}{name}: {message}, got {mistake['input']!r}" if place else f"{where}{message}"


def _keys_at(place: tuple[str, ...]) -> list[str]:
    section: Any = Config
    for part in place:
        field = section.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        section = field.annotation
    return list(section.model_fields)
