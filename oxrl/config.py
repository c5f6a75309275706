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


class Data(_Section):
    train_files_path: str | dict[str, str] = Field(description="file or hub id, or one per name of train_dnames")
    val_files_path: str | dict[str, str] | None = Field(None, description="held-out rows for evaluation")
    train_dnames: list[str] | None = Field(None, description="names of the datasets to mix")
    train_ratios: dict[str, float] | None = Field(None, description="share of each dataset; default by size")
    columns: dict[str, str] = Field({}, description="our column name -> the file's")
    format: str | None = Field(None, description="name of the row format; default told from the columns")
    max_seq_len: int | None = Field(2048, ge=2)
    overlong: Literal["drop", "truncate", "error"] = Field("drop", description="what happens to rows over max_seq_len")
    bad_rows: Literal["stop", "skip"] = Field("stop", description="what happens to rows that cannot be read")

    @model_validator(mode="after")
    def _names_agree(self) -> Data:
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
        return _by_name(self.train_files_path, self.train_dnames)

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


class ConfigError(ValueError):
    """Wrong input, said in words: one line per mistake."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A YAML file (or nothing), with overrides such as `train.lr=1e-4` laid over it."""
    text = "" if path is None else _read(Path(path))
    raw, lines = _parse(text, str(path))
    for override in overrides:
        _lay_over(raw, override)
    return check_config(raw, lines)


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
